//! What commands that read rows share: files behind `--data`, the system message, and positions in JSON.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};
use zeroth::base::counted;
use zeroth::data::{RowLocation, RowNumber, find_files};

use crate::output;

/// The data files behind paths. Files of folders that are no data are named.
pub(super) fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    const SHOWN: usize = 5;
    let found = find_files(paths)?;
    if !found.skipped.is_empty() {
        let mut names: Vec<String> =
            found.skipped.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
        if found.skipped.len() > SHOWN {
            names.push("…".to_owned());
        }
        output::note(&format!(
            "note: {} skipped, not data by {}: {}",
            counted(found.skipped.len() as u64, "file"),
            if found.skipped.len() == 1 { "its name" } else { "their names" },
            names.join(", ")
        ));
    }
    Ok(found.files)
}

/// Refuses an output inside a folder of data: a later run would read its files as rows.
pub(super) fn refuse_output_inside(flag: &str, paths: &[PathBuf], output: &Path) -> anyhow::Result<()> {
    let output_path = std::path::absolute(output)?;
    // Without symlinks as far as it exists.
    let resolved = output_path.ancestors().find_map(|above| {
        let rest = output_path.strip_prefix(above).ok()?;
        Some(above.canonicalize().ok()?.join(rest))
    });
    let holds_output = |folder: &PathBuf| {
        let folder = folder.canonicalize().ok().filter(|folder| folder.is_dir());
        folder.zip(resolved.as_ref()).is_some_and(|(folder, output)| output.starts_with(folder))
    };
    match paths.iter().find(|path| holds_output(path)) {
        None => Ok(()),
        Some(folder) => anyhow::bail!(
            "--output {} is inside {flag} {}: a later run would read its files as data; choose a folder outside",
            output.display(),
            folder.display()
        ),
    }
}

/// A system message: a text, or the contents of a .txt file.
pub(super) fn system(given: &str) -> anyhow::Result<String> {
    let path = Path::new(given);
    let is_file = path.extension().is_some_and(|extension| extension == "txt") && path.is_file();
    let text = if is_file {
        std::fs::read_to_string(path).with_context(|| format!("cannot read --system {given}"))?
    } else {
        given.to_owned()
    };
    anyhow::ensure!(!text.trim().is_empty(), "--system is empty: leave the flag out for no system message");
    Ok(text)
}

/// The position of a row in JSON.
pub(super) fn place(place: &RowLocation, files: &[PathBuf]) -> Value {
    let file = &files[place.file];
    match place.at {
        RowNumber::Line(line) => json!({"file": file, "line": line}),
        RowNumber::Row(row) => json!({"file": file, "row": row}),
        RowNumber::RowAtLine { row, line } => json!({"file": file, "row": row, "line": line}),
    }
}
