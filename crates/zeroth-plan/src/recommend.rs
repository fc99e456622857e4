//! The recommendation, and its reason in one sentence with the figures.

use crate::advice::advice_by_size;
use crate::format::exact;
use crate::row::{Row, needs};
use crate::{Placement, PlanRequest};
use zeroth_base::format_count;

/// In order of preference. zero1 precedes zero2 because it sends no more and, with accumulation, less; placements on
/// the device precede those that cross to the host at every step. zero0 is never recommended: zero1 needs no more
/// memory and sends the same.
const ORDER: [&str; 5] = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"];

/// A placement's position in that order; config files come after the presets, zero0 last.
pub(crate) fn precedence(placement: &Placement) -> usize {
    place(&placement.preset, placement.settings.stage)
}

fn place(preset: &str, stage: u8) -> usize {
    match ORDER.iter().position(|name| *name == preset) {
        Some(place) => place,
        None if stage > 0 => ORDER.len(),
        None => ORDER.len() + 1,
    }
}

/// The recommended preset and the reason.
pub(crate) fn recommend(request: &PlanRequest, rows: &[Row]) -> (Option<String>, String) {
    let mut candidates: Vec<&Row> = rows.iter().filter(|row| row.stage > 0).collect();
    candidates.sort_by_key(|row| place(&row.preset, row.stage));
    if request.device_memory.is_none() {
        return by_size(request, &candidates);
    }
    if let Some(at) = candidates.iter().position(|row| row.fits == Some(true)) {
        let mut clauses: Vec<String> = candidates[..at].iter().map(|row| needs(request, row)).collect();
        clauses.push(format!("{} and is the first that fits", needs(request, candidates[at])));
        return (Some(candidates[at].preset.clone()), clauses.join("; "));
    }
    if rows.iter().any(|row| row.fits == Some(true)) {
        return (
            None,
            "only zero0 was planned: it fits, and zero1 would need no more and send the same".into(),
        );
    }
    (None, nothing_fits(request, rows))
}

fn by_size(request: &PlanRequest, candidates: &[&Row]) -> (Option<String>, String) {
    let advice = advice_by_size(request.params);
    let said = format!(
        "by model size alone, as no device memory was given: {} parameters are {}, for which the usual advice is {}",
        format_count(request.params),
        advice.range,
        advice.says
    );
    let Some(row) = candidates.iter().find(|row| row.preset == advice.preset) else {
        return (None, format!("{said}; {} is not among the planned presets", advice.preset));
    };
    if row.fits != Some(false) {
        let why = advice.why.map_or_else(String::new, |why| format!(" ({}: {why})", advice.preset));
        return (Some(row.preset.clone()), said + &why);
    }
    let said = format!("{said}, but {}", needs(request, row));
    match candidates.iter().find(|row| row.fits == Some(true)) {
        Some(row) => (Some(row.preset.clone()), format!("{said}; {}", needs(request, row))),
        None => (None, said),
    }
}

fn nothing_fits(request: &PlanRequest, rows: &[Row]) -> String {
    let missing = |row: &&Row| request.missing(row.device_needs(), row.host_needs());
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
    format!(
        "nothing fits; the nearest, {}, misses {}: {}",
        row.preset,
        parts.join(" and "),
        needs(request, row)
    )
}
