//! Starts the ranks of one host as torchrun does: each is told its rank by variables, and ranks find each other by themselves.
//! Whoever started this launcher controls them by [`RankCommand`]s.
//!
//! - Ranks have process groups of their own, so that a terminal's signals reach the launcher alone, which passes them on once.
//! - They die with their launcher: the kernel kills them when the launching thread ends.
//! - After a failure the other ranks have some seconds to notice it and to say which rank was lost; then they are ended.
//! - If whoever started the launcher is gone, they are asked to save and to stop, and killed after a minute.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;

use super::output::Readers;
use super::{ExitReason, LOOK, LaunchError, OutOfMemory, RankExit, RankOutput, RankProcess, Ranks, memory};

/// How long ranks may take to find out by themselves that another one is lost, and to say so.
const NOTICE: Duration = Duration::from_secs(10);
/// Interval of SIGTERMs to ranks that have not noticed.
const INSIST: Duration = Duration::from_millis(500);
/// How long ranks may take to save once nobody controls them any more.
const ALONE: Duration = Duration::from_mins(1);

/// What a launcher does with its ranks on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankCommand {
    /// Sends a signal to each.
    Signal(Signal),
    /// Ends them at once.
    Kill,
}

impl RankCommand {
    /// Signals by which ranks are asked to stop or to save. Others are not passed on.
    const PASSED_ON: [Signal; 6] =
        [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2, Signal::XCPU];

    /// Passes a signal on, by its number, if it is one that ranks handle.
    pub fn signal(number: i32) -> Option<Self> {
        Self::PASSED_ON.into_iter().find(|signal| signal.as_raw() == number).map(Self::Signal)
    }

    /// Whether ranks that end after it have done as they were asked to.
    pub(super) fn stops(self) -> bool {
        matches!(self, Self::Signal(Signal::INT | Signal::TERM | Signal::HUP | Signal::XCPU))
    }
}

/// The ranks of one host, and how they are started.
pub struct HostLauncher {
    program: PathBuf,
    /// The program's argv[0], where it is not its path.
    called: Option<OsString>,
    arguments: Vec<OsString>,
    first: usize,
    variables: Vec<Vec<(String, String)>>,
    output: RankOutput,
    grace: Duration,
}

/// How the ranks of a host ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostReport {
    /// Every rank, in order.
    pub ranks: Vec<RankExit>,
    /// The place in [`Self::ranks`] of the one that failed first.
    pub first: Option<usize>,
}

impl HostReport {
    /// The exit code that all ranks ended with, if it is one.
    pub fn common_code(&self) -> Option<i32> {
        let mut codes = self.ranks.iter().map(|end| match end.how {
            ExitReason::Exited { code } => Some(code),
            _ => None,
        });
        let first = codes.next()??;
        codes.all(|code| code == Some(first)).then_some(first)
    }

    /// The ranks that something other than this launcher killed.
    pub fn killed(&self) -> impl Iterator<Item = &RankExit> {
        let is_killed = |end: &&RankExit| matches!(end.how, ExitReason::Killed { .. }) && !end.by_launcher;
        self.ranks.iter().filter(is_killed)
    }
}

impl HostLauncher {
    /// Processes of the running executable: the image in memory, even if the file is replaced before ranks are restarted. Rank
    /// `first + n` gets the n-th list of variables.
    pub fn of_this_program(first: usize, variables: Vec<Vec<(String, String)>>) -> Self {
        Self { called: std::env::args_os().next(), ..Self::new("/proc/self/exe", first, variables) }
    }

    /// The same, of another program.
    pub fn new(program: impl Into<PathBuf>, first: usize, variables: Vec<Vec<(String, String)>>) -> Self {
        Self {
            program: program.into(),
            called: None,
            arguments: Vec::new(),
            first,
            variables,
            output: RankOutput::Inherit,
            grace: Duration::from_secs(5),
        }
    }

    /// Arguments of every rank.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets the destination of the ranks' output.
    #[must_use]
    pub fn output(mut self, output: RankOutput) -> Self {
        self.output = output;
        self
    }

    /// Starts the ranks and returns when all have ended. Once `commands` is closed, nobody controls them any more.
    pub fn run(&self, commands: &Receiver<RankCommand>) -> Result<HostReport, LaunchError> {
        let before = memory::OomKills::count();
        let mut ranks = Ranks(Vec::with_capacity(self.variables.len()));
        let mut readers = Readers::default();
        for (at, variables) in self.variables.iter().enumerate() {
            let rank = self.first + at;
            let child = self.start(rank, variables)?;
            // Registered first: whatever fails from here on, it is not left behind.
            ranks.0.push(RankProcess { child, status: None, signalled: false });
            readers
                .read(rank, &mut ranks.0[at].child, &self.output)
                .map_err(|source| LaunchError::Reader { rank, source })?;
        }
        let first = self.watch(&mut ranks, commands);
        readers.finish();
        let starved = memory::OomKills::count().more_than(&before);
        let out_of_memory = starved.then(|| OutOfMemory { limit: memory::limit(), planned: None });
        let ends = ranks.0.iter().enumerate().map(|(at, process)| {
            let how = process.status.map_or(ExitReason::Unknown, ExitReason::of);
            let is_starved = !process.signalled && how == ExitReason::Killed { signal: 9 };
            RankExit {
                rank: self.first + at,
                pid: process.child.id(),
                how,
                by_launcher: process.signalled,
                out_of_memory: out_of_memory.filter(|_| is_starved),
                last: None,
            }
        });
        Ok(HostReport { ranks: ends.collect(), first })
    }

    #[allow(unsafe_code, reason = "sets up the child between fork and exec")]
    fn start(&self, rank: usize, variables: &[(String, String)]) -> Result<Child, LaunchError> {
        let launcher = rustix::process::getpid();
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).envs(variables.iter().map(|(name, value)| (name, value)));
        if let Some(called) = &self.called {
            command.arg0(called);
        }
        self.output.attach(&mut command);
        command.process_group(0);
        // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // A launcher that died before that call sends no signal, but then it is no longer the parent.
                let is_child = rustix::process::getppid() == Some(launcher);
                if is_child { Ok(()) } else { Err(io::Error::from(Errno::SRCH)) }
            });
        }
        command.spawn().map_err(|source| LaunchError::Start { rank, program: self.program.clone(), source })
    }

    /// Waits for all ranks to end. Returns the one that failed first.
    fn watch(&self, ranks: &mut Ranks, commands: &Receiver<RankCommand>) -> Option<usize> {
        let (mut first, mut failed, mut alone): (Option<usize>, Option<Instant>, Option<Instant>) =
            (None, None, None);
        let (mut asked, mut insisted): (bool, Option<Instant>) = (false, None);
        loop {
            if let Some(rank) = ranks.look(asked).filter(|_| first.is_none()) {
                first = Some(rank);
                failed = Some(Instant::now());
            }
            if ranks.0.iter().all(|rank| rank.status.is_some()) {
                return first;
            }
            match commands.try_recv() {
                Ok(RankCommand::Kill) => ranks.end(Signal::KILL),
                Ok(command @ RankCommand::Signal(signal)) => {
                    ranks.deliver(signal);
                    asked |= command.stops();
                }
                Err(TryRecvError::Disconnected) if alone.is_none() => {
                    ranks.deliver(Signal::TERM);
                    (asked, alone) = (true, Some(Instant::now()));
                }
                Err(_) => {}
            }
            if failed.is_some_and(|since| since.elapsed() >= NOTICE + self.grace)
                || alone.is_some_and(|since| since.elapsed() >= ALONE)
            {
                ranks.end(Signal::KILL);
            } else if failed.is_some_and(|since| since.elapsed() >= NOTICE)
                && insisted.is_none_or(|last| last.elapsed() >= INSIST)
            {
                ranks.end(Signal::TERM);
                // A stopped process handles SIGTERM only once it continues.
                ranks.end(Signal::CONT);
                insisted = Some(Instant::now());
            }
            std::thread::sleep(LOOK);
        }
    }
}
