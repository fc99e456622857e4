//! Two hosts as processes on one machine, which meet over loopback: killed, stopped, and with clocks an hour apart.
//!
//! A rank is this test binary again, told by `ZEROTH_COMM_TEST` to run only `rank_process`, which is ignored otherwise.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "how a rank tells its test, and a test that it skips"
)]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zeroth_comm::environment::LaunchedRank;
use zeroth_comm::hosts::{HostOptions, JobCoordinator, JoinedHost, TokenSource, request_join};
use zeroth_comm::{Handle, JoinOptions, OpName, Timing};

const ROLE: &str = "ZEROTH_COMM_TEST";
const RANK: [&str; 4] = ["hosts::rank_process", "--exact", "--ignored", "--nocapture"];
/// Variables of launchers that must not count.
const KNOWN: [&str; 6] =
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", "PMI_SIZE", "SLURM_PROCID", "ZEROTH_JOB_TOKEN"];
const SILENCE: Duration = Duration::from_secs(2);

#[test]
#[ignore = "a rank of the other tests, which start it as a process"]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let launched = LaunchedRank::of_this_process().unwrap().expect("started as torchrun does");
    let place = launched.place;
    let timing = Timing { host_silence: SILENCE, ..Timing::default() };
    let options = HostOptions::default()
        .token(TokenSource::of_environment().unwrap())
        .address(launched.rank0.clone())
        .timing(timing)
        .name(format!("n{}", place.host));
    let joined = if place.rank == 0 {
        let coordinator = JobCoordinator::open(&launched.job, place, &options).unwrap();
        coordinator.begin(1000, b"settings", &JoinOptions::default()).unwrap()
    } else {
        let admission = request_join(&launched.job, place, &options).unwrap();
        admission.join(&JoinOptions::default()).unwrap()
    };
    let JoinedHost { group, link } = joined;
    let all = link.gather_texts(&*group, OpName::new(0, "agreement", 0), &place.rank.to_string()).unwrap();
    assert_eq!(all.concat(), "0123");
    println!("\nready {}", place.rank);
    let watch = link.watch();
    let began = Instant::now();
    let error = loop {
        // A collective of the host, then a wait on a rail.
        let entered = group.barrier(OpName::new(1, "gather", 7)).and_then(Handle::wait);
        if let Err(error) = entered.and_then(|()| watch(OpName::new(1, "rail", 8))) {
            break error;
        }
        if role == "leaves" && began.elapsed() > 3 * SILENCE {
            link.leave(&*group, OpName::new(2, "leave", 9)).unwrap();
            println!("\ndone {}", place.rank);
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    println!("\ntold {}: {error}", place.rank);
}

/// The ranks of two hosts with two ranks each.
struct Job(Vec<(Child, BufReader<ChildStdout>)>);

impl Drop for Job {
    fn drop(&mut self) {
        for (rank, _) in &mut self.0 {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

impl Job {
    /// `around` is a command that starts the ranks of a host.
    fn start(test: &str, role: &str, around: impl Fn(usize) -> Vec<String>) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().min(65_000);
        let token = format!("{:032x}", u128::from(std::process::id()) << 64 | u128::from(port));
        let rank = |rank: usize| {
            let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
            let line: Vec<String> = around(rank / 2).into_iter().chain([program]).collect();
            let mut command = Command::new(&line[0]);
            for name in KNOWN {
                command.env_remove(name);
            }
            let numbers = [
                ("RANK", rank),
                ("WORLD_SIZE", 4),
                ("LOCAL_RANK", rank % 2),
                ("LOCAL_WORLD_SIZE", 2),
                ("GROUP_RANK", rank / 2),
                ("MASTER_PORT", usize::from(port)),
            ];
            command
                .args(&line[1..])
                .args(RANK)
                .env(ROLE, role)
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit());
            command.envs(numbers.map(|(name, number)| (name, number.to_string())));
            command.env("MASTER_ADDR", "127.0.0.1").env("ZEROTH_JOB_TOKEN", &token);
            command.env("TORCHELASTIC_RUN_ID", format!("{test}-{}", std::process::id()));
            let mut child = command.spawn().unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            (child, output)
        };
        Self((0..4).map(rank).collect())
    }

    /// The next line of a rank that begins so.
    fn line(&mut self, rank: usize, begins: &str) -> String {
        let mut lines = (&mut self.0[rank].1).lines().map(Result::unwrap);
        lines
            .find(|line| line.starts_with(begins))
            .unwrap_or_else(|| panic!("rank {rank} does not say {begins:?}"))
    }

    fn ready(&mut self) {
        (0..4).for_each(|rank| {
            self.line(rank, "ready");
        });
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.0[rank].0), signal).unwrap();
    }

    /// What the others are told once a rank got a signal, and after how long.
    fn told(&mut self, victim: usize, signal: Signal) -> Vec<(usize, String, Duration)> {
        self.ready();
        std::thread::sleep(Duration::from_millis(300));
        self.signal(victim, signal);
        let began = Instant::now();
        let others = (0..4).filter(|rank| *rank != victim).collect::<Vec<_>>();
        others.into_iter().map(|rank| (rank, self.line(rank, "told"), began.elapsed())).collect()
    }
}

fn own_machine(_: usize) -> Vec<String> {
    Vec::new()
}

fn assert_named(victim: usize, told: &[(usize, String, Duration)], reason: &str) {
    for (rank, told, after) in told {
        let name = format!("rank {victim} (host n{}, pid ", victim / 2);
        assert!(told.contains(&name) && told.contains(reason), "rank {rank}: {told}");
        assert!(
            told.contains("; it was ") && told.contains(&format!("; rank {rank} was in step 1, op ")),
            "{told}"
        );
        assert!(*after < Duration::from_secs(10), "{after:?}");
    }
    println!(
        "rank {victim}: known to all after {:?}",
        told.iter().map(|(_, _, after)| *after).max().unwrap()
    );
}

#[test]
fn a_rank_that_is_killed_is_named_on_both_hosts() {
    for victim in 0..4 {
        let told = Job::start(&format!("killed-{victim}"), "waits", own_machine).told(victim, Signal::KILL);
        assert_named(victim, &told, "is dead");
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_on_both_hosts() {
    for victim in 0..4 {
        let mut job = Job::start(&format!("stopped-{victim}"), "waits", own_machine);
        let told = job.told(victim, Signal::STOP);
        // A leader that is stopped is silent to its neighbour and to the other host at the same time.
        let is_silent = told.iter().all(|(_, told, _)| told.contains("for 2 s"));
        assert!(is_silent, "{told:?}");
        assert_named(victim, &told, "for 2 s");
        job.signal(victim, Signal::CONT);
    }
}

#[test]
fn clocks_an_hour_apart_change_nothing() {
    let apart = |host: usize| -> Vec<String> {
        let line =
            ["unshare", "--time", "--monotonic", "3600", "--boottime", "3600", "--fork", "--kill-child"];
        if host == 1 { line.map(str::to_owned).to_vec() } else { Vec::new() }
    };
    let can = Command::new("unshare").args(&apart(1)[1..]).arg("true").output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: time namespaces need root and unshare of util-linux 2.37");
        return;
    }
    // For three times the silence after which a host is lost.
    let mut job = Job::start("clocks", "leaves", apart);
    job.ready();
    (0..4).for_each(|rank| {
        job.line(rank, "done");
    });
    for (rank, _) in &mut job.0 {
        assert!(rank.wait().unwrap().success());
    }
}
