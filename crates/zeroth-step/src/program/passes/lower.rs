//! `lower`: the forward and backward of a micro-batch, and the sections of a step.
//!
//! Keys: `gradient_accumulation_steps`, `zero_optimization.stage`.

use zeroth_graph::{Backward, Graph};

use super::super::ir::micro_batch;
use super::super::{Program, Section, SectionKind, Settings};
use crate::Layout;

pub(in super::super) fn lower(
    graph: &Graph,
    backward: &Backward,
    layout: Layout,
    settings: Settings,
) -> Program {
    let kinds: &[SectionKind] = match settings.accumulation {
        0 | 1 => &[SectionKind::Only],
        2 => &[SectionKind::First, SectionKind::Last],
        _ => &[SectionKind::First, SectionKind::Middle, SectionKind::Last],
    };
    let instructions = micro_batch(graph, backward, &layout);
    let section = |kind: &SectionKind| Section { kind: *kind, instructions: instructions.clone() };
    Program {
        sections: kinds.iter().map(section).collect(),
        layout,
        accumulation: settings.accumulation.max(1),
        cuts_parameters: settings.stage == 3,
    }
}
