//! Ranks that `mpirun` starts on the hosts: this test binary again, told to run `rank_process` only.
#![allow(unsafe_code, reason = "ends a rank without exit handlers")]

use std::time::{Duration, Instant};

use zeroth_comm::mpi::{Left, Mpi};
use zeroth_comm::{CommError, OpName, Transfer};

use crate::control_star::ControlStar;

/// How many steps to run; without it the process is not a rank.
pub(crate) const STEPS: &str = "ZEROTH_HOSTS_TEST_STEPS";

/// The arguments of this binary that make it a rank.
pub(crate) const ARGUMENTS: [&str; 4] = ["ranks::rank_process", "--exact", "--ignored", "--nocapture"];

const BYTES: usize = 64 << 10;

#[test]
#[ignore = "a rank of the other tests, which start it by mpirun"]
fn rank_process() {
    let Ok(steps) = std::env::var(STEPS) else { return };
    let mpi = Mpi::init().unwrap();
    let (rank, _) = mpi.world();
    let star = ControlStar::connect(&mpi);
    let code = match exchange(&mpi, &star, steps.parse().unwrap()) {
        Ok(()) => {
            star.leave();
            let left = mpi.leave(Duration::from_secs(5));
            println!("rank {rank} left: {}", if left == Left::Finalized { "finalized" } else { "timed out" });
            0
        }
        Err(error) => {
            println!("rank {rank} ended: {error}");
            1
        }
    };
    // SAFETY: nothing is left to do. Exit handlers of a library that was not left may hang.
    unsafe { libc::_exit(code) };
}

/// Steps of three collectives over all ranks. The first is announced with the process id on its host.
fn exchange(mpi: &Mpi, star: &ControlStar, steps: u64) -> Result<(), CommError> {
    let (rank, world) = mpi.world();
    let comm = match mpi.split(0, rank, star.watch()) {
        Ok(comm) => comm,
        Err(zeroth_comm::mpi::MpiError::Ended(cause)) => return Err(cause),
        Err(error) => panic!("{error}"),
    };
    let (counts, own) = (vec![BYTES; world], vec![rank as u8; BYTES]);
    let (mut all, mut parts) = (vec![0; world * BYTES], vec![0; world * BYTES]);
    for step in 1..=steps {
        comm.all_gather(OpName::new(step, "gather", 0), &own, &mut all, &counts)?.wait()?;
        let exchanged = Transfer::AllToAll { send: &all, recv: &mut parts, counts: &counts };
        comm.start(OpName::new(step, "exchange", 1), exchanged)?.wait()?;
        comm.barrier(OpName::new(step, "end of a step", 2))?.wait()?;
        assert!(parts.iter().all(|byte| usize::from(*byte) == rank));
        if step == 1 {
            println!("rank {rank} runs as {}", std::process::id());
        }
        // A step of some milliseconds, as of a model.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(2) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}
