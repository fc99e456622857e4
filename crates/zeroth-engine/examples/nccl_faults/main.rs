//! Kills and stops ranks that are connected by NCCL, and reports how the others end.
//!
//!     cargo run --release -p zeroth-engine --example nccl_faults
//!
//! Needs one NVIDIA GPU and NCCL. Every rank is a process that NCCL takes for a host of its own, so that they can share the
//! GPU. 40 faults: SIGKILL and SIGSTOP of one rank while it joins the communicator, in the first exchange, among 1,000
//! exchanges, and between the abort of its communicator and its exit; with two and with four ranks. Exits with 1 unless all
//! survivors of each fault name the rank, its host, step and operation, and exit with 1 within ten seconds.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]

mod rank;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use zeroth_comm::local::{JOB_FD, JOB_TOKEN, LocalJob, RANK, WORLD, is_launched};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What happens to one rank: the signal, the phase, the delay within the phase in milliseconds, and the rank.
pub(crate) const FAULT: &str = "NCCL_FAULTS";
const PHASES: [&str; 4] = ["init", "first", "middle", "aborted"];
const SIGNALS: [&str; 2] = ["KILL", "STOP"];
/// The time in which survivors must end.
const LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a rank's region of host messages.
const REGION: usize = 1 << 20;
const LOOK: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    let ended = if is_launched() { rank::run() } else { all_faults() };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One process of a job, and when it ended.
struct Process {
    child: Child,
    ended: Option<(Instant, Option<i32>)>,
}

/// A fault of one rank.
struct Fault {
    signal: &'static str,
    phase: &'static str,
    delay: u64,
    victim: usize,
}

fn all_faults() -> Outcome<bool> {
    let mut failures = 0;
    for world in [2, 4] {
        let begun = Instant::now();
        let mut ranks = start(world, None)?;
        let all =
            wait(&mut ranks, Duration::from_mins(4), |ranks| ranks.iter().all(|rank| rank.ended.is_some()));
        let outputs = outputs(ranks);
        let good = all && outputs.iter().all(|(code, _)| *code == Some(0));
        failures += usize::from(!good);
        let verdict = if good { "ok" } else { "FAILED" };
        println!("{world} ranks without a fault: {verdict} in {:.1} s", begun.elapsed().as_secs_f64());
        for (_, output) in outputs {
            output.lines().for_each(|line| println!("    {line}"));
        }
    }
    println!(
        "| ranks | signal | phase | delay ms | victim was in | slowest survivor s | codes | abort ms | _exit | verdict |"
    );
    println!("|--:|---|---|--:|---|--:|---|---|---|---|");
    let delays = [0, 40, 200];
    for (world, repeats) in [(2, 3), (4, 2)] {
        for phase in PHASES {
            for signal in SIGNALS {
                for (repeat, delay) in delays.into_iter().enumerate().take(repeats) {
                    let fault = Fault { signal, phase, delay, victim: (repeat + world - 1) % world };
                    failures += usize::from(!run(world, &fault)?);
                }
            }
        }
    }
    println!("{failures} failures");
    Ok(failures == 0)
}

/// Runs a job with a fault and prints its row.
fn run(world: usize, fault: &Fault) -> Outcome<bool> {
    let mut ranks = start(world, Some(fault))?;
    let victim = fault.victim;
    let struck = wait(&mut ranks, Duration::from_mins(2), |ranks| {
        ranks[victim].ended.is_some() || is_stopped(ranks[victim].child.id())
    });
    let at = ranks[victim].ended.map_or_else(Instant::now, |(at, _)| at);
    let survivors = |ranks: &[Process]| -> Vec<Option<(Instant, Option<i32>)>> {
        ranks
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != victim)
            .map(|(_, process)| process.ended)
            .collect()
    };
    let all = wait(&mut ranks, LIMIT + Duration::from_secs(2), |ranks| {
        survivors(ranks).iter().all(Option::is_some)
    });
    let ends = survivors(&ranks);
    let slowest =
        ends.iter().flatten().map(|(end, _)| end.saturating_duration_since(at)).max().unwrap_or_default();
    let codes: Vec<String> = ends
        .iter()
        .map(|end| {
            end.map_or_else(
                || "hung".to_owned(),
                |(_, code)| code.map_or("signal".to_owned(), |code| code.to_string()),
            )
        })
        .collect();
    let outputs = outputs(ranks);
    let said = |rank: usize| outputs[rank].1.as_str();
    let find = |rank: usize, prefix: &str| {
        said(rank).lines().find_map(|line| line.strip_prefix(prefix)).map(str::to_owned)
    };
    let others = || (0..world).filter(|rank| *rank != victim);
    let name = format!("rank {victim} (host ");
    let named = others().all(|rank| {
        said(rank)
            .lines()
            .any(|line| line.contains(&name) && line.contains("was in step ") && line.contains(", op "))
    });
    let aborts: Vec<String> =
        others().map(|rank| find(rank, "abort ms: ").unwrap_or_else(|| "-".to_owned())).collect();
    let exits = others().filter(|rank| said(*rank).contains("did not end by itself")).count();
    let good = struck && all && named && slowest < LIMIT && codes.iter().all(|code| code == "1");
    println!(
        "| {world} | {} | {} | {} | {} | {:.2} | {} | {} | {exits} | {} |",
        fault.signal,
        fault.phase,
        fault.delay,
        find(victim, "fault in: ").unwrap_or_else(|| "?".to_owned()),
        slowest.as_secs_f64(),
        codes.join(" "),
        aborts.join(" "),
        if good { "ok" } else { "FAILED" }
    );
    if !good {
        for (rank, (code, output)) in outputs.iter().enumerate() {
            println!("    rank {rank}, code {code:?}:");
            output.lines().for_each(|line| println!("        {line}"));
        }
    }
    Ok(good)
}

/// Starts the ranks of a job, with the file of their shared memory.
fn start(world: usize, fault: Option<&Fault>) -> Outcome<Vec<Process>> {
    let job = LocalJob::create(world, REGION)?;
    // A duplicate stays open in the ranks.
    let file = rustix::io::dup(job.fd())?;
    let mut ranks = Vec::new();
    for rank in 0..world {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(RANK, rank.to_string())
            .env(WORLD, world.to_string())
            .env(JOB_FD, file.as_raw_fd().to_string())
            .env(JOB_TOKEN, job.token().to_string())
            .env("NCCL_HOSTID", format!("host{rank}"))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(Fault { signal, phase, delay, victim }) = fault {
            command.env(FAULT, format!("{signal} {phase} {delay} {victim}"));
        }
        ranks.push(Process { child: command.spawn()?, ended: None });
    }
    Ok(ranks)
}

/// Waits until `done`; false after `longest`.
fn wait(ranks: &mut [Process], longest: Duration, done: impl Fn(&[Process]) -> bool) -> bool {
    let begun = Instant::now();
    loop {
        for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            if let Ok(Some(status)) = rank.child.try_wait() {
                rank.ended = Some((Instant::now(), status.code()));
            }
        }
        if done(ranks) {
            return true;
        }
        if begun.elapsed() > longest {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// Ends what is left and returns the exit codes and what the ranks printed.
fn outputs(ranks: Vec<Process>) -> Vec<(Option<i32>, String)> {
    let read = |mut rank: Process| {
        // Ended ranks accept no signal; the others hung or are stopped.
        let _ = rank.child.kill();
        let _ = rank.child.wait();
        let mut text = String::new();
        if let Some(mut stdout) = rank.child.stdout.take() {
            let _ = stdout.read_to_string(&mut text);
        }
        if let Some(mut stderr) = rank.child.stderr.take() {
            let _ = stderr.read_to_string(&mut text);
        }
        (rank.ended.and_then(|(_, code)| code), text)
    };
    ranks.into_iter().map(read).collect()
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
}
