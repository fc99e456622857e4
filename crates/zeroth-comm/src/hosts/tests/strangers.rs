//! Those who do not know the token, and those who change what others say.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;

use super::*;
use crate::LostReason;
use crate::hosts::frame::{Opener, Sealer};
use crate::hosts::mac::MacKey;
use crate::hosts::message::HostMessage;
use crate::hosts::message::tests::samples;

/// A generator of the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    /// splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let length = self.next() % (most + 1);
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// What a stranger sends: random bytes, a recording, or a recording that is cut or changed.
fn sent(numbers: &mut Numbers, recording: &[u8]) -> Vec<u8> {
    match numbers.next() % 4 {
        0 => numbers.bytes(300),
        1 => recording.to_vec(),
        2 => recording[..numbers.next() as usize % recording.len()].to_vec(),
        _ => {
            let mut changed = recording.to_vec();
            let at = numbers.next() as usize % changed.len();
            changed[at] ^= 1 << (numbers.next() % 8);
            changed
        }
    }
}

/// What a leader of this job has sent on another connection, through a proxy that records it.
fn record(options: &HostOptions, at: std::net::SocketAddr) -> Vec<u8> {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = proxy.local_addr().unwrap().port();
    let address = Rank0Address { host: "127.0.0.1".to_owned(), port: PortChoice::Given(port) };
    let (said, options) = (Mutex::new(Vec::new()), options.clone().address(Some(address)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut leader = proxy.accept().unwrap().0;
            let mut coordinator = TcpStream::connect(at).unwrap();
            let (mut back, mut answers) = (leader.try_clone().unwrap(), coordinator.try_clone().unwrap());
            let forward = scope.spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = leader.read(&mut bytes) {
                said.lock().unwrap().extend_from_slice(&bytes[..read]);
                coordinator.write_all(&bytes[..read]).unwrap();
            }
            let _ = coordinator.shutdown(Shutdown::Both);
            forward.join().unwrap();
        });
        // It is of another world, and not let in.
        let place = Place { rank: 1, world: 9, local_rank: 0, local_world: 1, host: 1 };
        request_join(&job("recorded"), place, &options).unwrap_err();
    });
    said.into_inner().unwrap()
}

#[test]
fn a_stranger_with_a_thousand_connections_learns_and_changes_nothing() {
    let (hosts, job, options) = (table(&[1, 1]), job("stranger"), options("127.0.0.1"));
    let coordinator = JobCoordinator::open(&job, hosts.place(0).unwrap(), &options).unwrap();
    let at = coordinator.address().unwrap();
    let recording = record(&options, at);
    assert!(recording.len() > 64 + 20, "a proof, and a frame: {} bytes", recording.len());
    let learnt: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let recording = &recording;
                scope.spawn(move || {
                    let mut numbers = Numbers(thread);
                    let attempt = |_| {
                        let mut stream = TcpStream::connect(at).unwrap();
                        let mut heard = vec![0; 32];
                        stream.read_exact(&mut heard).unwrap();
                        // The coordinator may have closed already.
                        let _ = stream.write_all(&sent(&mut numbers, recording));
                        let _ = stream.shutdown(Shutdown::Write);
                        let _ = stream.read_to_end(&mut heard);
                        heard
                    };
                    (0..125).map(attempt).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(learnt.len(), 1000);
    assert!(learnt.iter().all(|heard| heard.len() == 32), "a challenge, and nothing else");
    let mut challenges = learnt.clone();
    challenges.sort();
    challenges.dedup();
    assert_eq!(challenges.len(), 1000, "no challenge comes twice");
    {
        let view = coordinator.thread().state.lock();
        assert_eq!(
            (view.missing.as_slice(), view.table.as_ref(), view.lost.as_ref()),
            (&[1][..], None, None)
        );
        assert!(view.strangers.len() <= 8 && view.refused.is_none() && view.rejected.is_none());
    }
    // The job goes on.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let joined = request_join(&job, hosts.place(1).unwrap(), &options).unwrap();
            let joined = joined.join(&JoinOptions::default()).unwrap();
            joined.link.leave(&*joined.group, OP).unwrap();
        });
        let joined = coordinator.begin(0, &[], &JoinOptions::default()).unwrap();
        joined.link.leave(&*joined.group, OP).unwrap();
    });
}

#[test]
fn of_a_thousand_random_cut_and_replayed_frames_none_is_believed() {
    let mut numbers = Numbers(7);
    let key = MacKey::new(b"the key of a connection");
    for round in 0..1000 {
        let (mut sealer, mut opener) = (Sealer::new(key.clone()), Opener::new(key.clone()));
        let messages = samples();
        let mut frames: Vec<Vec<u8>> = Vec::new();
        for message in &messages {
            let mut frame = Vec::new();
            sealer.seal(&message.to_bytes(), &mut frame);
            frames.push(frame);
        }
        // Some frames as they are; then one that is not.
        let good = numbers.next() as usize % messages.len();
        for frame in &frames[..good] {
            opener.open(&mut frame.as_slice()).unwrap();
        }
        let bad = match round % 4 {
            0 => numbers.bytes(500),
            1 => frames[good][..numbers.next() as usize % frames[good].len()].to_vec(),
            // Repeated, or from later.
            2 => frames[(good + 1 + numbers.next() as usize % (messages.len() - 1)) % messages.len()].clone(),
            _ => {
                let mut changed = frames[good].clone();
                let at = numbers.next() as usize % changed.len();
                changed[at] ^= 1 << (numbers.next() % 8);
                changed
            }
        };
        assert!(opener.open(&mut bad.as_slice()).is_err(), "round {round}");
        assert_eq!(believed_frames(&bad), 0);
    }
}

#[test]
fn random_bytes_are_messages_or_not_and_never_more() {
    let mut numbers = Numbers(11);
    let samples: Vec<Vec<u8>> = samples().iter().map(HostMessage::to_bytes).collect();
    let mut found = 0;
    for _ in 0..20_000 {
        let mut bytes = samples[numbers.next() as usize % samples.len()].clone();
        for _ in 0..=numbers.next() % 3 {
            let at = numbers.next() as usize % bytes.len();
            bytes[at] = numbers.next() as u8;
        }
        found += usize::from(is_message(&bytes));
        is_message(&numbers.bytes(100));
    }
    assert!(found > 100, "{found} of the changed messages are others");
}

/// A proxy between two hosts that changes what passes once `meddle` is set: a frame comes twice, is left out, or has another bit.
fn meddled(test: &str, meddle: impl Fn(&mut Vec<u8>, &[u8]) + Sync) -> (RankLost, RankLost) {
    let (hosts, job, options) = (table(&[1, 1]), job(test), options("127.0.0.1"));
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = PortChoice::Given(proxy.local_addr().unwrap().port());
    let through = options.clone().address(Some(Rank0Address { host: "127.0.0.1".to_owned(), port }));
    let coordinator = JobCoordinator::open(&job, hosts.place(0).unwrap(), &options).unwrap();
    let at = coordinator.address().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut leader = proxy.accept().unwrap().0;
            let mut coordinator = TcpStream::connect(at).unwrap();
            let (mut back, mut answers) = (leader.try_clone().unwrap(), coordinator.try_clone().unwrap());
            scope.spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
            let began = Instant::now();
            let (mut bytes, mut last) = ([0; 4096], Vec::new());
            while let Ok(read @ 1..) = leader.read(&mut bytes) {
                let mut passed = bytes[..read].to_vec();
                if began.elapsed() > Duration::from_secs(1) {
                    meddle(&mut passed, &last);
                }
                last = bytes[..read].to_vec();
                if coordinator.write_all(&passed).is_err() {
                    break;
                }
            }
            let _ = coordinator.shutdown(Shutdown::Both);
            let _ = leader.shutdown(Shutdown::Both);
        });
        let leader = scope.spawn(|| {
            let joined = request_join(&job, hosts.place(1).unwrap(), &through).unwrap();
            let joined = joined.join(&JoinOptions::default()).unwrap();
            wait_for_loss(&joined).0
        });
        let joined = coordinator.begin(0, &[], &JoinOptions::default()).unwrap();
        let lost = wait_for_loss(&joined).0;
        (lost, leader.join().unwrap())
    })
}

#[test]
fn what_someone_between_two_hosts_repeats_leaves_out_or_changes_ends_the_job_and_does_nothing_else() {
    let repeats: fn(&mut Vec<u8>, &[u8]) =
        |passed, last| passed.splice(0..0, last.iter().copied()).for_each(drop);
    let leaves_out: fn(&mut Vec<u8>, &[u8]) = |passed, _| {
        // Every other frame is of a heartbeat; the next one does not fit.
        passed.clear();
    };
    let changes: fn(&mut Vec<u8>, &[u8]) = |passed, _| {
        if let Some(byte) = passed.get_mut(6) {
            *byte ^= 1;
        }
    };
    for (test, meddle) in [("repeats", repeats), ("leaves-out", leaves_out), ("changes", changes)] {
        let (at_coordinator, at_leader) = meddled(test, meddle);
        let is_silent = matches!(at_coordinator.reason, LostReason::HostSilent { .. });
        assert!(
            at_coordinator.reason == LostReason::BadFrame || (is_silent && test == "leaves-out"),
            "{test}: {at_coordinator}"
        );
        assert_eq!((at_coordinator.rank, at_leader.rank), (1, 0), "{test}: {at_leader}");
    }
}

#[test]
fn hosts_with_a_wrong_token_none_or_an_old_one_are_not_let_in() {
    use crate::rendezvous::RendezvousError;
    let (hosts, job) = (table(&[1, 1]), job("tokens"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    // An earlier job's, which rank 0 replaces while the leader tries with it.
    TokenSource::create(&path).unwrap();
    let policy = WaitPolicy::default().hosts_timeout(Duration::from_secs(2));
    let old = options("127.0.0.1").token(Some(TokenSource::File(path.clone())));
    let place = hosts.place(1).unwrap();
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| {
            let joined = request_join(&job, place, &old).unwrap().join(&JoinOptions::default()).unwrap();
            joined.link.leave(&*joined.group, OP).unwrap();
        });
        std::thread::sleep(Duration::from_millis(200));
        let mine = old.clone().token(Some(TokenSource::create(&path).unwrap()));
        let coordinator = JobCoordinator::open(&job, hosts.place(0).unwrap(), &mine).unwrap();
        let joined = coordinator.begin(0, &[], &JoinOptions::default()).unwrap();
        joined.link.leave(&*joined.group, OP).unwrap();
        leader.join().unwrap();
    });

    let options = options("127.0.0.1").policy(policy);
    let coordinator = JobCoordinator::open(&job, hosts.place(0).unwrap(), &options).unwrap();
    let wrong = options.clone().token(Some(TokenSource::Given(JobToken::random().unwrap())));
    let error = request_join(&job, place, &wrong).unwrap_err();
    assert!(error.to_string().contains("does not know this job's token"), "{error}");
    let error = request_join(&job, place, &options.clone().token(None)).unwrap_err();
    assert!(error.to_string().contains("set ZEROTH_JOB_TOKEN on all of them"), "{error}");
    let error = coordinator.begin(0, &[], &JoinOptions::default()).err().unwrap();
    let RendezvousError::Missing { refused, .. } = &error else { panic!("{error}") };
    assert!(
        refused
            .iter()
            .any(|who| who.contains("127.0.0.1:") && who.ends_with("does not know this job's token")),
        "{error}"
    );

    // A port that something else has, and an address that is not this host's.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = PortChoice::Given(taken.local_addr().unwrap().port());
    for (host, port) in
        [("127.0.0.1", port), ("192.0.2.1", PortChoice::Given(0)), ("no-such-host.invalid", port)]
    {
        let address = Rank0Address { host: host.to_owned(), port };
        let error = JobCoordinator::open(
            &self::job("taken"),
            hosts.place(0).unwrap(),
            &options.clone().address(Some(address)),
        );
        let error = error.err().unwrap();
        assert!(
            matches!(&error, RendezvousError::Listen { address, .. } if address.starts_with(host)),
            "{error}"
        );
    }
    let none = JobCoordinator::open(&self::job("none"), hosts.place(0).unwrap(), &options.address(None))
        .err()
        .unwrap();
    assert!(none.to_string().contains("set MASTER_ADDR and MASTER_PORT"), "{none}");
}
