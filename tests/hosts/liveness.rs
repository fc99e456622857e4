//! Faults of ranks over MPI, two hosts with two ranks each: every survivor names the lost rank, or `mpirun` ends it first.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::namespaces::Hosts;
use crate::ranks::{ARGUMENTS, LINES, RANKS_OF_A_HOST, STEPS};

/// A rank is lost on all others within this time.
const NAMED: Duration = Duration::from_secs(10);

const RANKS: usize = 2 * RANKS_OF_A_HOST;

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

/// Survivors that `mpirun` ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Nobody,
    /// Those on the host of the rank that was killed.
    Neighbours,
    All,
}

/// `mpirun` of a library.
#[derive(Clone, Copy)]
struct Launcher {
    name: &'static str,
    options: &'static str,
    /// The survivors of a rank that was killed which it may end before they can speak.
    ends: Ended,
    /// Its process on every host.
    daemon: &'static str,
}

const MPICH: Launcher = Launcher { name: "mpich", options: "", ends: Ended::All, daemon: "hydra_pmi_proxy" };
/// Its daemon sends SIGKILL to the process groups of the other ranks of its host all the same, 1 ms after it has reaped one
/// that a signal ended.
const MPICH_WITHOUT_CLEANUP: Launcher =
    Launcher { options: "-disable-auto-cleanup", ends: Ended::Neighbours, ..MPICH };
const OPEN_MPI: Launcher = Launcher { name: "openmpi", options: "", ends: Ended::Nobody, daemon: "orted" };

impl std::fmt::Display for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.options)
    }
}

/// A job that runs.
struct Job {
    mpirun: Child,
    /// What `mpirun` prints.
    printed: File,
    /// The lines of its ranks.
    lines: NamedTempFile,
}

impl Job {
    fn start(hosts: &Hosts, launcher: Launcher, steps: u64) -> Self {
        let (printed, lines) = (tempfile::tempfile().unwrap(), NamedTempFile::new().unwrap());
        let program = std::env::current_exe().unwrap();
        let variables = [format!("{STEPS}={steps}"), format!("{LINES}={}", lines.path().display())];
        let command = ["2,2", "env", &variables[0], &variables[1], program.to_str().unwrap()];
        let mut command: Command = hosts.command(launcher.name, &[&command[..], &ARGUMENTS].concat());
        command.env("MPIRUN_OPTIONS", launcher.options).stdin(Stdio::null());
        command.stdout(printed.try_clone().unwrap()).stderr(printed.try_clone().unwrap());
        Self { mpirun: command.spawn().unwrap(), printed, lines }
    }

    /// What each rank said of something.
    fn said(&self, words: &str) -> Vec<Option<String>> {
        let lines = std::fs::read_to_string(self.lines.path()).unwrap();
        let said = |rank: usize| {
            let prefix = format!("rank {rank} {words}: ");
            lines.lines().find_map(|line| Some(line.strip_prefix(&prefix)?.to_owned()))
        };
        (0..RANKS).map(said).collect()
    }

    fn printed(&mut self) -> String {
        let mut text = Vec::new();
        self.printed.seek(SeekFrom::Start(0)).unwrap();
        self.printed.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The process ids of the ranks on their hosts, once all have done a step.
    fn pids(&mut self) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_mins(1);
        loop {
            if let Some(pids) = self.said("runs").into_iter().collect() {
                return pids;
            }
            assert!(Instant::now() < deadline, "{}", self.printed());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The exit code of `mpirun`; `None` if it was still there at the deadline, and is killed.
    fn end(&mut self, deadline: Instant) -> Option<i32> {
        loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                return Some(status.code().unwrap_or(-1));
            }
            if Instant::now() > deadline {
                self.mpirun.kill().unwrap();
                self.mpirun.wait().unwrap();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
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
    /// All that was printed.
    said: String,
    /// Whether `mpirun` named the process that was killed.
    named_by_mpirun: bool,
    /// Whether ranks still exchanged bytes 10 s later.
    goes_on: bool,
}

/// A step of the ranks sends more to a host within a tenth of a second, heartbeats and retries much less.
const BYTES_OF_STEPS: u64 = 200_000;

/// Whether ranks exchange bytes between hosts.
fn is_busy(hosts: &Hosts) -> bool {
    let received = || hosts.bytes(2)[0];
    let before = received();
    std::thread::sleep(Duration::from_millis(500));
    received() - before > BYTES_OF_STEPS
}

fn inject(hosts: &Hosts, launcher: Launcher, fault: Fault, victim: usize) -> Outcome {
    let mut job = Job::start(hosts, launcher, u64::MAX);
    let pids = job.pids();
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    let host = 1 + victim / RANKS_OF_A_HOST;
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
    let mut named: Vec<(usize, f64, String)> = Vec::new();
    while named.len() < survivors.len() && began.elapsed() < NAMED + Duration::from_secs(2) {
        for (rank, line) in job.said("ended").into_iter().enumerate() {
            if let Some(line) = line.filter(|_| named.iter().all(|(other, ..)| *other != rank)) {
                named.push((rank, began.elapsed().as_secs_f64(), line));
            }
        }
        // Whoever has not spoken when mpirun has ended was ended by it.
        if job.mpirun.try_wait().unwrap().is_some() && left_behind(hosts).is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let goes_on = fault == Fault::DaemonKilled && began.elapsed() > NAMED && is_busy(hosts);
    let code = job.end(Instant::now() + Duration::from_secs(if fault == Fault::Unplugged { 5 } else { 20 }));
    let mpirun = code.map(|code| (code, began.elapsed().as_secs_f64()));
    if fault == Fault::Unplugged {
        hosts.set_link(2, true);
    }
    let said = job.printed();
    let pid = &pids[victim];
    let words = [format!("PID {pid} RUNNING AT"), format!("process rank {victim} with PID {pid} on node")];
    let named_by_mpirun = fault == Fault::Killed && words.iter().any(|words| said.contains(words));
    Outcome { named, survivors: survivors.len(), mpirun, said, named_by_mpirun, goes_on }
}

/// Processes of a job that are still on a host.
fn left_behind(hosts: &Hosts) -> String {
    let list =
        "ps -eo pid,stat,args | grep -E 'rank_process|hydra_pmi|orted' | grep -v -e grep -e ' Z' || true";
    [1, 2].map(|host| String::from_utf8(hosts.shell(host, list).stdout).unwrap()).concat()
}

/// What is wrong with an outcome.
fn problem(launcher: Launcher, fault: Fault, victim: usize, outcome: &Outcome) -> Option<&'static str> {
    let Outcome { named, mpirun, said, named_by_mpirun, .. } = outcome;
    if ["Caught signal", "core dumped", "panicked"].iter().any(|words| said.contains(words)) {
        return Some("a rank crashed");
    }
    for (rank, seconds, line) in named {
        let expected = match fault {
            Fault::Killed | Fault::Stopped => vec![victim],
            // The other side is lost to each.
            Fault::Unplugged if *rank < 2 => vec![2, 3],
            Fault::Unplugged => vec![0],
            Fault::DaemonKilled => (0..RANKS).filter(|other| other != rank).collect(),
        };
        let found = expected.iter().any(|lost| line.starts_with(&format!("rank {lost} ")));
        // MPICH kills the others of a host at once, the coordinator among them: the rest sees these deaths too.
        let is_excused = *named_by_mpirun && launcher.name == MPICH.name;
        if !found && !is_excused {
            return Some("another rank is named");
        }
        if *seconds > NAMED.as_secs_f64() {
            return Some("the rank is named late");
        }
    }
    // Only mpirun may end a survivor before it can speak: MPICH's at once, both after the death of a daemon.
    let may_be_ended = |rank: usize| match launcher.ends {
        _ if fault == Fault::DaemonKilled => true,
        Ended::All => fault == Fault::Killed,
        Ended::Neighbours => fault == Fault::Killed && rank / RANKS_OF_A_HOST == victim / RANKS_OF_A_HOST,
        Ended::Nobody => false,
    };
    let is_silent = |rank: &usize| named.iter().all(|(other, ..)| other != rank);
    let died = matches!(fault, Fault::Killed | Fault::Stopped);
    let is_excused = |rank: &usize| died && *rank == victim || may_be_ended(*rank);
    let heard = (0..RANKS).filter(|rank| !is_excused(rank));
    if heard.into_iter().any(|rank| is_silent(&rank)) {
        return Some("a survivor says nothing");
    }
    if named.is_empty() && !named_by_mpirun && fault != Fault::DaemonKilled {
        return Some("nobody names the rank");
    }
    mpirun.is_some_and(|(code, _)| code == 0).then_some("mpirun's exit code is 0")
}

/// A number of faults of one kind under one launcher.
fn faults(launcher: Launcher, fault: Fault, each: usize) {
    let Some(hosts) = Hosts::up(2, &[launcher.name]) else { return };
    let mut problems = Vec::new();
    let (mut by_all, mut by_some, mut by_mpirun, mut hung, mut went_on) = (0, 0, 0, 0, 0);
    let (mut slowest, mut longest) = (0.0_f64, 0.0_f64);
    for case in 0..each {
        let victim = (case + 3) % RANKS;
        let outcome = inject(&hosts, launcher, fault, victim);
        if let Some(problem) = problem(launcher, fault, victim, &outcome) {
            problems.push(format!("{launcher} {fault:?} of rank {victim}: {problem}: {outcome:#?}"));
        }
        let count = match outcome.named.len() {
            0 => &mut by_mpirun,
            all if all == outcome.survivors => &mut by_all,
            _ => &mut by_some,
        };
        *count += 1;
        went_on += usize::from(outcome.goes_on);
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
        if !left.is_empty() {
            problems.push(format!("{launcher} {fault:?} of rank {victim}: left behind:\n{left}"));
            hosts.shell(1, "kill -9 -1");
            hosts.shell(2, "kill -9 -1");
        }
        if case == 0 && std::env::var_os("ZEROTH_FULL").is_some() {
            println!("{launcher} {fault:?}, first case:\n{}\n", outcome.said);
        }
    }
    println!(
        "{launcher} {fault:?}: {each} faults, named by all survivors in {by_all}, by those that mpirun did not end before in \
         {by_some}, by mpirun alone in {by_mpirun}; named within {slowest:.1} s; mpirun ended within {longest:.1} s, hung \
         {hung} times; ranks went on in {went_on}"
    );
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}

fn is_full() -> bool {
    std::env::var_os("ZEROTH_FULL").is_some()
}

#[test]
fn killed_ranks_are_named_under_mpich() {
    faults(MPICH, Fault::Killed, if is_full() { 20 } else { 1 });
}

#[test]
fn killed_ranks_are_named_under_mpich_without_cleanup() {
    faults(MPICH_WITHOUT_CLEANUP, Fault::Killed, if is_full() { 20 } else { 1 });
}

#[test]
fn stopped_ranks_are_named_under_mpich() {
    if is_full() {
        faults(MPICH, Fault::Stopped, 20);
    }
}

#[test]
fn pulled_cables_are_named_under_mpich() {
    if is_full() {
        faults(MPICH, Fault::Unplugged, 20);
    }
}

#[test]
fn killed_daemons_are_survived_or_end_jobs_under_mpich() {
    if is_full() {
        faults(MPICH, Fault::DaemonKilled, 20);
    }
}

#[test]
fn killed_ranks_are_named_under_open_mpi() {
    if is_full() {
        faults(OPEN_MPI, Fault::Killed, 20);
    }
}

#[test]
fn stopped_ranks_are_named_under_open_mpi() {
    faults(OPEN_MPI, Fault::Stopped, if is_full() { 20 } else { 1 });
}

#[test]
fn pulled_cables_are_named_under_open_mpi() {
    if is_full() {
        faults(OPEN_MPI, Fault::Unplugged, 20);
    }
}

#[test]
fn killed_daemons_are_survived_or_end_jobs_under_open_mpi() {
    if is_full() {
        faults(OPEN_MPI, Fault::DaemonKilled, 20);
    }
}

#[test]
fn ranks_leave_after_the_last_step_with_exit_code_0() {
    for launcher in [MPICH, OPEN_MPI] {
        let Some(hosts) = Hosts::up(2, &[launcher.name]) else { continue };
        let runs = if is_full() { 100 } else { 1 };
        let mut timed_out = 0;
        for _ in 0..runs {
            let mut job = Job::start(&hosts, launcher, 5);
            let code = job.end(Instant::now() + Duration::from_mins(1));
            let left: Option<Vec<_>> = job.said("left").into_iter().collect();
            assert!(code == Some(0) && left.is_some(), "{launcher}: {code:?} {left:?} {}", job.printed());
            timed_out += usize::from(left.unwrap().iter().any(|how| how == "timed out"));
        }
        println!("{launcher}: {runs} runs ended with exit code 0; MPI_Finalize hung in {timed_out}");
    }
}
