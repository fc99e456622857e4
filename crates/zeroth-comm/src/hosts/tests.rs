//! Hosts as threads of one process, which meet over loopback; those that are processes are in `tests/it/hosts.rs`.

mod control_comm;
mod losses;
mod meeting;
mod simulation;
mod strangers;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::*;
use crate::comm::JobControl;
use crate::local::JobToken;
use crate::place::Place;
use crate::{JoinOptions, OpName, RankLost};

const OP: OpName = OpName::new(1, "agreement", 0);

/// A job that no other test has.
fn job(test: &str) -> String {
    format!("test-hosts-{}-{test}", std::process::id())
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Options of hosts that meet at a port of their own, with a token of their own.
fn options(host: &str) -> HostOptions {
    let token = JobToken::random().unwrap();
    let address =
        Rank0Address { host: host.to_owned(), port: PortChoice::After(free_port().min(65_000) - 1) };
    let policy = WaitPolicy::default().hosts_timeout(Duration::from_secs(30));
    HostOptions::default().token(Some(TokenSource::Given(token))).address(Some(address)).policy(policy)
}

fn table(ranks: &[usize]) -> HostTable {
    HostTable::in_order(ranks.iter().enumerate().map(|(host, ranks)| (format!("h{host}"), *ranks))).unwrap()
}

/// Runs every rank of hosts with so many ranks each in a thread of its own.
fn run<T: Send>(
    test: &str,
    ranks: &[usize],
    options: &HostOptions,
    rank: impl Fn(Place, JoinedHost) -> T + Sync,
) -> Vec<T> {
    let (hosts, job) = (table(ranks), job(test));
    let (rank, job, hosts) = (&rank, &job, &hosts);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..hosts.world())
            .map(|number| {
                let place = hosts.place(number).unwrap();
                let options = options.clone().name(format!("h{}", place.host));
                scope.spawn(move || rank(place, join(job, place, &options)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn join(job: &str, place: Place, options: &HostOptions) -> JoinedHost {
    let join = JoinOptions::default().timing(options.timing);
    if place.rank == 0 {
        JobCoordinator::open(job, place, options).unwrap().begin(1000, b"settings", &join).unwrap()
    } else {
        let admission = request_join(job, place, options).unwrap();
        assert_eq!(admission.message(), b"settings");
        admission.join(&join).unwrap()
    }
}

/// The loss that a rank learns of while it polls a rail, and how long that took.
fn wait_for_loss(joined: &JoinedHost) -> (RankLost, Duration) {
    let (watch, began) = (joined.link.watch(), Instant::now());
    loop {
        match watch(OpName::new(4, "rail", 2)) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(CommError::RankLost(lost)) => return (*lost, began.elapsed()),
            Err(other) => panic!("{other}"),
        }
        assert!(began.elapsed() < Duration::from_mins(1), "nobody noticed");
    }
}

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_mins(1), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn stop_requested(control: &dyn JobControl) -> bool {
    control.is_stop_requested()
}
