//! Disk space: the size of a checkpoint, and free space.

use std::path::Path;

use zeroth_base::DType;
use zeroth_engine::StateKind;
use zeroth_machine::DiskError;
use zeroth_model::ParameterTable;

use super::model_files::COMPANION_FILES;

/// Headers, manifest entries and filesystem blocks per parameter and state.
const BESIDE_A_TENSOR: u64 = 512;
/// Filesystem blocks of the small files.
const BESIDE_A_MODEL: u64 = 64 << 10;

/// Upper estimate of a checkpoint's size with these states, each in its dtype. `model` is the folder whose config and
/// tokenizer files it includes.
pub fn needed_bytes(table: &ParameterTable, states: &[(StateKind, DType)], model: &Path) -> u64 {
    let (elements, parameters) = (table.total(), table.iter().count() as u64);
    let of_states: u64 =
        states.iter().map(|(_, dtype)| elements * dtype.bytes() + parameters * BESIDE_A_TENSOR).sum();
    let carried = std::iter::once(&"config.json").chain(COMPANION_FILES);
    let carried = carried.filter_map(|name| model.join(name).metadata().ok()).map(|found| found.len());
    of_states + carried.sum::<u64>() + BESIDE_A_MODEL
}

/// Bytes available to an unprivileged user on the disk of `folder`, which need not exist yet.
pub fn free_bytes(folder: &Path) -> Result<u64, DiskError> {
    zeroth_machine::disk(folder).map(|disk| disk.free)
}
