//! Ranks that `mpirun` of each library starts on this host. A rank is this test binary again, told by `ZEROTH_COMM_TEST` to
//! run only `rank_process`, which is ignored otherwise, and which part to play.
#![allow(clippy::print_stdout, reason = "how a rank tells its test, and a test that is skipped says so")]
#![allow(unsafe_code, reason = "ends a rank without exit handlers")]

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::rounds::TransferRounds;
use super::{LIBRARY_VARIABLE, Left, Mpi, RailComm, Watch};
use crate::OpName;
use crate::error::{CommError, LostReason, RankLost};

#[path = "../../tests/it/model.rs"]
mod model;

const ROLE: &str = "ZEROTH_COMM_TEST";
const ARGUMENTS: [&str; 4] = ["mpi::tests::rank_process", "--exact", "--ignored", "--nocapture"];
const REGION: usize = 700;
const OP: OpName = OpName::new(4, "test", 2);

fn nobody_is_lost() -> Watch {
    Arc::new(|_| Ok(()))
}

#[test]
#[ignore = "a rank of the other tests, which start it by mpirun"]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let taken = signals_taken();
    let mpi = match Mpi::init() {
        Ok(mpi) => mpi,
        Err(error) => {
            println!("refused: {error}");
            return;
        }
    };
    assert_eq!(signals_taken(), taken, "handlers of the library stay");
    assert!(Mpi::init().err().unwrap().to_string().contains("before"));
    println!("opened: {}", mpi.library());
    match role.as_str() {
        "model" => model_in_rounds(&mpi),
        "split" => splits(&mpi),
        "misuse" => misuse(&mpi),
        "lost" => lost(&mpi),
        other => panic!("no such role: {other}"),
    }
    let left = mpi.leave(Duration::from_secs(5));
    assert!(role != "lost" || left == Left::TimedOut);
    println!("done: {left:?}");
    if left == Left::TimedOut {
        // mpirun ends the others with the first that ends so: all of them say it before.
        std::thread::sleep(Duration::from_millis(300));
    }
    // SAFETY: nothing is left to do. Exit handlers of a library that was not left may hang.
    unsafe { libc::_exit(0) };
}

/// The signals that have handlers.
fn signals_taken() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find(|line| line.starts_with("SigCgt:")).unwrap().to_owned()
}

fn run_all(cases: &[model::Case], comm: &dyn crate::Comm) {
    for case in cases {
        case.run(comm).unwrap();
    }
}

/// Every collective, whole and in many rounds, by one call and by a message for each pair.
fn model_in_rounds(mpi: &Mpi) {
    let (rank, world) = mpi.world();
    let mut token = if rank == 1 { b"token".to_vec() } else { Vec::new() };
    mpi.broadcast(1, &mut token).unwrap();
    assert_eq!(token, b"token");
    let cases = model::cases(world, REGION);
    let comm = mpi.split(7, rank, nobody_is_lost()).unwrap();
    assert_eq!((comm.rank(), comm.world()), (rank, world));
    assert!(comm.windows().is_none() && comm.device_barrier().is_none() && comm.mesh().is_none());
    run_all(&cases, &*comm);
    assert_eq!(
        comm.gather_texts(OP, &"x".repeat(rank)).unwrap(),
        (0..world).map(|rank| "x".repeat(rank)).collect::<Vec<_>>()
    );
    for (piece, reach) in [(64, usize::MAX), (333, 500), (4096, 0)] {
        let world = mpi.session.calls().unwrap().world();
        let rounds = TransferRounds::of(piece, reach);
        let comm = RailComm::new(Arc::clone(&mpi.session), world, mpi.world(), rounds, nobody_is_lost());
        run_all(&cases, &comm);
    }
    mpi.share_host(1, 1);
    run_all(&cases, &*comm);
}

/// Ranks of even and of odd number, in reverse order.
fn splits(mpi: &Mpi) {
    let (rank, world) = mpi.world();
    let comm = mpi.split(rank % 2, world - rank, nobody_is_lost()).unwrap();
    assert_eq!(comm.world(), world.div_ceil(2) - (rank % 2) * (world % 2));
    assert_eq!(comm.rank(), comm.world() - 1 - rank / 2);
    run_all(&model::cases(comm.world(), REGION), &*comm);
}

fn misuse(mpi: &Mpi) {
    let first = mpi.split(0, 0, nobody_is_lost()).unwrap();
    let message = first.barrier(OP).and_then(|early| {
        let late = first.barrier(OpName::new(4, "next", 3))?;
        let out_of_order = late.wait();
        assert!(matches!(early.wait(), Err(CommError::Abandoned { .. })));
        out_of_order
    });
    assert!(matches!(message, Err(CommError::OutOfOrder { .. })), "{message:?}");
    let second = mpi.split(0, 0, nobody_is_lost()).unwrap();
    drop(second.barrier(OP).unwrap());
    let message = second.barrier(OP).err().unwrap().to_string();
    assert!(message.contains("step 4, op test#2 was given up by this rank"), "{message}");
    let third = mpi.split(0, 0, nobody_is_lost()).unwrap();
    assert!(third.all_gather(OP, &[1], &mut [], &[1]).is_err());
    // What was given up before moves nothing, so MPI is in order.
    third.barrier(OP).unwrap().wait().unwrap();
}

/// Rank 0 does not come; the verdict arrives while the others wait.
fn lost(mpi: &Mpi) {
    let (rank, world) = mpi.world();
    let ended = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended);
    let watch: Watch = Arc::new(move |op| {
        if !seen.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (host, reason) = ("elsewhere".to_owned(), LostReason::Dead);
        let lost = RankLost { rank: 0, host, pid: 1, reason, last: None, by: Some(1), waiting_in: Some(op) };
        Err(Box::new(lost).into())
    });
    let comm = mpi.split(0, rank, watch).unwrap();
    comm.barrier(OP).unwrap().wait().unwrap();
    if rank == 0 {
        std::thread::sleep(Duration::from_secs(1));
        mpi.session.give_up();
        return;
    }
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        ended.store(true, Ordering::Relaxed);
    });
    let (send, mut recv) = (vec![1; 1 << 20], vec![0; world << 20]);
    let counts = vec![1 << 20; world];
    let began = Instant::now();
    let error = comm.all_gather(OP, &send, &mut recv, &counts).unwrap().wait().unwrap_err().to_string();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(error.contains("rank 0 (host elsewhere, pid 1) is dead"), "{error}");
    assert!(error.contains("rank 1 was in step 4, op test#2"), "{error}");
    let after = mpi.split(0, rank, nobody_is_lost()).err().unwrap().to_string();
    assert!(after.contains("given up before"), "{after}");
}

/// The launchers of this machine, with the name of their library.
fn launchers() -> impl Iterator<Item = (&'static str, &'static [&'static str], &'static str)> {
    let all: [(_, &[_], _); 2] = [
        ("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe"], "Open MPI"),
        ("mpiexec.hydra", &[], "MPICH"),
    ];
    all.into_iter().filter(|(program, ..)| {
        let is_there = Command::new(program).arg("--version").output().is_ok();
        if !is_there {
            println!("skipped: {program} is not installed (apt-get install openmpi-bin mpich)");
        }
        is_there
    })
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Runs `ranks` ranks in a role under each launcher.
fn run(role: &str, ranks: usize) {
    for (program, more, library) in launchers() {
        let ranks_text = ranks.to_string();
        let ended = Command::new(program)
            .args(more)
            .args(["-n", &ranks_text])
            .arg(std::env::current_exe().unwrap())
            .args(ARGUMENTS)
            .env(ROLE, role)
            .output()
            .unwrap();
        let said = said(&ended);
        if role == "lost" {
            // Open MPI ends a job of which a rank leaves without MPI_Finalize, perhaps before rank 0 is done.
            assert!(said.matches("done: TimedOut").count() >= ranks - 1, "{program} {role}: {said}");
            assert!(!said.contains("panicked"), "{program} {role}: {said}");
            continue;
        }
        assert!(ended.status.success(), "{program} {role}: {said}");
        assert_eq!(said.matches("done: ").count(), ranks, "{program} {role}: {said}");
        let opened = said.lines().filter(|line| line.contains("opened: ")).collect::<Vec<_>>();
        assert!(opened.iter().all(|line| line.contains(library)), "{program} {role}: {opened:?}");
    }
}

#[test]
fn every_collective_moves_what_the_model_says_under_each_mpirun() {
    for world in [2, 3] {
        run("model", world);
    }
}

#[test]
fn ranks_are_split_by_color_and_ordered_by_key() {
    run("split", 5);
}

#[test]
fn collectives_given_up_or_out_of_order_are_named_and_leave_mpi_in_order() {
    run("misuse", 2);
}

#[test]
fn a_verdict_ends_a_collective_that_would_wait_for_ever() {
    run("lost", 3);
}

/// A rank without `mpirun`, in an environment.
fn alone(variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ARGUMENTS).env(ROLE, "model").envs(variables.iter().copied());
    said(&command.output().unwrap())
}

#[test]
fn a_library_without_its_launcher_and_another_library_are_refused_by_name() {
    let said = alone(&[("OMPI_COMM_WORLD_SIZE", "4"), (LIBRARY_VARIABLE, "libzeroth-absent.so")]);
    let wanted =
        ["no MPI library can be used, and Open MPI's mpirun started this process", "libzeroth-absent.so"];
    assert!(wanted.iter().all(|words| said.contains(words)), "{said}");
    for (_, _, library) in launchers() {
        let (given, other) = match library {
            "MPICH" => ("libmpich.so.12", [("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")]),
            _ => ("libmpi.so.40", [("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "4")]),
        };
        let said = alone(&[&other[..], &[(LIBRARY_VARIABLE, given)]].concat());
        assert!(said.contains(&format!("{given} is another library ({library}")), "{said}");
        let said = alone(&[("SLURM_STEP_NUM_TASKS", "4"), (LIBRARY_VARIABLE, given)]);
        assert!(said.contains("SLURM_STEP_NUM_TASKS says 4, MPI says 1"), "{said}");
        assert!(said.contains("under srun: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH"), "{said}");
    }
}
