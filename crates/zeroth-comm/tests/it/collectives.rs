//! Collectives of ranks that are threads, against the plain model, and what happens when a rank does not keep to
//! the rules.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use zeroth_comm::local::{LocalJob, join};
use zeroth_comm::{
    Comm, CommError, JoinError, JoinOptions, LostReason, OpName, RankLost, SlowRank, Timing, Transfer,
};

use crate::model::{Case, Kind, cases};

const OP: OpName = OpName::new(4, "test", 2);

/// Runs `rank` on a thread for each rank.
fn ranks<T: Send>(
    world: usize,
    region: usize,
    options: &JoinOptions,
    rank: impl Fn(Box<dyn Comm>) -> T + Sync,
) -> Vec<T> {
    let job = LocalJob::create(world, region).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|number| {
                let comm = job.join(number, options).unwrap();
                scope.spawn(|| rank(comm))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn lost(result: Result<(), CommError>) -> RankLost {
    match result {
        Err(CommError::RankLost(lost)) => *lost,
        other => panic!("expected a lost rank, got {other:?}"),
    }
}

#[test]
fn every_collective_moves_what_the_model_says_in_worlds_of_1_2_3_5_and_8() {
    for world in [1, 2, 3, 5, 8] {
        let cases = cases(world, 2000);
        ranks(world, 2000, &JoinOptions::default(), |comm| {
            for case in &cases {
                case.run(&*comm).unwrap();
            }
        });
    }
}

#[test]
fn messages_larger_than_the_caches_arrive_whole() {
    // Past 4 MiB destinations are written past the caches; the odd count leaves parts that begin within a line.
    let (region, counts) = (1 << 20, [(4 << 20) + 13, (3 << 20) + 1]);
    let byte = |rank: usize, i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ rank as u8;
    ranks(2, region, &JoinOptions::default(), |comm| {
        let rank = comm.rank();
        let send: Vec<u8> = (0..counts[rank]).map(|i| byte(rank, i)).collect();
        let mut all = vec![0; counts[0] + counts[1]];
        comm.all_gather(OP, &send, &mut all, &counts).unwrap().wait().unwrap();
        let expected: Vec<u8> =
            [0, 1].into_iter().flat_map(|from| (0..counts[from]).map(move |i| byte(from, i))).collect();
        assert!(all == expected, "all_gather on rank {rank}");

        let starts = [0, counts[0]];
        all[starts[1 - rank]..][..counts[1 - rank]].fill(0);
        let transfer = Transfer::AllGatherInPlace { buffer: &mut all, starts: &starts, counts: &counts };
        comm.start(OP, transfer).unwrap().wait().unwrap();
        assert!(all == expected, "all_gather in place on rank {rank}");

        let send: Vec<u8> = (0..counts[0] + counts[1]).map(|i| byte(rank, i)).collect();
        let mut parts = vec![0; 2 * counts[rank]];
        let transfer = Transfer::AllToAll { send: &send, recv: &mut parts, counts: &counts };
        comm.start(OP, transfer).unwrap().wait().unwrap();
        for from in [0, 1] {
            let part = &parts[from * counts[rank]..][..counts[rank]];
            assert!(part.iter().enumerate().all(|(i, value)| *value == byte(from, starts[rank] + i)));
        }
    });
}

#[test]
fn a_region_of_no_size_still_moves_everything() {
    let cases = cases(3, 0);
    ranks(3, 0, &JoinOptions::default(), |comm| cases.iter().for_each(|case| case.run(&*comm).unwrap()));
}

#[test]
fn ranks_in_different_collectives_are_told_so_by_name() {
    let results = ranks(3, 100, &JoinOptions::default(), |comm| {
        let name = if comm.rank() == 2 { "reduce" } else { "gather" };
        comm.barrier(OpName::new(9, name, 1))?.wait()
    });
    // All end with the same verdict, whoever of the disagreeing ranks saw it first.
    let verdicts: Vec<RankLost> = results.into_iter().map(lost).collect();
    assert!(matches!(verdicts[0].reason, LostReason::Differs { .. }), "{}", verdicts[0]);
    assert!(verdicts.iter().all(|lost| (lost.rank, lost.reason) == (verdicts[0].rank, verdicts[0].reason)));
    assert!(verdicts[0].to_string().contains("step 9, op"), "{}", verdicts[0]);
}

#[test]
fn a_rank_that_leaves_early_is_named_and_one_that_leaves_in_time_is_not() {
    let results = ranks(3, 100, &JoinOptions::default(), |comm| {
        comm.barrier(OP)?.wait()?;
        if comm.rank() == 1 { Ok(()) } else { comm.barrier(OpName::new(5, "next", 0))?.wait() }
    });
    let mut steps = Vec::new();
    for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let lost = lost(result);
        assert_eq!((lost.rank, lost.reason, lost.by), (1, LostReason::Left, Some(rank)));
        steps.push(lost.waiting_in.unwrap().step);
        let place = lost.last.unwrap();
        assert_eq!((place.step, place.name.as_str(), place.index, place.inside), (4, "test", 2, false));
    }
    // Who noticed was in the next barrier; the other may have been told in the first already.
    assert!(steps.contains(&5), "{steps:?}");
}

#[test]
fn a_handle_dropped_unwaited_gives_the_job_up_for_all() {
    let results = ranks(3, 100, &JoinOptions::default(), |comm| {
        if comm.rank() == 0 {
            drop(comm.barrier(OP)?);
        } else {
            // The others complete this barrier or learn of it here; the next one at the latest ends.
            comm.barrier(OP)?.wait()?;
        }
        comm.barrier(OpName::new(5, "next", 0))?.wait()
    });
    for result in results {
        let lost = lost(result);
        assert_eq!((lost.rank, lost.reason), (0, LostReason::GaveUp), "{lost}");
    }
}

#[test]
fn two_collectives_may_be_under_way_and_are_waited_for_in_order() {
    let (first, second) = (OpName::new(1, "first", 0), OpName::new(1, "second", 1));
    ranks(2, 100, &JoinOptions::default(), |comm| {
        let early = comm.barrier(first).unwrap();
        let late = comm.barrier(second).unwrap();
        early.wait().unwrap();
        late.wait().unwrap();
    });
    ranks(1, 100, &JoinOptions::default(), |comm| {
        let early = comm.barrier(first).unwrap();
        let late = comm.barrier(second).unwrap();
        let message = late.wait().unwrap_err().to_string();
        assert!(message.contains("op second#1 was waited for before"), "{message}");
        assert_eq!(lost(early.wait()).reason, LostReason::GaveUp);
    });
}

#[test]
fn a_slow_rank_is_a_warning_and_a_rank_that_never_comes_an_error() {
    let warnings: Arc<Mutex<Vec<SlowRank>>> = Arc::default();
    let seen = Arc::clone(&warnings);
    let short = Timing { slow: Duration::from_millis(100), ..Timing::default() };
    let options =
        JoinOptions::default().timing(short).on_slow(move |slow| seen.lock().unwrap().push(slow.clone()));
    ranks(2, 100, &options, |comm| {
        comm.barrier(OP).unwrap().wait().unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(400));
        }
        comm.barrier(OpName::new(5, "next", 0)).unwrap().wait().unwrap();
    });
    let warnings = warnings.lock().unwrap();
    let slow = warnings.iter().find(|slow| slow.waiting_in.step == 5).expect("a wait of 4 × slow warns");
    assert_eq!((slow.rank, slow.last.as_ref().unwrap().step), (1, 4));
    assert!(slow.to_string().contains("for rank 1, which lives and is after step 4, op test#2"), "{slow}");

    let job = LocalJob::create(2, 0).unwrap();
    let short = Timing { join: Duration::from_millis(300), ..short };
    let alone = job.join(0, &JoinOptions::default().timing(short)).unwrap();
    // Publishing the first round of a barrier needs nobody; its wait does.
    let lost = lost(alone.barrier(OP).unwrap().wait());
    assert_eq!((lost.rank, lost.pid), (1, 0));
    assert!(matches!(lost.reason, LostReason::NeverJoined { .. }), "{lost}");
    assert_eq!(job.lost().unwrap().rank, 1);
}

#[test]
fn joining_needs_the_token_a_free_rank_and_the_right_world() {
    let (job, other) = (LocalJob::create(2, 0).unwrap(), LocalJob::create(2, 0).unwrap());
    let options = JoinOptions::default();
    assert!(matches!(join(job.fd(), other.token(), 0, &options), Err(JoinError::Token)));
    assert!(matches!(job.join(2, &options), Err(JoinError::Rank { rank: 2, world: 2 })));
    assert_eq!(job.status(0).unwrap().pid, None);
    let rank = job.join(0, &options).unwrap();
    assert_eq!(job.status(0).unwrap().pid, Some(std::process::id()));
    let taken = job.join(0, &options).err().unwrap();
    assert!(matches!(taken, JoinError::Taken { rank: 0, pid } if pid == std::process::id()), "{taken}");
    drop(rank);
    assert!(job.status(0).unwrap().left);
    assert!(job.join(0, &options).is_err(), "a rank that left does not come back");
}

fn any_case(index: usize, world: usize, region: usize) -> impl Strategy<Value = Case> {
    let kinds = [Kind::AllGather, Kind::AllToAll, Kind::Gather, Kind::Broadcast, Kind::Barrier];
    let op = OpName::new(1, "any", index as u32);
    (prop::sample::select(kinds.to_vec()), 0..world, prop::collection::vec(0..2 * region, world))
        .prop_map(move |(kind, root, counts)| Case { kind, op, root, counts })
}

/// The size of a region, and collectives of one world.
fn any_program() -> impl Strategy<Value = (usize, Vec<Case>)> {
    (1..=8_usize, 1..3000_usize, 1..40_usize).prop_flat_map(|(world, region, length)| {
        let cases: Vec<_> = (0..length).map(|index| any_case(index, world, region)).collect();
        (Just(region), cases)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_collectives_in_any_order_with_any_delays_move_what_the_model_says(
        (region, cases) in any_program(),
        delays in any::<u64>(),
    ) {
        ranks(cases[0].counts.len(), region, &JoinOptions::default(), |comm| {
            let mut random = delays ^ (comm.rank() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut pause = || {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 62 == 0 {
                    std::thread::sleep(Duration::from_micros(random >> 55 & 0xff));
                }
            };
            // By twos: the second starts before the first is waited for.
            for pair in cases.chunks(2) {
                let mut buffers: Vec<_> = pair.iter().map(|case| case.buffers(comm.rank())).collect();
                let mut handles = Vec::new();
                for (case, buffers) in pair.iter().zip(&mut buffers) {
                    handles.push(case.start(&*comm, buffers).unwrap());
                    pause();
                }
                for handle in handles {
                    handle.wait().unwrap();
                    pause();
                }
                pair.iter().zip(&buffers).for_each(|(case, buffers)| case.check(comm.rank(), buffers));
            }
        });
    }
}
