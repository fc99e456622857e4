//! The end of a run: a summary as text, or as one JSON object.

use std::path::{Path, PathBuf};

use anyhow::Context;
use zeroth::base::{counted, format_bytes, publish, was};
use zeroth::train::checkpoint::{Checkpoint, step_folder};
use zeroth::train::{
    exported_step, loss_curves, progress, read_evaluation_losses, read_losses, summarize_steps,
};

use super::prepared_run::PreparedRun;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::Signals;

pub(super) fn print(run: &PreparedRun, output: &Output) -> anyhow::Result<Exit> {
    let PreparedRun { resolved_job, folder, earlier, .. } = run;
    let losses = read_losses(&folder.metrics()).unwrap_or_default();
    let counts = summarize_steps(&folder.metrics()).unwrap_or_default();
    // Early stopping may have ended it before its last step.
    let steps = counts.last.map_or(resolved_job.job.steps, |(step, _)| step);
    let title = format!("{}, {}", resolved_job.name, counted(steps, "step"));
    let evaluated = read_evaluation_losses(&folder.metrics()).unwrap_or_default();
    // The run is done, and its model is written: a curve is not worth an error.
    if let Err(error) = publish(&folder.loss_curve(), loss_curves(&losses, &evaluated, &title).as_bytes()) {
        output::note(&format!("note: the loss curve was not written: {error}"));
    }
    let values: Vec<f64> = losses.iter().map(|(_, loss)| *loss).collect();
    if let (Some(first), Some(last)) = (values.first(), values.last()) {
        output::note(&format!("loss {first:.4} → {last:.4}  {}", progress::sparkline(&values, 60)));
    }
    if counts.skipped + counts.non_finite > 0 {
        output::note(&format!(
            "{} of {} {} skipped; {} had a non-finite loss",
            counts.skipped,
            counted(counts.steps, "step"),
            was(counts.skipped),
            counts.non_finite
        ));
    }
    output::note(&format!("metrics and loss curve in {}", folder.root().display()));
    let newest = earlier.newest_after(&folder.checkpoints())?;
    if let Some(newest) = &newest {
        output::note(&format!("newest checkpoint in {}", newest.display()));
    }
    if resolved_job.writes_model {
        let size = folder_bytes(&folder.model());
        output::note(&format!("model in {} ({})", folder.model().display(), format_bytes(size)));
    } else if let Some(newest) = newest.as_deref().map(|newest| best_or(newest, run)) {
        output::note(&format!(
            "no model was written: stage3_gather_16bit_weights_on_model_save is false. `zeroth checkpoint export {} --output \
             {}` writes it",
            newest.display(),
            folder.model().display()
        ));
    } else {
        output::note(
            "no model was written: stage3_gather_16bit_weights_on_model_save is false, and no checkpoint was saved",
        );
    }
    if output.is_json() {
        Signals::end_at_once()?;
        let loss = |place: Option<&(u64, f64)>| place.map(|(_, loss)| *loss);
        output::json(&serde_json::json!({
            "steps": counts.steps,
            "skipped": counts.skipped,
            "non_finite": counts.non_finite,
            "first_loss": loss(losses.first()),
            "last_loss": counts.last.and_then(|(_, loss)| loss),
            "output": folder.root(),
            "checkpoint": newest,
            "model": resolved_job.writes_model.then(|| folder.model()),
            "model_step": resolved_job.writes_model.then(|| exported_step(&folder.model())).flatten(),
        }))?;
    }
    Ok(match counts.last {
        Some((step, None)) => fail_without_loss(step),
        _ => Exit::Done,
    })
}

/// The best checkpoint if it is the one to export, else the newest.
fn best_or(newest: &Path, run: &PreparedRun) -> PathBuf {
    let best =
        Checkpoint::open(newest).ok().and_then(|found| run.resolved_job.job.best_step(found.manifest()));
    best.map_or_else(|| newest.to_owned(), |best| run.folder.checkpoints().join(step_folder(best)))
}

/// Fails a run whose last step has a non-finite loss.
pub(super) fn fail_without_loss(step: u64) -> Exit {
    output::error(&format!(
        "the loss of the last step ({step}) is not finite: check the model before using it, or train with a lower \
         --learning-rate or in bf16"
    ));
    Exit::Failed
}

fn folder_bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The file of a rank's part of the trace.
pub(super) fn trace_part(output: &Path, rank: usize) -> PathBuf {
    output.join(format!("logs/trace-{rank}.part"))
}

/// Joins the ranks' parts of the trace.
pub(super) fn join_traces(path: &Path, output: &Path, ranks: usize) -> anyhow::Result<()> {
    let parts: Vec<String> =
        (0..ranks).map(|rank| std::fs::read_to_string(trace_part(output, rank))).collect::<Result<_, _>>()?;
    trace(path, &parts)?;
    for rank in 0..ranks {
        std::fs::remove_file(trace_part(output, rank))?;
    }
    Ok(())
}

/// The parts of all ranks as one file for Perfetto.
pub(super) fn trace_text(parts: &[String]) -> String {
    format!("{{\"traceEvents\": [\n{}\n]}}\n", parts.join(",\n"))
}

pub(super) fn trace(path: &Path, parts: &[String]) -> anyhow::Result<()> {
    publish(path, trace_text(parts).as_bytes())
        .with_context(|| format!("cannot write the trace to {}", path.display()))?;
    output::note(&format!("trace written to {}: open it at ui.perfetto.dev", path.display()));
    Ok(())
}
