//! `checkpoint`: inspects, verifies and exports checkpoints.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zeroth::base::{DType, counted, format_bytes, grouped};
use zeroth::model::is_adapter_folder;
use zeroth::train::checkpoint::{
    Checkpoint, CheckpointError, CheckpointPath, ListedCheckpoint, LoraEntry, Verified, list, newest_valid,
    now, resolve, state_name, verify_folder,
};
use zeroth::train::{ExportDestination, ExportError, TeacherCache, export_checkpoint};

use super::{checkpoint_merge, verify_cache};
use crate::cli::{CheckpointCommand, CheckpointExportArgs};
use crate::exit::Exit;
use crate::output::{self, Colour, Output};
use crate::signals::Signals;
use crate::table::Table;

pub(super) fn run(command: &CheckpointCommand, output: &Output) -> anyhow::Result<Exit> {
    match command {
        CheckpointCommand::Inspect { dir } => match resolve(dir)? {
            CheckpointPath::Step(folder) => inspect_one(&folder, output),
            CheckpointPath::Run(checkpoints) => inspect_all(&checkpoints, output),
        },
        CheckpointCommand::Verify { dir } if TeacherCache::is_in(dir) => verify_cache::run(dir, output),
        CheckpointCommand::Verify { dir } => verify(dir, output),
        CheckpointCommand::Export(arguments) => {
            Signals::install_for_model_folder()?;
            if arguments.merge {
                checkpoint_merge::run(arguments, output)
            } else {
                export_model(arguments, output)
            }
        }
    }
}

fn inspect_one(folder: &Path, output: &Output) -> anyhow::Result<Exit> {
    let checkpoint = match Checkpoint::open(folder) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Ok(refused(&error)),
    };
    let manifest = checkpoint.manifest();
    let states: Vec<&str> = manifest.states.iter().filter_map(|state| state_name(*state)).collect();
    if output.is_json() {
        let mut result = json!({"path": folder, "params": manifest.model.total, "bytes": manifest.bytes()});
        if let (Value::Object(result), Value::Object(fields)) = (&mut result, serde_json::to_value(manifest)?)
        {
            result.extend(fields);
        }
        output::json(&result)?;
        return Ok(Exit::Done);
    }
    let batch = manifest.batch;
    let mut rows = vec![
        ("step", grouped(manifest.step)),
        ("loss", loss(manifest.loss)),
        (
            "samples",
            format!("{} seen, {} per epoch", grouped(manifest.samples_seen), grouped(manifest.data.samples)),
        ),
        ("saved", format!("{}, by zeroth {}", ago(manifest.created), manifest.zeroth_version)),
        ("ranks", format!("{}, stage {}", manifest.ranks, manifest.stage)),
        (
            "batch",
            format!(
                "{} per step: {} × {} × {}",
                counted(batch.train_batch_size, "sample"),
                batch.micro_batch,
                batch.accumulation,
                counted(manifest.ranks, "rank")
            ),
        ),
        (
            "model",
            format!(
                "{}, {} parameters in {} tensors",
                manifest.model.model_type,
                grouped(manifest.model.total),
                manifest.model.parameters.len()
            ),
        ),
        (
            "states",
            format!("{} ({}, moments in {})", states.join(", "), manifest.optimizer, manifest.moments),
        ),
        ("type", manifest.dtype.to_string()),
        ("seed", manifest.seed.to_string()),
    ];
    if let Some(LoraEntry { rank, alpha, rslora, base, .. }) = &manifest.lora {
        let scale = if *rslora { " (rslora)" } else { "" };
        rows.push(("adapters", format!("LoRA r {rank}, alpha {alpha}{scale}")));
        let total = grouped(base.total);
        rows.push(("base", format!("{}, {total} parameters, weights {}", base.name, base.hash)));
    }
    let mut table = Table::new(&["file", "bytes"], &[1]);
    for file in &manifest.files {
        table.row([file.name.clone(), format_bytes(file.bytes)]);
    }
    let fact = |(name, value): &(&str, String)| format!("{}  {value}\n", output.bold(&format!("{name:8}")));
    let facts: Vec<String> = rows.iter().map(fact).collect();
    output::text(&format!(
        "{}\n{}\n{}\n{} in total; verify checksums with zeroth checkpoint verify {}\n",
        folder.display(),
        facts.concat(),
        table.lines().concat(),
        format_bytes(manifest.bytes()),
        folder.display()
    ));
    Ok(Exit::Done)
}

fn inspect_all(checkpoints: &Path, output: &Output) -> anyhow::Result<Exit> {
    let opened: Vec<(ListedCheckpoint, Result<Checkpoint, CheckpointError>)> = list(checkpoints)?
        .into_iter()
        .map(|found| (found.clone(), Checkpoint::open(&found.folder)))
        .collect();
    let newest = opened.iter().rev().find(|(_, opened)| opened.is_ok()).map(|(found, _)| found.step);
    let are_all_valid = opened.iter().all(|(_, opened)| opened.is_ok());
    if output.is_json() {
        let rows: Vec<Value> = opened
            .iter()
            .map(|(found, opened)| match opened {
                Ok(checkpoint) => {
                    let manifest = checkpoint.manifest();
                    json!({
                        "step": found.step, "path": found.folder, "ok": true, "loss": manifest.loss,
                        "samples_seen": manifest.samples_seen, "ranks": manifest.ranks, "stage": manifest.stage,
                        "bytes": manifest.bytes(), "created": manifest.created,
                    })
                }
                Err(error) => json!({
                    "step": found.step, "path": found.folder, "ok": false, "problem": error.to_string(),
                }),
            })
            .collect();
        output::json(&json!({"path": checkpoints, "newest": newest, "checkpoints": rows}))?;
    } else {
        let head = ["checkpoint", "loss", "samples", "ranks", "stage", "bytes", "saved", ""];
        let mut table = Table::new(&head, &[1, 2, 3, 4, 5]);
        for (found, opened) in &opened {
            let name = format!("step-{}", found.step);
            let Ok(checkpoint) = opened else {
                table.row([name, "damaged".to_owned()]);
                continue;
            };
            let manifest = checkpoint.manifest();
            table.row([
                name,
                loss(manifest.loss),
                grouped(manifest.samples_seen),
                manifest.ranks.to_string(),
                manifest.stage.to_string(),
                format_bytes(manifest.bytes()),
                ago(manifest.created),
                if newest == Some(found.step) { "newest".to_owned() } else { String::new() },
            ]);
        }
        output::text(&table.lines().concat());
        for (_, opened) in &opened {
            if let Err(error) = opened {
                output::error(&error.to_string());
            }
        }
    }
    Ok(if are_all_valid { Exit::Done } else { Exit::Problems })
}

fn verify(dir: &Path, output: &Output) -> anyhow::Result<Exit> {
    let folders: Vec<PathBuf> = match resolve(dir)? {
        CheckpointPath::Step(folder) => vec![folder],
        CheckpointPath::Run(checkpoints) => {
            list(&checkpoints)?.into_iter().map(|found| found.folder).collect()
        }
    };
    let results: Vec<(PathBuf, Result<Verified, Vec<CheckpointError>>)> =
        folders.into_iter().map(|folder| (folder.clone(), verify_folder(&folder))).collect();
    let is_ok = results.iter().all(|(_, result)| result.is_ok());
    if output.is_json() {
        let rows: Vec<Value> = results
            .iter()
            .map(|(folder, result)| match result {
                Ok(Verified { files, bytes, took }) => json!({
                    "path": folder, "ok": true, "files": files, "bytes": bytes, "seconds": took.as_secs_f64(),
                    "problems": [],
                }),
                Err(problems) => {
                    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
                    json!({"path": folder, "ok": false, "problems": problems})
                }
            })
            .collect();
        output::json(&json!({"path": dir, "ok": is_ok, "checkpoints": rows}))?;
    } else {
        for (folder, result) in &results {
            match result {
                Ok(Verified { files, bytes, took }) => output::text(&format!(
                    "{} {}: {} in {} verified in {:.2} s\n",
                    output.coloured(Colour::Green, "ok"),
                    folder.display(),
                    format_bytes(*bytes),
                    counted(*files as u64, "file"),
                    took.as_secs_f64()
                )),
                Err(problems) => problems.iter().for_each(|problem| output::error(&problem.to_string())),
            }
        }
    }
    Ok(if is_ok { Exit::Done } else { Exit::Problems })
}

fn export_model(arguments: &CheckpointExportArgs, output: &Output) -> anyhow::Result<Exit> {
    anyhow::ensure!(
        arguments.model.is_none(),
        "--model names the base that adapters are merged into: it needs --merge"
    );
    anyhow::ensure!(
        !arguments.allow_other_base,
        "--allow-other-base is of adapters that are merged: it needs --merge"
    );
    anyhow::ensure!(
        !is_adapter_folder(&arguments.dir),
        "{} is the folder of an adapter: --merge writes its base with the adapter merged",
        arguments.dir.display()
    );
    let checkpoint = open_verified(&arguments.dir)?;
    let checkpoint = match checkpoint {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Ok(refused(&error)),
    };
    let manifest = checkpoint.manifest();
    let default = if manifest.lora.is_some() { DType::F32 } else { manifest.dtype };
    let dtype = arguments.dtype.map_or(default, DType::from);
    let destination = if arguments.overwrite { ExportDestination::Overwrite } else { ExportDestination::New };
    let to = &arguments.output;
    let written = match export_checkpoint(&checkpoint, to, destination, dtype, arguments.max_shard_size) {
        Ok(written) => written,
        Err(
            error @ (ExportError::NotEmpty { .. }
            | ExportError::Lock(_)
            | ExportError::HoldsARun { .. }
            | ExportError::HoldsAModel { .. }
            | ExportError::InsideCheckpoint { .. }
            | ExportError::OutOfRange { .. }),
        ) => return Err(error.into()),
        Err(error) => {
            output::error(&error.to_string());
            return Ok(Exit::Failed);
        }
    };
    if output.is_json() {
        output::json(&json!({
            "path": to,
            "checkpoint": checkpoint.folder(),
            "step": manifest.step,
            "model_type": manifest.model.model_type,
            "params": manifest.model.total,
            "dtype": dtype.to_string(),
            "bytes": written.bytes,
            "files": written.files,
        }))?;
    } else {
        output::text(&format!(
            "{} with {} parameters after {}, {} of weights in {dtype}\nmodel saved to {}\n",
            manifest.model.model_type,
            grouped(manifest.model.total),
            counted(manifest.step, "step"),
            format_bytes(written.bytes),
            to.display()
        ));
    }
    Ok(Exit::Done)
}

/// Opens and verifies a checkpoint, or the newest valid one of a run. The outer error is a path that has none.
pub(super) fn open_verified(dir: &Path) -> anyhow::Result<Result<Checkpoint, CheckpointError>> {
    Ok(match resolve(dir)? {
        CheckpointPath::Step(folder) => {
            Checkpoint::open(&folder).and_then(|found| found.verify().map(|_| found))
        }
        CheckpointPath::Run(checkpoints) => {
            let newest = newest_valid(&checkpoints)?;
            for (_, error) in &newest.refused {
                output::note(&format!("skipped: {error}"));
            }
            newest.found.ok_or(CheckpointError::NoneValid { folder: checkpoints })
        }
    })
}

/// Reports a checkpoint that exists but cannot be used.
pub(super) fn refused(error: &CheckpointError) -> Exit {
    output::error(&error.to_string());
    Exit::Problems
}

fn loss(loss: Option<f64>) -> String {
    loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"))
}

/// The age of a timestamp.
fn ago(moment: u64) -> String {
    age(now().saturating_sub(moment))
}

/// Seconds in the past, in the largest unit with at least two.
fn age(passed: u64) -> String {
    let units = [(86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")];
    let (size, unit) = units.into_iter().find(|(size, _)| passed >= 2 * size).unwrap_or((1, "second"));
    format!("{} ago", counted(passed / size, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_in_the_number_of_their_unit() {
        let ages = [0, 1, 2, 119, 120, 7_199, 7_200, 172_800].map(age);
        let expected = [
            "0 seconds",
            "1 second",
            "2 seconds",
            "119 seconds",
            "2 minutes",
            "119 minutes",
            "2 hours",
            "2 days",
        ];
        assert_eq!(ages, expected.map(|age| format!("{age} ago")));
    }
}
