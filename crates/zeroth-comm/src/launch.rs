//! Starting the ranks of a job on this machine, watching over them, and saying how each of them ended.
//!
//! - Ranks get the job's segment as an inherited descriptor, and rank, world, descriptor and token as variables.
//! - They die with their launcher: the kernel kills them when the launching thread ends, however it ends.
//! - The first failure ends the job: the others are told through the segment and given a moment to end by themselves
//!   with their own message, then get SIGTERM, then SIGKILL.
//! - Ranks end well when they are asked to: by SIGUSR1, and never by the terminal's Ctrl-C or its end, which are the
//!   launcher's. Before their first step they may have nothing to save: then they are killed at once, if the launch says so.

mod handoff;
mod ignore;
mod memory;
mod output;
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

use crate::error::{JoinError, Lost};
use crate::local::{JOB_FD, JOB_TOKEN, Job, RANK, WORLD};

pub use handoff::{inherited, sealed};
pub use output::{Line, Output, Stream};
pub use report::{How, OutOfMemory, RankEnd, Report};

/// How often the launcher looks whether a rank has ended.
const LOOK: Duration = Duration::from_millis(20);
/// How long ranks may take to end by themselves once they have been told.
const NOTICE: Duration = Duration::from_secs(1);
/// From one asking to the next: a rank that has no handler yet does not hear the first.
const ASK: Duration = Duration::from_millis(500);
/// From one SIGTERM to the next: a rank may take the first for the system's way of asking, never the second.
const INSIST: Duration = Duration::from_millis(100);

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
    /// No thread to read a rank's output.
    #[error("cannot start a thread that reads the output of rank {rank}: {source}")]
    Reader {
        /// The rank.
        rank: usize,
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
    /// What the program is called, where not by its path.
    called: Option<OsString>,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    inherited: Vec<File>,
    world: usize,
    region: usize,
    output: Output,
    grace: Duration,
    ask: Arc<AtomicBool>,
    on_ask: Option<Box<dyn Fn() + Send + Sync>>,
    ends_before_first_step: bool,
    stop: Arc<AtomicBool>,
    planned: Option<u64>,
}

impl Launch {
    /// `world` processes of `program`, each with a region of `region` bytes in the segment.
    pub fn new(program: impl Into<PathBuf>, world: usize, region: usize) -> Self {
        Self {
            program: program.into(),
            called: None,
            arguments: Vec::new(),
            variables: Vec::new(),
            inherited: Vec::new(),
            world,
            region,
            output: Output::Inherit,
            grace: Duration::from_secs(5),
            ask: Arc::default(),
            on_ask: None,
            ends_before_first_step: false,
            stop: Arc::default(),
            planned: None,
        }
    }

    /// The same with the program that runs now: the image in memory, whatever lies under its path by the time that ranks are
    /// started again.
    pub fn of_this_program(world: usize, region: usize) -> Self {
        Self { called: std::env::args_os().next(), ..Self::new("/proc/self/exe", world, region) }
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

    /// A file that every rank inherits under the number it has here.
    #[must_use]
    pub fn inherit(mut self, file: File) -> Self {
        self.inherited.push(file);
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

    /// All ranks are asked to end well when this becomes true: they get SIGUSR1, again and again until they have ended.
    ///
    /// A rank that does so ends with exit code 130 or 143, or 0 where it was done anyway; see [`Report::asked`]. How long
    /// it takes is its own affair: it may be saving.
    #[must_use]
    pub fn ask_when(mut self, ask: Arc<AtomicBool>) -> Self {
        self.ask = ask;
        self
    }

    /// Called once, when ranks are asked for the first time: the moment to tell a person what is going on.
    #[must_use]
    pub fn on_ask(mut self, tell: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_ask = Some(Box::new(tell));
        self
    }

    /// Asked before a rank has begun its first step ([`crate::FirstStep::begin`]), all ranks are killed at once: they have
    /// nothing to save. See [`Report::before_first_step`].
    #[must_use]
    pub fn ends_before_first_step(mut self) -> Self {
        self.ends_before_first_step = true;
        self
    }

    /// Bytes of host memory that the plan gives each rank, for the report of one that was killed for lack of memory.
    #[must_use]
    pub fn planned(mut self, bytes: u64) -> Self {
        self.planned = Some(bytes);
        self
    }

    /// All ranks are ended when this becomes true, whatever they do.
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
        let before = memory::Kills::count();
        let mut ranks = Ranks(Vec::with_capacity(self.world));
        let mut readers = output::Readers::default();
        for rank in 0..self.world {
            let child = self.start(&job, rank)?;
            // Among the others first: whatever goes wrong from here on, it is not left behind.
            ranks.0.push(Rank { child, status: None, signalled: false });
            readers
                .read(rank, &mut ranks.0[rank].child, &self.output)
                .map_err(|source| LaunchError::Reader { rank, source })?;
        }
        let Watched { first, asked, before_first_step } = self.watch(&job, &mut ranks);
        readers.finish();
        let starved = memory::Kills::count().more_than(&before);
        let out_of_memory = starved.then(|| OutOfMemory { limit: memory::limit(), planned: self.planned });
        let ends = ranks.0.iter().enumerate().map(|(rank, process)| {
            let how = process.status.map_or(How::Unknown, How::of);
            RankEnd {
                rank,
                pid: process.child.id(),
                how,
                by_launcher: process.signalled,
                out_of_memory: out_of_memory
                    .filter(|_| !process.signalled && how == How::Killed { signal: 9 }),
                last: job.status(rank).ok().and_then(|status| status.last),
            }
        });
        Ok(Report { ranks: ends.collect(), first, asked, before_first_step, lost: job.lost() })
    }

    #[allow(unsafe_code, reason = "sets up the child between fork and exec")]
    fn start(&self, job: &Job, rank: usize) -> Result<Child, LaunchError> {
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
        self.output.attach(rank, &mut command)?;
        // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
        // The descriptors are open: `job` and `self` are borrowed, and fork copies them.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // A launcher that died before that call sends no signal any more; but then it is not the parent.
                if rustix::process::getppid() != Some(launcher) {
                    return Err(Errno::SRCH.into());
                }
                for file in &inherited {
                    rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*file), FdFlags::empty())?;
                }
                // What is ignored stays so over exec. The terminal's Ctrl-C goes to ranks too, but is the launcher's to
                // act on; and being asked before there is a handler must not end a rank.
                // The same holds for the SIGHUP of a terminal that is closed.
                ignore::ignore(Signal::INT)?;
                ignore::ignore(Signal::HUP)?;
                ignore::ignore(Signal::USR1)
            });
        }
        command.spawn().map_err(|source| LaunchError::Start { rank, program: self.program.clone(), source })
    }

    /// Waits for all ranks to end, and sees to it that they do.
    fn watch(&self, job: &Job, ranks: &mut Ranks) -> Watched {
        let mut first = None;
        let mut told: Option<Instant> = None;
        let (mut asked, mut insisted): (Option<Instant>, Option<Instant>) = (None, None);
        let (mut forced, mut before_first_step) = (false, false);
        loop {
            let failed = ranks.look(asked.is_some());
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
                return Watched { first, asked: asked.is_some(), before_first_step };
            }
            // To be ended: nobody failed, so nobody is told whom to blame, and SIGTERM comes at once.
            if told.is_none() && self.stop.load(Ordering::Relaxed) {
                told = Some(Instant::now().checked_sub(NOTICE).unwrap_or_else(Instant::now));
            }
            if let Some(since) = told.map(|told| told.elapsed()) {
                if since >= NOTICE && insisted.is_none_or(|last| last.elapsed() >= INSIST) {
                    ranks.end(Signal::TERM);
                    // A stopped process takes SIGTERM only once it goes on.
                    ranks.end(Signal::CONT);
                    insisted = Some(Instant::now());
                }
                if !forced && since >= NOTICE + self.grace {
                    ranks.end(Signal::KILL);
                    forced = true;
                }
            } else if self.ask.load(Ordering::Relaxed) && asked.is_none_or(|last| last.elapsed() >= ASK) {
                if asked.is_none() && self.ends_before_first_step && job.stop_before_first_step() {
                    ranks.end(Signal::KILL);
                    (told, forced, before_first_step) = (Some(Instant::now()), true, true);
                    continue;
                }
                if let (None, Some(tell)) = (asked, &self.on_ask) {
                    tell();
                }
                ranks.ask();
                asked = Some(Instant::now());
            }
            std::thread::sleep(LOOK);
        }
    }
}

struct Watched {
    /// The rank that failed first.
    first: Option<usize>,
    /// Whether ranks were asked to end.
    asked: bool,
    /// Whether they were killed because none had begun its first step.
    before_first_step: bool,
}

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    signalled: bool,
}

impl Rank {
    /// Only for one not yet waited for: its pid is still this child's.
    fn signal(&self, signal: Signal) -> rustix::io::Result<()> {
        rustix::process::kill_process(Pid::from_child(&self.child), signal)
    }
}

/// The processes started so far. Whatever happens to the launcher's thread, none is left behind.
struct Ranks(Vec<Rank>);

impl Ranks {
    /// Collects those that have ended. Of several failures at one look, one by a signal is the cause and one by an
    /// exit code its effect. Where ranks were asked to end, one that has done so has not failed.
    fn look(&mut self, asked: bool) -> Option<usize> {
        let mut failed: Option<(bool, usize)> = None;
        for (number, rank) in self.0.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            rank.status = rank.child.try_wait().ok().flatten();
            let failure = |status: &ExitStatus| !How::of(*status).is_well(asked);
            if let Some(status) = rank.status.filter(failure) {
                let found = (status.code().is_some(), number);
                failed = Some(failed.map_or(found, |known| known.min(found)));
            }
        }
        failed.map(|(_, number)| number)
    }

    /// Asks all that still run to end well.
    fn ask(&self) {
        for rank in self.0.iter().filter(|rank| rank.status.is_none()) {
            // It may have ended since the last look: then there is nobody to ask.
            let _ = rank.signal(Signal::USR1);
        }
    }

    /// Sends all that still run a signal that ends them.
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
