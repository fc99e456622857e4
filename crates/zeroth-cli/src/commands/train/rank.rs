//! One rank: its device, what it does besides steps, and how it ends.

use std::fs;
use std::path::Path;

use anyhow::Context;
use zeroth::base::publish;
use zeroth::comm::Comm;
use zeroth::comm::local::{LocalComm, Options, join_from_environment};
use zeroth::cpu::CpuDevice;
use zeroth::cuda::CudaDevice;
use zeroth::kernel::{Device, Tier};
use zeroth::program::Compiled;
use zeroth::program::Target;
use zeroth::train::{Chores, Done, Ended, ExportError, TrainError, Wish, train};

use super::ask::{self, Asked};
use super::follow::Follower;
use super::{Begun, Told, agreement, finish, saves};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;
use crate::signals::{Ended as SignalEnd, Role, Signals};

/// A rank alone: launcher and rank in one process.
pub(super) fn alone(arguments: &TrainArgs, begun: &Begun, signals: &Signals) -> anyhow::Result<Exit> {
    let Begun { asked, compiled, folder, .. } = begun;
    let follow = || Follower::new(asked, compiled, arguments)?.with_log(&folder.log(0)?);
    let follower = signals.before_first_step().map_or_else(follow, |before| before.write(follow))?;
    let ended = steps(arguments, asked, compiled, None, Some(follower), signals)?;
    match ended {
        Ok(ended) => {
            if let (Some(path), Some(trace)) = (&arguments.trace, &ended.trace) {
                finish::trace(path, &[trace.to_json_lines()?])?;
            }
            Ok(end(&ended))
        }
        Err(error) => Ok(failed(&error)),
    }
}

/// One rank of several, started by our launcher.
pub(super) fn of_a_launcher(arguments: &TrainArgs) -> anyhow::Result<Exit> {
    let signals = Signals::install(Role::Watched)?;
    // Started from the image that runs already, a rank would be called "exe" in lists of processes.
    let _ = fs::write("/proc/self/comm", "zeroth");
    let mut asked = ask::ask(arguments, None, Told::from_environment()?)?;
    // The launcher has checked and shown everything; a rank says only what goes wrong.
    let compiled = match asked.fit()? {
        Ok(compiled) => compiled,
        Err(misfit) => {
            output::error(&misfit);
            return Ok(Exit::DoesNotFit);
        }
    };
    let comm = join_from_environment(&options(&asked))?.context("the launcher's variables are gone")?;
    agreement::check(comm.rank(), &agreement::of(arguments, &asked), &asked.told.agreement)?;
    joined(arguments, &asked, &compiled, comm, &signals)
}

/// How a rank joins the others.
pub(super) fn options(asked: &Asked) -> Options {
    let threads = match asked.target {
        Target::Cpu { threads } => threads,
        Target::Cuda => 1,
    };
    Options::default().threads(threads).on_slow(|slow| output::note(&slow.to_string()))
}

/// A rank that has joined the others.
pub(super) fn joined(
    arguments: &TrainArgs,
    asked: &Asked,
    compiled: &Compiled,
    comm: LocalComm,
    signals: &Signals,
) -> anyhow::Result<Exit> {
    let number = comm.rank();
    if let Some(before) = signals.before_first_step() {
        before.join(comm.first_step());
    }
    let follow = || Follower::new(asked, compiled, arguments);
    let follower = match (number, signals.before_first_step()) {
        (0, Some(before)) => Some(before.write(follow)?),
        (0, None) => Some(follow()?),
        _ => None,
    };
    match steps(arguments, asked, compiled, Some(comm), follower, signals)? {
        Ok(ended) => {
            if let Some(trace) = ended.trace.as_ref().filter(|_| arguments.trace.is_some()) {
                publish(&finish::trace_part(&arguments.output, number), trace.to_json_lines()?.as_bytes())?;
            }
            Ok(end(&ended))
        }
        // All ranks find the same: one says it.
        Err(TrainError::NotFinite { .. } | TrainError::AtMinScale { .. }) if number != 0 => Ok(Exit::Failed),
        // Rank 0 writes the model, and says why it could not.
        Err(TrainError::Export(error)) if matches!(*error, ExportError::OtherRank) => Ok(Exit::Failed),
        Err(error) => Ok(failed(&error)),
    }
}

/// Trains, and follows what is done.
fn steps(
    arguments: &TrainArgs,
    asked: &Asked,
    compiled: &Compiled,
    comm: Option<LocalComm>,
    mut follower: Option<Follower<'_>>,
    signals: &Signals,
) -> anyhow::Result<Result<Ended, TrainError>> {
    let number = comm.as_ref().map_or(0, Comm::rank);
    let first_step = comm.as_ref().map(LocalComm::first_step);
    let comm = comm.map(|comm| Box::new(comm) as Box<dyn Comm>);
    let device = device(asked, compiled, number)?;
    let save_now = arguments.output.join("save-now");
    let wish = || wish(signals, number, &save_now);
    let saves = saves::saves(arguments, asked);
    let chores = Chores {
        model: asked.writes_model.then(|| arguments.output.join("model")),
        trace: arguments.trace.is_some(),
        timed: follower.as_ref().is_some_and(Follower::wants_times),
        ahead: asked.target == Target::Cuda,
        look: asked.logging_steps,
        saves: Some(&saves),
        from: asked.checkpoint.as_ref(),
        wish: &wish,
    };
    let ended = train(&asked.job, compiled, device, comm, &chores, &mut |done| {
        if let Done::Loaded = done {
            signals.begin_steps(first_step.as_ref());
        }
        follower.as_mut().map_or(Ok(()), |follower| follower.take(done))
    });
    Ok(ended)
}

/// What is asked for from outside. The file is taken away as soon as it is seen: it asks for one save.
fn wish(signals: &Signals, number: usize, save_now: &Path) -> Wish {
    if let Some(asked) = signals.asked() {
        match asked {
            SignalEnd::Interrupt => Wish::Stop,
            SignalEnd::HangUp => Wish::HangUp,
            SignalEnd::Terminate => Wish::Terminate,
        }
    } else if number == 0 && save_now.exists() && fs::remove_file(save_now).is_ok() {
        Wish::Save
    } else {
        Wish::GoOn
    }
}

/// The device of a rank, with an arena as large as planned. Ranks beyond the cards there are share them.
fn device(asked: &Asked, compiled: &Compiled, rank: usize) -> anyhow::Result<Box<dyn Device>> {
    let [bytes, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.arena(tier));
    Ok(match asked.target {
        Target::Cpu { threads } => Box::new(CpuDevice::new(threads, bytes, host)?),
        Target::Cuda => {
            let mut card = CudaDevice::open(rank % asked.cards.max(1) as usize, bytes, host)?;
            // A budget holds for what is tried on the way, too.
            if let Some(budget) = asked.told.budget.device {
                card.limit_autotune_bytes(budget.saturating_sub(bytes));
            }
            Box::new(card)
        }
    })
}

/// The end of a rank that did not fail. All ranks stop together, so all end with the code of what one was asked for.
fn end(ended: &Ended) -> Exit {
    match ended.wish {
        Wish::Terminate if ended.stopped => Exit::after(SignalEnd::Terminate),
        Wish::HangUp if ended.stopped => Exit::after(SignalEnd::HangUp),
        _ if ended.stopped => Exit::after(SignalEnd::Interrupt),
        _ => Exit::Done,
    }
}

fn failed(error: &TrainError) -> Exit {
    output::error(&error.to_string());
    if let TrainError::Save(_) = error {
        output::note("once that is mended, --resume auto goes on from the newest checkpoint");
    }
    Exit::Failed
}
