//! Starting the ranks of a job on this machine, watching over them, and saying how each of them ended.
//!
//! - Ranks get the job's segment as an inherited descriptor, and rank, world, descriptor and token as variables.
//! - They die with their launcher: the kernel kills them when the launching thread ends, however it ends.
//! - The first failure ends the job: the others are told through the segment and given a moment to end by themselves
//!   with their own message, then get SIGTERM, then SIGKILL.

mod memory;
mod output;
mod report;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, Signal};

use crate::error::{JoinError, Lost};
use crate::local::{JOB_FD, JOB_TOKEN, Job, RANK, WORLD};

pub use output::{Line, Output, Stream};
pub use report::{How, RankEnd, Report};

/// How often the launcher looks whether a rank has ended.
const LOOK: Duration = Duration::from_millis(20);
/// How long ranks may take to end by themselves once they have been told.
const NOTICE: Duration = Duration::from_secs(1);

/// Ranks could not be started. None is left running.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The job's segment could not be made.
    #[error(transparent)]
    Job(#[from] JoinError),
    /// A process could not be started.
    #[error("cannot start rank {rank} as {}: {source}", program.display())]
    Start {
        /// The rank.
        rank: usize,
        /// The program it was to run.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file for a rank's output could not be made.
    #[error("cannot write the output of rank {rank} to {}: {source}", path.display())]
    Output {
        /// The rank.
        rank: usize,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What to start, how often, and where its output goes.
pub struct Launch {
    program: PathBuf,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    world: usize,
    region: usize,
    output: Output,
    grace: Duration,
    stop: Arc<AtomicBool>,
}

impl Launch {
    /// `world` processes of `program`, each with a region of `region` bytes in the segment.
    pub fn new(program: impl Into<PathBuf>, world: usize, region: usize) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            variables: Vec::new(),
            world,
            region,
            output: Output::Inherit,
            grace: Duration::from_secs(5),
            stop: Arc::default(),
        }
    }

    /// Arguments of every rank.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// A variable of every rank, besides the launcher's own environment.
    #[must_use]
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Where the output of ranks goes.
    #[must_use]
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// How long a rank may take to end after SIGTERM.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// All ranks are ended when this becomes true (a launcher sets it when it is told to end).
    #[must_use]
    pub fn stop_when(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }

    /// Starts the ranks and returns when all have ended.
    ///
    /// It blocks because the kernel ties the ranks' lives to the thread that started them.
    pub fn run(&self) -> Result<Report, LaunchError> {
        let job = Job::create(self.world, self.region)?;
        let kills_before = memory::kills();
        let mut ranks = Ranks(Vec::with_capacity(self.world));
        let mut readers = output::Readers::default();
        for rank in 0..self.world {
            let mut child = self.start(&job, rank)?;
            readers.read(rank, &mut child, &self.output);
            ranks.0.push(Rank { child, status: None, signalled: false });
        }
        let first = self.watch(&job, &mut ranks);
        readers.finish();
        let starved = memory::kills().zip(kills_before).is_some_and(|(after, before)| after > before);
        let ends = ranks.0.iter().enumerate().map(|(rank, process)| {
            let how = process.status.map_or(How::Unknown, How::of);
            RankEnd {
                rank,
                pid: process.child.id(),
                how,
                by_launcher: process.signalled,
                out_of_memory: starved && !process.signalled && how == How::Killed { signal: 9 },
                last: job.status(rank).ok().and_then(|status| status.last),
            }
        });
        Ok(Report { ranks: ends.collect(), first, lost: job.lost() })
    }

    #[allow(unsafe_code, reason = "sets up the child between fork and exec")]
    fn start(&self, job: &Job, rank: usize) -> Result<Child, LaunchError> {
        let file = job.fd().as_raw_fd();
        let launcher = rustix::process::getpid();
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(RANK, rank.to_string())
            .env(WORLD, self.world.to_string())
            .env(JOB_FD, file.to_string())
            .env(JOB_TOKEN, job.token().to_string());
        self.output.attach(rank, &mut command)?;
        // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
        // The descriptor is open: `job` is borrowed, and fork copies it.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // A launcher that died before that call sends no signal any more; but then it is not the parent.
                if rustix::process::getppid() != Some(launcher) {
                    return Err(Errno::SRCH.into());
                }
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(file).as_fd(), FdFlags::empty())?;
                Ok(())
            });
        }
        command.spawn().map_err(|source| LaunchError::Start { rank, program: self.program.clone(), source })
    }

    /// Waits for all ranks; the first that failed.
    fn watch(&self, job: &Job, ranks: &mut Ranks) -> Option<usize> {
        let mut first = None;
        let mut told: Option<Instant> = None;
        let (mut asked, mut forced) = (false, false);
        loop {
            let failed = ranks.look();
            // Later failures are effects of the first, or of a signal sent from here.
            if told.is_none()
                && let Some(rank) = failed
            {
                first = Some(rank);
                let left = job.status(rank).is_ok_and(|status| status.left);
                job.end(rank, if left { Lost::Left } else { Lost::Dead });
                told = Some(Instant::now());
            }
            if ranks.0.iter().all(|rank| rank.status.is_some()) {
                return first;
            }
            // Asked to stop: nobody failed, so nobody is told whom to blame, and SIGTERM comes at once.
            if told.is_none() && self.stop.load(Ordering::Relaxed) {
                told = Some(Instant::now().checked_sub(NOTICE).unwrap_or_else(Instant::now));
            }
            if let Some(since) = told.map(|told| told.elapsed()) {
                if !asked && since >= NOTICE {
                    ranks.signal(Signal::TERM);
                    // A stopped process takes SIGTERM only once it goes on.
                    ranks.signal(Signal::CONT);
                    asked = true;
                }
                if !forced && since >= NOTICE + self.grace {
                    ranks.signal(Signal::KILL);
                    forced = true;
                }
            }
            std::thread::sleep(LOOK);
        }
    }
}

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    signalled: bool,
}

/// The processes started so far. Whatever happens to the launcher's thread, none is left behind.
struct Ranks(Vec<Rank>);

impl Ranks {
    /// Collects those that have ended. Of several failures at one look, one by a signal is the cause and one by an
    /// exit code its effect.
    fn look(&mut self) -> Option<usize> {
        let mut failed: Option<(bool, usize)> = None;
        for (number, rank) in self.0.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            rank.status = rank.child.try_wait().ok().flatten();
            if let Some(status) = rank.status.filter(|status| !status.success()) {
                let found = (status.code().is_some(), number);
                failed = Some(failed.map_or(found, |known| known.min(found)));
            }
        }
        failed.map(|(_, number)| number)
    }

    fn signal(&mut self, signal: Signal) {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            // Not yet waited for, so the pid is still this child's.
            rank.signalled |= rustix::process::kill_process(Pid::from_child(&rank.child), signal).is_ok();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.child.wait();
        }
    }
}
