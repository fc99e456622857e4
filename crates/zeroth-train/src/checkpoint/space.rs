//! Room on the disk: what a checkpoint takes, and what is free.

use std::path::Path;

use zeroth_base::DType;
use zeroth_engine::State;
use zeroth_machine::DiskError;
use zeroth_model::ParameterTable;

use crate::export::BESIDE;

/// Headers, manifest and a filesystem's own blocks, for each parameter of each state.
const BESIDE_A_TENSOR: u64 = 512;
/// Blocks of a filesystem that small files fill up.
const BESIDE_A_MODEL: u64 = 64 << 10;

/// Bytes of a checkpoint of this model with these states, each in its type, a little rounded up. `model` is the folder whose
/// config and tokenizer it carries.
pub fn needed_bytes(table: &ParameterTable, states: &[(State, DType)], model: &Path) -> u64 {
    let (elements, parameters) = (table.total(), table.iter().count() as u64);
    let of_states: u64 =
        states.iter().map(|(_, dtype)| elements * dtype.bytes() + parameters * BESIDE_A_TENSOR).sum();
    let carried = std::iter::once(&"config.json").chain(BESIDE);
    let carried = carried.filter_map(|name| model.join(name).metadata().ok()).map(|found| found.len());
    of_states + carried.sum::<u64>() + BESIDE_A_MODEL
}

/// Bytes that an ordinary user can still write where `folder` is or will be.
pub fn free_bytes(folder: &Path) -> Result<u64, DiskError> {
    zeroth_machine::disk(folder).map(|disk| disk.free)
}
