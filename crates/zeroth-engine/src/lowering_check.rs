//! The check that all ranks compiled the same program, before any of them reads another's memory.

use zeroth_comm::{Comm, OpName};
use zeroth_program::{Compiled, LoweringDifference, LoweringPart, World};

use super::RunError;

/// Checks that a communicator has the ranks that a program was compiled for, and its axes.
pub(super) fn check_mesh(world: World, comm: &dyn Comm) -> Result<(), RunError> {
    let ranks = comm.world() as u64;
    let group = comm.mesh().map(|mesh| mesh.group.world() as u64);
    // Without a mesh all ranks are on one axis.
    let is_alike = group.map_or(!world.has_two_levels(), |group| group == world.group);
    if ranks == world.ranks && is_alike {
        return Ok(());
    }
    Err(RunError::Mesh { ranks, group: group.unwrap_or(ranks), world })
}

/// Compares everything that lowering depends on across ranks: they read each other's arenas by offset.
pub(super) fn check_lowering(compiled: &Compiled, comm: &dyn Comm) -> Result<(), RunError> {
    let failed = |source| RunError::Comm { step: 0, op: "start".to_owned(), source };
    let lines = |parts: Vec<LoweringPart>| -> Vec<String> {
        parts.into_iter().map(|LoweringPart { name, value }| format!("{name}\t{value}")).collect()
    };
    let own = lines(compiled.lowering_parts()).join("\n");
    let all = comm.gather_texts(OpName::new(0, "agree on the program", 0), &own).map_err(failed)?;
    if all.iter().all(|other| *other == own) {
        return Ok(());
    }
    let parts = |text: &String| -> Vec<LoweringPart> {
        let of_line = |line: &str| {
            let (name, value) = line.split_once('\t').unwrap_or((line, ""));
            LoweringPart { name: name.to_owned(), value: value.to_owned() }
        };
        text.lines().map(of_line).collect()
    };
    let all: Vec<Vec<LoweringPart>> = all.iter().map(parts).collect();
    LoweringDifference::first(&all).map_or(Ok(()), |difference| Err(RunError::Lowering(Box::new(difference))))
}
