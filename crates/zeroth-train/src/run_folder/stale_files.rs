//! Removes files that killed processes left half-written in a run folder.

use std::path::Path;

use zeroth_base::{FolderLock, LOCK_FILE, PUBLICATION_LIST, is_silent, parse_unfinished, remove_abandoned};
use zeroth_model::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_weight_file};

use super::files::{FILES, exists};
use super::shared_folder::PROOF;
use crate::checkpoint::{COMPANION_FILES, CONFIG, clean, look_at_unfinished};
use crate::export::RECORD;

/// Removes what dead processes left in a run folder, its model and its checkpoints; other files stay. The caller
/// holds the folder's lock and writes nothing there meanwhile.
pub(crate) fn remove(root: &Path) {
    remove_abandoned(root, |name| FILES.contains(&name) || name == PROOF);
    remove_abandoned(&root.join("logs"), |name| {
        let number = |first, last| name.strip_prefix(first).and_then(|rest: &str| rest.strip_suffix(last));
        let number = number("trace-", ".part").or_else(|| number("step-", ".trace.json"));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    });
    let model = root.join("model");
    remove_abandoned(&model, is_of_a_model);
    if exists(&model.join(LOCK_FILE)) {
        // That of a killed export goes when it is released.
        drop(FolderLock::take_at_once(&model));
    }
    // Best effort: a leftover is never taken for a checkpoint, and the next save reports it.
    let _ = clean(&root.join("checkpoints"));
}

/// Looks at what processes of other hosts have left, so that [`remove`] knows a minute later whether they live.
pub(crate) fn look(root: &Path) {
    look_at_unfinished(&root.join("checkpoints"));
    let _ = is_silent(&root.join("model").join(LOCK_FILE));
}

/// Whether an export, of a model or of adapters, writes files of this name.
pub(crate) fn is_of_a_model(name: &str) -> bool {
    [CONFIG, RECORD, ADAPTER_CONFIG, ADAPTER_WEIGHTS].contains(&name)
        || COMPANION_FILES.contains(&name)
        || is_weight_file(name)
}

/// Whether an export writes files of this name, hidden ones included.
pub(crate) fn is_of_an_export(name: &str) -> bool {
    let hidden = parse_unfinished(name).map(|(name, _)| name);
    name == LOCK_FILE
        || is_of_a_model(name)
        || hidden.is_some_and(|name| name == PUBLICATION_LIST || is_of_a_model(name))
}
