//! Prepares a run: resolves, checks and shows it, and writes its folder.

use zeroth::base::{counted, publish};
use zeroth::config::preset::Preset;
use zeroth::data::find_files;
use zeroth::job::{ResolvedJob, StartedRanks, is_inside, token_cache};
use zeroth::program::Compiled;
use zeroth::train::checkpoint::{Checkpoint, parse_step_folder, step_folder};
use zeroth::train::{
    Distillation, ExistingRun, Interval, RunFolder, RunInput, check_export, check_output, completed_run,
    exported_step, summarize_steps,
};

use super::prepared_run::PreparedRun;
use super::{agreement, checkpoints, reporter, resolve_job, startup_summary, summary};
use crate::cli::TrainArgs;
use crate::commands::dump_program;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::Signals;
use crate::startup_signals::OnStop;

/// Prepares a run before ranks are started. The inner error is an exit code if there is nothing to run.
pub(super) fn prepare_run(
    arguments: &TrainArgs,
    started: Option<StartedRanks>,
    output: &Output,
    signals: &Signals,
) -> anyhow::Result<Result<PreparedRun, Exit>> {
    if let Some(before) = signals.startup() {
        let cache = token_cache(&arguments.output);
        before.on_stop(move || cache.remove_unfinished());
    }
    if !arguments.dry_run && arguments.dump_program.is_none() {
        // Checked again when it is opened; until then much work is done.
        let replaces = arguments.overwrite_output_dir && arguments.resume.is_none();
        check_output(&arguments.output, if replaces { ExistingRun::Overwrite } else { ExistingRun::Keep })?;
    }
    let mut resolved_job = resolve_job::resolve_job(arguments, started, None)?;
    let compiled = match resolved_job.fit()? {
        Ok(compiled) => compiled,
        Err(misfit) => {
            startup_summary::model(&resolved_job);
            output::error(&misfit.to_string());
            return Ok(Err(Exit::DoesNotFit));
        }
    };
    resolved_job.handoff.agreement = agreement::of(arguments, &resolved_job);
    let notes = resolved_job.check_weights()?;
    resolved_job.notes.extend(notes);
    reporter::report_plan(arguments, &resolved_job)?.check_table(resolved_job.resumes_here)?;
    match finished(arguments, &resolved_job) {
        Some(Ok(steps)) => {
            // Best effort: opening the folder removes leftovers of killed processes.
            let _ = RunFolder::open(&arguments.output, ExistingRun::Keep, &[]);
            let done = counted(steps, "step");
            output::note(&format!("this run is already complete ({done}); nothing was changed"));
            let of_last = |found: &Checkpoint| {
                (found.manifest().step == steps).then(|| found.manifest().loss.is_some())
            };
            let has_loss = resolved_job.checkpoint.as_ref().and_then(of_last).unwrap_or_else(|| {
                let counts = summarize_steps(&arguments.output.join("metrics.jsonl")).unwrap_or_default();
                counts.last.is_some_and(|(_, loss)| loss.is_some())
            });
            return Ok(Err(if has_loss { Exit::Done } else { summary::fail_without_loss(steps) }));
        }
        Some(Err(why)) => {
            resolved_job
                .notes
                .push(format!("all steps are done, only the model remains to be written: {why}"));
        }
        None => {}
    }
    startup_summary::model(&resolved_job);
    startup_summary::origins(&resolved_job);
    startup_summary::memory(&resolved_job, &compiled);
    startup_summary::between_hosts(&resolved_job, &compiled);
    for note in &resolved_job.notes {
        output::note(&format!("note: {note}"));
    }
    if let Some(lack) = checkpoints::lack_of_space(arguments, &resolved_job) {
        output::error(&lack);
        return Ok(Err(Exit::DoesNotFit));
    }
    if arguments.dry_run {
        startup_summary::first_batch(&resolved_job, output)?;
        return Ok(Err(Exit::Done));
    }
    if let Some(file) = &arguments.dump_program {
        dump_program::write(file, &compiled)?;
        return Ok(Err(Exit::Done));
    }
    let (folder, earlier) = write_folder(arguments, &resolved_job, &compiled, signals)?;
    print_removed(&folder);
    if let Some(checkpoint) = &resolved_job.checkpoint {
        output::note(&format!(
            "resuming from {} after {} of {} steps",
            checkpoint.folder().display(),
            checkpoint.manifest().step,
            resolved_job.job.steps
        ));
    }
    Ok(Ok(PreparedRun { resolved_job, compiled, folder, earlier }))
}

/// The number of steps if the run is complete and its model is that of the last step, or of the best one, so that resuming
/// would change nothing; the inner error describes a missing or outdated model.
fn finished(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> Option<Result<u64, String>> {
    let is_ours = |checkpoint: &&Checkpoint| is_inside(checkpoint.folder(), &arguments.output);
    let checkpoint = resolved_job.checkpoint.as_ref().filter(is_ours);
    let (job, model) = (&resolved_job.job, arguments.output.join("model"));
    let Some(checkpoint) = checkpoint.filter(|checkpoint| job.is_complete(checkpoint.manifest())) else {
        // Without a checkpoint of the last step, the model tells.
        let is_asked = checkpoint.is_some() || arguments.resume.as_deref() == Some("auto");
        let end = (is_asked && resolved_job.strategies.saving == Interval::Never)
            .then(|| completed_run(&model))
            .flatten()?;
        let stops_early = job.best_policy().is_some_and(|policy| policy.patience.is_some());
        let is_complete = end.steps >= job.steps || (end.early && stops_early);
        return is_complete.then_some(Ok(end.steps));
    };
    let step = checkpoint.manifest().step;
    if !resolved_job.writes_model {
        return Some(Ok(step));
    }
    let Some(best) = job.best_step(checkpoint.manifest()).filter(|best| *best != step) else {
        return Some(check_export(&model, checkpoint).map(|()| step));
    };
    let checked = match Checkpoint::open(&arguments.output.join("checkpoints").join(step_folder(best))) {
        Ok(best) => check_export(&model, &best),
        // The best checkpoint was removed, and its model is all that is left of it.
        Err(_) if exported_step(&model) == Some(best) => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    Some(checked.map(|()| step))
}

/// Opens the run folder and writes config, origins and plan. A signal before the first step removes them.
fn write_folder(
    arguments: &TrainArgs,
    resolved_job: &ResolvedJob,
    compiled: &Compiled,
    signals: &Signals,
) -> anyhow::Result<(RunFolder, checkpoints::Earlier)> {
    let write = || {
        let folder = open_folder(arguments, resolved_job)?;
        let earlier = checkpoints::Earlier::of(&folder.checkpoints(), resolved_job.checkpoint.as_ref());
        // Written first, as it marks the folder as a run.
        write_json(&folder.origin(), &startup_summary::origin_json(resolved_job))?;
        write_json(&folder.config(), &resolved_job.resolved.to_json())?;
        write_json(&folder.plan(), &startup_summary::plan_json(resolved_job, compiled))?;
        let reports = reporter::report_plan(arguments, resolved_job)?.unstarted();
        let on_stop = match folder.unstarted() {
            Some(unstarted) => OnStop::Undo(Box::new(move || {
                if unstarted.remove() {
                    reports.remove();
                }
            })),
            None => OnStop::KeepCheckpoints,
        };
        anyhow::Ok(((folder, earlier), on_stop))
    };
    match signals.startup() {
        Some(before) => before.write_with_cleanup(write),
        None => write().map(|(written, _)| written),
    }
}

fn open_folder(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> anyhow::Result<RunFolder> {
    let checkpoint = resolved_job.checkpoint.as_ref().map(Checkpoint::folder);
    let existing = match (arguments.overwrite_output_dir, resolved_job.resumes_here) {
        (_, true) => ExistingRun::Keep,
        (true, false) => ExistingRun::Overwrite,
        (false, false) => ExistingRun::Refuse,
    };
    let mut inputs = vec![RunInput::new("--model", &resolved_job.job.folder)];
    for (flag, paths) in [("--data", &arguments.data), ("--eval-data", &arguments.eval_data)] {
        inputs.extend(find_files(paths)?.files.into_iter().map(|path| RunInput::new(flag, path)));
    }
    inputs.extend(checkpoint.map(|folder| RunInput::new("--resume", folder)));
    let adapter = resolved_job.job.lora.as_ref().and_then(|lora| lora.adapter.as_ref());
    inputs.extend(adapter.map(|folder| RunInput::new("--adapter", folder)));
    let distillation = resolved_job.job.objective.distillation();
    let teacher = distillation.and_then(Distillation::model).map(|teacher| &teacher.folder);
    inputs.extend(teacher.map(|folder| RunInput::new("--teacher", folder)));
    inputs.extend(arguments.kd.teacher.iter().map(|folder| RunInput::new("--teacher", folder)));
    inputs.extend(arguments.kd.kd_cache.iter().map(|folder| RunInput::new("--kd-cache", folder)));
    inputs.extend(arguments.trainer.config.iter().map(|path| RunInput::new("--config", path)));
    // Presets are not paths; neither is JSON text, which does not exist as a file.
    let configs = [
        ("--deepspeed", Some(&arguments.deepspeed)),
        ("--teacher-deepspeed", arguments.kd.teacher_deepspeed.as_ref()),
    ];
    for (flag, config) in configs {
        let file = config.filter(|name| Preset::find(name).is_err());
        inputs.extend(file.map(|name| RunInput::new(flag, name)));
    }
    let tell = |waiting: &str| output::note(&format!("note: {waiting}"));
    Ok(RunFolder::open_telling(&arguments.output, existing, &inputs, &tell)?)
}

/// Prints what overwriting has removed and kept.
fn print_removed(folder: &RunFolder) {
    for name in folder.removed() {
        output::note(&format!("removed {name} of an earlier run"));
    }
    for name in folder.kept() {
        let is_step = name.strip_prefix("checkpoints/").and_then(parse_step_folder).is_some();
        let why = if is_step { "; --resume auto would treat it as a checkpoint: move it away" } else { "" };
        output::note(&format!("note: {name} was kept: it is not, or not only, from a run{why}"));
    }
}

fn write_json(path: &std::path::Path, value: &serde_json::Value) -> anyhow::Result<()> {
    publish(path, format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())?;
    Ok(())
}
