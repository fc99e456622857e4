//! What SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask of a run: to finish the step, save and stop. A second SIGINT stops at once.
//!
//! A signal sets a flag that the loop polls between steps. Before the first step nobody polls: see [`BeforeFirstStep`]. The
//! second SIGINT ends the process inside its handler, whatever the process is computing; ranks end with their launcher.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag::{register, register_conditional_default, register_conditional_shutdown};
use zeroth::comm::FirstStep;

use crate::before_first_step::{BeforeFirstStep, wait_for_the_end};

/// Whose signals these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A launcher, a rank alone, or rank 0 of those that another launcher started: SIGINT, SIGTERM and SIGHUP ask.
    Own,
    /// Another rank of those: the same, and rank 0 speaks for it.
    Peer,
    /// A rank under our launcher, which alone hears the terminal: SIGUSR1 asks, and SIGINT and SIGHUP stay ignored.
    ///
    /// SIGTERM asks, too: a cluster's manager sends it to every process of a job. The second ends the process; our
    /// launcher sends several when a rank is to end now.
    Watched,
}

/// What a run was ended by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// A person's Ctrl-C, or our launcher.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGHUP: the terminal was closed.
    HangUp,
}

impl Ended {
    /// The exit code after a good save: 128 and the signal's number.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
            Self::HangUp => 129,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
        }
    }
}

/// The signals that ask a process to stop; the last may be ignored.
const STOPS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Which of them have come.
#[derive(Clone)]
struct Flags {
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
    hung_up: Arc<AtomicBool>,
}

/// The signals of this process.
pub(crate) struct Signals {
    asked: Arc<AtomicBool>,
    flags: Flags,
    /// None for a rank under our launcher, which sees to it.
    before_first_step: Option<Arc<BeforeFirstStep>>,
}

impl Signals {
    /// Takes the signals over for the rest of this process's life. Once a process.
    pub(crate) fn install(role: Role) -> io::Result<Self> {
        let [asked, interrupted, terminated, hung_up] = [(); 4].map(|()| Arc::new(AtomicBool::new(false)));
        // Actions run in the order of their registration: the one that ends the process must not see this signal's flag.
        match role {
            Role::Own | Role::Peer => {
                let code = i32::from(Ended::Interrupt.exit_code());
                register_conditional_shutdown(SIGINT, code, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&asked))?;
                // nohup ignores it for the commands that it starts: they are to go on.
                if !is_ignored(SIGHUP) {
                    register(SIGHUP, Arc::clone(&hung_up))?;
                    register(SIGHUP, Arc::clone(&asked))?;
                }
            }
            Role::Watched => {
                register_conditional_default(SIGTERM, Arc::clone(&terminated))?;
                register(SIGUSR1, Arc::clone(&interrupted))?;
                register(SIGUSR1, Arc::clone(&asked))?;
            }
        }
        register(SIGTERM, Arc::clone(&terminated))?;
        register(SIGTERM, Arc::clone(&asked))?;
        let flags = Flags { interrupted, terminated, hung_up };
        let own = flags.clone();
        let before_first_step = match role {
            Role::Own | Role::Peer => {
                let signals = if is_ignored(SIGHUP) { &STOPS[..2] } else { &STOPS };
                Some(BeforeFirstStep::watch(role == Role::Own, signals, move || own.ended())?)
            }
            Role::Watched => None,
        };
        Ok(Self { asked, flags, before_first_step })
    }

    /// Whether this process was asked to finish, and by what; of several, SIGTERM: its sender is a program that reads codes.
    pub(crate) fn asked(&self) -> Option<Ended> {
        self.flags.ended()
    }

    /// What a signal before the first step does; none for a rank under our launcher.
    pub(crate) fn before_first_step(&self) -> Option<&Arc<BeforeFirstStep>> {
        self.before_first_step.as_ref()
    }

    /// The first step of a rank begins; `first_step` is that of its job, where it has one.
    pub(crate) fn begin_steps(&self, first_step: Option<&FirstStep>) {
        match (&self.before_first_step, first_step) {
            (Some(before), _) => before.begin(),
            // Its launcher has stopped the job, and is about to end this process.
            (None, Some(first_step)) if !first_step.begin() => wait_for_the_end(),
            (None, _) => {}
        }
    }

    /// From here on SIGINT and SIGTERM end the process: all is saved, and what is left to do may wait for a reader.
    pub(crate) fn end_at_once() -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
        }
        Ok(())
    }

    /// True once this process was asked, for a launch that asks its ranks in turn and for whoever else waits.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }
}

impl Flags {
    fn ended(&self) -> Option<Ended> {
        let flags = [
            (&self.terminated, Ended::Terminate),
            (&self.hung_up, Ended::HangUp),
            (&self.interrupted, Ended::Interrupt),
        ];
        flags.into_iter().find(|(flag, _)| flag.load(Ordering::Relaxed)).map(|(_, ended)| ended)
    }
}

/// Whether whoever started this process had it ignore a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::print_stdout, reason = "how a process tells its test")]
    #![allow(clippy::exit, clippy::unwrap_used, reason = "processes end with codes, tests with a panic")]

    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    const ROLE: &str = "ZEROTH_SIGNALS_TEST";
    const COMPUTES: &str = "ZEROTH_SIGNALS_TEST_COMPUTES";

    #[test]
    #[ignore = "the process that the other tests start and send signals to"]
    fn process() {
        let Ok(role) = std::env::var(ROLE) else { return };
        let signals = Signals::install(if role == "watched" { Role::Watched } else { Role::Own }).unwrap();
        signals.begin_steps(None);
        println!("\nready");
        while signals.asked().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(signals.flag().load(Ordering::Relaxed));
        println!("\n{:?}", signals.asked());
        if std::env::var_os(COMPUTES).is_some() {
            // It polls nothing, and is bounded: where no signal ends it, the test fails by its code.
            let (began, mut number) = (Instant::now(), 1_u64);
            while began.elapsed() < Duration::from_mins(1) {
                number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005));
            }
            std::process::exit(1);
        }
        // Its own end comes when the test lets it, by closing the pipe.
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
        std::process::exit(signals.asked().map_or(1, |ended| i32::from(ended.exit_code())));
    }

    struct Process {
        child: Child,
        lines: io::Lines<BufReader<ChildStdout>>,
    }

    impl Process {
        /// One that waits to be asked and then for its own end.
        fn start(role: &str) -> Self {
            Self::spawn(role, |_| ())
        }

        /// One that waits to be asked and then computes for long.
        fn start_computing(role: &str) -> Self {
            Self::spawn(role, |command| _ = command.env(COMPUTES, "1"))
        }

        fn spawn(role: &str, set: impl Fn(&mut Command)) -> Self {
            // As our launcher starts ranks.
            let ignore = match role {
                "watched" => "trap '' INT USR1 HUP;",
                "nohup" => "trap '' HUP;",
                _ => "",
            };
            let mut command = Command::new("/bin/sh");
            command
                .args(["-c", &format!("{ignore} exec \"$0\" \"$@\"")])
                .arg(std::env::current_exe().unwrap())
                .args(["signals::tests::process", "--exact", "--ignored", "--nocapture"])
                .env(ROLE, role)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            set(&mut command);
            let mut child = command.spawn().unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut process = Self { child, lines };
            process.wait_for("ready");
            process
        }

        fn wait_for(&mut self, text: &str) {
            assert!(self.lines.any(|line| line.unwrap() == text), "the process ended before it said {text}");
        }

        fn send(&self, signal: &str) {
            let kill = format!("kill -{signal} {}", self.child.id());
            assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
        }

        /// Lets it come to its own end, and waits for it to end in any way.
        fn end(mut self) -> ExitStatus {
            // Waiting closes the pipe to its standard input first.
            self.child.wait().unwrap()
        }
    }

    #[test]
    fn the_first_interrupt_asks_and_the_run_goes_on_to_its_own_end() {
        let mut process = Process::start("own");
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn the_second_interrupt_ends_a_process_that_polls_nothing() {
        let mut process = Process::start_computing("own");
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        process.send("INT");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn sigterm_asks_however_often_it_comes() {
        let mut process = Process::start("own");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("TERM");
        assert_eq!(process.end().code(), Some(143));
    }

    #[test]
    fn a_closed_terminal_asks_unless_nohup_had_it_ignored() {
        let mut process = Process::start("own");
        process.send("HUP");
        process.wait_for("Some(HangUp)");
        assert_eq!(process.end().code(), Some(129));
        let mut process = Process::start("nohup");
        process.send("HUP");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        assert_eq!(process.end().code(), Some(143));
    }

    #[test]
    fn a_rank_under_our_launcher_ignores_the_terminal_and_is_asked_by_sigusr1() {
        let mut process = Process::start("watched");
        process.send("INT");
        process.send("INT");
        process.send("HUP");
        process.send("USR1");
        process.wait_for("Some(Interrupt)");
        process.send("USR1");
        process.send("INT");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn a_rank_under_our_launcher_is_asked_by_one_sigterm_and_ended_by_two() {
        let mut process = Process::start_computing("watched");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("TERM");
        assert_eq!(process.end().signal(), Some(15));
    }
}
