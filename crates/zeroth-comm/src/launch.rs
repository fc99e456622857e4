//! Launcher: starts the ranks of a job on this machine, monitors them, and reports how each ended.
//!
//! - Ranks inherit the descriptor of the job's segment, and get rank, world size, descriptor and token as variables.
//! - They die with their launcher: the kernel kills them when the launching thread ends, however it ends.
//! - The first failure ends the job: the other ranks are notified through the segment and get a moment to end with their own
//!   message, then SIGTERM, then SIGKILL.
//! - On several hosts, [`run_on_hosts`] starts a [`HostLauncher`] on each, by a [`Hostfile`].
//! - A save or a graceful stop is requested through the segment ([`crate::JobControl`]). Ctrl-C, the terminal's SIGHUP and
//!   the warnings of cluster managers (SIGUSR1, SIGUSR2) are handled by the launcher alone. Before the first step there may be
//!   nothing to save: then a stop kills ranks at once, if the launch is configured so.

mod handoff;
mod host_launcher;
mod hostfile;
mod ignore;
mod memory;
mod mpi_command;
mod mpi_run;
mod output;
mod remote_hosts;
mod report;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, Signal};

use crate::comm::RankObserver;
use crate::error::{JoinError, LostReason};
use crate::local::{JOB_FD, JOB_TOKEN, LocalJob, RANK, WORLD};

pub use handoff::{inherited, sealed};
pub use host_launcher::{HostLauncher, HostReport, RankCommand};
pub use hostfile::{HostSlots, Hostfile, HostfileError, LineProblem};
pub use mpi_command::{MpiCommandError, MpiLauncher};
pub use mpi_run::MpiRun;
pub use output::{OutputLine, OutputStream, RankOutput};
pub use remote_hosts::{
    HostExit, RemoteHost, RemoteShellError, parse_command, pass_on_commands, run_on_hosts, write_command,
};
pub use report::{ExitReason, LaunchReport, OutOfMemory, RankExit};

/// Polling interval for ended ranks.
const LOOK: Duration = Duration::from_millis(20);
/// Time for ranks to end by themselves after another one failed.
const NOTICE: Duration = Duration::from_secs(1);
/// Interval of SIGTERMs: a rank may treat the first as a request to save, never the second.
const INSIST: Duration = Duration::from_millis(100);

/// Ranks could not be started. None is left running.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum LaunchError {
    #[error(transparent)]
    Job(#[from] JoinError),
    #[error("cannot start rank {rank} as {}: {source}", program.display())]
    Start { rank: usize, program: PathBuf, source: io::Error },
    #[error("cannot start a thread that reads the output of rank {rank}: {source}")]
    Reader { rank: usize, source: io::Error },
}

/// Called once the job exists, with what its ranks publish.
type OnJob = Box<dyn Fn(Box<dyn RankObserver>) + Send + Sync>;

/// The ranks to start and how.
pub struct RankLauncher {
    program: PathBuf,
    /// The program's argv[0], where it is not its path.
    called: Option<OsString>,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    inherited: Vec<File>,
    world: usize,
    region: usize,
    output: RankOutput,
    grace: Duration,
    ask: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
    on_stop_request: Option<Box<dyn Fn() + Send + Sync>>,
    ends_before_first_step: bool,
    stop: Arc<AtomicBool>,
    planned: Option<u64>,
    on_job: Option<OnJob>,
}

impl RankLauncher {
    /// `world` processes of `program`, each with a shared-memory region of `region` bytes.
    pub fn new(program: impl Into<PathBuf>, world: usize, region: usize) -> Self {
        Self {
            program: program.into(),
            called: None,
            arguments: Vec::new(),
            variables: Vec::new(),
            inherited: Vec::new(),
            world,
            region,
            output: RankOutput::Inherit,
            grace: Duration::from_secs(5),
            ask: Arc::default(),
            save: Arc::default(),
            on_stop_request: None,
            ends_before_first_step: false,
            stop: Arc::default(),
            planned: None,
            on_job: None,
        }
    }

    /// As [`Self::new`] with the running executable: the image in memory, even if the file is replaced before ranks are
    /// restarted.
    pub fn of_this_program(world: usize, region: usize) -> Self {
        Self { called: std::env::args_os().next(), ..Self::new("/proc/self/exe", world, region) }
    }

    /// Arguments of every rank.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable of every rank, in addition to the launcher's own.
    #[must_use]
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Passes a file to every rank under its descriptor number.
    #[must_use]
    pub fn inherit(mut self, file: File) -> Self {
        self.inherited.push(file);
        self
    }

    /// Sets the destination of the ranks' output.
    #[must_use]
    pub fn output(mut self, output: RankOutput) -> Self {
        self.output = output;
        self
    }

    /// Sets the time between SIGTERM and SIGKILL.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Requests a graceful stop of all ranks when this becomes true: see [`crate::JobControl`].
    ///
    /// A rank that stops exits with code 130 or 143, or 0 where it was done anyway; see [`LaunchReport::asked`]. It may take
    /// as long as it needs, for instance to save.
    #[must_use]
    pub fn request_stop_when(mut self, ask: Arc<AtomicBool>) -> Self {
        self.ask = ask;
        self
    }

    /// Requests a save whenever this becomes true, and makes it false again.
    #[must_use]
    pub fn request_save_when(mut self, save: Arc<AtomicBool>) -> Self {
        self.save = save;
        self
    }

    /// Called once, at the stop request, to inform the user.
    #[must_use]
    pub fn on_stop_request(mut self, tell: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_stop_request = Some(Box::new(tell));
        self
    }

    /// Kills all ranks at a stop request before the first step ([`crate::JobControl::begin_first_step`]), when there is nothing to
    /// save. See [`LaunchReport::before_first_step`].
    #[must_use]
    pub fn ends_before_first_step(mut self) -> Self {
        self.ends_before_first_step = true;
        self
    }

    /// Sets the planned host memory per rank, for the report of a rank killed for lack of memory.
    #[must_use]
    pub fn planned(mut self, bytes: u64) -> Self {
        self.planned = Some(bytes);
        self
    }

    /// Called with an observer of the ranks before they are started.
    #[must_use]
    pub fn on_job(mut self, observe: impl Fn(Box<dyn RankObserver>) + Send + Sync + 'static) -> Self {
        self.on_job = Some(Box::new(observe));
        self
    }

    /// Terminates all ranks when this becomes true.
    #[must_use]
    pub fn stop_when(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }

    /// Starts the ranks and returns when all have ended.
    ///
    /// It blocks because the kernel ties the ranks' lifetimes to the thread that started them.
    pub fn run(&self) -> Result<LaunchReport, LaunchError> {
        let job = LocalJob::create(self.world, self.region)?;
        if let Some(observe) = &self.on_job {
            observe(job.observer());
        }
        let before = memory::OomKills::count();
        let mut ranks = Ranks(Vec::with_capacity(self.world));
        let mut readers = output::Readers::default();
        for rank in 0..self.world {
            let child = self.start(&job, rank)?;
            // Registered first: whatever fails from here on, it is not left behind.
            ranks.0.push(RankProcess { child, status: None, signalled: false });
            readers
                .read(rank, &mut ranks.0[rank].child, &self.output)
                .map_err(|source| LaunchError::Reader { rank, source })?;
        }
        let WatchOutcome { first, asked, before_first_step } = self.watch(&job, &mut ranks);
        readers.finish();
        let starved = memory::OomKills::count().more_than(&before);
        let out_of_memory = starved.then(|| OutOfMemory { limit: memory::limit(), planned: self.planned });
        let ends = ranks.0.iter().enumerate().map(|(rank, process)| {
            let how = process.status.map_or(ExitReason::Unknown, ExitReason::of);
            RankExit {
                rank,
                pid: process.child.id(),
                how,
                by_launcher: process.signalled,
                out_of_memory: out_of_memory
                    .filter(|_| !process.signalled && how == ExitReason::Killed { signal: 9 }),
                last: job.status(rank).ok().and_then(|status| status.last),
            }
        });
        Ok(LaunchReport { ranks: ends.collect(), first, asked, before_first_step, lost: job.lost() })
    }

    #[allow(unsafe_code, reason = "sets up the child between fork and exec")]
    fn start(&self, job: &LocalJob, rank: usize) -> Result<Child, LaunchError> {
        let file = job.fd().as_raw_fd();
        let inherited: Vec<i32> = self.inherited.iter().map(AsRawFd::as_raw_fd).chain([file]).collect();
        let launcher = rustix::process::getpid();
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(RANK, rank.to_string())
            .env(WORLD, self.world.to_string())
            .env(JOB_FD, file.to_string())
            .env(JOB_TOKEN, job.token().to_string());
        if let Some(called) = &self.called {
            command.arg0(called);
        }
        self.output.attach(&mut command);
        // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
        // The descriptors are open: `job` and `self` are borrowed, and fork copies them.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // A launcher that died before that call sends no signal, but then it is no longer the parent.
                if rustix::process::getppid() != Some(launcher) {
                    return Err(Errno::SRCH.into());
                }
                for file in &inherited {
                    rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*file), FdFlags::empty())?;
                }
                // Ignored signals stay ignored across exec. Ctrl-C and the terminal's SIGHUP also reach the ranks, but
                // are the launcher's to handle; so are signals of cluster managers, which send them to every process.
                ignore::ignore(Signal::INT)?;
                ignore::ignore(Signal::HUP)?;
                ignore::ignore(Signal::USR1)?;
                ignore::ignore(Signal::USR2)
            });
        }
        command.spawn().map_err(|source| LaunchError::Start { rank, program: self.program.clone(), source })
    }

    /// Waits for all ranks to end, and terminates them where needed.
    fn watch(&self, job: &LocalJob, ranks: &mut Ranks) -> WatchOutcome {
        let mut first = None;
        let mut told: Option<Instant> = None;
        let mut insisted: Option<Instant> = None;
        let (mut asked, mut forced, mut before_first_step) = (false, false, false);
        loop {
            let failed = ranks.look(asked);
            // Later failures follow from the first or from our own signals.
            if told.is_none()
                && let Some(rank) = failed
            {
                first = Some(rank);
                let left = job.status(rank).is_ok_and(|status| status.left);
                job.end(rank, if left { LostReason::Left } else { LostReason::Dead });
                told = Some(Instant::now());
            }
            if ranks.0.iter().all(|rank| rank.status.is_some()) {
                return WatchOutcome { first, asked, before_first_step };
            }
            // Termination without a failure: there is no rank to blame, and SIGTERM is sent at once.
            if told.is_none() && self.stop.load(Ordering::Relaxed) {
                told = Some(Instant::now().checked_sub(NOTICE).unwrap_or_else(Instant::now));
            }
            if let Some(since) = told.map(|told| told.elapsed()) {
                if since >= NOTICE && insisted.is_none_or(|last| last.elapsed() >= INSIST) {
                    ranks.end(Signal::TERM);
                    // A stopped process handles SIGTERM only once it continues.
                    ranks.end(Signal::CONT);
                    insisted = Some(Instant::now());
                }
                if !forced && since >= NOTICE + self.grace {
                    ranks.end(Signal::KILL);
                    forced = true;
                }
            } else if self.ask.load(Ordering::Relaxed) && !asked {
                if self.ends_before_first_step && job.stop_before_first_step() {
                    ranks.end(Signal::KILL);
                    (told, forced, before_first_step) = (Some(Instant::now()), true, true);
                    continue;
                }
                if let Some(tell) = &self.on_stop_request {
                    tell();
                }
                job.request_stop();
                asked = true;
            } else if self.save.swap(false, Ordering::Relaxed) {
                job.request_save();
            }
            std::thread::sleep(LOOK);
        }
    }
}

struct WatchOutcome {
    /// The rank that failed first.
    first: Option<usize>,
    /// Whether a stop was requested.
    asked: bool,
    /// Whether they were killed before the first step.
    before_first_step: bool,
}

struct RankProcess {
    child: Child,
    status: Option<ExitStatus>,
    signalled: bool,
}

impl RankProcess {
    /// Only for a child not yet waited for, whose pid is still valid.
    fn signal(&self, signal: Signal) -> rustix::io::Result<()> {
        rustix::process::kill_process(Pid::from_child(&self.child), signal)
    }
}

/// The processes started so far; dropping it kills those left.
struct Ranks(Vec<RankProcess>);

impl Ranks {
    /// Collects ended ranks and returns the first failure. Of several at once, a signal is the cause and an exit code
    /// its effect. After a stop request, a rank that stopped has not failed.
    fn look(&mut self, asked: bool) -> Option<usize> {
        let mut failed: Option<(bool, usize)> = None;
        for (number, rank) in self.0.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            rank.status = rank.child.try_wait().ok().flatten();
            let failure = |status: &ExitStatus| !ExitReason::of(*status).is_well(asked);
            if let Some(status) = rank.status.filter(failure) {
                let found = (status.code().is_some(), number);
                failed = Some(failed.map_or(found, |known| known.min(found)));
            }
        }
        failed.map(|(_, number)| number)
    }

    /// Passes a signal on to all running ranks.
    fn deliver(&self, signal: Signal) {
        for rank in self.0.iter().filter(|rank| rank.status.is_none()) {
            let _ = rank.signal(signal);
        }
    }

    /// Ends all running ranks by a signal.
    fn end(&mut self, signal: Signal) {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            rank.signalled |= rank.signal(signal).is_ok();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.end(Signal::KILL);
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.child.wait();
        }
    }
}
