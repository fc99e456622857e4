//! Runs as plain text, once: where standard output is not a terminal.

use zeroth_base::counted;

use crate::figures::{ago, bytes, duration, of_curve};
use crate::run::Run;

/// The curves of the summary line.
const SHOWN: [(&str, &str); 6] = [
    ("loss", "loss"),
    ("eval_loss", "eval loss"),
    ("lr", "lr"),
    ("grad_norm", "norm"),
    ("tokens_per_second", "tokens/s"),
    ("mfu", "MFU"),
];

/// All runs as text.
pub fn report(runs: &[Run]) -> String {
    runs.iter().map(one).collect::<Vec<_>>().join("\n")
}

fn one(run: &Run) -> String {
    let (model, device) = run.model();
    let mut lines = vec![format!("{} · {}", run.name, run.folder.display())];
    let total = if run.steps() > 0 { format!("/{}", run.steps()) } else { String::new() };
    let mut head = vec![run.state().to_owned(), format!("step {}{total}", run.step())];
    head.extend(model.map(str::to_owned));
    head.extend(device.map(str::to_owned));
    head.extend(run.seconds_left().map(|seconds| format!("{} left", duration(seconds))));
    lines.push(format!("  {}", head.join(" · ")));
    let values: Vec<String> = SHOWN
        .iter()
        .filter_map(|(curve, name)| Some(format!("{name} {}", of_curve(curve, run.last(curve)?))))
        .collect();
    if !values.is_empty() {
        lines.push(format!("  {}", values.join(" · ")));
    }
    for rank in run.ranks() {
        let mut fields = vec![format!("rank {}", rank.rank), rank.health.name().to_owned()];
        fields.push(format!("step {}", rank.step));
        fields.extend(rank.op);
        fields.extend(
            rank.heartbeat_age.filter(|_| !run.has_ended()).map(|age| format!("heartbeat {age:.1} s")),
        );
        fields.extend(rank.pss_bytes.map(|pss| format!("{} host", bytes(pss))));
        fields.extend(rank.gpu_bytes.map(|gpu| format!("{} GPU", bytes(gpu))));
        lines.push(format!("  {}", fields.join(" · ")));
    }
    for tier in run.planned() {
        let categories: Vec<String> = tier
            .categories
            .iter()
            .filter(|(_, size)| *size > 0)
            .map(|(name, size)| format!("{name} {}", bytes(*size)))
            .collect();
        lines.push(format!("  planned on {}: {} ({})", tier.tier, bytes(tier.total), categories.join(", ")));
    }
    let saved: Vec<String> =
        run.checkpoints().iter().take(3).map(|entry| format!("step {}", entry.step)).collect();
    if !saved.is_empty() {
        lines.push(format!("  checkpoints: {}", saved.join(", ")));
    }
    for event in run.events().rev().take(5) {
        let step = event.step.map(|step| format!(" step {step}")).unwrap_or_default();
        lines.push(
            format!("  {}: {}{step} {}", ago(event.time), event.event, event.detail).trim_end().to_owned(),
        );
    }
    let seams: Vec<String> = run.seams().map(|step| step.to_string()).collect();
    if !seams.is_empty() {
        lines.push(format!("  resumed after step {}", seams.join(", ")));
    }
    if run.garbage() > 0 {
        lines.push(format!("  {} could not be read", counted(run.garbage(), "line")));
    }
    lines.extend(run.problem().map(|problem| format!("  {problem}")));
    lines.join("\n") + "\n"
}
