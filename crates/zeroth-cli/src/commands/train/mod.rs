//! `train`: resolves, plans, starts the ranks and watches them.
//!
//! Every rank is this same command, started again with the ranks' variables in its environment: it resolves the same job
//! from the same arguments. The launcher owns the run folder; rank 0 writes its metrics and its model.

mod ask;
mod follow;
mod show;

use std::io::{IsTerminal, Write};
use std::sync::Arc;

use anyhow::Context;
use zeroth::base::{format_bytes, publish};
use zeroth::comm::Comm;
use zeroth::comm::launch::{How, Launch, Line, Output as RankOutput, Stream};
use zeroth::comm::local::{Options, join_from_environment};
use zeroth::device::cpu::CpuDevice;
use zeroth::device::cuda::CudaDevice;
use zeroth::device::{Device, Target, Tier};
use zeroth::step::run::Compiled;
use zeroth::train::{Chores, Existing, RunFolder, TrainError, Weights, loss_curve, progress, read_losses};

use self::ask::Asked;
use self::follow::Follower;
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::{self, Output};

/// Bytes of shared memory through which each rank sends: large messages go in pieces of half of it.
const REGION: usize = 8 << 20;

pub(super) fn run(arguments: &TrainArgs, output: &Output) -> anyhow::Result<Exit> {
    // The launcher has checked and shown everything; a rank resolves the same and says only what goes wrong.
    let is_rank = std::env::var_os(zeroth::comm::local::JOB_FD).is_some();
    let mut asked = ask::ask(arguments)?;
    let compiled = match asked.fit()? {
        Ok(compiled) => compiled,
        Err(misfit) => {
            show::model(&asked);
            output::error(&misfit);
            return Ok(Exit::DoesNotFit);
        }
    };
    if is_rank {
        return rank(arguments, &asked, &compiled);
    }
    // Whether the weights fit the model is known from their headers: better now than on every rank.
    let weights = Weights::open(&asked.job.folder, &asked.job.table, asked.job.seed)?;
    asked.notes.extend(weights.warnings().iter().map(ToString::to_string));
    show::model(&asked);
    show::origins(&asked);
    show::memory(&asked, &compiled);
    for note in &asked.notes {
        output::note(&format!("note: {note}"));
    }
    if arguments.dry_run {
        show::first_batch(&asked, output);
        return Ok(Exit::Done);
    }
    let existing = if arguments.overwrite_output_dir { Existing::Overwrite } else { Existing::Refuse };
    let folder = RunFolder::open(&arguments.output, existing)?;
    for name in folder.removed() {
        output::note(&format!("removed {name} of an earlier run"));
    }
    write_json(&folder.origin(), &show::origin_json(&asked))?;
    write_json(&folder.config(), &asked.resolved.to_json())?;
    write_json(&folder.plan(), &show::plan_json(&asked, &compiled))?;
    if asked.ranks == 1 {
        let exit = one_rank(arguments, &asked, &compiled, &folder)?;
        return if exit == Exit::Done { finish(&asked, &folder, output) } else { Ok(exit) };
    }
    let exit = many_ranks(arguments, &asked, &folder)?;
    if exit == Exit::Done { finish(&asked, &folder, output) } else { Ok(exit) }
}

/// The device of a rank, with an arena as large as planned. Ranks beyond the cards there are share them.
fn device(asked: &Asked, compiled: &Compiled, rank: usize) -> anyhow::Result<Box<dyn Device>> {
    let [bytes, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.arena(tier));
    Ok(match asked.target {
        Target::Cpu { threads } => Box::new(CpuDevice::new(threads, bytes, host)?),
        Target::Cuda => Box::new(CudaDevice::open(rank % asked.cards.max(1) as usize, bytes, host)?),
    })
}

fn chores(arguments: &TrainArgs, asked: &Asked, folder: &std::path::Path) -> Chores {
    Chores {
        model: asked.writes_model.then(|| folder.join("model")),
        trace: arguments.trace.is_some(),
        look: asked.logging_steps,
    }
}

/// A rank alone needs no processes.
fn one_rank(
    arguments: &TrainArgs,
    asked: &Asked,
    compiled: &Compiled,
    folder: &RunFolder,
) -> anyhow::Result<Exit> {
    let mut follower = Follower::new(asked, folder.root())?.with_log(&folder.log(0)?)?;
    let device = device(asked, compiled, 0)?;
    let chores = chores(arguments, asked, folder.root());
    let ended =
        zeroth::train::train(&asked.job, compiled, device, None, &chores, &mut |done| follower.take(done));
    follower.end();
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => return Ok(failed(&error)),
    };
    if let (Some(path), Some(trace)) = (&arguments.trace, ended.trace) {
        write_trace(path, &[trace.to_json_lines()?])?;
    }
    Ok(Exit::Done)
}

/// One rank of several, started by the launcher.
fn rank(arguments: &TrainArgs, asked: &Asked, compiled: &Compiled) -> anyhow::Result<Exit> {
    let threads = match asked.target {
        Target::Cpu { threads } => threads,
        Target::Cuda => 1,
    };
    let warn = |slow: &zeroth::comm::Slow| output::note(&slow.to_string());
    let options = Options::default().threads(threads).on_slow(warn);
    let comm = join_from_environment(&options)?.context("the launcher's variables are gone")?;
    let number = comm.rank();
    let mut follower = if number == 0 { Some(Follower::new(asked, &arguments.output)?) } else { None };
    let device = device(asked, compiled, number)?;
    let chores = chores(arguments, asked, &arguments.output);
    let ended =
        zeroth::train::train(&asked.job, compiled, device, Some(Box::new(comm)), &chores, &mut |done| {
            follower.as_mut().map_or(Ok(()), |follower| follower.take(done))
        });
    if let Some(follower) = &mut follower {
        follower.end();
    }
    match ended {
        Ok(ended) => {
            if let Some(trace) = ended.trace {
                let part = arguments.output.join(format!("logs/trace-{number}.part"));
                publish(&part, trace.to_json_lines()?.as_bytes())?;
            }
            Ok(Exit::Done)
        }
        // All ranks find the same: one says it.
        Err(TrainError::NotFinite { .. } | TrainError::AtMinScale { .. }) if number != 0 => Ok(Exit::Failed),
        Err(error) => Ok(failed(&error)),
    }
}

fn failed(error: &TrainError) -> Exit {
    output::error(&error.to_string());
    Exit::Failed
}

/// Starts the ranks, passes on what they say, and explains how they ended.
fn many_ranks(arguments: &TrainArgs, asked: &Asked, folder: &RunFolder) -> anyhow::Result<Exit> {
    let logs: Vec<std::fs::File> = (0..asked.ranks)
        .map(|rank| anyhow::Ok(std::fs::File::create(folder.log(rank)?)?))
        .collect::<anyhow::Result<_>>()?;
    let logs = Arc::new(logs);
    let said = Arc::clone(&logs);
    let on_terminal = std::io::stderr().is_terminal();
    let lines = move |line: Line| {
        // A line that takes the place of the last one is no line for a log.
        if let Some(passing) = line.text.strip_prefix(follow::PASSING) {
            output::over(passing);
            return;
        }
        let _ = writeln!(&said[line.rank], "{}", line.text);
        // Rank 0 speaks for all; what the others say is a problem, and carries their number.
        match (line.rank, line.stream) {
            (0, Stream::Err) if !line.text.starts_with("error:") => output::note(&line.text),
            _ => output::note(&line.to_string()),
        }
    };
    let program = std::env::current_exe().context("this program cannot find itself to start ranks")?;
    let report = Launch::new(program, asked.ranks as usize, REGION)
        .arguments(std::env::args_os().skip(1))
        .variable(ask::BUDGET, ask::budget_text(asked.budget))
        .variable(follow::TERMINAL, if on_terminal { "1" } else { "0" })
        .output(RankOutput::Lines(Arc::new(lines)))
        .run()?;
    if !report.success() {
        // Where all ranks ended by themselves with an error of the run, rank 0 has said which.
        let agreed = report.ranks.iter().all(|end| end.how == How::Exited { code: Exit::Failed as i32 });
        if !agreed {
            output::error(report.to_string().trim_end());
        }
        return Ok(Exit::Failed);
    }
    if let Some(path) = &arguments.trace {
        let part = |rank: u64| folder.root().join(format!("logs/trace-{rank}.part"));
        let parts: Vec<String> =
            (0..asked.ranks).map(|rank| std::fs::read_to_string(part(rank))).collect::<Result<_, _>>()?;
        write_trace(path, &parts)?;
        for rank in 0..asked.ranks {
            std::fs::remove_file(part(rank))?;
        }
    }
    Ok(Exit::Done)
}

fn write_trace(path: &std::path::Path, parts: &[String]) -> anyhow::Result<()> {
    let text = format!("{{\"traceEvents\": [\n{}\n]}}\n", parts.join(",\n"));
    publish(path, text.as_bytes())
        .with_context(|| format!("cannot write the trace to {}", path.display()))?;
    output::note(&format!("timeline in {}: open it at ui.perfetto.dev", path.display()));
    Ok(())
}

fn write_json(path: &std::path::Path, value: &serde_json::Value) -> anyhow::Result<()> {
    publish(path, format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())?;
    Ok(())
}

/// What a person looks at in the end, and one object for programs.
fn finish(asked: &Asked, folder: &RunFolder, output: &Output) -> anyhow::Result<Exit> {
    let losses = read_losses(&folder.metrics())?;
    let title = format!("{}, {} steps", asked.name, asked.job.steps);
    publish(&folder.loss_curve(), loss_curve(&losses, &title).as_bytes())?;
    let values: Vec<f64> = losses.iter().map(|(_, loss)| *loss).collect();
    if let (Some(first), Some(last)) = (values.first(), values.last()) {
        output::note(&format!("loss {first:.4} → {last:.4}  {}", progress::sparkline(&values, 60)));
    }
    output::note(&format!("metrics and loss curve in {}", folder.root().display()));
    if asked.writes_model {
        let size = folder_bytes(&folder.model());
        output::note(&format!("model in {} ({})", folder.model().display(), format_bytes(size)));
    } else {
        output::note(
            "no model was written: stage3_gather_16bit_weights_on_model_save is false, and checkpoints to export from are \
             not yet built",
        );
    }
    if output.is_json() {
        let step = |place: Option<&(u64, f64)>| place.map(|(_, loss)| *loss);
        output::json(&serde_json::json!({
            "steps": losses.len(),
            "first_loss": step(losses.first()),
            "last_loss": step(losses.last()),
            "output": folder.root(),
            "model": asked.writes_model.then(|| folder.model()),
        }))?;
    }
    Ok(Exit::Done)
}

fn folder_bytes(folder: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}
