//! Windows: what ranks read in each other's memory, and what becomes of a meeting that one of them does not keep.
#![allow(unsafe_code, reason = "maps a window as a device does")]

use std::ops::Range;

use rustix::mm::{MapFlags, ProtFlags};
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, CommError, JoinOptions, LostReason, OpName, SharedWindows};

const BYTES: usize = 3 * 4096 + 100;

/// This rank's window as memory of its own; unmapped with the process.
fn mapped(comm: &dyn Comm) -> &'static mut [u8] {
    let (file, at) = windows(comm).own();
    // SAFETY: a new mapping at a place of the system's choice, used as one slice and never unmapped.
    unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let start =
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, rights, MapFlags::SHARED, file, at).unwrap();
        std::slice::from_raw_parts_mut(start.cast(), BYTES)
    }
}

fn value(rank: usize, step: u64, at: usize) -> u8 {
    (7 * rank + 31 * step as usize + at) as u8
}

fn write(own: &mut [u8], rank: usize, step: u64) {
    own.iter_mut().enumerate().for_each(|(at, byte)| *byte = value(rank, step, at));
}

fn windows(comm: &dyn Comm) -> &dyn SharedWindows {
    comm.windows().expect("a local job has windows")
}

fn open(comm: &dyn Comm, ready: bool) -> bool {
    windows(comm).open(OpName::new(0, "open windows", 0), BYTES, ready).unwrap()
}

fn on_ranks<R: Send>(
    world: usize,
    options: &JoinOptions,
    rank: impl Fn(Box<dyn Comm>) -> R + Sync,
) -> Vec<R> {
    let job = LocalJob::create(world, 1000).unwrap();
    std::thread::scope(|scope| {
        let start = |number| {
            let comm = job.join(number, options).unwrap();
            let rank = &rank;
            scope.spawn(move || rank(comm))
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_reads_what_every_other_wrote_last_beside_other_collectives() {
    for world in [1, 2, 5] {
        on_ranks(world, &JoinOptions::default(), |comm| {
            let (me, own) = (comm.rank(), mapped(&*comm));
            assert!(open(&*comm, true));
            for step in 1..40 {
                write(own, me, step);
                // Parts of different places and lengths, one of them empty.
                let part = |rank: usize| 100 * rank..if rank == 1 { 100 } else { BYTES - rank };
                let from: Vec<Range<usize>> = (0..world).map(part).collect();
                let mut read = 0;
                windows(&*comm)
                    .read(OpName::new(step, "read", 1), &from, &mut |peers| {
                        for rank in (0..world).filter(|rank| *rank != me) {
                            let bytes = peers.of(rank);
                            assert_eq!(bytes.len(), from[rank].len());
                            let expected =
                                |(at, byte): (usize, &u8)| *byte == value(rank, step, from[rank].start + at);
                            assert!(bytes.iter().enumerate().all(expected), "rank {rank}, step {step}");
                            read += 1;
                        }
                        assert!(peers.of(me).is_empty());
                    })
                    .unwrap();
                assert_eq!(read, world - 1);
                let (counts, mut all) = (vec![1; world], vec![0; world]);
                let op = OpName::new(step, "gather", 2);
                comm.all_gather(op, &[me as u8], &mut all, &counts).unwrap().wait().unwrap();
                assert!(all.iter().enumerate().all(|(rank, byte)| usize::from(*byte) == rank));
            }
        });
    }
}

#[test]
fn where_one_rank_cannot_all_do_without() {
    let open = on_ranks(3, &JoinOptions::default(), |comm| {
        let opened = open(&*comm, comm.rank() != 1);
        let refused = windows(&*comm).read(OpName::new(1, "read", 1), &[0..1, 0..1, 0..1], &mut |_| ());
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("3 windows to read") && message.contains('0'), "{message}");
        opened
    });
    assert_eq!(open, [false; 3]);
}

#[test]
fn places_beyond_a_window_are_refused() {
    on_ranks(2, &JoinOptions::default(), |comm| {
        assert!(open(&*comm, true));
        let refused =
            windows(&*comm).read(OpName::new(1, "read", 1), &[0..BYTES + 1, 0..BYTES + 1], &mut |_| ());
        assert!(matches!(refused, Err(CommError::Operands { .. })), "{refused:?}");
    });
}

#[test]
fn a_rank_that_leaves_or_meets_elsewhere_is_named() {
    let options = JoinOptions::default();
    let reasons = on_ranks(2, &options, |comm| {
        assert!(open(&*comm, true));
        if comm.rank() == 1 {
            return None;
        }
        let lost = windows(&*comm).read(OpName::new(1, "read", 1), &[0..9, 0..9], &mut |_| ()).unwrap_err();
        let CommError::RankLost(lost) = lost else { panic!("{lost}") };
        assert_eq!(lost.rank, 1);
        Some(lost.reason)
    });
    assert_eq!(reasons, [Some(LostReason::Left), None]);
    let differ = on_ranks(2, &options, |comm| {
        assert!(open(&*comm, true));
        let op = OpName::new(1, "meet", 1);
        let met = if comm.rank() == 0 {
            windows(&*comm).read(op, &[0..9, 0..9], &mut |_| ())
        } else {
            comm.barrier(op).and_then(zeroth_comm::Handle::wait)
        };
        matches!(met, Err(CommError::RankLost(lost)) if matches!(lost.reason, LostReason::Differs { .. } | LostReason::Left))
    });
    assert_eq!(differ, [true, true]);
}

#[test]
fn the_memory_of_a_rank_that_has_left_is_given_back() {
    let job = LocalJob::create(2, 1000).unwrap();
    let (own, other) = std::thread::scope(|scope| {
        let joined = [0, 1].map(|rank| job.join(rank, &JoinOptions::default()).unwrap());
        let [first, second] = joined.map(|comm| {
            scope.spawn(move || {
                let own = mapped(&*comm);
                write(own, comm.rank(), 1);
                assert!(open(&*comm, true));
                comm.barrier(OpName::new(1, "written", 1)).unwrap().wait().unwrap();
                (comm, own)
            })
        });
        let ((left, own), (kept, other)) = (first.join().unwrap(), second.join().unwrap());
        drop(left);
        let other = other.to_vec();
        drop(kept);
        (own, other)
    });
    // Its pages are gone, and what is read there are new ones.
    assert!(own.iter().all(|byte| *byte == 0));
    assert!(other.iter().enumerate().all(|(at, byte)| *byte == value(1, 1, at)));
}
