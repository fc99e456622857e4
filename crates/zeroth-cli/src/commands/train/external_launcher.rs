//! Ranks started by an external launcher on this machine: torchrun, srun, mpirun. Rank 0 does the work of zeroth's
//! launcher, the others wait for its handoff, and then all of them train.

use zeroth::comm::JoinOptions;
use zeroth::comm::environment::LaunchedRank;
use zeroth::comm::rendezvous::{Coordinator, RendezvousError, WaitPolicy, request_join};
use zeroth::job::{LauncherHandoff, REGION, ResolvedJob, StartedRanks};
use zeroth::program::Compiled;

use super::agreement::Refusal;
use super::live::LiveStatus;
use super::prepare::prepare_run;
use super::rank::Agreed;
use super::{agreement, rank, resolve_job, several_hosts, summary};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;

/// This process's rank under an external launcher; `None` without one.
pub(super) fn place() -> anyhow::Result<Option<LaunchedRank>> {
    Ok(LaunchedRank::of_this_process()?)
}

/// The ranks that the launcher has started.
pub(super) fn started(launched: &LaunchedRank) -> StartedRanks {
    let place = launched.place;
    let [world, local_world, local_rank] =
        [place.world, place.local_world, place.local_rank].map(|number| number as u64);
    StartedRanks { world, local_world, host: place.host, local_rank }
}

pub(super) fn run(arguments: &TrainArgs, launched: &LaunchedRank, output: &Output) -> anyhow::Result<Exit> {
    let place = launched.place;
    let ranks = place.world as u64;
    if let Some(typed) = arguments.ranks.filter(|typed| *typed != ranks) {
        anyhow::bail!(
            "--ranks is {typed}, but {} started {ranks}: leave --ranks out, or start that many",
            launched.launcher
        );
    }
    if !place.is_one_host() {
        return several_hosts::run(arguments, launched, output);
    }
    let role = if place.rank == 0 { SignalRole::Primary } else { SignalRole::Secondary };
    let saves = SaveSignals::of(Some(launched.launcher), arguments.signal_exit);
    let signals = Signals::install(role, InterruptedWork::Training, saves)?;
    let patience = WaitPolicy::default().tell(|waiting| output::note(&waiting.to_string()));
    if place.rank == 0 {
        run_rank_0(arguments, launched, output, &signals, patience)
    } else {
        run_peer(arguments, launched, &signals, &patience)
    }
}

fn run_rank_0(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    output: &Output,
    signals: &Signals,
    patience: WaitPolicy,
) -> anyhow::Result<Exit> {
    let host = Coordinator::open(&launched.job, launched.place.world, patience)?;
    let run = match prepare_run(arguments, Some(started(launched)), output, signals) {
        Ok(Ok(run)) => run,
        Ok(Err(exit)) => {
            host.refuse(&(exit as u8).to_string());
            return Ok(exit);
        }
        Err(error) => {
            host.refuse(&(Exit::Wrong as u8).to_string());
            return Err(error);
        }
    };
    let status = LiveStatus::start(&run, signals);
    let handoff = run.resolved_job.handoff.to_text()?;
    let comm = host.begin(REGION, handoff.as_bytes(), &rank::options(&run.resolved_job))?;
    if let Some(exit) = agreement::exchange(&*comm, Ok(&run.resolved_job.facts.of_rank(0)))? {
        return Ok(exit);
    }
    status.observe(&*comm.control());
    let exit = rank::joined(arguments, &run.resolved_job, &run.compiled, comm, signals, Agreed::Yes)?;
    status.finish(exit);
    if exit == Exit::Done { summary::print(&run, output) } else { Ok(exit) }
}

fn run_peer(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    signals: &Signals,
    patience: &WaitPolicy,
) -> anyhow::Result<Exit> {
    let place = launched.place;
    let invitation = match request_join(&launched.job, place.rank, place.world, patience) {
        Ok(invitation) => invitation,
        // Rank 0 prints the reason and shares its exit code.
        Err(RendezvousError::Refused { reason }) => return Ok(Exit::of_code(&reason)),
        Err(error) => return Err(error.into()),
    };
    // The others wait for this rank, so it joins even to report an error.
    let resolved = LauncherHandoff::read(invitation.message())
        .map_err(|error| refusal(&error.into()))
        .and_then(|handoff| resolve(arguments, launched, handoff));
    let options = resolved
        .as_ref()
        .map_or_else(|_| JoinOptions::default(), |(resolved_job, _)| rank::options(resolved_job));
    let comm = invitation.join(&options)?;
    let facts = resolved.as_ref().map(|(resolved_job, _)| resolved_job.facts.of_rank(place.local_rank));
    if let Some(exit) = agreement::exchange(&*comm, facts.as_ref().map_err(|refusal| *refusal))? {
        return Ok(exit);
    }
    match resolved {
        Ok((resolved_job, compiled)) => {
            rank::joined(arguments, &resolved_job, &compiled, comm, signals, Agreed::Yes)
        }
        Err(refusal) => Ok(refusal.exit),
    }
}

/// Resolves this rank's own command line, which must agree with rank 0's.
pub(super) fn resolve(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    handoff: LauncherHandoff,
) -> Result<(ResolvedJob, Compiled), Refusal> {
    let mut resolved_job = resolve_job::resolve_job(arguments, Some(started(launched)), Some(handoff))
        .map_err(|error| refusal(&error))?;
    let compiled = match resolved_job.fit().map_err(|error| refusal(&error.into()))? {
        Ok(compiled) => compiled,
        Err(misfit) => return Err(Refusal { exit: Exit::DoesNotFit, why: misfit.to_string() }),
    };
    let own = agreement::of(arguments, &resolved_job);
    agreement::check(launched.place.rank, &own, &resolved_job.handoff.agreement)
        .map_err(|error| refusal(&error))?;
    Ok((resolved_job, compiled))
}

pub(super) fn refusal(error: &anyhow::Error) -> Refusal {
    Refusal { exit: Exit::Wrong, why: format!("{error:#}") }
}
