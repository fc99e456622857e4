//! Ranks as threads of one process; those that are processes are in `tests/it/rendezvous.rs`.

use std::io::Write;
use std::sync::Mutex;

use super::socket::JobSocket;
use super::*;
use crate::{JoinOptions, OpName};

/// A job that no other test has.
fn job(test: &str) -> String {
    format!("test-{}-{test}", std::process::id())
}

fn short() -> WaitPolicy {
    WaitPolicy::default().peers_timeout(Duration::from_millis(500)).rank0_timeout(Duration::from_millis(500))
}

#[test]
fn ranks_meet_and_hear_what_rank_0_says_whoever_comes_first() {
    let (job, message) = (job("meet"), vec![7_u8; 3_000_000]);
    std::thread::scope(|scope| {
        for rank in 1..3 {
            let (job, message) = (&job, &message);
            scope.spawn(move || {
                let admission = request_join(job, rank, 3, &WaitPolicy::default()).unwrap();
                assert!(admission.message() == message);
                let comm = admission.join(&JoinOptions::default()).unwrap();
                comm.barrier(OpName::new(1, "start", 0)).unwrap().wait().unwrap();
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        let coordinator = Coordinator::open(&job, 3, WaitPolicy::default()).unwrap();
        let comm = coordinator.begin(0, &message, &JoinOptions::default()).unwrap();
        comm.barrier(OpName::new(1, "start", 0)).unwrap().wait().unwrap();
    });
}

#[test]
fn a_refusal_of_rank_0_reaches_all_others() {
    let job = job("refuse");
    std::thread::scope(|scope| {
        let peers: Vec<_> = (1..3)
            .map(|rank| {
                let job = &job;
                scope.spawn(move || request_join(job, rank, 3, &WaitPolicy::default()).unwrap_err())
            })
            .collect();
        Coordinator::open(&job, 3, WaitPolicy::default()).unwrap().refuse("the data has no rows");
        for peer in peers {
            let error = peer.join().unwrap();
            assert!(
                matches!(&error, RendezvousError::Refused { reason } if reason == "the data has no rows"),
                "{error}"
            );
        }
    });
}

#[test]
fn a_host_that_goes_away_ends_the_wait_of_those_who_came() {
    let job = job("gone");
    let coordinator = Coordinator::open(&job, 2, WaitPolicy::default()).unwrap();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| request_join(&job, 1, 2, &WaitPolicy::default()).unwrap_err());
        // The system lists the socket that listens, and one more for each connection.
        while std::fs::read_to_string("/proc/net/unix").unwrap().matches(&job).count() < 2 {
            std::thread::sleep(LOOK);
        }
        drop(coordinator);
        let error = peer.join().unwrap();
        assert!(matches!(error, RendezvousError::Rank0Gone { leader: 0 }), "{error}");
    });
}

#[test]
fn ranks_of_another_world_and_ranks_that_are_there_twice_are_not_let_in() {
    let job = job("strangers");
    let coordinator = Coordinator::open(&job, 3, WaitPolicy::default()).unwrap();
    std::thread::scope(|scope| {
        let hosted = scope.spawn(|| coordinator.begin(0, &[], &JoinOptions::default()));
        let first = request_join(&job, 1, 3, &WaitPolicy::default()).unwrap();
        let own = std::process::id();
        for (rank, world, reason) in [
            (1, 3, format!("processes {own} and {own} were both started as rank 1")),
            (0, 3, format!("processes {own} and {own} were both started as rank 0")),
            (2, 4, format!("process {own} was started as rank 2 of 4, and rank 0 as one of 3")),
            (3, 3, format!("process {own} was started as rank 3, but there are 3, from 0")),
        ] {
            let error = request_join(&job, rank, world, &WaitPolicy::default()).unwrap_err();
            assert!(
                matches!(&error, RendezvousError::Rejected { reason: said, .. } if *said == reason),
                "{error}"
            );
        }
        let last = request_join(&job, 2, 3, &WaitPolicy::default()).unwrap();
        let _job = hosted.join().unwrap().unwrap();
        let ranks = [first, last].map(|admission| admission.join(&JoinOptions::default()).unwrap());
        assert_eq!(ranks.map(|comm| (comm.rank(), comm.world())), [(1, 3), (2, 3)]);
    });
}

#[test]
fn ranks_that_did_not_come_are_named_with_those_who_came_instead() {
    let refused = vec!["process 7 was started as rank 2 of 4, and rank 0 as one of 3".to_owned()];
    let error = RendezvousError::Missing { missing: vec![1, 2], waited: Duration::from_mins(2), refused };
    assert_eq!(
        error.to_string(),
        "ranks 1, 2 did not join within 120 s; rejected: process 7 was started as rank 2 of 4, and rank 0 as one of 3"
    );
}

#[test]
fn waiting_is_told_of_and_ends() {
    let told: Arc<Mutex<Vec<Waiting>>> = Arc::default();
    let keep = Arc::clone(&told);
    let mut policy = short().tell(move |waiting| keep.lock().unwrap().push(waiting.clone()));
    // At the first look: a busy machine may not let this process have a second one in time.
    policy.first = Duration::ZERO;
    let error = request_join(&job("nobody"), 4, 5, &policy).unwrap_err();
    assert!(matches!(error, RendezvousError::NoRank0 { rank: 4, .. }), "{error}");
    let error = Coordinator::open(&job("lonely"), 3, policy)
        .unwrap()
        .begin(0, &[], &JoinOptions::default())
        .err()
        .unwrap();
    assert!(matches!(&error, RendezvousError::Missing { missing, .. } if *missing == [1, 2]), "{error}");
    let told = told.lock().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for said in ["rank 4 is waiting for rank 0 (", "rank 0 is waiting for ranks 1, 2 ("] {
        assert!(told.contains(said), "{told}");
    }
}

#[test]
fn waiting_is_told_of_after_the_first_time_and_then_after_twice_as_long() {
    let told: Arc<Mutex<Vec<u64>>> = Arc::default();
    let keep = Arc::clone(&told);
    let policy = WaitPolicy::default().tell(move |waiting| keep.lock().unwrap().push(waiting.seconds));
    let mut reporter = WaitReporter::new(&policy);
    for waited in [0, 9, 10, 11, 19, 25, 49, 50, 99, 100] {
        reporter.wait(Duration::from_secs(waited), 1, vec![0]);
    }
    assert_eq!(*told.lock().unwrap(), [10, 25, 50, 100]);
}

#[test]
fn a_second_rank_0_finds_the_name_taken() {
    let job = job("twice");
    let _host = Coordinator::open(&job, 2, WaitPolicy::default()).unwrap();
    let error = Coordinator::open(&job, 2, WaitPolicy::default()).err().unwrap();
    assert!(matches!(error, RendezvousError::NameTaken { .. }), "{error}");
}

#[test]
fn bytes_that_ranks_do_not_say_are_refused_on_both_sides() {
    let (of_peer, of_host) = (job("malformed-peer"), job("malformed-host"));
    let coordinator = Coordinator::open(&of_peer, 2, short()).unwrap();
    let mut stranger = JobSocket::of(&of_peer).unwrap().connect().unwrap().unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let error = coordinator.begin(0, &[], &JoinOptions::default()).err().unwrap().to_string();
    assert!(error.contains("sent a message that is not of this version"), "{error}");

    let listening = JobSocket::of(&of_host).unwrap().listen(LOOK).unwrap();
    listening.listener.set_nonblocking(false).unwrap();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| request_join(&of_host, 1, 2, &WaitPolicy::default()).unwrap_err());
        let mut stranger = listening.listener.accept().unwrap().0;
        stranger.write_all(&[b'x'; 100]).unwrap();
        let error = peer.join().unwrap();
        assert!(matches!(error, RendezvousError::Malformed { .. }), "{error}");
    });
}

#[test]
fn the_name_of_a_host_that_was_killed_is_taken_over_and_leaves_nothing() {
    let job = job("killed");
    let socket = JobSocket::of(&job).unwrap();
    let path = PathBuf::from(socket.shown());
    // As a killed process leaves it: a name that nobody listens at.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    assert!(socket.connect().unwrap().is_none());
    let coordinator = Coordinator::open(&job, 2, WaitPolicy::default()).unwrap();
    assert!(socket.connect().unwrap().is_some());
    drop(coordinator);
    assert!(!path.exists() && !path.with_file_name(format!("{job}.lock")).exists());
}
