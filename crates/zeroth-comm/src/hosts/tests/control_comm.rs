//! All transfers over the control connection, along all axes, as their definition has them.

use super::*;
use crate::comm::Comm;
use crate::transfer::Transfer;
use crate::{Handle, MeshAxes};

/// The byte that one rank sends another.
fn byte(from: usize, to: usize, at: usize) -> u8 {
    (from * 59 + to * 17 + at * 3) as u8
}

/// Runs every transfer among the ranks of `comm`. `name` tells its ranks from those of other communicators.
fn all_transfers(comm: &dyn Comm, name: usize, bytes: usize) {
    let (own, world) = (comm.rank(), comm.world());
    let counts: Vec<usize> = (0..world).map(|rank| bytes + 5 * rank).collect();
    let starts: Vec<usize> = (0..world).map(|rank| rank * (bytes + 50)).collect();
    let part = |from: usize, to: usize, count: usize| -> Vec<u8> {
        (0..count).map(|at| byte(from + name, to, at)).collect()
    };
    let go = |transfer: Transfer<'_>| comm.start(OP, transfer).and_then(Handle::wait).unwrap();
    let send = part(own, 0, counts[own]);
    let expected: Vec<u8> = (0..world).flat_map(|rank| part(rank, 0, counts[rank])).collect();
    let mut recv = vec![0; expected.len()];
    go(Transfer::AllGather { send: &send, recv: &mut recv, counts: &counts });
    assert!(recv == expected, "all_gather");

    let mut buffer = vec![1; world * (bytes + 50)];
    buffer[starts[own]..starts[own] + counts[own]].copy_from_slice(&send);
    go(Transfer::AllGatherInPlace { buffer: &mut buffer, starts: &starts, counts: &counts });
    for rank in 0..world {
        let (start, count) = (starts[rank], counts[rank]);
        assert!(buffer[start..start + count] == part(rank, 0, count), "all_gather_in_place from {rank}");
        assert_eq!(
            buffer[start + count..][..50 - 5 * rank],
            vec![1; 50 - 5 * rank],
            "nothing else is written"
        );
    }

    let send: Vec<u8> = (0..world).flat_map(|to| part(own, to, counts[to])).collect();
    let mut recv = vec![0; world * counts[own]];
    go(Transfer::AllToAll { send: &send, recv: &mut recv, counts: &counts });
    assert!(
        recv == (0..world).flat_map(|from| part(from, own, counts[own])).collect::<Vec<_>>(),
        "all_to_all"
    );

    for root in 0..world {
        let send = part(own, 0, counts[own]);
        let mut recv = vec![0; if own == root { expected.len() } else { 0 }];
        go(Transfer::Gather { root, send: &send, recv: &mut recv, counts: &counts });
        assert!(own != root || recv == expected, "gather to {root}");
        let mut buffer = if own == root { part(root, 3, bytes) } else { vec![0; bytes] };
        go(Transfer::Broadcast { root, buffer: &mut buffer });
        assert!(buffer == part(root, 3, bytes), "broadcast from {root}");
    }
    go(Transfer::Barrier);
}

#[test]
fn transfers_move_what_they_define_along_all_axes_in_one_piece_and_in_several() {
    run("control-comm", &[2, 2], &options("127.0.0.1"), |place, joined| {
        let comm = ControlComm::new(joined.group, joined.link, 2);
        assert_eq!((comm.rank(), comm.world()), (place.rank, 4));
        let MeshAxes { group, rail } = comm.mesh().unwrap();
        assert_eq!((group.rank(), group.world()), (place.local_rank, 2));
        assert_eq!((rail.rank(), rail.world()), (place.host, 2));
        assert_eq!(comm.of_machine().unwrap().world(), 2);
        for bytes in [0, 7, 40_000] {
            all_transfers(&comm, 0, bytes);
            all_transfers(rail, 100 * place.local_rank, bytes + place.local_rank);
        }
        assert!(group.device_barrier().unwrap().counters().is_some());
        assert!(rail.device_barrier().unwrap().counters().is_none());
        comm.leave(OP).unwrap();
    });
}

#[test]
fn groups_smaller_than_a_host_have_rails_of_several_ranks_a_host() {
    let (hosts, job, options) = (table(&[2, 2]), job("control-comm-small"), options("127.0.0.1"));
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (place, job, options) = (hosts.place(rank).unwrap(), &job, &options);
            scope.spawn(move || {
                let join = JoinOptions::default().group(1);
                let joined = if rank == 0 {
                    JobCoordinator::open(job, place, options).unwrap().begin(0, b"", &join).unwrap()
                } else {
                    request_join(job, place, options).unwrap().join(&join).unwrap()
                };
                let comm = ControlComm::new(joined.group, joined.link, 1);
                let MeshAxes { group, rail } = comm.mesh().unwrap();
                assert_eq!((group.world(), rail.rank(), rail.world()), (1, rank, 4));
                all_transfers(rail, 0, 11);
                comm.leave(OP).unwrap();
            });
        }
    });
}

#[test]
fn a_device_on_a_rail_learns_of_a_loss_on_another_host() {
    let started = std::sync::Barrier::new(2);
    run("control-comm-loss", &[1, 1], &options("127.0.0.1"), |place, joined| {
        let comm = ControlComm::new(joined.group, joined.link, 1);
        let barrier = comm.mesh().unwrap().rail.device_barrier().unwrap();
        barrier.next(OP).unwrap();
        started.wait();
        if place.rank == 1 {
            return;
        }
        let (aborted, notified) = std::sync::mpsc::channel();
        barrier.on_lost(Some(Box::new(move |error| {
            let _ = aborted.send(error.to_string());
        })));
        let error = notified.recv_timeout(Duration::from_mins(1)).unwrap();
        assert!(error.contains("rank 1 (host h1") && error.contains("left the job"), "{error}");
        assert!(barrier.check(OP).is_err());
    });
}
