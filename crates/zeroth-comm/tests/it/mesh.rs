//! Meshes of groups and rails: lanes of one segment, and communicators composed of others.

use std::ops::Range;

use zeroth_base::Axis;
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, CommError, JoinError, JoinOptions, LostReason, MeshComm, OpName, alone};

use crate::model::{Case, cases};

/// (groups, ranks of a group)
const SHAPES: [(usize, usize); 6] = [(2, 2), (2, 3), (3, 2), (4, 1), (1, 3), (2, 1)];

/// Runs ranks as threads, in groups of `group`.
fn in_groups<T: Send>(world: usize, group: usize, rank: impl Fn(Box<dyn Comm>) -> T + Sync) -> Vec<T> {
    let job = LocalJob::create(world, 2000).unwrap();
    let options = JoinOptions::default().group(group);
    std::thread::scope(|scope| {
        let start = |number| {
            let comm = job.join(number, &options).unwrap();
            scope.spawn(|| rank(comm))
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn assert_all(comm: &dyn Comm, cases: &[Case]) {
    for case in cases {
        case.run(comm).unwrap();
    }
}

#[test]
fn collectives_along_both_axes_and_of_all_ranks_move_what_the_model_says() {
    for (groups, group) in SHAPES {
        let world = groups * group;
        let [all, of_group, of_rail] = [world, group, groups].map(|ranks| cases(ranks, 2000));
        in_groups(world, group, |comm| {
            let rank = comm.rank();
            assert_eq!(comm.world(), world);
            assert_all(&*comm, &all);
            let Some(mesh) = comm.mesh() else {
                assert_eq!(groups, 1, "one group has no axes");
                return;
            };
            assert_eq!(Axis::ALL.map(|axis| mesh.along(axis).rank()), [rank % group, rank / group]);
            assert_eq!(Axis::ALL.map(|axis| mesh.along(axis).world()), [group, groups]);
            for axis in Axis::ALL {
                assert_all(mesh.along(axis), if axis == Axis::Group { &of_group } else { &of_rail });
            }
            assert_all(&*comm, &all);
        });
    }
}

#[test]
fn a_composed_communicator_moves_what_the_model_says() {
    for (groups, group) in SHAPES {
        let world = groups * group;
        let jobs = |count: usize, ranks| -> Vec<LocalJob> {
            (0..count).map(|_| LocalJob::create(ranks, 2000).unwrap()).collect()
        };
        let (group_jobs, rail_jobs) = (jobs(groups, group), jobs(group, groups));
        let cases = cases(world, 2000);
        std::thread::scope(|scope| {
            for rank in 0..world {
                let options = JoinOptions::default();
                let of_group = group_jobs[rank / group].join(rank % group, &options).unwrap();
                let of_rail = rail_jobs[rank % group].join(rank / group, &options).unwrap();
                let cases = &cases;
                scope.spawn(move || {
                    let comm = MeshComm::new(of_group, of_rail, alone);
                    assert_eq!((comm.rank(), comm.world()), (rank, world));
                    assert_all(&comm, cases);
                    let texts = comm.gather_texts(OpName::new(1, "texts", 0), &"x".repeat(rank)).unwrap();
                    assert!(texts.iter().enumerate().all(|(rank, text)| text.len() == rank), "{texts:?}");
                    let axes = comm.mesh().unwrap();
                    assert_eq!((axes.group.world(), axes.rail.world()), (group, groups));
                });
            }
        });
    }
}

#[test]
fn windows_of_a_group_are_read_by_its_ranks_only() {
    const OP: OpName = OpName::new(1, "windows", 0);
    in_groups(6, 2, |comm| {
        let (rank, mesh) = (comm.rank(), comm.mesh().unwrap());
        assert!(mesh.rail.windows().is_none(), "ranks of a rail may be on different machines");
        let windows = mesh.group.windows().unwrap();
        let (file, at) = windows.own();
        rustix::io::pwrite(file, &[rank as u8; 64], at).unwrap();
        assert!(windows.open(OP, 4096, true).unwrap());
        let ranges: [Range<usize>; 2] = [0..64, 0..64];
        let mut seen = Vec::new();
        windows
            .read(OpName { index: 1, ..OP }, &ranges, &mut |peers| {
                seen = (0..2).map(|place| peers.of(place).to_vec()).collect();
            })
            .unwrap();
        let other = rank ^ 1;
        assert_eq!(seen[rank % 2], [] as [u8; 0]);
        assert_eq!(seen[1 - rank % 2], [other as u8; 64]);
    });
}

#[test]
fn a_rank_that_gives_up_on_one_axis_is_named_on_all_ranks() {
    const OP: OpName = OpName::new(3, "sum", 7);
    let found = in_groups(4, 2, |comm| {
        let mesh = comm.mesh().unwrap();
        if comm.rank() == 3 {
            drop(mesh.rail.barrier(OP));
            return (3, LostReason::GaveUp);
        }
        // What it has sent before is complete; ranks that share neither group nor rail with it find out in turn.
        let lost = Axis::ALL
            .into_iter()
            .cycle()
            .find_map(|axis| mesh.along(axis).barrier(OP).and_then(zeroth_comm::Handle::wait).err());
        match lost {
            Some(CommError::RankLost(lost)) => (lost.rank, lost.reason),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(found, [(3, LostReason::GaveUp); 4]);
}

#[test]
fn groups_that_do_not_divide_the_ranks_are_refused() {
    let job = LocalJob::create(6, 0).unwrap();
    for group in [0, 4, 7, 12] {
        let refused = job.join(0, &JoinOptions::default().group(group)).err().unwrap();
        assert!(matches!(refused, JoinError::Groups { world: 6, group: found } if found == group));
    }
    // Its slot is not taken.
    assert!(job.join(0, &JoinOptions::default().group(3)).is_ok());
}
