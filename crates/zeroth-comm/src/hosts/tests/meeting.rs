//! Hosts that meet, agree, decide and leave.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::rendezvous::RendezvousError;
use crate::{Handle, ProcessState, RankPhase};

#[test]
fn ranks_of_equal_and_unequal_hosts_meet_agree_and_leave_over_both_families() {
    let has_ipv6 = TcpListener::bind("[::1]:0").is_ok();
    for (number, (ranks, host)) in
        [(&[2, 2][..], "127.0.0.1"), (&[2, 1, 3], "localhost"), (&[1, 1], "::1")].iter().enumerate()
    {
        if *host == "::1" && !has_ipv6 {
            println!("skipped: no IPv6 here");
            continue;
        }
        let world = ranks.iter().sum();
        run(&format!("meet-{number}"), ranks, &options(host), |place, joined| {
            let JoinedHost { group, link } = joined;
            assert_eq!((link.place(), link.hosts()), (place, &table(ranks)));
            assert_eq!((group.rank(), group.world()), (place.local_rank, place.local_world));
            let texts = link.gather_texts(&*group, OP, &"x".repeat(place.rank)).unwrap();
            assert_eq!(texts.iter().map(String::len).collect::<Vec<_>>(), (0..world).collect::<Vec<_>>());
            let least = link.minimum(&*group, OP, &[place.rank as u64 + 5, 9 - place.rank as u64]).unwrap();
            assert_eq!(least, [5, 9 - (world as u64 - 1)]);
            let said = link.broadcast(&*group, OP, format!("from {}", place.rank).as_bytes()).unwrap();
            assert_eq!(said, b"from 0");
            group.barrier(OP).and_then(Handle::wait).unwrap();
            link.leave(&*group, OP).unwrap();
        });
    }
}

#[test]
fn several_megabytes_go_down_at_the_beginning_and_around_in_a_gather() {
    let (hosts, job, options) = (table(&[1, 2]), job("megabytes"), options("127.0.0.1"));
    let message: Vec<u8> = (0..5_000_000_u32).map(|number| (number % 251) as u8).collect();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (place, job, options, message) = (hosts.place(rank).unwrap(), &job, &options, &message);
            scope.spawn(move || {
                let joined = if rank == 0 {
                    JobCoordinator::open(job, place, options)
                        .unwrap()
                        .begin(0, message, &JoinOptions::default())
                        .unwrap()
                } else {
                    let admission = request_join(job, place, options).unwrap();
                    assert!(admission.message() == message, "the message differs");
                    admission.join(&JoinOptions::default()).unwrap()
                };
                let own = vec![place.rank as u8; 1_000_000 * (rank + 1)];
                let all = joined.link.gather(&*joined.group, OP, &own).unwrap();
                for (rank, part) in all.iter().enumerate() {
                    assert!(
                        *part == vec![rank as u8; 1_000_000 * (rank + 1)],
                        "the part of rank {rank} differs"
                    );
                }
                joined.link.leave(&*joined.group, OP).unwrap();
            });
        }
    });
}

#[test]
fn a_part_that_is_too_long_is_refused_by_name_and_ends_the_job() {
    run("too-long", &[1, 1], &options("127.0.0.1"), |place, joined| {
        let own = vec![0; if place.rank == 1 { chunks::MOST_BYTES + 1 } else { 0 }];
        let error = joined.link.gather(&*joined.group, OP, &own).unwrap_err();
        let said = if place.rank == 1 { "takes at most 67108864" } else { "rank 1 (host h1" };
        assert!(error.to_string().contains(said), "{error}");
    });
}

#[test]
fn a_job_is_begun_or_stopped_on_all_hosts_and_never_both_whoever_is_first() {
    for round in 0..6 {
        let stops = AtomicUsize::new(0);
        let decided = run(&format!("first-step-{round}"), &[2, 2], &options("127.0.0.1"), |place, joined| {
            let control = joined.link.control();
            // Rank 3 stops in some rounds, at about the time at which the others begin.
            let is_stopping = place.rank == 3 && round % 2 == 1;
            let begun = if is_stopping {
                stops.fetch_add(1, Ordering::Relaxed);
                !control.stop_before_first_step()
            } else {
                std::thread::sleep(Duration::from_millis(round * 10));
                control.begin_first_step()
            };
            assert_eq!(control.begin_first_step(), begun, "decided once");
            assert_eq!(control.stop_before_first_step(), !begun);
            joined.link.leave(&*joined.group, OP).unwrap();
            begun
        });
        assert!(decided.iter().all(|begun| *begun == decided[0]), "{decided:?}");
        assert!(decided[0] || stops.load(Ordering::Relaxed) > 0, "nobody stopped it");
    }
}

#[test]
fn requests_of_any_host_reach_all_ranks() {
    run("requests", &[2, 1, 1], &options("127.0.0.1"), |place, joined| {
        let control = joined.link.control();
        assert!(!stop_requested(&*control) && control.save_requests() == 0);
        joined.link.gather(&*joined.group, OP, &[]).unwrap();
        if place.rank == 1 || place.rank == 3 {
            joined.link.request_save();
        }
        until("saves are not requested", || control.save_requests() == 2);
        joined.link.gather(&*joined.group, OP, &[]).unwrap();
        if place.rank == 2 {
            joined.link.request_stop();
        }
        until("no stop is requested", || stop_requested(&*control));
        assert_eq!(control.save_requests(), 2);
        joined.link.leave(&*joined.group, OP).unwrap();
    });
}

#[test]
fn rank_0_observes_the_ranks_of_all_hosts_and_others_their_own() {
    run("observer", &[1, 2], &options("127.0.0.1"), |place, joined| {
        let control = joined.link.control();
        control.publish_progress(RankPhase::Training, Some(10 + place.rank as u64));
        let observer = control.observer();
        if place.rank == 0 {
            assert_eq!(observer.world(), 3);
            until("ranks are not seen", || (0..3).all(|rank| observer.look(rank).step == 10 + rank as u64));
            for rank in 0..3 {
                let seen = observer.look(rank);
                assert_eq!(seen.host.as_deref(), Some(if rank == 0 { "h0" } else { "h1" }));
                assert_eq!((seen.phase, seen.state), (RankPhase::Training, ProcessState::Running));
                assert_eq!(seen.process.unwrap().0, std::process::id());
                assert!(rank == 0 || seen.resident.unwrap() > 1 << 20);
            }
        } else {
            assert_eq!(observer.world(), 2);
        }
        joined.link.leave(&*joined.group, OP).unwrap();
    });
}

#[test]
fn a_refusal_reaches_the_ranks_of_all_hosts() {
    let (hosts, job, options) = (table(&[2, 2]), job("refusal"), options("127.0.0.1"));
    std::thread::scope(|scope| {
        for rank in 1..4 {
            let (place, job, options) = (hosts.place(rank).unwrap(), &job, &options);
            scope.spawn(move || {
                let error = request_join(job, place, options).unwrap_err();
                assert!(matches!(&error, RendezvousError::Refused { reason } if reason == "2"), "{error}");
            });
        }
        JobCoordinator::open(&job, hosts.place(0).unwrap(), &options).unwrap().refuse("2");
    });
}

#[test]
fn ranks_that_never_come_are_named_with_their_host_and_waiting_is_told_of() {
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let keep = Arc::clone(&told);
    let policy = WaitPolicy::default()
        .hosts_timeout(Duration::from_millis(300))
        .tell(move |waiting| keep.lock().unwrap().push(waiting.to_string()));
    let options = options("127.0.0.1").policy(policy).expected(Some(table(&[1, 9])));
    let place = table(&[1, 9]).place(0).unwrap();
    let coordinator = JobCoordinator::open(&job("missing"), place, &options).unwrap();
    let error = coordinator.begin(0, &[], &JoinOptions::default()).err().unwrap().to_string();
    assert!(
        error.starts_with("ranks 1 to 9 did not join within 0 s; rejected: nothing came from host h1"),
        "{error}"
    );

    let leader = table(&[1, 9]).place(1).unwrap();
    let error = request_join(&job("nobody"), leader, &options).unwrap_err();
    assert!(matches!(error, RendezvousError::NoCoordinator { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("nobody listens there"), "{error}");
}

#[test]
fn hosts_that_overlap_or_belong_to_another_world_are_not_let_in() {
    let (job, options) = (job("overlap"), options("127.0.0.1"));
    let hosts = table(&[2, 2]);
    let wrong = [
        (
            Place { rank: 1, world: 4, local_rank: 0, local_world: 3, host: 1 },
            "must be numbered host by host",
        ),
        (
            Place { rank: 2, world: 6, local_rank: 0, local_world: 4, host: 1 },
            "rank 2 of 6, and rank 0 as one of 4",
        ),
    ];
    std::thread::scope(|scope| {
        let (one, two) = (hosts.place(1).unwrap(), hosts.place(3).unwrap());
        let (job, options) = (&job, &options);
        let coordinator = JobCoordinator::open(job, hosts.place(0).unwrap(), options).unwrap();
        for (place, said) in wrong {
            let error = request_join(job, place, options).unwrap_err();
            assert!(
                matches!(&error, RendezvousError::Rejected { reason, .. } if reason.contains(said)),
                "{error}"
            );
        }
        // The job goes on without them.
        for place in [one, hosts.place(2).unwrap(), two] {
            scope.spawn(move || {
                let joined =
                    request_join(job, place, options).unwrap().join(&JoinOptions::default()).unwrap();
                joined.link.leave(&*joined.group, OP).unwrap();
            });
        }
        let joined = coordinator.begin(0, &[], &JoinOptions::default()).unwrap();
        joined.link.leave(&*joined.group, OP).unwrap();
    });
}

#[test]
fn on_one_host_nothing_listens_and_no_token_is_needed() {
    let listening = || {
        ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(|file| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
                .collect();
            // Column 4 is the state, 0A a socket that listens; column 10 the inode.
            let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let lines = text.lines().skip(1).map(fields).filter(|fields| fields[3] == "0A");
            lines.filter(|fields| own.contains(&format!("socket:[{}]", fields[9]))).count()
        })
    };
    // In a process of its own: other tests listen meanwhile.
    if std::env::var_os("ZEROTH_COMM_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["hosts::tests::meeting::on_one_host_nothing_listens_and_no_token_is_needed", "--exact"])
            .env("ZEROTH_COMM_ALONE", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    run("one-host", &[3], &HostOptions::default(), |_, joined| {
        assert_eq!(listening(), [0, 0]);
        assert!(joined.link.control().begin_first_step());
        let texts = joined.link.gather_texts(&*joined.group, OP, "a").unwrap();
        assert_eq!(texts, ["a", "a", "a"]);
        joined.link.leave(&*joined.group, OP).unwrap();
    });
    let spread = run("listens", &[1, 1], &options("127.0.0.1"), |place, joined| {
        let found = listening();
        joined.link.leave(&*joined.group, OP).unwrap();
        (place.rank, found)
    });
    assert!(
        spread.iter().all(|(_, found)| *found == [0, 0]),
        "once all hosts have come, nothing listens: {spread:?}"
    );
}
