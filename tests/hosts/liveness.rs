//! Faults of ranks over MPI, two hosts with two ranks each: every survivor names the lost rank, or `mpirun` ends it first.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::namespaces::Hosts;
use crate::ranks::{ARGUMENTS, STEPS};

/// A rank is lost on all others within this time.
const NAMED: Duration = Duration::from_secs(10);

const RANKS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A rank gets SIGKILL.
    Killed,
    /// A rank gets SIGSTOP.
    Stopped,
    /// The cable of the second host is pulled.
    Unplugged,
    /// The daemon of `mpirun` on the second host gets SIGKILL.
    DaemonKilled,
}

const FAULTS: [Fault; 4] = [Fault::Killed, Fault::Stopped, Fault::Unplugged, Fault::DaemonKilled];

/// `mpirun` of a library.
#[derive(Clone, Copy)]
struct Launcher {
    name: &'static str,
    /// Its process on every host.
    daemon: &'static str,
}

const LAUNCHERS: [Launcher; 2] =
    [Launcher { name: "mpich", daemon: "hydra_pmi_proxy" }, Launcher { name: "openmpi", daemon: "orted" }];

/// A job that runs.
struct Job {
    mpirun: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Job {
    fn start(hosts: &Hosts, launcher: Launcher, steps: u64) -> Self {
        let program = std::env::current_exe().unwrap();
        let variable = format!("{STEPS}={steps}");
        let command = ["2,2", "env", &variable, program.to_str().unwrap()];
        let mut command: Command = hosts.command(launcher.name, &[&command[..], &ARGUMENTS].concat());
        let mut mpirun =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = channel();
        let pipes: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(mpirun.stdout.take().unwrap()), Box::new(mpirun.stderr.take().unwrap())];
        for pipe in pipes {
            let send = send.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Self { mpirun, lines, said: Vec::new() }
    }

    /// Reads lines until `enough` of them or the deadline; false at the deadline.
    fn read(&mut self, deadline: Instant, mut enough: impl FnMut(&[String]) -> bool) -> bool {
        while !enough(&self.said) {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return enough(&self.said),
            }
        }
        true
    }

    /// The process ids of the ranks on their hosts, once all have done a step.
    fn pids(&mut self) -> Vec<String> {
        let pid = |said: &[String], rank: usize| {
            let prefix = format!("rank {rank} runs as ");
            said.iter().find_map(|line| Some(line.split_once(&prefix)?.1.trim().to_owned()))
        };
        let pids = |said: &[String]| (0..RANKS).map(|rank| pid(said, rank)).collect::<Option<Vec<_>>>();
        let deadline = Instant::now() + Duration::from_mins(1);
        assert!(self.read(deadline, |said| pids(said).is_some()), "{}", self.said.join("\n"));
        pids(&self.said).unwrap()
    }

    /// The exit code of `mpirun`; `None` if it was still there at the deadline, and is killed.
    fn end(&mut self, deadline: Instant) -> Option<i32> {
        loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                self.read(Instant::now() + Duration::from_millis(200), |_| false);
                return Some(status.code().unwrap_or(-1));
            }
            if Instant::now() > deadline {
                self.mpirun.kill().unwrap();
                self.mpirun.wait().unwrap();
                return None;
            }
            self.read(Instant::now() + Duration::from_millis(20), |_| false);
        }
    }
}

/// What became of a job with a fault.
#[derive(Debug)]
struct Outcome {
    /// Each survivor that spoke: its rank, after how many seconds, and what it said.
    named: Vec<(usize, f64, String)>,
    /// How many survivors there were.
    survivors: usize,
    /// The exit code of `mpirun`, and after how many seconds.
    mpirun: Option<(i32, f64)>,
    /// The words of `mpirun`.
    said: String,
}

fn inject(hosts: &Hosts, launcher: Launcher, fault: Fault, victim: usize) -> Outcome {
    let mut job = Job::start(hosts, launcher, u64::MAX);
    let pids = job.pids();
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    let host = 1 + victim / 2;
    let survivors: Vec<usize> = match fault {
        Fault::Killed | Fault::Stopped => {
            let signal = if fault == Fault::Killed { "KILL" } else { "STOP" };
            assert!(hosts.shell(host, &format!("kill -{signal} {}", pids[victim])).status.success());
            (0..RANKS).filter(|rank| *rank != victim).collect()
        }
        Fault::Unplugged => {
            hosts.set_link(2, false);
            (0..RANKS).collect()
        }
        Fault::DaemonKilled => {
            // The name of a process has 15 characters.
            let kill = format!("kill -9 $(pgrep {})", launcher.daemon);
            assert!(hosts.shell(2, &kill).status.success());
            (0..RANKS).collect()
        }
    };
    let mut named = Vec::new();
    let ended = |line: &str, rank: usize| line.split_once(&format!("rank {rank} ended: ")).is_some();
    let mut seen = 0;
    let survivors_left = survivors.clone();
    job.read(began + NAMED + Duration::from_secs(2), |said| {
        for line in &said[seen..] {
            if let Some(rank) = survivors_left.iter().find(|rank| ended(line, **rank)) {
                named.push((*rank, began.elapsed().as_secs_f64(), line.clone()));
            }
        }
        seen = said.len();
        named.len() == survivors_left.len()
    });
    let code = job.end(Instant::now() + Duration::from_secs(if fault == Fault::Unplugged { 5 } else { 20 }));
    let mpirun = code.map(|code| (code, began.elapsed().as_secs_f64()));
    if fault == Fault::Unplugged {
        hosts.set_link(2, true);
    }
    let said = job.said.join("\n");
    Outcome { named, survivors: survivors.len(), mpirun, said }
}

/// Processes of a job that are still on a host.
fn left_behind(hosts: &Hosts) -> String {
    let list =
        "ps -eo pid,stat,args | grep -E 'rank_process|hydra_pmi|orted' | grep -v -e grep -e ' Z' || true";
    [1, 2].map(|host| String::from_utf8(hosts.shell(host, list).stdout).unwrap()).concat()
}

fn check(launcher: Launcher, fault: Fault, victim: usize, outcome: &Outcome) {
    let Outcome { named, survivors, mpirun, said } = outcome;
    let context = || format!("{} {fault:?} rank {victim}: {mpirun:?} {named:?}\n{said}", launcher.name);
    for words in ["Caught signal", "core dumped", "panicked"] {
        assert!(!said.contains(words), "{words}: {}", context());
    }
    for (rank, seconds, line) in named {
        assert!(*seconds < NAMED.as_secs_f64(), "{}", context());
        let expected = match fault {
            Fault::Killed | Fault::Stopped => vec![victim],
            // The other side is lost to each; where mpirun ends ranks, any of them.
            Fault::Unplugged if *rank < 2 => vec![2, 3],
            Fault::Unplugged => vec![0],
            Fault::DaemonKilled => (0..RANKS).filter(|other| other != rank).collect(),
        };
        let found = expected.iter().any(|lost| line.contains(&format!("ended: rank {lost} ")));
        assert!(found, "{}", context());
    }
    // mpirun ends the others once a rank has ended, perhaps before they can speak.
    let by_mpirun = ["BAD TERMINATION", "exited on signal", "lost communication", "daemon"];
    let is_named = !named.is_empty() || by_mpirun.iter().any(|words| said.contains(words));
    assert!(is_named && named.len() <= *survivors, "{}", context());
    assert_ne!(mpirun.map(|(code, _)| code), Some(0), "{}", context());
}

/// A number of each fault under one launcher.
fn faults(launcher: Launcher, kinds: &[Fault], each: usize) {
    let Some(hosts) = Hosts::up(2, &[launcher.name]) else { return };
    for fault in kinds {
        let (mut by_all, mut by_some, mut by_mpirun, mut hung) = (0, 0, 0, 0);
        let (mut slowest, mut longest) = (0.0_f64, 0.0_f64);
        for case in 0..each {
            let victim = (case + 3) % RANKS;
            let outcome = inject(&hosts, launcher, *fault, victim);
            check(launcher, *fault, victim, &outcome);
            let count = match outcome.named.len() {
                0 => &mut by_mpirun,
                all if all == outcome.survivors => &mut by_all,
                _ => &mut by_some,
            };
            *count += 1;
            slowest = outcome.named.iter().map(|(_, seconds, _)| *seconds).fold(slowest, f64::max);
            match outcome.mpirun {
                Some((_, seconds)) => longest = longest.max(seconds),
                None => hung += 1,
            }
            let deadline = Instant::now() + NAMED;
            let mut left = left_behind(&hosts);
            while !left.is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(100));
                left = left_behind(&hosts);
            }
            assert!(left.is_empty(), "{} {fault:?}: left behind:\n{left}\n{outcome:?}", launcher.name);
            if case == 0 && std::env::var_os("ZEROTH_FULL").is_some() {
                println!("{} {fault:?}, first case:\n{}\n", launcher.name, outcome.said);
            }
        }
        println!(
            "{} {fault:?}: {each} faults, named by all survivors in {by_all}, by those that mpirun did not end before in \
             {by_some}, by mpirun alone in {by_mpirun}; named within {slowest:.1} s; mpirun ended within {longest:.1} s, hung \
             {hung} times",
            launcher.name
        );
    }
}

fn is_full() -> bool {
    std::env::var_os("ZEROTH_FULL").is_some()
}

#[test]
fn lost_ranks_are_named_under_mpich() {
    if is_full() { faults(LAUNCHERS[0], &FAULTS, 20) } else { faults(LAUNCHERS[0], &FAULTS[..1], 1) }
}

#[test]
fn lost_ranks_are_named_under_open_mpi() {
    if is_full() { faults(LAUNCHERS[1], &FAULTS, 20) } else { faults(LAUNCHERS[1], &FAULTS[1..2], 1) }
}

#[test]
fn ranks_leave_after_the_last_step_with_exit_code_0() {
    for launcher in LAUNCHERS {
        let Some(hosts) = Hosts::up(2, &[launcher.name]) else { continue };
        let runs = if is_full() { 100 } else { 1 };
        let mut timed_out = 0;
        for _ in 0..runs {
            let mut job = Job::start(&hosts, launcher, 5);
            let code = job.end(Instant::now() + Duration::from_mins(1));
            let said = job.said.join("\n");
            assert_eq!(code, Some(0), "{}: {said}", launcher.name);
            assert_eq!(said.matches(" left: ").count(), RANKS, "{}: {said}", launcher.name);
            timed_out += usize::from(said.contains("left: timed out"));
        }
        println!("{}: {runs} runs ended with exit code 0; MPI_Finalize hung in {timed_out}", launcher.name);
    }
}
