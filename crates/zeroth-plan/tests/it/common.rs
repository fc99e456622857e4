//! The six presets, as the command line hands them in.

use zeroth_machine::DeviceKind;
use zeroth_plan::{OffloadedStates, Placement, PlanDevice};

pub(crate) const GPU: PlanDevice = PlanDevice { kind: DeviceKind::Cuda, cpus: 1, threads: None };

pub(crate) fn presets() -> Vec<Placement> {
    [
        ("zero0", 0, OffloadedStates::None),
        ("zero1", 1, OffloadedStates::None),
        ("zero2", 2, OffloadedStates::None),
        ("zero2_offload", 2, OffloadedStates::Optimizer),
        ("zero3", 3, OffloadedStates::None),
        ("zero3_offload", 3, OffloadedStates::OptimizerAndParameters),
    ]
    .map(|(preset, stage, offload)| Placement::new(preset, stage, offload))
    .into()
}
