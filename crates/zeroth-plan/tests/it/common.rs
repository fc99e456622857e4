//! The six presets, as the command line hands them in.

use zeroth_plan::{Offload, Placement};

pub(crate) fn presets() -> Vec<Placement> {
    [
        ("zero0", 0, Offload::None),
        ("zero1", 1, Offload::None),
        ("zero2", 2, Offload::None),
        ("zero2_offload", 2, Offload::Optimizer),
        ("zero3", 3, Offload::None),
        ("zero3_offload", 3, Offload::OptimizerAndParameters),
    ]
    .map(|(preset, stage, offload)| Placement::new(preset, stage, offload))
    .into()
}
