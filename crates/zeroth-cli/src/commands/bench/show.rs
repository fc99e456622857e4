//! Formats results as tables or as one JSON object.

use std::path::Path;

use serde_json::{Value, json};
use zeroth::base::{format_bytes, grouped};
use zeroth::bench::{StepReport, StepShares};
use zeroth::machine::bench::{BenchPart, BenchResult};

use super::bench_run::BenchFindings;
use crate::output::Output;
use crate::table::Table;

/// The table of a group; preceded by a blank line unless first.
pub(super) fn part(part: BenchPart, lines: &[BenchResult], first: bool, output: &Output) -> String {
    let across = if part == BenchPart::Collectives { "ranks" } else { "threads" };
    let head =
        [part.name(), across, "best", "median", "unit", "best %", "median %", "of the limit, in this run"];
    let mut table = Table::new(&head, &[1, 2, 3, 5, 6]);
    for line in lines {
        let percent = |of: fn(&BenchResult) -> Option<f64>| {
            of(line).map_or_else(String::new, |value| format!("{value:.1}"))
        };
        table.row([
            line.name.clone(),
            line.threads.to_string(),
            figure(line.best),
            figure(line.median),
            line.unit.name().to_owned(),
            percent(|line| line.percent.map(|percent| percent.best)),
            percent(|line| line.percent.map(|percent| percent.median)),
            line.limit.as_ref().map_or_else(|| "–".to_owned(), |limit| limit.name.clone()),
        ]);
    }
    let mut rows = table.lines();
    rows[0] = output.bold(rows[0].trim_end()) + "\n";
    format!("{}{}", if first { "" } else { "\n" }, rows.concat())
}

/// Three significant digits or more.
fn figure(value: f64) -> String {
    match value {
        100.0.. => grouped(value.round() as u64),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Text below the tables: a step's time by phase, and the profile's path.
pub(super) fn end(found: &BenchFindings, profile: Option<&Path>) -> String {
    let step = found.step.as_ref().map_or_else(String::new, step_text);
    let kept = profile
        .map_or_else(String::new, |path| format!("\nsaved as this machine's profile: {}\n", path.display()));
    format!("{step}{kept}")
}

fn step_text(step: &StepReport) -> String {
    let StepShares { matmuls, attention, other_ops, gather, reduce, update, other } = step.shares;
    format!(
        "\nstep time: {:.0}% matrix work (matmuls {matmuls:.0}%, attention {attention:.0}%), other ops \
         {other_ops:.0}%, gather {gather:.0}%, reduce {reduce:.0}%, update {update:.0}%, rest {other:.0}%\n{} parameters, {} \
         tokens per step, {} planned per rank, loss {:.3}\n",
        step.shares.matrix(),
        grouped(step.params),
        grouped(step.tokens as u64),
        format_bytes(step.planned_bytes),
        step.loss
    )
}

/// The results as one JSON object.
pub(super) fn json(found: &BenchFindings, profile: Option<&Path>) -> Value {
    let parts: serde_json::Map<String, Value> =
        found.parts.iter().map(|(part, lines)| (part.name().to_owned(), json!(lines))).collect();
    json!({
        "machine": found.machine,
        "quick": found.quick,
        "rounds": found.rounds,
        "parts": parts,
        "step": found.step.as_ref().map(step_json),
        "profile": profile,
    })
}

fn step_json(step: &StepReport) -> Value {
    let StepShares { matmuls, attention, other_ops, gather, reduce, update, other } = step.shares;
    let [flops, tokens] = step.lines.each_ref().map(|line| json!({"best": line.best, "median": line.median}));
    json!({
        "name": step.lines[0].name,
        "params": step.params,
        "tokens": step.tokens,
        "tokens_per_second": tokens,
        "gflops": flops,
        "matrix_percent": step.shares.matrix(),
        "percent_of_time": {
            "products": matmuls, "attention": attention, "other_ops": other_ops, "gather": gather, "reduce": reduce,
            "update": update, "rest": other,
        },
        "planned_bytes": step.planned_bytes,
        "loss": step.loss,
    })
}
