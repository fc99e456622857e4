//! A large job in one process: 128 leaders over loopback, each with eight ranks in a segment of its own.

use std::sync::mpsc;

use super::*;
use crate::hosts::control_thread::{ControlOrder, ControlThread, LinkState, small_thread};
use crate::hosts::leader::{LeaderThread, NotAdmitted, attempt};
use crate::hosts::local_host::LocalHost;
use crate::local::{EndedBy, LocalJob, SharedSegment};
use crate::process::Process;
use crate::{LostReason, Timing};

const HOSTS: usize = 128;
const RANKS: usize = 8;

/// A host whose ranks are slots of this process.
struct Simulated {
    segment: Arc<SharedSegment>,
    thread: ControlThread,
}

fn segment_of(place: Place) -> Arc<SharedSegment> {
    let job = LocalJob::create(place.local_world, 0).unwrap();
    let segment = Arc::clone(job.segment());
    segment.header().hosts.set(place.first(), place.world, &format!("h{}", place.host));
    let (pid, started) = Process::own().unwrap();
    (0..place.local_world).for_each(|slot| segment.slot(slot).take(pid, started).unwrap());
    segment
}

/// A leader that has met the coordinator and attached its ranks.
fn leader(place: Place, options: &HostOptions) -> Simulated {
    let (address, token) = (options.address.as_ref().unwrap(), options.token.as_ref().unwrap());
    let admitted = loop {
        match attempt(address, token, place, &format!("h{}", place.host)) {
            Ok(admitted) => break admitted,
            Err(NotAdmitted::Yet(_)) => std::thread::sleep(Duration::from_millis(10)),
            Err(NotAdmitted::Rejected(why) | NotAdmitted::Refused(why)) => panic!("{why}"),
        }
    };
    let state = Arc::new(LinkState::default());
    let (orders, receiver) = mpsc::channel();
    let events = (orders.clone(), receiver);
    let leader = LeaderThread::new(admitted, place, options.timing, events, Arc::clone(&state)).unwrap();
    let thread = small_thread("control".to_owned(), move || leader.run()).unwrap();
    let thread = ControlThread { orders, state, thread: Some(thread) };
    let segment = segment_of(place);
    let host = LocalHost::new(Arc::clone(&segment), options.timing);
    thread.order(ControlOrder::Attach(Box::new(host)));
    Simulated { segment, thread }
}

/// CPU time of the threads of this process with one of these names, by the kernel's scheduler.
fn cpu_time(names: &[&str]) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of_task = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let ran = std::fs::read_to_string(path.join("schedstat")).ok()?;
        names
            .iter()
            .any(|known| name.starts_with(known))
            .then(|| ran.split(' ').next()?.parse::<u64>().ok())?
    };
    Duration::from_nanos(tasks.filter_map(of_task).sum())
}

#[test]
fn a_job_of_128_hosts_and_1024_ranks_learns_a_verdict_everywhere_at_once() {
    let timing =
        Timing { lost: Duration::from_mins(5), host_silence: Duration::from_secs(20), ..Timing::default() };
    let options = options("127.0.0.1").timing(timing);
    let hosts = table(&[RANKS; HOSTS]);
    let coordinator_job = job("simulation");
    let place = hosts.place(0).unwrap();
    let began = Instant::now();
    let coordinator = JobCoordinator::open(&coordinator_job, place, &options.clone().name("h0")).unwrap();
    let leaders: Vec<Simulated> = std::thread::scope(|scope| {
        let join = |host: usize| {
            let (place, options) = (hosts.place(host * RANKS).unwrap(), &options);
            scope.spawn(move || leader(place, options))
        };
        let threads: Vec<_> = (1..HOSTS).map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let own = segment_of(place);
    let star = coordinator.thread();
    star.order(ControlOrder::Attach(Box::new(LocalHost::new(Arc::clone(&own), timing))));
    until("not all hosts have come", || star.state.lock().table.is_some());
    println!("128 hosts met after {:?}", began.elapsed());
    assert_eq!(star.state.lock().table.as_ref().unwrap(), &hosts);
    until("not all ranks are seen", || {
        let view = star.state.lock();
        view.seen.iter().all(|seen| seen.as_ref().is_some_and(|seen| seen.process.is_some()))
    });

    let (began, before) = (Instant::now(), cpu_time(&["control", "coordinator"]));
    std::thread::sleep(Duration::from_secs(2));
    let used = cpu_time(&["control", "coordinator"]).saturating_sub(before);
    println!("idle: {used:?} of CPU in {:?} for 128 hosts", began.elapsed());

    // A rank of host 77 is found dead by its leader a moment after host 100 is gone: the first one wins.
    let began = Instant::now();
    leaders[99].thread.order(ControlOrder::Break);
    let segments: Vec<&Arc<SharedSegment>> = leaders
        .iter()
        .enumerate()
        .filter(|(host, _)| *host != 99)
        .map(|(_, host)| &host.segment)
        .chain([&own])
        .collect();
    until("the verdict does not come", || segments.iter().all(|segment| segment.ended().is_some()));
    let after = began.elapsed();
    println!("a closed connection was known to all 1,016 ranks left after {after:?}");
    assert!(after < Duration::from_secs(5), "{after:?}");
    leaders[76].segment.end(3, LostReason::Dead);
    std::thread::sleep(Duration::from_millis(200));
    for segment in segments {
        assert_eq!(segment.ended(), Some(EndedBy::Elsewhere));
        let lost = segment.describe(EndedBy::Elsewhere);
        assert_eq!((lost.rank, lost.host.as_str(), lost.reason), (800, "h100", LostReason::Dead));
        assert_eq!(lost.pid, std::process::id());
    }
}

/// The control connection of a job of two hosts with two ranks each must cost less than a hundredth of a step of 50 ms.
#[test]
fn an_idle_job_of_two_hosts_costs_little() {
    let used = run("idle", &[2, 2], &options("127.0.0.1"), |place, joined| {
        joined.link.gather(&*joined.group, OP, &[]).unwrap();
        let names = ["control", "coordinator"];
        let (began, before) = (Instant::now(), cpu_time(&names));
        std::thread::sleep(Duration::from_secs(2));
        let used = cpu_time(&names).saturating_sub(before).as_secs_f64() / began.elapsed().as_secs_f64();
        joined.link.leave(&*joined.group, OP).unwrap();
        (place.rank, used)
    });
    let (_, share) = used[0];
    println!("leader and coordinator together use {:.3} % of a core", 100.0 * share);
    assert!(share < 0.05, "{share}");
}
