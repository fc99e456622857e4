//! Starts a launcher on each of several hosts through a remote shell such as ssh, and ends them together.
//!
//! A remote launcher reads its standard input: a first line with what must be on no command line, then a line a command
//! ([`write_command`], [`parse_command`]). At the end of it the launcher here is gone. A killed ssh client leaves the remote
//! command running, so this is the only way by which a host learns of it.

use std::ffi::OsString;
use std::io::{self, BufRead, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;

use super::output::Readers;
use super::{ExitReason, LOOK, RankCommand, RankOutput, ignore};

/// How long the other hosts may take to find out by themselves that one is lost, before their ranks are asked to stop.
const NOTICE: Duration = Duration::from_secs(10);
/// How long they may take to save then.
const SAVE: Duration = Duration::from_mins(1);
/// How long their launchers may take to end killed ranks, before the remote shells are killed.
const GRACE: Duration = Duration::from_secs(5);
/// What ssh exits with if the connection failed.
const NO_CONNECTION: i32 = 255;
/// The longest line of a command.
const LONGEST: u64 = 64;

/// A remote shell could not be started. None is left running.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {} for host {host}: {source}", program.display())]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RemoteShellError {
    pub host: String,
    pub program: PathBuf,
    pub source: io::Error,
}

/// The launcher of one host, as a command of a remote shell.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RemoteHost {
    pub name: String,
    /// The remote shell with its arguments.
    pub command: Vec<OsString>,
    /// The first line of its standard input.
    pub opening: String,
}

/// How a host's launcher ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct HostExit {
    pub name: String,
    pub how: ExitReason,
    /// Whether the others were ended because of it.
    pub is_first: bool,
    /// Whether the remote shell was killed here, as its launcher did not answer.
    pub by_launcher: bool,
}

impl HostExit {
    /// Whether the connection was lost or never made, so that nothing is known of the host.
    pub fn is_unreachable(&self) -> bool {
        self.by_launcher || !matches!(self.how, ExitReason::Exited { code } if code != NO_CONNECTION)
    }
}

/// Runs the launchers of all hosts until each has ended. `output` gets their lines, by the number of the host as the rank.
pub fn run_on_hosts(
    hosts: &[RemoteHost],
    output: &RankOutput,
    commands: &Receiver<RankCommand>,
) -> Result<Vec<HostExit>, RemoteShellError> {
    let mut shells = Shells(Vec::with_capacity(hosts.len()));
    let mut readers = Readers::default();
    for (number, host) in hosts.iter().enumerate() {
        let program = PathBuf::from(host.command.first().cloned().unwrap_or_default());
        let failed = |source| RemoteShellError { host: host.name.clone(), program: program.clone(), source };
        let mut child = start(host).map_err(failed)?;
        let stdin = child.stdin.take();
        shells.0.push(Shell { child, stdin, how: None, killed: false });
        let shell = &mut shells.0[number];
        shell.say(&host.opening);
        readers.read(number, &mut shell.child, output).map_err(failed)?;
    }
    let first = shells.watch(commands);
    readers.finish();
    let ends = shells.0.iter().zip(hosts).enumerate().map(|(number, (shell, host))| HostExit {
        name: host.name.clone(),
        how: shell.how.unwrap_or(ExitReason::Unknown),
        is_first: first == Some(number),
        by_launcher: shell.killed,
    });
    Ok(ends.collect())
}

/// A command as a line of a remote launcher's standard input.
pub fn write_command(command: RankCommand) -> String {
    match command {
        RankCommand::Signal(signal) => format!("signal {}", signal.as_raw()),
        RankCommand::Kill => "kill".to_owned(),
    }
}

/// Parses a line of [`write_command`]. Other lines, of another version, are no commands.
pub fn parse_command(line: &str) -> Option<RankCommand> {
    match line.trim().split_once(' ') {
        Some(("signal", number)) => RankCommand::signal(number.parse().ok()?),
        None if line.trim() == "kill" => Some(RankCommand::Kill),
        _ => None,
    }
}

/// Passes the commands of a standard input on until it ends.
pub fn pass_on_commands(mut input: impl BufRead, commands: &Sender<RankCommand>) {
    let mut line = Vec::new();
    while matches!((&mut input).take(LONGEST).read_until(b'\n', &mut line), Ok(1..)) {
        if let Some(command) = str::from_utf8(&line).ok().and_then(parse_command)
            && commands.send(command).is_err()
        {
            return;
        }
        line.clear();
    }
}

#[allow(unsafe_code, reason = "sets up the child between fork and exec")]
fn start(host: &RemoteHost) -> io::Result<Child> {
    let launcher = rustix::process::getpid();
    let (program, arguments) = host.command.split_first().ok_or(Errno::INVAL)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec only system calls are made: no allocation, no lock, and errors are numbers.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(launcher) {
                return Err(Errno::SRCH.into());
            }
            // The terminal's signals are the launcher's to pass on. ssh keeps them ignored.
            ignore::ignore(Signal::INT)?;
            ignore::ignore(Signal::HUP)?;
            ignore::ignore(Signal::QUIT)
        });
    }
    command.spawn()
}

struct Shell {
    child: Child,
    /// Closed to tell the remote launcher that it is alone.
    stdin: Option<ChildStdin>,
    how: Option<ExitReason>,
    killed: bool,
}

impl Shell {
    /// A shell that has ended says so by its exit code.
    fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        }
    }
}

/// The shells started so far; dropping it kills those left, whose launchers then end their ranks.
struct Shells(Vec<Shell>);

impl Shells {
    /// Waits for all shells. Returns the first that failed.
    fn watch(&mut self, commands: &Receiver<RankCommand>) -> Option<usize> {
        let mut first: Option<(usize, Instant)> = None;
        // What was done about the first failure.
        let mut measures = 0;
        let (mut asked, mut killed): (bool, Option<Instant>) = (false, None);
        loop {
            if let Some(number) = self.look(asked).filter(|_| first.is_none()) {
                first = Some((number, Instant::now()));
            }
            if self.0.iter().all(|shell| shell.how.is_some()) {
                return first.map(|(number, _)| number);
            }
            match commands.try_recv() {
                Ok(command) => {
                    self.say(command);
                    asked |= command.stops();
                    killed = killed.or((command == RankCommand::Kill).then(Instant::now));
                }
                Err(TryRecvError::Disconnected | TryRecvError::Empty) => {}
            }
            let since = first.map_or(Duration::ZERO, |(_, since)| since.elapsed());
            if measures == 0 && since >= NOTICE {
                self.say(RankCommand::Signal(Signal::TERM));
                measures = 1;
            } else if measures == 1 && since >= NOTICE + SAVE {
                self.say(RankCommand::Kill);
                killed = killed.or_else(|| Some(Instant::now()));
                measures = 2;
            }
            if killed.is_some_and(|since| since.elapsed() >= GRACE) {
                self.kill();
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Collects ended shells and returns the first failure.
    fn look(&mut self, asked: bool) -> Option<usize> {
        let mut failed = None;
        for (number, shell) in self.0.iter_mut().enumerate().filter(|(_, shell)| shell.how.is_none()) {
            shell.how = shell.child.try_wait().ok().flatten().map(ExitReason::of);
            if shell.how.is_some() {
                // What it left running reads the end of its input.
                shell.stdin = None;
            }
            if shell.how.is_some_and(|how| !how.is_well(asked)) {
                failed = failed.or(Some(number));
            }
        }
        failed
    }

    fn say(&mut self, command: RankCommand) {
        let line = write_command(command);
        for shell in self.0.iter_mut().filter(|shell| shell.how.is_none()) {
            shell.say(&line);
        }
    }

    fn kill(&mut self) {
        for shell in self.0.iter_mut().filter(|shell| shell.how.is_none()) {
            shell.killed |= shell.child.kill().is_ok();
        }
    }
}

impl Drop for Shells {
    fn drop(&mut self) {
        self.kill();
        for shell in self.0.iter_mut().filter(|shell| shell.how.is_none()) {
            let _ = shell.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn commands_are_written_and_read() {
        let stops = [Signal::INT, Signal::TERM, Signal::USR2].map(RankCommand::Signal);
        for command in stops.into_iter().chain([RankCommand::Kill]) {
            assert_eq!(parse_command(&write_command(command)), Some(command));
        }
        for line in ["", "signal", "signal 9", "signal 19", "signal -1", "signal x", "kill 1", "stop"] {
            assert_eq!(parse_command(line), None, "{line}");
        }
    }

    #[test]
    fn commands_are_passed_on_until_the_input_ends() {
        let (sender, commands) = mpsc::channel();
        let long = format!("{}\nsignal 2\nsignal 9\nkill", "x".repeat(1000));
        pass_on_commands(long.as_bytes(), &sender);
        drop(sender);
        let all: Vec<RankCommand> = commands.iter().collect();
        assert_eq!(all, [RankCommand::Signal(Signal::INT), RankCommand::Kill]);
    }
}
