//! Signal handling: SIGINT, SIGTERM, SIGHUP and SIGXCPU request a run to finish its step, save and stop. A second SIGINT
//! stops at once. SIGUSR1 and SIGUSR2, the warnings of cluster managers, request a save; with --signal-exit also a stop.
//!
//! A signal sets a flag that the training loop polls between steps. Before the first step nobody polls: see
//! [`StartupSignals`]. The second SIGINT exits inside the handler; ranks exit with their launcher.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::flag::{register, register_conditional_default, register_conditional_shutdown};
use zeroth::comm::JobControl;
use zeroth::comm::environment::ExternalLauncher;

use crate::startup_signals::{InterruptedWork, StartupSignals, wait_to_be_killed};
use crate::stop_signal::StopSignal;

/// The role of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalRole {
    /// A launcher, a single rank, or rank 0 under a foreign launcher: handles SIGINT, SIGTERM and SIGHUP.
    Primary,
    /// Another rank under a foreign launcher: the same, but rank 0 prints for it.
    Secondary,
    /// A rank under zeroth's launcher, which handles the terminal and cluster managers: it ignores their signals.
    ///
    /// It also stops on SIGTERM, which cluster managers send to every process of a job. The second SIGTERM kills the
    /// process; the launcher sends several to end a rank immediately.
    Launched,
}

/// The environment variable with the signal by which `zeroth launch` asks ranks under `mpirun` to stop.
pub(crate) const STOP_SIGNAL: &str = "ZEROTH_STOP_SIGNAL";

/// What the warnings of cluster managers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SaveSignals {
    signals: &'static [i32],
    /// Whether the run also ends.
    stops: bool,
    /// The one by which `zeroth launch` asks for a stop, where `mpirun` forwards no other.
    stop: Option<i32>,
}

impl SaveSignals {
    /// They are not handled here.
    pub(crate) const NONE: Self = Self { signals: &[], stops: false, stop: None };

    /// Those of a run under another launcher, or of its own. MPICH uses SIGUSR1 itself.
    pub(crate) fn of(launcher: Option<ExternalLauncher>, stops: bool) -> Self {
        let stop = match std::env::var(STOP_SIGNAL).as_deref() {
            Ok("SIGUSR1") => Some(SIGUSR1),
            Ok("SIGUSR2") => Some(SIGUSR2),
            _ => None,
        };
        match launcher {
            // It uses SIGUSR1 itself, to tell ranks of a lost one.
            Some(ExternalLauncher::Mpich) if stop.is_none() => Self { signals: &[SIGUSR2], stops, stop },
            _ => Self { signals: &[SIGUSR1, SIGUSR2], stops, stop },
        }
    }
}

/// Makes writes beyond the limit of file sizes (`ulimit -f`) fail, as those to a full disk do: the default kills the process.
pub(crate) fn report_file_size_limit() -> io::Result<()> {
    register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(|_| ())
}

/// Signals received so far.
#[derive(Clone)]
struct Flags {
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
    hung_up: Arc<AtomicBool>,
    out_of_cpu_time: Arc<AtomicBool>,
    /// SIGUSR1 and SIGUSR2 that stop.
    user: [Arc<AtomicBool>; 2],
}

/// The signal handling of this process.
pub(crate) struct Signals {
    stop_requested: Arc<AtomicBool>,
    save_requested: Arc<AtomicBool>,
    flags: Flags,
    /// `None` for a rank under zeroth's launcher, which handles it.
    startup: Option<Arc<StartupSignals>>,
}

impl Signals {
    /// Installs the handlers for the rest of the process. Called once.
    pub(crate) fn install(role: SignalRole, work: InterruptedWork, saves: SaveSignals) -> io::Result<Self> {
        let [stop_requested, save_requested, interrupted, terminated, hung_up, out_of_cpu_time] =
            [(); 6].map(|()| Arc::new(AtomicBool::new(false)));
        let user = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let mut stops = vec![SIGINT, SIGTERM, SIGXCPU];
        // Actions run in registration order: the conditional exit must not see the flag that this signal sets.
        match role {
            SignalRole::Primary | SignalRole::Secondary => {
                let code = i32::from(StopSignal::Interrupt.exit_code());
                register_conditional_shutdown(SIGINT, code, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&interrupted))?;
                register(SIGINT, Arc::clone(&stop_requested))?;
                // nohup starts commands with SIGHUP ignored, and they should continue.
                if !is_ignored(SIGHUP) {
                    register(SIGHUP, Arc::clone(&hung_up))?;
                    register(SIGHUP, Arc::clone(&stop_requested))?;
                    stops.push(SIGHUP);
                }
            }
            SignalRole::Launched => _ = register_conditional_default(SIGTERM, Arc::clone(&terminated))?,
        }
        for signal in saves.signals {
            if saves.stops || saves.stop == Some(*signal) {
                register(*signal, Arc::clone(&user[usize::from(*signal == SIGUSR2)]))?;
                register(*signal, Arc::clone(&stop_requested))?;
                stops.push(*signal);
            } else {
                register(*signal, Arc::clone(&save_requested))?;
            }
        }
        register(SIGXCPU, Arc::clone(&out_of_cpu_time))?;
        register(SIGXCPU, Arc::clone(&stop_requested))?;
        register(SIGTERM, Arc::clone(&terminated))?;
        register(SIGTERM, Arc::clone(&stop_requested))?;
        let flags = Flags { interrupted, terminated, hung_up, out_of_cpu_time, user };
        let own = flags.clone();
        let startup = match role {
            SignalRole::Primary | SignalRole::Secondary => {
                Some(StartupSignals::watch(role == SignalRole::Primary, work, &stops, move || own.pending())?)
            }
            SignalRole::Launched => None,
        };
        Ok(Self { stop_requested, save_requested, flags, startup })
    }

    /// Installs the handlers of a command that writes a model folder: a signal removes what is unfinished, and ends it.
    pub(crate) fn install_for_model_folder() -> io::Result<()> {
        // Where the system gives no threads, a signal ends the command at once, and the next one removes what it has left.
        if std::thread::Builder::new().spawn(|| ()).is_err() {
            return Ok(());
        }
        let signals = Self::install(SignalRole::Primary, InterruptedWork::ModelFolder, SaveSignals::NONE)?;
        if let Some(startup) = signals.startup() {
            startup.on_stop(zeroth::base::remove_own);
        }
        Ok(())
    }

    /// The pending stop request; SIGTERM takes precedence, because its sender is a program that reads exit codes.
    pub(crate) fn stop_requested(&self) -> Option<StopSignal> {
        self.flags.pending()
    }

    /// Signal handling before the first step; `None` for a rank under zeroth's launcher.
    pub(crate) fn startup(&self) -> Option<&Arc<StartupSignals>> {
        self.startup.as_ref()
    }

    /// Begins the first step of a rank.
    pub(crate) fn begin_steps(&self, control: &dyn JobControl) {
        match &self.startup {
            Some(before) => before.begin(),
            // The launcher has stopped the job and is about to kill this process.
            None if !control.begin_first_step() => wait_to_be_killed(),
            None => {}
        }
    }

    /// From here on SIGINT and SIGTERM exit at once: everything is saved, and the rest may block on a reader.
    pub(crate) fn end_at_once() -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
        }
        Ok(())
    }

    /// Whether a save is requested.
    pub(crate) fn is_save_requested(&self) -> bool {
        self.save_requested.load(Ordering::Relaxed)
    }

    /// All requests for a save are answered.
    pub(crate) fn forget_saves(&self) {
        self.save_requested.store(false, Ordering::Relaxed);
    }

    /// A flag that is true while a save is requested, for launchers.
    pub(crate) fn save_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.save_requested)
    }

    /// A flag that is true once a stop is requested, for launchers and other waiters.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop_requested)
    }
}

impl Flags {
    fn pending(&self) -> Option<StopSignal> {
        let flags = [
            (&self.terminated, StopSignal::Terminate),
            (&self.out_of_cpu_time, StopSignal::CpuTime),
            (&self.hung_up, StopSignal::HangUp),
            (&self.interrupted, StopSignal::Interrupt),
            (&self.user[0], StopSignal::User1),
            (&self.user[1], StopSignal::User2),
        ];
        flags.into_iter().find(|(flag, _)| flag.load(Ordering::Relaxed)).map(|(_, pending)| pending)
    }
}

/// Whether this process was started with a signal ignored.
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

    use zeroth::comm::alone;

    use super::*;

    const ROLE: &str = "ZEROTH_SIGNALS_TEST";
    const COMPUTES: &str = "ZEROTH_SIGNALS_TEST_COMPUTES";

    #[test]
    #[ignore = "the process that the other tests start and send signals to"]
    fn process() {
        let Ok(role) = std::env::var(ROLE) else { return };
        let (role, saves) = match role.as_str() {
            "watched" => (SignalRole::Launched, SaveSignals::NONE),
            "exits" => (SignalRole::Primary, SaveSignals::of(None, true)),
            "mpich" => (SignalRole::Primary, SaveSignals::of(Some(ExternalLauncher::Mpich), false)),
            _ => (SignalRole::Primary, SaveSignals::of(None, false)),
        };
        let signals = Signals::install(role, InterruptedWork::Training, saves).unwrap();
        signals.begin_steps(&*alone());
        println!("\nready");
        while signals.stop_requested().is_none() {
            if signals.is_save_requested() {
                signals.forget_saves();
                println!("\nsave");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(signals.flag().load(Ordering::Relaxed));
        println!("\n{:?}", signals.stop_requested());
        if std::env::var_os(COMPUTES).is_some() {
            // Polls nothing, and is bounded: if no signal ends it, the test fails by its exit code.
            let (began, mut number) = (Instant::now(), 1_u64);
            while began.elapsed() < Duration::from_mins(1) {
                number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005));
            }
            std::process::exit(1);
        }
        // Exits when the test closes the pipe.
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
        std::process::exit(signals.stop_requested().map_or(1, |pending| i32::from(pending.exit_code())));
    }

    struct Process {
        child: Child,
        lines: io::Lines<BufReader<ChildStdout>>,
    }

    impl Process {
        /// A process that waits for a request, then for the pipe to close.
        fn start(role: &str) -> Self {
            Self::spawn(role, |_| ())
        }

        /// A process that waits for a request, then computes for a minute.
        fn start_computing(role: &str) -> Self {
            Self::spawn(role, |command| _ = command.env(COMPUTES, "1"))
        }

        fn spawn(role: &str, set: impl Fn(&mut Command)) -> Self {
            // As zeroth's launcher starts ranks.
            let ignore = match role {
                "watched" => "trap '' INT USR1 USR2 HUP;",
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
            assert!(
                self.lines.any(|line| line.unwrap() == text),
                "the process exited before it printed {text}"
            );
        }

        fn send(&self, signal: &str) {
            let kill = format!("kill -{signal} {}", self.child.id());
            assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
        }

        /// Lets it exit normally, and waits for it.
        fn end(mut self) -> ExitStatus {
            // `wait` closes its stdin first.
            self.child.wait().unwrap()
        }
    }

    #[test]
    fn the_first_sigint_requests_a_stop() {
        let mut process = Process::start("own");
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn the_second_sigint_ends_a_busy_process() {
        let mut process = Process::start_computing("own");
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        process.send("INT");
        assert_eq!(process.end().code(), Some(130));
    }

    #[test]
    fn repeated_sigterm_only_requests_a_stop() {
        let mut process = Process::start("own");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("TERM");
        assert_eq!(process.end().code(), Some(143));
    }

    #[test]
    fn sighup_requests_a_stop_except_under_nohup() {
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
    fn a_launched_rank_ignores_the_terminal_and_cluster_managers() {
        let mut process = Process::start("watched");
        for signal in ["INT", "INT", "HUP", "USR1", "USR2"] {
            process.send(signal);
        }
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("USR1");
        process.send("INT");
        assert_eq!(process.end().code(), Some(143));
    }

    #[test]
    fn sigusr1_and_sigusr2_request_saves_and_stop_only_if_asked_to() {
        let mut process = Process::start("own");
        for signal in ["USR1", "USR2", "USR1"] {
            process.send(signal);
            process.wait_for("save");
        }
        process.send("INT");
        process.wait_for("Some(Interrupt)");
        assert_eq!(process.end().code(), Some(130));
        for (signal, pending, code) in [("USR1", "Some(User1)", 138), ("USR2", "Some(User2)", 140)] {
            let mut process = Process::start("exits");
            process.send(signal);
            process.wait_for(pending);
            assert_eq!(process.end().code(), Some(code));
        }
    }

    #[test]
    fn under_mpich_sigusr1_is_left_to_it() {
        let mut process = Process::start("mpich");
        process.send("USR2");
        process.wait_for("save");
        process.send("USR1");
        assert_eq!(process.end().signal(), Some(10));
    }

    #[test]
    fn the_limit_of_cpu_time_requests_a_stop() {
        for role in ["own", "watched"] {
            let mut process = Process::start(role);
            process.send("XCPU");
            process.wait_for("Some(CpuTime)");
            assert_eq!(process.end().code(), Some(152));
        }
    }

    #[test]
    fn a_launched_rank_is_killed_by_the_second_sigterm() {
        let mut process = Process::start_computing("watched");
        process.send("TERM");
        process.wait_for("Some(Terminate)");
        process.send("TERM");
        assert_eq!(process.end().signal(), Some(15));
    }
}
