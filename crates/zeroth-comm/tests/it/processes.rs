//! Ranks that are real processes: started, killed, stopped.
//!
//! A rank is this test binary again, told by `ZEROTH_COMM_TEST` to run only `rank_process`, which is ignored
//! otherwise, and which part to play.
#![allow(clippy::print_stdout, reason = "how a rank tells its test")]
#![allow(unsafe_code, reason = "hands a descriptor to a child")]

use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, getpid, kill_process};
use zeroth_comm::launch::{ExitReason, LaunchReport, OutputLine, RankLauncher, RankOutput};
use zeroth_comm::local::{JOB_FD, JOB_TOKEN, LocalJob, RANK, WORLD, join_from_environment};
use zeroth_comm::{Comm, JoinOptions, OpName, Timing};

use crate::model;

const ROLE: &str = "ZEROTH_COMM_TEST";
const ARGUMENTS: [&str; 4] = ["processes::rank_process", "--exact", "--ignored", "--nocapture"];
const REGION: usize = 4000;

#[test]
#[ignore = "a rank of the other tests, which start it as a process"]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role == "launcher" {
        launch("idle", 2).run().unwrap();
        return;
    }
    let timing = Timing { lost: Duration::from_secs(5), ..Timing::default() };
    let options = JoinOptions::default().timing(timing);
    let comm = join_from_environment(&options).unwrap().expect("started by a launcher");
    match role.as_str() {
        "exchange" => model::cases(comm.world(), REGION).iter().for_each(|case| case.run(&*comm).unwrap()),
        "dies" => lose(&*comm, Signal::KILL),
        "stops" => lose(&*comm, Signal::STOP),
        "fails" => {
            comm.barrier(OpName::new(1, "start", 0)).unwrap().wait().unwrap();
            assert_ne!(comm.rank(), 1, "this rank fails");
            let error =
                comm.barrier(OpName::new(2, "update", 1)).and_then(zeroth_comm::Handle::wait).unwrap_err();
            println!("told: {error}");
        }
        "idle" => {
            println!("pid {}", std::process::id());
            std::thread::sleep(Duration::from_mins(10));
        }
        other => panic!("no such role: {other}"),
    }
}

/// Some steps of all_gather; in step 3 the last rank gets `signal` after it has published its first piece.
fn lose(comm: &dyn Comm, signal: Signal) {
    let counts = vec![3 * REGION; comm.world()];
    let (send, mut recv) = (vec![1; counts[0]], vec![0; counts.iter().sum()]);
    for step in 1..=3 {
        let began = Instant::now();
        let handle =
            comm.all_gather(OpName::new(step, "gather layers", 17), &send, &mut recv, &counts).unwrap();
        if step == 3 && comm.rank() + 1 == comm.world() {
            kill_process(getpid(), signal).unwrap();
            // The signal reaches another thread first, perhaps: this one must not finish the collective meanwhile.
            std::thread::sleep(Duration::from_mins(1));
            panic!("{signal:?} did not arrive");
        }
        if let Err(error) = handle.wait() {
            println!("told after {} s: {error}", began.elapsed().as_secs());
        }
    }
}

fn launch(role: &str, world: usize) -> RankLauncher {
    RankLauncher::new(std::env::current_exe().unwrap(), world, REGION)
        .arguments(ARGUMENTS)
        .variable(ROLE, role)
}

/// Runs a launch and keeps the lines of its ranks.
fn run(launch: RankLauncher) -> (LaunchReport, Vec<OutputLine>) {
    let lines: Arc<Mutex<Vec<OutputLine>>> = Arc::default();
    let keep = Arc::clone(&lines);
    let report = launch
        .output(RankOutput::Lines(Arc::new(move |line| keep.lock().unwrap().push(line))))
        .run()
        .unwrap();
    let lines = lines.lock().unwrap().clone();
    (report, lines)
}

/// A rank with no launcher that would tell it of the others: it must find out by itself.
fn unwatched(job: &LocalJob, role: &str, rank: usize) -> Command {
    let file = job.fd().as_raw_fd();
    let mut command = Command::new(std::env::current_exe().unwrap());
    // In the child only: other tests of this process start children too, which must not inherit it.
    // SAFETY: one system call between fork and exec, on a descriptor that `job` keeps open.
    unsafe {
        command.pre_exec(move || {
            rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(file), FdFlags::empty()).map_err(Into::into)
        });
    }
    command
        .args(ARGUMENTS)
        .env(ROLE, role)
        .env(RANK, rank.to_string())
        .env(WORLD, job.world().to_string())
        .env(JOB_FD, file.to_string())
        .env(JOB_TOKEN, job.token().to_string())
        .stdout(Stdio::piped());
    command
}

fn start_unwatched(job: &LocalJob, role: &str) -> Vec<Child> {
    (0..job.world()).map(|rank| unwatched(job, role, rank).spawn().unwrap()).collect()
}

/// Ends the last of three ranks in the middle of an all_gather; what the other two were told.
fn told(role: &str) -> Vec<String> {
    let job = LocalJob::create(3, REGION).unwrap();
    let mut ranks = start_unwatched(&job, role);
    let mut victim = ranks.pop().unwrap();
    let told = ranks
        .into_iter()
        .map(|rank| {
            let output = rank.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines()
                .find(|line| line.contains("told after"))
                .expect("the rank tells what it was told")
                .to_owned()
        })
        .collect();
    assert_eq!(job.status(2).unwrap().pid, Some(victim.id()));
    victim.kill().unwrap();
    victim.wait().unwrap();
    told
}

fn seconds(told: &str) -> u64 {
    let after = told.split("told after ").nth(1).unwrap();
    after.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn two_three_and_five_processes_move_what_the_model_says() {
    for world in [2, 3, 5] {
        let (report, lines) = run(launch("exchange", world));
        assert!(report.success(), "{report}\n{lines:#?}");
        assert_eq!(report.lost, None);
    }
}

#[test]
fn a_rank_killed_in_an_all_gather_is_named_with_step_and_op_by_all_others() {
    for (rank, told) in told("dies").iter().enumerate() {
        assert!(told.contains("rank 2 (host ") && told.contains(") is dead"), "{told}");
        assert!(told.contains("it was in step 3, op gather layers#17"), "{told}");
        assert!(told.contains(&format!("rank {rank} was in step 3, op gather layers#17")), "{told}");
        assert!(seconds(told) < 10, "{told}");
    }
}

#[test]
fn a_rank_stopped_in_an_all_gather_is_named_after_five_seconds() {
    for told in told("stops") {
        assert!(told.contains("rank 2 (host ") && told.contains("has not moved for 5 s"), "{told}");
        assert!(told.contains("it was in step 3, op gather layers#17"), "{told}");
        assert!((5..10).contains(&seconds(&told)), "{told}");
    }
}

#[test]
fn the_first_failure_ends_the_job_and_the_report_names_it() {
    let (report, lines) = run(launch("fails", 3));
    assert_eq!(report.first, Some(1), "{report}");
    assert!(matches!(report.ranks[1].how, ExitReason::Exited { code } if code != 0), "{report}");
    let lost = report.lost.as_ref().unwrap();
    assert_eq!((lost.rank, lost.last.as_ref().unwrap().name.as_str()), (1, "start"));
    for rank in [0, 2] {
        let told = lines.iter().find(|line| line.rank == rank && line.text.contains("told: rank 1 ("));
        assert!(told.is_some(), "{lines:#?}");
        assert_eq!(report.ranks[rank].how, ExitReason::Exited { code: 0 });
    }
}

#[test]
fn ranks_that_do_not_end_by_themselves_get_sigterm_and_then_sigkill() {
    let script = "case $ZEROTH_RANK in \
        0) while :; do sleep 0.1; done;; \
        1) trap '' TERM; while :; do sleep 0.1; done;; \
        *) sleep 0.3; echo goodbye; echo trouble >&2; exit 4;; esac";
    let sh = RankLauncher::new("/bin/sh", 3, 0).arguments(["-c", script]).grace(Duration::from_millis(300));
    let (report, lines) = run(sh);
    let shown: Vec<String> =
        report.ranks.iter().map(|end| format!("{} {}", end.how, end.by_launcher)).collect();
    assert_eq!(shown, ["killed by SIGTERM true", "killed by SIGKILL true", "exit code 4 false"]);
    assert_eq!(report.first, Some(2));
    assert!(report.to_string().starts_with("the job ended with rank 2 ("), "{report}");
    assert!(report.ranks.iter().all(|end| end.out_of_memory.is_none()), "a kill of ours is not the system's");
    let mut shown: Vec<String> = lines.iter().map(OutputLine::to_string).collect();
    shown.sort();
    assert_eq!(shown, ["[rank 2] goodbye", "[rank 2] trouble"]);
}

#[test]
fn a_launcher_that_is_told_to_stop_ends_all_ranks_and_blames_none() {
    let stop = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&stop);
    let output = RankOutput::Lines(Arc::new(move |line: OutputLine| {
        if line.text.contains("pid") {
            set.store(true, Ordering::Relaxed);
        }
    }));
    let report = launch("idle", 2).output(output).stop_when(stop).run().unwrap();
    assert!(
        report.ranks.iter().all(|end| end.how == ExitReason::Killed { signal: 15 } && end.by_launcher),
        "{report}"
    );
}

#[test]
fn a_program_that_is_not_there_is_an_error_that_names_it() {
    let error = RankLauncher::new("no-such-program", 2, 0).run().unwrap_err().to_string();
    assert!(error.contains("rank 0 as no-such-program"), "{error}");
}

#[test]
fn ranks_die_with_a_launcher_that_is_killed() {
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(ARGUMENTS)
        .env(ROLE, "launcher")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The test harness prints too, and its unfinished line comes before the pid.
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pid = |line: String| line.split("pid ").nth(1).map(|pid| pid.parse::<i32>().unwrap());
    let ranks: Vec<i32> = lines.filter_map(pid).take(2).collect();
    assert!(ranks.iter().all(|rank| running(*rank)));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let began = Instant::now();
    while ranks.iter().any(|rank| running(*rank)) {
        if began.elapsed() > Duration::from_secs(10) {
            for rank in &ranks {
                let _ = kill_process(Pid::from_raw(*rank).unwrap(), Signal::KILL);
            }
            panic!("ranks {ranks:?} outlive their launcher");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there and is no zombie.
fn running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[test]
fn an_environment_that_is_not_the_jobs_is_refused_with_the_reason() {
    let (job, other) = (LocalJob::create(2, REGION).unwrap(), LocalJob::create(2, REGION).unwrap());
    let token = other.token().to_string();
    for (name, value, reason) in [
        (JOB_TOKEN, token.as_str(), "Token"),
        (JOB_TOKEN, "12", "is not a job token"),
        (JOB_FD, "999", "names a descriptor that is not open"),
        (JOB_FD, "-1", "is not the number of a descriptor"),
        (JOB_FD, "1", "NotASegment"),
        (RANK, "2", "Rank { rank: 2, world: 2 }"),
        (WORLD, "", "is not a number of ranks"),
        (WORLD, "3", "is 3, but the job has 2 rank(s)"),
    ] {
        let output = unwatched(&job, "exchange", 0).env(name, value).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(reason), "{name}={value}: {said}");
        assert_eq!(job.status(0).unwrap().pid, None, "{name}={value} took the rank");
    }
}

#[test]
fn the_segment_is_gone_with_its_last_holder() {
    let job = LocalJob::create(2, REGION).unwrap();
    let inode = rustix::fs::fstat(job.fd()).unwrap().st_ino.to_string();
    let ranks = start_unwatched(&job, "exchange");
    assert!(holders(&inode).contains(&std::process::id()));
    drop(job);
    for rank in ranks {
        assert!(rank.wait_with_output().unwrap().status.success(), "ranks go on without the job's maker");
    }
    // A child that another test starts meanwhile holds it too, until it becomes its program.
    let began = Instant::now();
    while !holders(&inode).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(10), "{:?} still hold it", holders(&inode));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The processes that map a segment or have it open.
fn holders(inode: &str) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let entry = entry.ok()?;
        Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path()))
    });
    let holds = |folder: &std::path::Path| {
        let maps = std::fs::read_to_string(folder.join("maps")).unwrap_or_default();
        let mapped = maps
            .lines()
            .any(|line| line.contains("memfd:zeroth-job") && line.split_whitespace().nth(4) == Some(inode));
        let open = std::fs::read_dir(folder.join("fd")).into_iter().flatten().flatten().any(|entry| {
            let link = std::fs::read_link(entry.path()).unwrap_or_default();
            link.to_string_lossy().contains("memfd:zeroth-job")
                && std::fs::metadata(entry.path())
                    .is_ok_and(|file| std::os::unix::fs::MetadataExt::ino(&file).to_string() == inode)
        });
        mapped || open
    };
    processes.filter(|(_, folder)| holds(folder)).map(|(pid, _)| pid).collect()
}
