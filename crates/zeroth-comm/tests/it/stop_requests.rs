//! Stop requests to ranks, and the launcher's report of them.
//!
//! A rank is this test binary, started with `ZEROTH_COMM_TEST` to run only `rank_process`, which is ignored otherwise.
#![allow(clippy::print_stdout, reason = "how a rank tells its test")]
#![allow(clippy::exit, reason = "ranks end with the exit codes under test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::SIGTERM;
use zeroth_comm::launch::{ExitReason, LaunchReport, OutputLine, RankLauncher, RankOutput};
use zeroth_comm::local::join_from_environment;
use zeroth_comm::{Comm, JoinOptions, OpName};

const ROLE: &str = "ZEROTH_COMM_TEST";

#[test]
#[ignore = "a rank of the other tests, which start it as a process"]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    println!("pid {}", std::process::id());
    if role == "late" {
        // The stop is requested meanwhile, before it joins.
        std::thread::sleep(Duration::from_millis(1200));
    }
    if role == "insisted on" {
        let told = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register_conditional_default(SIGTERM, Arc::clone(&told)).unwrap();
        signal_hook::flag::register(SIGTERM, told).unwrap();
        println!("ready");
        std::thread::sleep(Duration::from_mins(10));
    }
    let comm = join_from_environment(&JoinOptions::default()).unwrap().expect("started by a launcher");
    if role == "begins" {
        assert!(comm.control().begin_first_step());
        println!("begun");
    }
    steps(&*comm);
    let (rank, world) = (comm.rank(), comm.world());
    if role == "fails" && rank == 1 {
        std::process::exit(1);
    }
    // The rank that all others might be waiting for exits first, the others long after it.
    std::thread::sleep(Duration::from_millis(200) * rank as u32);
    drop(comm);
    std::process::exit(if rank + 1 == world { 143 } else { 130 });
}

/// Runs steps until one of the ranks is requested to stop; all stop after the same step.
fn steps(comm: &dyn Comm) {
    let control = comm.control();
    for step in 1.. {
        let own = [u8::from(control.is_stop_requested())];
        let mut all = vec![0; comm.world()];
        let counts = vec![1; comm.world()];
        comm.all_gather(OpName::new(step, "asked", 0), &own, &mut all, &counts).unwrap().wait().unwrap();
        if all.contains(&1) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs three ranks. `on_line` gets each line of their output, and the flag that requests a stop.
fn run(role: &str, on_line: fn(&OutputLine, &AtomicBool)) -> LaunchReport {
    let ask = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ask);
    ranks(role, 3)
        .request_stop_when(ask)
        .output(RankOutput::Lines(Arc::new(move |line| on_line(&line, &flag))))
        .run()
        .unwrap()
}

fn ranks(role: &str, world: usize) -> RankLauncher {
    RankLauncher::new(std::env::current_exe().unwrap(), world, 0)
        .arguments(["stop_requests::rank_process", "--exact", "--ignored", "--nocapture"])
        .variable(ROLE, role)
}

fn pid(line: &OutputLine) -> Option<Pid> {
    // The test harness prints too, and its unfinished line comes before the pid.
    line.text.split("pid ").nth(1).and_then(|pid| Pid::from_raw(pid.parse().ok()?))
}

fn ask_once_started(line: &OutputLine, ask: &AtomicBool) {
    ask.fetch_or(pid(line).is_some(), Ordering::Relaxed);
}

#[test]
fn ranks_stop_after_the_same_step_on_request_and_none_has_failed() {
    let report = run("steps", ask_once_started);
    assert!(report.stopped_on_request() && report.asked && !report.success(), "{report}");
    assert_eq!((report.first, report.lost.as_ref()), (None, None));
    let codes: Vec<ExitReason> = report.ranks.iter().map(|end| end.how).collect();
    assert_eq!(codes, [130, 130, 143].map(|code| ExitReason::Exited { code }));
    assert_eq!(report.to_string(), "3 rank(s) stopped as they were asked to");
}

#[test]
fn signals_of_a_terminal_and_of_cluster_managers_end_no_rank() {
    let report = run("late", |line, ask| {
        if let Some(pid) = pid(line) {
            kill_process(pid, Signal::INT).unwrap();
            kill_process(pid, Signal::USR1).unwrap();
            kill_process(pid, Signal::USR2).unwrap();
            ask.store(true, Ordering::Relaxed);
        }
    });
    assert!(report.stopped_on_request(), "{report}");
}

#[test]
fn rank_that_fails_after_a_stop_request_has_failed() {
    let report = run("fails", ask_once_started);
    assert!(report.asked && !report.stopped_on_request(), "{report}");
    assert_eq!(report.first, Some(1), "{report}");
}

#[test]
fn exit_code_130_without_a_stop_request_is_a_failure() {
    let report = RankLauncher::new("/bin/sh", 1, 0).arguments(["-c", "exit 130"]).run().unwrap();
    assert!(!report.asked && !report.stopped_on_request());
    assert_eq!(report.first, Some(0));
}

#[test]
fn on_stop_request_is_called_once() {
    let told = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let report = ranks("late", 2)
        .request_stop_when(Arc::new(AtomicBool::new(true)))
        .on_stop_request(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
        .output(RankOutput::Lines(Arc::new(|_| ())))
        .run()
        .unwrap();
    assert!(report.stopped_on_request(), "{report}");
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

#[test]
fn rank_that_handles_the_first_sigterm_is_ended_by_the_next_one() {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let ready = move |line: OutputLine| {
        if line.text.contains("ready") {
            flag.store(true, Ordering::Relaxed);
        }
    };
    let report = ranks("insisted on", 1)
        .stop_when(stop)
        .grace(Duration::from_mins(5))
        .output(RankOutput::Lines(Arc::new(ready)))
        .run()
        .unwrap();
    assert_eq!(report.ranks[0].how, ExitReason::Killed { signal: 15 }, "{report}");
    assert!(report.ranks[0].by_launcher && !report.stopped_on_request());
}

#[test]
fn stop_request_before_the_first_step_kills_ranks_at_once() {
    let ask = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ask);
    let report = ranks("late", 2)
        .request_stop_when(ask)
        .on_stop_request(|| unreachable!("they are not asked"))
        .ends_before_first_step()
        .output(RankOutput::Lines(Arc::new(move |line| ask_once_started(&line, &flag))))
        .run()
        .unwrap();
    assert!(report.before_first_step && !report.stopped_on_request(), "{report}");
    assert!(report.ranks.iter().all(|end| end.how == ExitReason::Killed { signal: 9 }), "{report}");
}

#[test]
fn stop_request_after_the_first_step_has_begun_is_graceful() {
    let ask = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ask);
    let begun = move |line: OutputLine| {
        flag.fetch_or(line.text.contains("begun"), Ordering::Relaxed);
    };
    let report = ranks("begins", 2)
        .request_stop_when(ask)
        .ends_before_first_step()
        .output(RankOutput::Lines(Arc::new(begun)))
        .run()
        .unwrap();
    assert!(report.stopped_on_request() && !report.before_first_step, "{report}");
}
