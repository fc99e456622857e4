//! Meshes of groups and rails: what is added up in which order, by hand, and that nothing else decides the bits.

mod by_hand;
mod frozen;
mod same_bits;

use zeroth_program::Settings;

use crate::job::{ROOMY, Setup};

/// (groups, ranks of a group)
const MESHES: [(u64, u64); 3] = [(2, 2), (2, 3), (3, 2)];

/// A mesh with micro-batches of one row: 4 ranks take 4 rows a step, 6 ranks 12.
fn setup((groups, group): (u64, u64), settings: Settings) -> Setup {
    let ranks = groups * group;
    let micro_batch = if ranks == 6 { 2 / settings.accumulation } else { 1 };
    let settings = Settings { group: Some(group), ..settings };
    Setup { steps: 3, ranks, micro_batch, settings, ..Setup::default() }
}

/// Everything as it is by default, at a stage.
fn at_stage(stage: u8) -> Settings {
    Settings { stage, ..ROOMY }
}
