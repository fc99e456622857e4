//! A rank that the system kills for lack of memory: a real control group with a small limit, where one can be made.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "how a process tells its test, and a test that it skips"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

use zeroth_comm::JoinOptions;
use zeroth_comm::OpName;
use zeroth_comm::launch::RankLauncher;
use zeroth_comm::local::join_from_environment;

const ROLE: &str = "ZEROTH_COMM_TEST";
/// Whole pages: the system rounds.
const LIMIT: u64 = 64_000_000;

#[test]
#[ignore = "the launcher and the ranks of the other test, which starts them as processes"]
fn started_process() {
    match std::env::var(ROLE).as_deref() {
        Ok("launcher") => {
            let report = RankLauncher::new(std::env::current_exe().unwrap(), 2, 0)
                .arguments(["starved::started_process", "--exact", "--ignored", "--nocapture"])
                .variable(ROLE, "rank")
                .planned(300_000_000)
                .run()
                .unwrap();
            println!("report: {report}");
        }
        Ok("rank") => {
            let comm =
                join_from_environment(&JoinOptions::default()).unwrap().expect("started by a launcher");
            comm.barrier(OpName::new(1, "start", 0)).unwrap().wait().unwrap();
            if comm.rank() == 1 {
                // Touched page by page, and bounded: where no limit holds, the test fails and the machine does not.
                let eaten = vec![1_u8; 5 * LIMIT as usize];
                println!("still here with {} bytes", eaten.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            }
            let _ = comm.barrier(OpName::new(2, "update", 7)).and_then(zeroth_comm::Handle::wait);
        }
        _ => {}
    }
}

/// A group below our own that may hold processes and a limit; removed with this value.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let membership = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let line = |controllers: &str| {
            membership.lines().find_map(|line| {
                let (names, path) = line.split_once(':')?.1.split_once(':')?;
                names.split(',').any(|name| name == controllers).then_some(path.trim_start_matches('/'))
            })
        };
        let mounted = Path::new("/sys/fs/cgroup");
        let (parent, file) = match (line("memory"), line("")) {
            (Some(path), _) => (mounted.join("memory").join(path), "memory.limit_in_bytes"),
            (None, Some(path)) => (mounted.join(path), "memory.max"),
            (None, None) => return Err("there is no control group for memory".to_owned()),
        };
        let group = Self(parent.join(format!("zeroth-test-{}", std::process::id())));
        let wrong =
            |what: &str, error: std::io::Error| format!("cannot {what} {}: {error}", group.0.display());
        std::fs::create_dir(&group.0).map_err(|error| wrong("make the control group", error))?;
        if !group.0.join(file).exists() {
            return Err(format!("{} has no {file}: its parent does not hand memory on", group.0.display()));
        }
        std::fs::write(group.0.join(file), LIMIT.to_string()).map_err(|error| wrong("limit", error))?;
        // Memory must not go to a swap file instead; a machine without one has no such file.
        let _ = std::fs::write(group.0.join("memory.swap.max"), "0");
        let _ = std::fs::write(group.0.join("memory.memsw.limit_in_bytes"), LIMIT.to_string());
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_rank_killed_for_lack_of_memory_is_explained_with_the_limit_and_the_plan() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => {
            eprintln!("skipped: {why} (root may make one: systemd-run --scope -p Delegate=yes)");
            return;
        }
    };
    let output = Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$GROUP/cgroup.procs\" && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["starved::started_process", "--exact", "--ignored", "--nocapture"])
        .env("GROUP", &group.0)
        .env(ROLE, "launcher")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let report = said.split("report: ").nth(1).unwrap_or_else(|| panic!("{said}\n{output:?}"));
    let limit = zeroth_base::format_bytes(LIMIT);
    let why = format!(
        "killed by SIGKILL: the system killed it for lack of memory (limit of the control group: {limit}, plan: 300 MB \
         a rank); it was after step 1, op start#0"
    );
    assert!(report.starts_with("the job ended with rank 1 (pid ") && report.contains(&why), "{report}");
}
