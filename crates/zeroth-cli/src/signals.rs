//! What SIGINT, SIGTERM and SIGUSR1 ask of a run: to finish the step, save and stop. A second SIGINT stops at once.
//!
//! A signal sets a flag that the loop polls between steps; from [`Signals::install`] on it does so during loading, too. The
//! second SIGINT ends the process inside its handler, whatever the process is computing; ranks end with their launcher.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag::{register, register_conditional_default, register_conditional_shutdown};

/// Whose signals these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A launcher, a rank alone, or a rank that another launcher started: SIGINT and SIGTERM ask.
    Own,
    /// A rank under our launcher, which alone hears the terminal: SIGUSR1 asks, and SIGINT stays ignored.
    ///
    /// SIGTERM asks, too: a cluster's manager sends it to every process of a job. The second ends the process; our
    /// launcher sends several when a rank is to end now.
    Watched,
}

/// What a run was asked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A person's Ctrl-C, or our launcher.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

impl Asked {
    /// The exit code after a good save: 128 and the signal's number.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// The signals of this process.
#[derive(Debug)]
pub(crate) struct Signals {
    asked: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Signals {
    /// Takes the signals over for the rest of this process's life. Once a process.
    pub(crate) fn install(role: Role) -> io::Result<Self> {
        let [asked, interrupted, terminated] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        // Actions run in the order of their registration: the one that ends the process must not see this signal's flag.
        match role {
            Role::Own => {
                let code = i32::from(Asked::Interrupt.exit_code());
                register_conditional_shutdown(SIGINT, code, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&asked))?;
            }
            Role::Watched => {
                register_conditional_default(SIGTERM, Arc::clone(&terminated))?;
                register(SIGUSR1, Arc::clone(&interrupted))?;
                register(SIGUSR1, Arc::clone(&asked))?;
            }
        }
        register(SIGTERM, Arc::clone(&terminated))?;
        register(SIGTERM, Arc::clone(&asked))?;
        Ok(Self { asked, interrupted, terminated })
    }

    /// Whether this process was asked to finish, and by what; of both, SIGTERM: its sender is a program that reads codes.
    pub(crate) fn asked(&self) -> Option<Asked> {
        if self.terminated.load(Ordering::Relaxed) {
            Some(Asked::Terminate)
        } else {
            self.interrupted.load(Ordering::Relaxed).then_some(Asked::Interrupt)
        }
    }

    /// True once this process was asked, for a launch that asks its ranks in turn and for whoever else waits.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::print_stdout, reason = "how a process tells its test")]
    #![allow(clippy::exit, clippy::unwrap_used, reason = "processes end with codes, tests with a panic")]

    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    const ROLE: &str = "ZEROTH_SIGNALS_TEST";

    #[test]
    #[ignore = "the process that the other tests start and send signals to"]
    fn process() {
        let role = match std::env::var(ROLE).as_deref() {
            Ok("own") => Role::Own,
            Ok("watched") => Role::Watched,
            _ => return,
        };
        let signals = Signals::install(role).unwrap();
        println!("\nready");
        let began = Instant::now();
        while signals.asked().is_none() && began.elapsed() < Duration::from_mins(1) {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(signals.flag().load(Ordering::Relaxed));
        println!("\n{:?}", signals.asked());
        // A long computation that polls nothing. What it is asked meanwhile shows in its exit code.
        let mut number = 1_u64;
        while began.elapsed() < Duration::from_secs(1) {
            number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005));
        }
        std::process::exit(signals.asked().map_or(1, |asked| i32::from(asked.exit_code())));
    }

    struct Process {
        child: Child,
        lines: std::io::Lines<BufReader<ChildStdout>>,
    }

    impl Process {
        /// A process of that role, with SIGINT and SIGUSR1 ignored from the start, as our launcher starts ranks.
        fn start(role: &str) -> Self {
            let ignore = if role == "watched" { "trap '' INT USR1;" } else { "" };
            let mut child = Command::new("/bin/sh")
                .args(["-c", &format!("{ignore} exec \"$0\" \"$@\"")])
                .arg(std::env::current_exe().unwrap())
                .args(["signals::tests::process", "--exact", "--ignored", "--nocapture"])
                .env(ROLE, role)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
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

        fn end(mut self) -> ExitStatus {
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
        let mut process = Process::start("own");
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        // SIGTERM between the two would give 143, were the process to reach its own end.
        process.send("TERM");
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
    fn a_rank_under_our_launcher_ignores_the_terminal_and_is_asked_by_sigusr1() {
        let mut process = Process::start("watched");
        process.send("INT");
        process.send("INT");
        process.send("USR1");
        process.wait_for("Some(Interrupt)");
        process.send("USR1");
        process.send("INT");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn a_rank_under_our_launcher_is_asked_by_one_sigterm_and_ended_by_two() {
        let mut process = Process::start("watched");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("TERM");
        assert_eq!(process.end().signal(), Some(15));
    }
}
