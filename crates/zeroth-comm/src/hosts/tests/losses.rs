//! Ranks and hosts that are lost, as all others learn of it.

use super::*;
use crate::LostReason;
use crate::Timing;
use crate::hosts::control_thread::ControlOrder;

/// All ranks are there, and none waits for another any more.
fn meet(joined: &JoinedHost) {
    joined.link.gather(&*joined.group, OP, &[]).unwrap();
    std::thread::sleep(Duration::from_millis(300));
}

fn quick(host: &str) -> HostOptions {
    let timing = Timing { host_silence: Duration::from_secs(1), ..Timing::default() };
    options(host).timing(timing)
}

#[test]
fn a_rank_that_leaves_too_early_is_named_on_all_hosts_also_by_those_who_wait_on_rails() {
    for leaving in [0, 1, 2, 3] {
        let losses = run(&format!("left-{leaving}"), &[2, 2], &options("127.0.0.1"), |place, joined| {
            meet(&joined);
            if place.rank == leaving {
                return None;
            }
            let lost = wait_for_loss(&joined).0;
            // Not before the others know it: this rank may lead the host that reports it.
            std::thread::sleep(Duration::from_millis(500));
            Some(lost)
        });
        for lost in losses.into_iter().flatten() {
            assert_eq!((lost.rank, lost.reason), (leaving, LostReason::Left), "{lost}");
            assert_eq!(lost.host, format!("h{}", leaving / 2), "{lost}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_to_its_host_is_named_on_all_hosts() {
    let (hosts, job) = (table(&[1, 2]), job("never"));
    let policy = WaitPolicy::default().hosts_timeout(Duration::from_secs(2));
    let options = options("127.0.0.1").policy(policy);
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| {
            let error = request_join(&job, hosts.place(1).unwrap(), &options).unwrap_err();
            assert!(error.to_string().starts_with("rank 2 did not join within 2 s"), "{error}");
        });
        let coordinator = JobCoordinator::open(&job, hosts.place(0).unwrap(), &options).unwrap();
        let joined = coordinator.begin(0, &[], &JoinOptions::default()).unwrap();
        let lost = wait_for_loss(&joined).0;
        assert_eq!((lost.rank, lost.reason), (2, LostReason::NeverJoined { seconds: 2 }), "{lost}");
        leader.join().unwrap();
    });
}

#[test]
fn a_connection_that_closes_is_a_death_at_once_on_both_sides() {
    let losses = run("closes", &[1, 1, 1], &options("127.0.0.1"), |place, joined| {
        meet(&joined);
        if place.rank == 1 {
            let (state, began) = (Arc::clone(&joined.link.thread().state), Instant::now());
            joined.link.thread().order(ControlOrder::Break);
            until("the broken link is not noticed", || state.lock().lost.is_some());
            let lost = state.lock().lost.clone().unwrap();
            return (place.rank, lost, began.elapsed());
        }
        let (lost, after) = wait_for_loss(&joined);
        (place.rank, lost, after)
    });
    for (rank, lost, after) in losses {
        let expected = usize::from(rank != 1);
        assert_eq!((lost.rank, lost.reason), (expected, LostReason::Dead), "{lost}");
        assert!(after < Duration::from_secs(5), "{after:?}");
        println!("a closed connection is known to rank {rank} after {after:?}");
    }
}

#[test]
fn silence_is_a_lost_host_on_both_sides_and_takes_no_less_than_its_time() {
    let losses = run("silence", &[1, 1, 1], &quick("127.0.0.1"), |place, joined| {
        meet(&joined);
        let began = Instant::now();
        if place.rank == 1 {
            // Neither sends nor hears, as behind a link that is cut.
            joined.link.thread().order(ControlOrder::Mute);
        }
        let (lost, _) = wait_for_loss(&joined);
        let after = began.elapsed();
        // Its end would be heard here, where no link is cut.
        std::thread::sleep(Duration::from_millis(if place.rank == 1 { 3000 } else { 0 }));
        (place.rank, lost, after)
    });
    for (rank, lost, after) in losses {
        let expected = usize::from(rank != 1);
        assert!(matches!(lost.reason, LostReason::HostSilent { seconds: 1 }), "{lost}");
        assert_eq!(
            (lost.rank, lost.host.as_str()),
            (expected, if rank == 1 { "h0" } else { "h1" }),
            "{lost}"
        );
        // The last heartbeat that was heard is up to a quarter of a second old.
        assert!(after >= Duration::from_millis(600) && after < Duration::from_secs(10), "{after:?}");
        assert!(lost.to_string().contains("its host has not responded for 1 s"), "{lost}");
        println!("a silent host is known to rank {rank} after {after:?}");
    }
}

#[test]
fn of_several_losses_all_hosts_name_the_first_one_that_the_coordinator_learns_of() {
    let losses = run("first", &[1, 1, 1, 1, 1], &options("127.0.0.1"), |place, joined| {
        meet(&joined);
        if place.rank >= 3 {
            joined.link.thread().order(ControlOrder::Break);
            return None;
        }
        let first = wait_for_loss(&joined).0;
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(wait_for_loss(&joined).0.rank, first.rank, "a verdict stays");
        Some(first.rank)
    });
    let named: Vec<usize> = losses.into_iter().flatten().collect();
    assert!(named.iter().all(|rank| *rank == named[0] && *rank >= 3), "{named:?}");
}

#[test]
fn a_rank_that_dies_while_others_leave_is_named_and_one_that_dies_behind_the_barrier_is_not() {
    let outcomes = run("leave", &[1, 1, 1], &options("127.0.0.1"), |place, joined| {
        meet(&joined);
        if place.rank == 2 {
            std::thread::sleep(Duration::from_millis(100));
            joined.link.thread().order(ControlOrder::Break);
            return None;
        }
        Some(joined.link.leave(&*joined.group, OP).unwrap_err().to_string())
    });
    for said in outcomes.into_iter().flatten() {
        assert!(said.contains("rank 2 (host h2") && said.contains("is dead"), "{said}");
    }
    run("left", &[1, 1, 1], &options("127.0.0.1"), |place, joined| {
        let JoinedHost { group, link } = joined;
        let watch = link.watch();
        link.leave(&*group, OP).unwrap();
        if place.rank != 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(watch(OP).is_ok(), "nobody is lost");
    });
}

#[test]
fn a_gather_that_waits_for_a_lost_host_fails_with_its_name() {
    let said = run("gather", &[2, 1], &options("127.0.0.1"), |place, joined| {
        meet(&joined);
        if place.rank == 2 {
            std::thread::sleep(Duration::from_millis(100));
            joined.link.thread().order(ControlOrder::Break);
            return None;
        }
        Some(joined.link.gather(&*joined.group, OpName::new(3, "rates", 1), b"own").unwrap_err().to_string())
    });
    for (rank, said) in said.into_iter().flatten().enumerate() {
        assert!(
            said.contains("rank 2 (host h1")
                && said.contains(&format!("rank {rank} was in step 3, op rates#1")),
            "{said}"
        );
    }
}

/// What tells time on a host never leaves it: see also `tests/it/hosts.rs`, where clocks are an hour apart.
#[test]
fn no_source_of_the_control_connection_asks_for_the_time_of_day() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/hosts");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(!text.contains("SystemTime") || path.ends_with("tests.rs"), "{}", path.display());
            files += 1;
        }
    }
    assert!(files > 10);
}
