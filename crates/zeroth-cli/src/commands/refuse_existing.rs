//! Refuses to write over files.

use std::path::Path;

/// Refuses to write over files, unless that is asked for.
pub(super) fn refuse_existing<'a>(
    paths: impl IntoIterator<Item = &'a Path>,
    overwrite: bool,
) -> anyhow::Result<()> {
    let exists = |path: &&Path| std::fs::symlink_metadata(path).is_ok();
    let found: Vec<String> =
        paths.into_iter().filter(exists).map(|path| path.display().to_string()).collect();
    anyhow::ensure!(
        overwrite || found.is_empty(),
        "{} {} there already, and nothing was written: choose another --output, or replace {} with --overwrite",
        found.join(", "),
        if found.len() == 1 { "is" } else { "are" },
        if found.len() == 1 { "it" } else { "them" }
    );
    Ok(())
}
