//! Ranks that `mpirun` starts on the hosts: this test binary again, told to run `rank_process` only.
#![allow(unsafe_code, reason = "ends a rank without exit handlers")]

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use zeroth_comm::mpi::{Left, Mpi};
use zeroth_comm::{CommError, OpName, Transfer};

use crate::control_star::ControlStar;

/// How many steps to run; without it the process is not a rank.
pub(crate) const STEPS: &str = "ZEROTH_HOSTS_TEST_STEPS";

/// The file that ranks write lines to.
pub(crate) const LINES: &str = "ZEROTH_HOSTS_TEST_LINES";

/// The arguments of this binary that make it a rank.
pub(crate) const ARGUMENTS: [&str; 4] = ["ranks::rank_process", "--exact", "--ignored", "--nocapture"];

const BYTES: usize = 64 << 10;

/// Both hosts have as many.
pub(crate) const RANKS_OF_A_HOST: usize = 2;

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
            say(&format!(
                "rank {rank} left: {}",
                if left == Left::Finalized { "finalized" } else { "timed out" }
            ));
            0
        }
        Err(error) => {
            say(&format!("rank {rank} ended: {error}"));
            // mpirun ends the others once a rank has ended: first all of them speak.
            std::thread::sleep(Duration::from_millis(300));
            1
        }
    };
    // SAFETY: nothing is left to do. Exit handlers of a library that was not left may hang.
    unsafe { libc::_exit(code) };
}

/// Steps of three collectives along this rank's rail: the ranks with the same place on their hosts, as in a mesh. The first
/// step is announced with the process id on its host.
fn exchange(mpi: &Mpi, star: &ControlStar, steps: u64) -> Result<(), CommError> {
    let (rank, world) = mpi.world();
    let comm = match mpi.split(rank % RANKS_OF_A_HOST, rank, star.watch()) {
        Ok(comm) => comm,
        Err(zeroth_comm::mpi::MpiError::Ended(cause)) => return Err(cause),
        Err(error) => panic!("{error}"),
    };
    let rail = comm.world();
    assert_eq!((rail, comm.rank()), (world / RANKS_OF_A_HOST, rank / RANKS_OF_A_HOST));
    let (counts, own) = (vec![BYTES; rail], vec![rank as u8; BYTES]);
    let (mut all, mut parts) = (vec![0; rail * BYTES], vec![0; rail * BYTES]);
    for step in 1..=steps {
        comm.all_gather(OpName::new(step, "gather", 0), &own, &mut all, &counts)?.wait()?;
        let exchanged = Transfer::AllToAll { send: &all, recv: &mut parts, counts: &counts };
        comm.start(OpName::new(step, "exchange", 1), exchanged)?.wait()?;
        comm.barrier(OpName::new(step, "end of a step", 2))?.wait()?;
        assert!(parts.iter().all(|byte| usize::from(*byte) == rank));
        if step == 1 {
            say(&format!("rank {rank} runs: {}", std::process::id()));
        }
        // A step of some milliseconds, as of a model.
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Writes a line to the test. What is printed passes through `mpirun`, which drops the last lines of a job that it ends.
fn say(line: &str) {
    let path = std::env::var(LINES).unwrap();
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}
