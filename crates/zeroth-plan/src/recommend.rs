//! Which row to take, and why, in one sentence with the numbers.

use crate::advice::advice_by_size;
use crate::figures::{exact, pair};
use crate::{Ask, Offload, Placement, Row};
use zeroth_base::{format_bytes, format_count};

/// Tried in this order. zero1 comes before zero2 because it sends no more and, with accumulation, less; what stays on
/// the device comes before what crosses to the host at every step. zero0 is never recommended: zero1 needs no more
/// memory and sends the same.
const ORDER: [&str; 5] = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"];

/// A placement's place in that order; those of files come after the presets, zero0 last.
pub(crate) fn precedence(placement: &Placement) -> usize {
    place(&placement.preset, placement.stage)
}

fn place(preset: &str, stage: u8) -> usize {
    match ORDER.iter().position(|name| *name == preset) {
        Some(place) => place,
        None if stage > 0 => ORDER.len(),
        None => ORDER.len() + 1,
    }
}

/// The recommended preset and the reason.
pub(crate) fn recommend(ask: &Ask, rows: &[Row]) -> (Option<String>, String) {
    let mut candidates: Vec<&Row> = rows.iter().filter(|row| row.stage > 0).collect();
    candidates.sort_by_key(|row| place(&row.preset, row.stage));
    if ask.device_memory.is_none() {
        return by_size(ask, &candidates);
    }
    if let Some(at) = candidates.iter().position(|row| row.fits == Some(true)) {
        let mut clauses: Vec<String> = candidates[..at].iter().map(|row| needs(ask, row)).collect();
        clauses.push(format!("{} and is the first that fits", needs(ask, candidates[at])));
        return (Some(candidates[at].preset.clone()), clauses.join("; "));
    }
    if rows.iter().any(|row| row.fits == Some(true)) {
        return (
            None,
            "only zero0 was asked for: it fits, and zero1 would need no more and send the same".into(),
        );
    }
    (None, nothing_fits(ask, rows))
}

fn by_size(ask: &Ask, candidates: &[&Row]) -> (Option<String>, String) {
    let advice = advice_by_size(ask.params);
    let said = format!(
        "by model size alone, as no device memory was given: {} parameters are {}, for which the usual advice is {}",
        format_count(ask.params),
        advice.range,
        advice.says
    );
    let Some(row) = candidates.iter().find(|row| row.preset == advice.preset) else {
        return (None, format!("{said}; {} is not among the rows asked for", advice.preset));
    };
    if row.fits != Some(false) {
        let why = advice.why.map_or_else(String::new, |why| format!(" ({}: {why})", advice.preset));
        return (Some(row.preset.clone()), said + &why);
    }
    let said = format!("{said}, but {}", needs(ask, row));
    match candidates.iter().find(|row| row.fits == Some(true)) {
        Some(row) => (Some(row.preset.clone()), format!("{said}; {}", needs(ask, row))),
        None => (None, said),
    }
}

/// `zero2 needs 52 GB of the device's 44 GB`, with the host's share where it has one.
pub(crate) fn needs(ask: &Ask, row: &Row) -> String {
    let part = |need, budget: Option<u64>, owner: &str| match budget {
        Some(budget) => {
            let (need, have) = pair(need, budget);
            format!("{need} of the {owner}'s {have}")
        }
        None => format!("{} of a {owner}", format_bytes(need)),
    };
    let mut needs = format!("{} needs {}", row.preset, part(row.device_needs(), ask.device_memory, "device"));
    if row.offload != Offload::None {
        needs = format!("{needs} and {}", part(row.host_bytes.total, ask.host_memory, "host"));
    }
    needs
}

fn nothing_fits(ask: &Ask, rows: &[Row]) -> String {
    let missing = |row: &&Row| ask.missing(row.device_needs(), row.host_bytes.total);
    let nearest = rows.iter().min_by_key(|row| {
        let (device, host) = missing(row);
        (device.saturating_add(host), place(&row.preset, row.stage))
    });
    let Some(row) = nearest else { return "no placement was given".into() };
    let (device, host) = missing(&row);
    let mut parts = Vec::new();
    if device > 0 {
        parts.push(format!("{} of device memory", exact(device)));
    }
    if host > 0 {
        parts.push(format!("{} of host memory", exact(host)));
    }
    format!("nothing fits; the nearest, {}, misses {}: {}", row.preset, parts.join(" and "), needs(ask, row))
}
