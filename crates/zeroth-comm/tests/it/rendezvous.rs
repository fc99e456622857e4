//! Ranks that nobody of ours started: processes with the variables of each launcher, and the launchers themselves where
//! they are installed.
//!
//! A rank is this test binary again, told by `ZEROTH_COMM_TEST` to run only `rank_process`, which is ignored otherwise.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "how a rank tells its test, and a test that it skips"
)]

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use zeroth_comm::environment::LaunchedRank;
use zeroth_comm::rendezvous::{Coordinator, RendezvousError, WaitPolicy, request_join};
use zeroth_comm::{JoinOptions, OpName};

const ROLE: &str = "ZEROTH_COMM_TEST";
const RANK: [&str; 4] = ["rendezvous::rank_process", "--exact", "--ignored", "--nocapture"];
/// Every variable that tells of a launcher: whatever started this test must not count.
const KNOWN: [&str; 8] = [
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMI_ID",
    "PMI_SIZE",
    "SLURM_PROCID",
];

#[test]
#[ignore = "a rank of the other tests, which start it as a process"]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let launched = LaunchedRank::of_this_process().unwrap().expect("started by a launcher");
    let place = launched.place;
    let said = match meet(&role, &launched) {
        Ok(sum) => format!("\n{} rank {} sum {sum}\n", launched.launcher, place.rank),
        Err(error) => format!("\nrank {} error {error}\n", place.rank),
    };
    // In one piece: a launcher puts what other ranks say between two.
    print!("{said}");
}

/// All ranks send their number and what rank 0 told them; the sum over ranks.
fn meet(role: &str, launched: &LaunchedRank) -> Result<u64, RendezvousError> {
    let LaunchedRank { place, job, .. } = launched;
    let comm = if place.rank == 0 {
        let coordinator = Coordinator::open(
            job,
            place.world,
            WaitPolicy::default().peers_timeout(Duration::from_secs(20)),
        )?;
        if role == "refuses" {
            coordinator.refuse("the data has no rows");
            return Ok(0);
        }
        if role == "dies" {
            // Only once the others wait: the system lists the socket that listens, and one for each connection.
            while std::fs::read_to_string("/proc/net/unix").unwrap().matches(job.as_str()).count()
                < place.world
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::process::abort();
        }
        coordinator.begin(1000, &100_u64.to_le_bytes(), &JoinOptions::default())?
    } else {
        let admission = request_join(job, place.rank, place.world, &WaitPolicy::default())?;
        assert_eq!(admission.message(), 100_u64.to_le_bytes());
        admission.join(&JoinOptions::default())?
    };
    let own = (100 + place.rank as u64).to_le_bytes();
    let mut all = vec![0; 8 * place.world];
    let counts = vec![8; place.world];
    comm.all_gather(OpName::new(1, "numbers", 0), &own, &mut all, &counts).unwrap().wait().unwrap();
    Ok(all.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).sum())
}

fn rank(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for name in KNOWN {
        command.env_remove(name);
    }
    command.args(RANK).env(ROLE, role).stdout(Stdio::piped());
    command
}

/// Three ranks with variables that `place` gives from the rank; what they said, sorted.
fn three(role: &str, place: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<String> {
    let ranks: Vec<Child> = (0..3).map(|number| rank(role).envs(place(number)).spawn().unwrap()).collect();
    let texts = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap().stdout);
    said(&texts.map(|text| String::from_utf8(text).unwrap()).collect::<String>())
}

/// The lines of ranks among those of the test harness.
fn said(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text
        .lines()
        .filter(|line| line.contains(" sum ") || line.contains(" error "))
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

fn torchrun(test: &str, rank: usize, world: usize) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", world.to_string()),
        ("TORCHELASTIC_RUN_ID", format!("{test}-{}", std::process::id())),
    ]
}

#[test]
fn three_processes_with_the_variables_of_any_launcher_become_one_job() {
    let own = std::process::id();
    let met = three("meets", |rank| torchrun("meet", rank, 3));
    assert_eq!(met, [0, 1, 2].map(|rank| format!("torchrun rank {rank} sum 303")));
    let met = three("meets", |rank| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", "3".to_owned()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "3".to_owned()),
            ("PMIX_NAMESPACE", own.to_string()),
        ]
    });
    assert_eq!(met, [0, 1, 2].map(|rank| format!("Open MPI rank {rank} sum 303")));
    let met = three("meets", |rank| {
        vec![
            ("PMI_RANK", rank.to_string()),
            ("PMI_SIZE", "3".to_owned()),
            ("MPI_LOCALRANKID", rank.to_string()),
            ("MPI_LOCALNRANKS", "3".to_owned()),
        ]
    });
    assert_eq!(met, [0, 1, 2].map(|rank| format!("MPICH (PMI) rank {rank} sum 303")));
    let met = three("meets", |rank| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", "3".to_owned()),
            ("SLURM_LOCALID", rank.to_string()),
            ("SLURM_STEP_ID", "0".to_owned()),
            ("SLURM_JOB_ID", own.to_string()),
            ("SLURM_NNODES", "1".to_owned()),
        ]
    });
    assert_eq!(met, [0, 1, 2].map(|rank| format!("SLURM rank {rank} sum 303")));
}

#[test]
fn a_refusal_sends_the_other_processes_home() {
    let met = three("refuses", |rank| torchrun("refuse", rank, 3));
    let refused = |rank| format!("rank {rank} error rank 0 has cancelled the job: the data has no rows");
    assert_eq!(met, [refused(1), refused(2), "torchrun rank 0 sum 0".to_owned()]);
}

#[test]
fn a_rank_0_that_dies_ends_the_wait_of_the_others() {
    let met = three("dies", |rank| torchrun("die", rank, 3));
    let gone = |rank| format!("rank {rank} error rank 0 ended before the job began; see its messages");
    assert_eq!(met, [gone(1), gone(2)]);
}

#[test]
fn a_process_of_another_world_is_not_let_in_and_the_job_goes_on_without_it() {
    let coordinator = start("world", 0, 3);
    let refused = said_by(start("world", 2, 4));
    assert!(refused[0].contains("was started as rank 2 of 4, and rank 0 as one of 3"), "{refused:?}");
    assert_met([coordinator, start("world", 1, 3), start("world", 2, 3)]);
}

#[test]
fn of_two_processes_with_one_number_the_second_is_not_let_in() {
    let coordinator = start("duplicate", 0, 3);
    let (mut one, mut two) = (start("duplicate", 1, 3), start("duplicate", 1, 3));
    // The one that is let in waits for rank 2, whichever it is.
    while one.try_wait().unwrap().is_none() {
        std::mem::swap(&mut one, &mut two);
        std::thread::sleep(Duration::from_millis(5));
    }
    let refused = said_by(one);
    assert!(refused[0].contains("were both started as rank 1"), "{refused:?}");
    assert_met([coordinator, two, start("duplicate", 2, 3)]);
}

#[test]
fn a_process_that_holds_the_jobs_name_without_a_file_keeps_nobody_out() {
    // Names of this kind have no owner: any user could hold one.
    let user = rustix::process::geteuid().as_raw();
    let name = format!("zeroth-{user}-torchrun-held-{}", std::process::id());
    let _held = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let met = three("meets", |rank| torchrun("held", rank, 3));
    assert_eq!(met, [0, 1, 2].map(|rank| format!("torchrun rank {rank} sum 303")));
}

#[test]
fn the_folder_of_sockets_is_this_users_alone_and_one_of_another_user_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let user = rustix::process::geteuid().as_raw();
    let folder = temporary.path().join(format!("zeroth-{user}"));
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let place = |rank: usize| {
        let mut variables = torchrun("folder", rank, 3);
        variables.extend([("TMPDIR", path(temporary.path())), ("XDG_RUNTIME_DIR", String::new())]);
        variables
    };
    let met = three("meets", place);
    assert_eq!(met, [0, 1, 2].map(|rank| format!("torchrun rank {rank} sum 303")));
    assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");

    if chown(&folder, Some(54321), None).is_err() {
        println!("skipped: giving a folder to another user needs root (sudo -E cargo test -p zeroth-comm)");
        return;
    }
    for said in three("meets", place) {
        assert!(said.contains("it belongs to user 54321"), "{said}");
        assert!(said.contains("set XDG_RUNTIME_DIR to a folder of your own"), "{said}");
    }
    let runtime = tempfile::tempdir().unwrap();
    let met = three("meets", |rank| {
        let mut variables = place(rank);
        variables.push(("XDG_RUNTIME_DIR", path(runtime.path())));
        variables
    });
    assert_eq!(met, [0, 1, 2].map(|rank| format!("torchrun rank {rank} sum 303")));
}

fn start(test: &str, number: usize, world: usize) -> Child {
    rank("meets").envs(torchrun(test, number, world)).spawn().unwrap()
}

fn said_by(rank: Child) -> Vec<String> {
    said(&String::from_utf8(rank.wait_with_output().unwrap().stdout).unwrap())
}

fn assert_met(ranks: [Child; 3]) {
    let mut met = ranks.map(said_by).concat();
    met.sort();
    assert_eq!(met, [0, 1, 2].map(|rank| format!("torchrun rank {rank} sum 303")));
}

/// Runs three ranks under a real launcher; `None` where it is not installed.
fn under(launcher: &str, arguments: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new(launcher);
    for name in KNOWN {
        command.env_remove(name);
    }
    let output = command
        .args(arguments)
        .arg(std::env::current_exe().unwrap())
        .args(RANK)
        .env(ROLE, "meets")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{launcher}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
    Some(said(&text))
}

#[test]
fn three_ranks_of_a_real_launcher_become_one_job() {
    let oversubscribe = ["--oversubscribe", "-n", "3"];
    let torchrun = ["--nproc-per-node", "3", "--standalone", "--no-python"];
    for (launcher, arguments, shown, install) in [
        ("mpirun.openmpi", &oversubscribe[..], "Open MPI", "apt install openmpi-bin"),
        ("mpiexec.hydra", &["-n", "3"], "MPICH (PMI)", "apt install mpich"),
        ("torchrun", &torchrun, "torchrun", "pip install torch"),
    ] {
        match under(launcher, arguments) {
            Some(met) => assert_eq!(met, [0, 1, 2].map(|rank| format!("{shown} rank {rank} sum 303"))),
            None => eprintln!("skipped: no {launcher} here ({install})"),
        }
    }
}
