//! CPU ranks on several hosts, which mpirun or srun started. Leaders meet at rank 0 by TCP; tensors travel inside of a host
//! through shared memory, and between hosts by MPI.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use zeroth::comm::environment::{ExternalLauncher, LaunchedRank};
use zeroth::comm::hosts::{
    HostAdmission, HostLink, HostOptions, JobCoordinator, JoinedHost, PortChoice, Rank0Address, TokenSource,
    request_join,
};
use zeroth::comm::local::{JobToken, LocalJob};
use zeroth::comm::mpi::{Mpi, Watch};
use zeroth::comm::rendezvous::{RendezvousError, WaitPolicy};
use zeroth::comm::{Comm, JoinOptions, MeshComm, OpName};
use zeroth::job::{LauncherHandoff, REGION, ResolvedJob};

use super::agreement::Refusal;
use super::external_launcher::{refusal, resolve, started};
use super::live::LiveStatus;
use super::prepare::prepare_run;
use super::rank::Agreed;
use super::{agreement, rank, summary};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;

/// mpirun ends the others once one rank has failed: first all of them say why. Verdicts are 100 ms apart at most.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// How long `MPI_Finalize` may take.
const LEAVES: Duration = Duration::from_secs(5);

/// A job that ended on this rank, together with all others or not.
enum Ended {
    Together(Exit),
    Alone(Exit),
}

/// Trains, and ends the process: exit handlers of an MPI library may hang.
pub(super) fn run(arguments: &TrainArgs, launched: &LaunchedRank, output: &Output) -> anyhow::Result<Exit> {
    if launched.launcher == ExternalLauncher::Torchrun {
        anyhow::bail!(
            "CPU ranks on several hosts need MPI, which torchrun does not start: start them with `zeroth launch --launcher \
             openmpi` or `mpich`, with mpirun or with srun"
        );
    }
    let mpi = Mpi::init()?;
    let place = launched.place;
    if mpi.world() != (place.rank, place.world) {
        anyhow::bail!(
            "{} says that this is rank {} of {}, {} that it is {} of {}",
            launched.launcher,
            place.rank,
            place.world,
            mpi.library(),
            mpi.world().0,
            mpi.world().1
        );
    }
    let role = if place.rank == 0 { SignalRole::Primary } else { SignalRole::Secondary };
    let saves = SaveSignals::of(Some(launched.launcher), arguments.signal_exit);
    let signals = Signals::install(role, InterruptedWork::Training, saves)?;
    let ended = if place.rank == 0 {
        run_rank_0(arguments, launched, output, &signals, &mpi)
    } else {
        run_peer(arguments, launched, &signals, &mpi)
    };
    let exit = match ended {
        Ok(Ended::Together(exit)) => {
            mpi.leave(LEAVES);
            exit
        }
        Ok(Ended::Alone(exit)) => exit,
        Err(error) => {
            output::error(&format!("{error:#}"));
            Exit::Wrong
        }
    };
    if exit == Exit::Failed {
        std::thread::sleep(LAST_WORDS);
    }
    let _ = std::io::stdout().flush();
    signal_hook::low_level::exit(exit as i32);
}

/// What all ranks know of rank 0: the token, and where it listens.
fn told(mpi: &Mpi, own: Option<(JobToken, String)>) -> anyhow::Result<(JobToken, Rank0Address)> {
    let mut text = own.map(|(token, at)| format!("{token} {at}").into_bytes()).unwrap_or_default();
    mpi.broadcast(0, &mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let (token, at) = text.split_once(' ').context("rank 0 could not open the job")?;
    let (host, port) = at.rsplit_once(':').context("rank 0 has no address")?;
    let token = token.parse().map_err(anyhow::Error::msg)?;
    Ok((token, Rank0Address { host: host.to_owned(), port: PortChoice::Given(port.parse()?) }))
}

fn policy() -> WaitPolicy {
    WaitPolicy::default().tell(|waiting| output::note(&waiting.to_string()))
}

fn run_rank_0(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    output: &Output,
    signals: &Signals,
    mpi: &Mpi,
) -> anyhow::Result<Ended> {
    let token = JobToken::random()?;
    let options = HostOptions::default()
        .token(Some(TokenSource::Given(token)))
        .address(launched.rank0.clone().or_else(Rank0Address::on_this_host))
        .policy(policy())
        .expected(launched.hosts.clone());
    let host = JobCoordinator::open(&launched.job, launched.place, &options);
    let at = host.as_ref().ok().and_then(JobCoordinator::address);
    told(mpi, at.map(|at| (token, at.to_string())))?;
    let host = host?;
    let run = match prepare_run(arguments, Some(started(launched)), output, signals) {
        Ok(Ok(run)) => run,
        Ok(Err(exit)) => {
            host.refuse(&(exit as u8).to_string());
            return Ok(Ended::Alone(exit));
        }
        Err(error) => {
            host.refuse(&(Exit::Wrong as u8).to_string());
            return Err(error);
        }
    };
    let status = LiveStatus::start(&run, signals);
    let handoff = run.resolved_job.handoff.to_text()?;
    let joined = host.begin(REGION, handoff.as_bytes(), &rank::options(&run.resolved_job))?;
    let job = &run.resolved_job;
    let (comm, ends) = mesh(joined, mpi, job)?;
    if let Some(exit) = agreement::exchange(&*comm, Ok(&job.facts.of_rank(0)))? {
        drop(comm);
        return ends.leave(exit);
    }
    status.observe(&*comm.control());
    let exit = rank::joined(arguments, job, &run.compiled, comm, signals, Agreed::Yes)?;
    let ended = ends.leave(exit)?;
    status.finish(exit);
    if exit == Exit::Done {
        summary::print(&run, output)?;
    }
    Ok(ended)
}

fn run_peer(
    arguments: &TrainArgs,
    launched: &LaunchedRank,
    signals: &Signals,
    mpi: &Mpi,
) -> anyhow::Result<Ended> {
    let place = launched.place;
    let (token, address) = told(mpi, None)?;
    let options =
        HostOptions::default().token(Some(TokenSource::Given(token))).address(Some(address)).policy(policy());
    let admission: HostAdmission = match request_join(&launched.job, place, &options) {
        Ok(admission) => admission,
        // Rank 0 prints the reason and shares its exit code.
        Err(RendezvousError::Refused { reason }) => return Ok(Ended::Alone(Exit::of_code(&reason))),
        Err(error) => return Err(error.into()),
    };
    // The others wait for this rank, so it joins even to report an error.
    let resolved = LauncherHandoff::read(admission.message())
        .map_err(|error| refusal(&error.into()))
        .and_then(|handoff| resolve(arguments, launched, handoff));
    let (job, compiled) = match resolved {
        Ok(resolved) => resolved,
        Err(Refusal { exit, why }) => {
            // Rank 0 does not reach the first step without it.
            admission.join(&JoinOptions::default())?;
            output::error(&why);
            return Ok(Ended::Alone(exit));
        }
    };
    let joined = admission.join(&rank::options(&job))?;
    let (comm, ends) = mesh(joined, mpi, &job)?;
    if let Some(exit) = agreement::exchange(&*comm, Ok(&job.facts.of_rank(place.local_rank)))? {
        drop(comm);
        return ends.leave(exit);
    }
    let exit = rank::joined(arguments, &job, &compiled, comm, signals, Agreed::Yes)?;
    ends.leave(exit)
}

/// What a rank needs to leave with all others.
struct Ends {
    link: Arc<HostLink>,
    /// All ranks, over MPI.
    world: Box<dyn Comm>,
    /// The ranks of this host, where its groups are single ranks.
    host: Option<Box<dyn Comm>>,
}

impl Ends {
    /// Leaves after a job that ended on all ranks alike; the communicator of training is dropped.
    fn leave(self, exit: Exit) -> anyhow::Result<Ended> {
        if exit == Exit::Failed {
            return Ok(Ended::Alone(exit));
        }
        drop(self.host);
        let link = Arc::into_inner(self.link).context("a part of training still holds the connection")?;
        link.leave(&*self.world, OpName::new(0, "leave", 0))?;
        Ok(Ended::Together(exit))
    }
}

/// Groups of this host's ranks, or of one rank each, and rails over MPI.
fn mesh(joined: JoinedHost, mpi: &Mpi, job: &ResolvedJob) -> anyhow::Result<(Box<dyn Comm>, Ends)> {
    let JoinedHost { group, link } = joined;
    let place = link.place();
    let ranks = job.job.settings.group.unwrap_or(1) as usize;
    if ranks != 1 && ranks != place.local_world {
        anyhow::bail!(
            "gradients are added up in groups of {ranks} ranks (zeroth.sum_group), and this host has {}: a group is all \
             ranks of a host, or a single one",
            place.local_world
        );
    }
    mpi.share_host(place.local_world, job.threads);
    let watch: Watch = link.watch();
    let world = mpi.split(0, place.rank, Arc::clone(&watch))?;
    let (color, key) = (place.rank % ranks, place.rank / ranks);
    let rail = mpi.split(color, key, watch)?;
    let (group, host) = if ranks == place.local_world {
        (group, None)
    } else {
        let alone = LocalJob::create(1, REGION)?;
        (alone.join(0, &rank::options(job))?, Some(group))
    };
    let link = Arc::new(link);
    let control = Arc::clone(&link);
    let comm = MeshComm::new(group, rail, move || control.control());
    Ok((Box::new(comm), Ends { link, world, host }))
}
