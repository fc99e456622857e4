//! Ranks started by an external launcher, on one host or several: torchrun, srun, mpirun. Rank 0 does the work of zeroth's
//! launcher, the others wait for its handoff, and then all of them train.

use zeroth::comm::environment::LaunchedRank;
use zeroth::comm::hosts::{ControlComm, HostOptions, JobCoordinator, JoinedHost, TokenSource, request_join};
use zeroth::comm::rendezvous::{RendezvousError, WaitPolicy};
use zeroth::comm::{Comm, JoinOptions, OpName};
use zeroth::job::{LauncherHandoff, REGION, ResolvedJob, StartedRanks, gpus};
use zeroth::machine::{DeviceKind, probe};
use zeroth::program::Compiled;

use super::agreement::Refusal;
use super::live::LiveStatus;
use super::prepare::prepare_run;
use super::rank::Agreed;
use super::{agreement, cpu_hosts, rank, resolve_job, summary};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;

/// Ranks that all end before the first step.
const LEAVE: OpName = OpName::new(0, "leave", 0);

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
    if !place.is_one_host() && trains_on_cpus(arguments) {
        return cpu_hosts::run(arguments, launched, output);
    }
    let role = if place.rank == 0 { SignalRole::Primary } else { SignalRole::Secondary };
    let saves = SaveSignals::of(Some(launched.launcher), arguments.signal_exit);
    let signals = Signals::install(role, InterruptedWork::Training, saves)?;
    let patience = WaitPolicy::default().tell(|waiting| output::note(&waiting.to_string()));
    let options = HostOptions::default()
        .token(TokenSource::of_environment()?)
        .address(launched.rank0.clone())
        .expected(launched.hosts.clone())
        .policy(patience);
    if place.rank == 0 {
        run_rank_0(arguments, launched, output, &signals, &options)
    } else {
        run_peer(arguments, launched, &signals, &options)
    }
}

/// Whether ranks on several hosts exchange tensors by MPI.
fn trains_on_cpus(arguments: &TrainArgs) -> bool {
    match arguments.device {
        Some(device) => DeviceKind::from(device) == DeviceKind::Cpu,
        None => gpus(&probe()) == 0,
    }
}

/// The ranks of the whole job, in groups of `group`. On several hosts tensors travel between GPUs.
fn all_ranks(joined: JoinedHost, group: Option<u64>) -> Box<dyn Comm> {
    let JoinedHost { group: host, link } = joined;
    let place = link.place();
    if place.is_one_host() {
        return host;
    }
    let group = group.map_or(place.local_world, |group| group as usize);
    Box::new(ControlComm::new(host, link, group))
}

fn run_rank_0(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    output: &Output,
    signals: &Signals,
    options: &HostOptions,
) -> anyhow::Result<Exit> {
    let host = JobCoordinator::open(&launched.job, launched.place, options)?;
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
    let joined = host.begin(REGION, handoff.as_bytes(), &rank::options(&run.resolved_job))?;
    let comm = all_ranks(joined, run.resolved_job.job.settings.group);
    if let Some(exit) = agreement::exchange(&*comm, Ok(&run.resolved_job.facts.of_rank(0)))? {
        comm.leave(LEAVE)?;
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
    options: &HostOptions,
) -> anyhow::Result<Exit> {
    let place = launched.place;
    let admission = match request_join(&launched.job, place, options) {
        Ok(admission) => admission,
        // Rank 0 prints the reason and shares its exit code.
        Err(RendezvousError::Refused { reason }) => return Ok(Exit::of_code(&reason)),
        Err(error) => return Err(error.into()),
    };
    // The others wait for this rank, so it joins even to report an error.
    let resolved = LauncherHandoff::read(admission.message())
        .map_err(|error| refusal(&error.into()))
        .and_then(|handoff| resolve(arguments, launched, handoff));
    let options = resolved
        .as_ref()
        .map_or_else(|_| JoinOptions::default(), |(resolved_job, _)| rank::options(resolved_job));
    let group = resolved.as_ref().ok().and_then(|(resolved_job, _)| resolved_job.job.settings.group);
    let comm = all_ranks(admission.join(&options)?, group);
    let facts = resolved.as_ref().map(|(resolved_job, _)| resolved_job.facts.of_rank(place.local_rank));
    if let Some(exit) = agreement::exchange(&*comm, facts.as_ref().map_err(|refusal| *refusal))? {
        comm.leave(LEAVE)?;
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
    let handoff = if launched.place.host == 0 { handoff } else { handoff.for_other_host() };
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
