//! `train`: resolves, plans, starts the ranks and watches them.
//!
//! Every rank is this same command, started again with the ranks' variables in its environment: it resolves the same job
//! from the same arguments, and is told what the launcher has found. The launcher owns the run folder; rank 0 writes its
//! metrics, its checkpoints' manifests and its model. Where another launcher has started the ranks (torchrun, srun,
//! mpirun), rank 0 does the launcher's work and then its own.

mod agreement;
mod ask;
mod data;
mod finish;
mod follow;
mod foreign;
mod launch;
mod rank;
mod resume;
mod saves;
mod show;
mod told;

use zeroth::base::{counted, publish};
use zeroth::comm::local::JOB_FD;
use zeroth::config::preset::Preset;
use zeroth::program::Compiled;
use zeroth::train::checkpoint::{Checkpoint, is_step_folder};
use zeroth::train::{Existing, Input, RunFolder, Weights, check_export};

use self::ask::Asked;
pub(super) use self::data::Reading;
use self::told::Told;
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::missing_unit;
use crate::output::{self, Output};
use crate::signals::{Role, Signals};

pub(super) fn run(arguments: &TrainArgs, output: &Output) -> anyhow::Result<Exit> {
    if std::env::var_os(JOB_FD).is_some() {
        return rank::of_a_launcher(arguments);
    }
    if let Some(place) = foreign::place()? {
        return foreign::run(arguments, &place, output);
    }
    let signals = Signals::install(Role::Own)?;
    let begun = match begin(arguments, None, output, &signals)? {
        Ok(begun) => begun,
        Err(exit) => return Ok(exit),
    };
    // A rank alone needs no process of its own, unless it is to be started again when it dies.
    let exit = if begun.asked.ranks == 1 && arguments.max_restarts == 0 {
        rank::alone(arguments, &begun, &signals)?
    } else {
        launch::many(arguments, &begun, &signals)?
    };
    if exit == Exit::Done { finish::summary(&begun, output) } else { Ok(exit) }
}

/// A run that is about to start: everything is checked, shown and written down.
struct Begun {
    asked: Asked,
    compiled: Compiled,
    folder: RunFolder,
    /// The checkpoints that were there before.
    earlier: saves::Earlier,
}

/// Does all that comes before ranks meet. Gives an exit code where there is nothing left to do.
fn begin(
    arguments: &TrainArgs,
    ranks: Option<u64>,
    output: &Output,
    signals: &Signals,
) -> anyhow::Result<Result<Begun, Exit>> {
    if let Some(before) = signals.before_first_step() {
        let cache = data::cache(arguments);
        before.on_stop(move || cache.remove_unfinished());
    }
    let mut asked = ask::ask(arguments, ranks, None)?;
    let compiled = match asked.fit()? {
        Ok(compiled) => compiled,
        Err(misfit) => {
            show::model(&asked);
            output::error(&misfit);
            hint_at_units(arguments);
            return Ok(Err(Exit::DoesNotFit));
        }
    };
    asked.told.agreement = agreement::of(arguments, &asked);
    if asked.checkpoint.is_none() {
        // Whether the weights fit the model is known from their headers: better now than on every rank.
        let weights = Weights::open(&asked.job.folder, &asked.job.model, &asked.job.table, asked.job.seed)?;
        asked.notes.extend(weights.notes());
    }
    match finished(arguments, &asked) {
        Some(Ok(steps)) => {
            // Best effort: opened and closed, it is rid of what killed processes left.
            let _ = RunFolder::open(&arguments.output, Existing::Keep, &[]);
            let done = counted(steps, "step");
            output::note(&format!("this run is complete: {done} done; nothing was changed"));
            let has_loss = asked.checkpoint.as_ref().is_some_and(|found| found.manifest().loss.is_some());
            return Ok(Err(if has_loss { Exit::Done } else { finish::without_loss(steps) }));
        }
        Some(Err(why)) => {
            asked.notes.push(format!("all steps are done, only the model is left to write: {why}"));
        }
        None => {}
    }
    show::model(&asked);
    show::origins(&asked);
    show::memory(&asked, &compiled);
    for note in &asked.notes {
        output::note(&format!("note: {note}"));
    }
    if let Some(lack) = saves::lack_of_space(arguments, &asked) {
        output::error(&lack);
        hint_at_units(arguments);
        return Ok(Err(Exit::DoesNotFit));
    }
    if arguments.dry_run {
        show::first_batch(&asked, output)?;
        return Ok(Err(Exit::Done));
    }
    if let Some(file) = &arguments.dump_program {
        dump_program(file, &compiled)?;
        return Ok(Err(Exit::Done));
    }
    let (folder, earlier) = write_folder(arguments, &asked, &compiled, signals)?;
    say_removed(&folder);
    if let Some(checkpoint) = &asked.checkpoint {
        output::note(&format!(
            "going on from {} after {} of {} steps",
            checkpoint.folder().display(),
            checkpoint.manifest().step,
            asked.job.steps
        ));
    }
    Ok(Ok(Begun { asked, compiled, folder, earlier }))
}

/// Writes the compiled program as text: to standard output for `-`, else to a file.
fn dump_program(file: &std::path::Path, compiled: &Compiled) -> anyhow::Result<()> {
    if file.as_os_str() == "-" {
        output::text(&compiled.to_string());
        return Ok(());
    }
    Ok(publish(file, compiled.to_string().as_bytes())?)
}

/// Says where a budget lacks its unit.
fn hint_at_units(arguments: &TrainArgs) {
    let budgets = [
        ("--device-memory", arguments.device_memory),
        ("--host-memory", arguments.host_memory),
        ("--disk-space", arguments.disk_space),
    ];
    for hint in missing_unit::hints(&budgets) {
        output::note(&format!("note: {hint}"));
    }
}

/// How many steps are done, where none is left and the model is that of the last one: going on would change nothing. Or what
/// the model lacks.
fn finished(arguments: &TrainArgs, asked: &Asked) -> Option<Result<u64, String>> {
    let is_ours = |checkpoint: &&Checkpoint| resume::is_inside(checkpoint.folder(), &arguments.output);
    let checkpoint = asked.checkpoint.as_ref().filter(is_ours)?;
    let step = checkpoint.manifest().step;
    if step < asked.job.steps {
        return None;
    }
    if !asked.writes_model {
        return Some(Ok(step));
    }
    Some(check_export(&arguments.output.join("model"), checkpoint).map(|()| step))
}

/// Opens the run's folder and writes what is known before the first step. A signal that comes before it undoes that.
fn write_folder(
    arguments: &TrainArgs,
    asked: &Asked,
    compiled: &Compiled,
    signals: &Signals,
) -> anyhow::Result<(RunFolder, saves::Earlier)> {
    let write = || {
        let folder = open_folder(arguments, asked)?;
        let earlier = saves::Earlier::of(&folder.checkpoints(), asked.checkpoint.as_ref());
        // It marks the folder as a run's, so it comes first.
        write_json(&folder.origin(), &show::origin_json(asked))?;
        write_json(&folder.config(), &asked.resolved.to_json())?;
        write_json(&folder.plan(), &show::plan_json(asked, compiled))?;
        anyhow::Ok((folder, earlier))
    };
    let Some(before) = signals.before_first_step() else { return write() };
    let (folder, earlier) = before.write(write)?;
    match folder.unstarted() {
        Some(unstarted) => before.on_stop(move || unstarted.remove()),
        None => before.keeps_checkpoints(),
    }
    Ok((folder, earlier))
}

fn open_folder(arguments: &TrainArgs, asked: &Asked) -> anyhow::Result<RunFolder> {
    let checkpoint = asked.checkpoint.as_ref().map(Checkpoint::folder);
    let goes_on_here = match checkpoint {
        Some(checkpoint) => resume::is_inside(checkpoint, &arguments.output),
        // Killed before its first checkpoint: `auto` begins it again.
        None => arguments.resume.as_deref() == Some("auto"),
    };
    let existing = match (arguments.overwrite_output_dir, goes_on_here) {
        (_, true) => Existing::Keep,
        (true, false) => Existing::Overwrite,
        (false, false) => Existing::Refuse,
    };
    let mut inputs = vec![Input::new("--model", &asked.job.folder)];
    inputs.extend(arguments.data.iter().map(|path| Input::new("--data", path)));
    inputs.extend(arguments.eval_data.iter().map(|path| Input::new("--eval-data", path)));
    inputs.extend(checkpoint.map(|folder| Input::new("--resume", folder)));
    // A preset's name is no path; a config may also be typed as text, which is none that exists.
    inputs.extend(
        Preset::find(&arguments.deepspeed).is_err().then(|| Input::new("--deepspeed", &arguments.deepspeed)),
    );
    Ok(RunFolder::open(&arguments.output, existing, &inputs)?)
}

/// Says what overwriting has removed, and what it left.
fn say_removed(folder: &RunFolder) {
    for name in folder.removed() {
        output::note(&format!("removed {name} of an earlier run"));
    }
    for name in folder.kept() {
        let is_step = name.strip_prefix("checkpoints/").and_then(is_step_folder).is_some();
        let why = if is_step { "; --resume auto would take it for a checkpoint: move it away" } else { "" };
        output::note(&format!("note: {name} stays: not all of it was written by a run{why}"));
    }
}

fn write_json(path: &std::path::Path, value: &serde_json::Value) -> anyhow::Result<()> {
    publish(path, format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())?;
    Ok(())
}
