//! Runs an `mpirun` and passes on what its ranks are asked for. It forwards user signals and no others: those by which other
//! programs end, it takes for its own end.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use super::{ExitReason, LOOK, MpiCommandError, MpiLauncher, RankCommand};

/// How long `mpirun` may take to end its ranks.
const GRACE: Duration = Duration::from_secs(5);

/// An `mpirun` and its command.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct MpiRun {
    pub library: MpiLauncher,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub variables: Vec<(String, String)>,
}

impl MpiLauncher {
    /// The user signal that its `mpirun` forwards, and ranks started by it take for a request to stop.
    pub const fn stop_signal(self) -> &'static str {
        match self {
            Self::OpenMpi => "SIGUSR2",
            // SIGUSR2 ends its mpirun.
            Self::Mpich => "SIGUSR1",
        }
    }

    /// What to send to its `mpirun` for a command; `None` where it has no way to pass that on.
    fn forwarded(self, command: RankCommand) -> Option<Signal> {
        match (self, command) {
            (Self::OpenMpi, RankCommand::Signal(Signal::USR1 | Signal::USR2)) => Some(Signal::USR1),
            (Self::Mpich, RankCommand::Signal(Signal::USR1 | Signal::USR2)) => None,
            (Self::OpenMpi, RankCommand::Signal(_)) => Some(Signal::USR2),
            (Self::Mpich, RankCommand::Signal(_)) => Some(Signal::USR1),
            (_, RankCommand::Kill) => Some(Signal::TERM),
        }
    }
}

impl MpiRun {
    /// Runs it to its end.
    pub fn run(&self, commands: &Receiver<RankCommand>) -> Result<ExitReason, MpiCommandError> {
        let failed = |source| MpiCommandError::Start { program: self.program.clone(), source };
        let mut mpirun = Mpirun(self.start().map_err(failed)?);
        let mut killed: Option<Instant> = None;
        loop {
            if let Some(status) = mpirun.0.try_wait().map_err(failed)? {
                return Ok(ExitReason::of(status));
            }
            if let Ok(command) = commands.try_recv() {
                if let Some(signal) = self.library.forwarded(command) {
                    let _ = rustix::process::kill_process(Pid::from_child(&mpirun.0), signal);
                }
                killed = killed.or((command == RankCommand::Kill).then(Instant::now));
            }
            if killed.is_some_and(|since| since.elapsed() >= GRACE) {
                let _ = mpirun.0.kill();
            }
            std::thread::sleep(LOOK);
        }
    }

    #[allow(unsafe_code, reason = "sets up the child between fork and exec")]
    fn start(&self) -> io::Result<Child> {
        let launcher = rustix::process::getpid();
        let mut command = Command::new(&self.program);
        let variables = self.variables.iter().map(|(name, value)| (name, value));
        // A group of its own: the terminal's signals are the launcher's to pass on.
        command.args(&self.arguments).envs(variables).stdin(Stdio::null()).process_group(0);
        // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
        unsafe {
            command.pre_exec(move || {
                // It ends its ranks on SIGTERM; killed, it would leave those of other hosts behind.
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
                let is_child = rustix::process::getppid() == Some(launcher);
                if is_child { Ok(()) } else { Err(Errno::SRCH.into()) }
            });
        }
        command.spawn()
    }
}

/// Ended when it is dropped.
struct Mpirun(Child);

impl Drop for Mpirun {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
