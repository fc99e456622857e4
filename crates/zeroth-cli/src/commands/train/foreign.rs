//! Ranks that another launcher has started on this machine: torchrun, srun, mpirun. Rank 0 does our launcher's work, the
//! others wait for its word, and then all of them are ranks.

use zeroth::comm::environment::LaunchedRank;
use zeroth::comm::local::Options;
use zeroth::comm::rendezvous::{Coordinator, RendezvousError, WaitPolicy, request_join};
use zeroth::program::Compiled;

use super::agreement::Refusal;
use super::ask::Asked;
use super::told::Told;
use super::{agreement, ask, begin, finish, launch, rank};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::{Role, Signals};

/// This process's place among ranks that another launcher started; none where nobody did.
pub(super) fn place() -> anyhow::Result<Option<LaunchedRank>> {
    Ok(LaunchedRank::of_this_process()?)
}

pub(super) fn run(arguments: &TrainArgs, place: &LaunchedRank, output: &Output) -> anyhow::Result<Exit> {
    let ranks = place.world as u64;
    if let Some(typed) = arguments.ranks.filter(|typed| *typed != ranks) {
        anyhow::bail!(
            "--ranks {typed} was given, and {} has started {ranks}: leave --ranks out, or start that many",
            place.launcher
        );
    }
    let signals = Signals::install(if place.rank == 0 { Role::Own } else { Role::Peer })?;
    let patience = WaitPolicy::default().tell(|waiting| output::note(&waiting.to_string()));
    if place.rank == 0 {
        host(arguments, place, output, &signals, patience)
    } else {
        guest(arguments, place, &signals, &patience)
    }
}

fn host(
    arguments: &TrainArgs,
    place: &LaunchedRank,
    output: &Output,
    signals: &Signals,
    patience: WaitPolicy,
) -> anyhow::Result<Exit> {
    let host = Coordinator::open(&place.job, place.world, patience)?;
    let begun = match begin(arguments, Some(place.world as u64), output, signals) {
        Ok(Ok(begun)) => begun,
        Ok(Err(exit)) => {
            host.refuse(&(exit as u8).to_string());
            return Ok(exit);
        }
        Err(error) => {
            host.refuse(&(Exit::Wrong as u8).to_string());
            return Err(error);
        }
    };
    let told = begun.asked.told.to_text()?;
    let comm = host.begin(launch::REGION, told.as_bytes())?.join(0, &rank::options(&begun.asked))?;
    if let Some(exit) = agreement::exchange(&comm, Ok(()))? {
        return Ok(exit);
    }
    let exit = rank::joined(arguments, &begun.asked, &begun.compiled, comm, signals)?;
    if exit == Exit::Done { finish::summary(&begun, output) } else { Ok(exit) }
}

fn guest(
    arguments: &TrainArgs,
    place: &LaunchedRank,
    signals: &Signals,
    patience: &WaitPolicy,
) -> anyhow::Result<Exit> {
    let invitation = match request_join(&place.job, place.rank, place.world, patience) {
        Ok(invitation) => invitation,
        // Rank 0 has said why, and tells with which exit code.
        Err(RendezvousError::Refused { reason }) => return Ok(Exit::of_code(&reason)),
        Err(error) => return Err(error.into()),
    };
    // Whatever is wrong here, the others wait for this rank: it joins them and says so.
    let resolved = Told::read(invitation.message())
        .map_err(|error| refusal(&error))
        .and_then(|told| resolve(arguments, place, told));
    let options = resolved.as_ref().map_or_else(|_| Options::default(), |(asked, _)| rank::options(asked));
    let comm = invitation.join(&options)?;
    if let Some(exit) = agreement::exchange(&comm, resolved.as_ref().map(|_| ()))? {
        return Ok(exit);
    }
    match resolved {
        Ok((asked, compiled)) => rank::joined(arguments, &asked, &compiled, comm, signals),
        Err(refusal) => Ok(refusal.exit),
    }
}

/// What this rank's own command line asks for, where it is what rank 0 is asked for.
fn resolve(arguments: &TrainArgs, place: &LaunchedRank, told: Told) -> Result<(Asked, Compiled), Refusal> {
    let mut asked =
        ask::ask(arguments, Some(place.world as u64), Some(told)).map_err(|error| refusal(&error))?;
    let compiled = match asked.fit().map_err(|error| refusal(&error))? {
        Ok(compiled) => compiled,
        Err(why) => return Err(Refusal { exit: Exit::DoesNotFit, why }),
    };
    let own = agreement::of(arguments, &asked);
    agreement::check(place.rank, &own, &asked.told.agreement).map_err(|error| refusal(&error))?;
    Ok((asked, compiled))
}

fn refusal(error: &anyhow::Error) -> Refusal {
    Refusal { exit: Exit::Wrong, why: format!("{error:#}") }
}
