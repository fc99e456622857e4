//! Removes files that killed processes left half-written in a run folder.

use std::fs;
use std::path::Path;

use zeroth_model::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_weight_file};

use crate::checkpoint::clean;
use crate::export_record::RECORD;
use crate::model_files::{COMPANION_FILES, CONFIG};
use crate::run_files::FILES;
use crate::run_lock::start_time;

/// Removes what dead processes left in a run folder, its model and its checkpoints; other files stay. The caller
/// holds the folder's lock and writes nothing there meanwhile.
pub(crate) fn remove(root: &Path) {
    remove_files(root, |name| FILES.contains(&name));
    remove_files(&root.join("logs"), |name| {
        let number = |first, last| name.strip_prefix(first).and_then(|rest: &str| rest.strip_suffix(last));
        let number = number("trace-", ".part").or_else(|| number("step-", ".trace.json"));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    });
    remove_files(&root.join("model"), is_of_a_model);
    // Best effort: a leftover is never taken for a checkpoint, and the next save reports it.
    let _ = clean(&root.join("checkpoints"));
}

/// Whether an export, of a model or of adapters, writes files of this name.
pub(crate) fn is_of_a_model(name: &str) -> bool {
    [CONFIG, RECORD, ADAPTER_CONFIG, ADAPTER_WEIGHTS].contains(&name)
        || COMPANION_FILES.contains(&name)
        || is_weight_file(name)
}

/// Parses `.NAME.unfinished-PID` into the final name and the process id.
pub(crate) fn unfinished(name: &str) -> Option<(&str, u32)> {
    let (name, process) = name.strip_prefix('.')?.rsplit_once(".unfinished-")?;
    let is_number = !process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Some((name, process.parse().ok()?)))?
}

fn remove_files(folder: &Path, is_ours: fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(unfinished).filter(|(name, _)| is_ours(name));
        // Process ids are reused, possibly by this process.
        let is_dead = |process: u32| process == std::process::id() || start_time(process).is_none();
        let is_file = entry.file_type().is_ok_and(|kind| !kind.is_dir());
        if is_file && process.is_some_and(|(_, process)| is_dead(process)) {
            // Best effort: it is hidden and harmless.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_unfinished_files_are_parsed() {
        assert_eq!(unfinished(".config.json.unfinished-12"), Some(("config.json", 12)));
        assert_eq!(unfinished(".a.unfinished-1.unfinished-2"), Some(("a.unfinished-1", 2)));
        for other in [
            "config.json",
            "config.json.unfinished-12",
            ".config.json.unfinished-",
            ".config.json.unfinished-+1",
            ".config.json.unfinished-1-2",
            ".config.json.unfinished-99999999999",
            ".unfinished-mine",
        ] {
            assert_eq!(unfinished(other), None, "{other}");
        }
    }
}
