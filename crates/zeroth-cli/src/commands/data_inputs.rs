//! What commands that read rows share: files behind `--data`, and positions in JSON.

use std::path::PathBuf;

use serde_json::{Value, json};
use zeroth::data::{RowLocation, RowNumber};
use zeroth::job::data_files;

use crate::output;

/// The data files behind paths. Files of folders that are no data are named.
pub(super) fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let (files, note) = data_files(paths)?;
    if let Some(note) = note {
        output::note(&format!("note: {note}"));
    }
    Ok(files)
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
