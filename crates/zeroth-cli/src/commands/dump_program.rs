//! `--dump-program`: a compiled step as text.

use std::path::Path;

use zeroth::base::{grouped, publish};
use zeroth::program::Compiled;

use crate::output;

/// Writes the program with a last line of its memory: to standard output for `-`, else to a file.
pub(super) fn write(file: &Path, compiled: &Compiled) -> anyhow::Result<()> {
    let arenas = compiled.memory.arenas();
    let arenas = arenas.iter().map(|(tier, bytes)| format!("{} {} bytes", tier.name(), grouped(*bytes)));
    let arenas = arenas.collect::<Vec<_>>().join(", ");
    let sizes = compiled.row_sizes.iter();
    let rows: Vec<String> =
        sizes.map(|rows| rows.iter().map(u64::to_string).collect::<Vec<_>>().join("+")).collect();
    let rows = rows.join(" ");
    let text = format!("{compiled}memory: {arenas}, rows {rows}\n");
    if file.as_os_str() == "-" {
        output::text(&text);
        return Ok(());
    }
    Ok(publish(file, text.as_bytes())?)
}
