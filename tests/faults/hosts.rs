//! A run that goes on on another host after each kill, in one folder that all hosts see. Hosts are namespaces on this machine:
//! names, processes and boots of their own. Process ids are small and equal on all of them.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::cases;
use super::chance::Chance;
use super::inject::LIMIT;
use super::job::Job;

const AUDIT: u32 = 2000;
/// What another host that lives holds in the folder of checkpoints.
const LIVE: &str = ".step-3.unfinished-00000001-00000002-1-1";

/// Starts a command on a host: the shell before it gives it a boot of its own.
fn on_host(folder: &Path, host: u32, command: &[&str]) -> Command {
    let boot = folder.join(format!("boot-{host}"));
    if !boot.exists() {
        fs::write(&boot, format!("{host:08x}-0000-4000-8000-000000000000\n")).unwrap();
    }
    let script = format!(
        "mount --bind {} /proc/sys/kernel/random/boot_id && hostname host-{host} && exec \"$@\"",
        boot.display()
    );
    let mut unshare = Command::new("unshare");
    unshare
        .args([
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            &script,
            "sh",
        ])
        .args(command)
        .env("NO_COLOR", "1")
        // All hosts share it: names must not collide.
        .env("ZEROTH_CACHE", folder.join("cache"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0);
    unshare
}

/// Whether this user can make hosts; says why not.
fn can_make_hosts(folder: &Path) -> bool {
    let tried = on_host(folder, 1, &["true"]).stderr(Stdio::piped()).output();
    match tried {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            println!("skipped: hosts need root: {}", String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            println!("skipped: hosts need unshare (util-linux): {error}");
            false
        }
    }
}

fn children(process: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Waits for a command; true if it ended with success. What it says goes to `said`.
fn wait(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(begun.elapsed() < LIMIT, "it hangs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process of a host that lives: it renews what it holds, as a long save does.
struct LiveHost(Child);

impl LiveHost {
    fn new(folder: &Path, checkpoints: &Path) -> Self {
        let held = checkpoints.join(LIVE);
        fs::create_dir_all(&held).unwrap();
        fs::write(held.join("rank-00000-of-00002.safetensors"), "half").unwrap();
        let script = format!("while :; do touch '{}'; sleep 5; done", held.display());
        Self(on_host(folder, 9, &["sh", "-c", &script]).spawn().unwrap())
    }
}

impl Drop for LiveHost {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Removes what killed processes of hosts have not finished, and checks that it is no more than that.
fn remove_unfinished(run: &Path) {
    for folder in [run.to_owned(), run.join("model"), run.join("checkpoints"), run.join("logs")] {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let hidden = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"."));
        for path in hidden.map(|entry| entry.path()) {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let is_known = [".unfinished-", ".removed-", ".replaced-"].iter().any(|mark| name.contains(mark));
            assert!(is_known || name == ".lock", "{}", path.display());
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
    }
}

#[test]
fn kills_on_hosts_that_share_a_folder_lose_nothing() {
    let job = Job::new();
    let folder = job.path("hosts");
    fs::create_dir(&folder).unwrap();
    if !can_make_hosts(&folder) {
        return;
    }
    let binary = env!("CARGO_BIN_EXE_zeroth");
    let command = |run: &Path| -> Vec<String> {
        std::iter::once(binary.to_owned()).chain(job.arguments(run, &[])).collect()
    };
    let start = |run: &Path, host: u32| {
        let command = command(run);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        on_host(&folder, host, &command)
            .stderr(fs::File::create(folder.join("said")).unwrap())
            .spawn()
            .unwrap()
    };
    let said = || fs::read_to_string(folder.join("said")).unwrap_or_default();
    let whole = job.path("whole");
    let begun = Instant::now();
    assert_eq!(wait(&mut start(&whole, 1)), Some(0), "{}", said());
    let (takes, expected) = (begun.elapsed(), Job::left(&whole).unwrap());
    let wanted = cases(4, 50);
    let (mut kills, mut runs, mut case) = (0, 0, 0);
    while kills < wanted {
        runs += 1;
        let run: PathBuf = job.path(&format!("run-{runs}"));
        let live = LiveHost::new(&folder, &run.join("checkpoints"));
        loop {
            case += 1;
            let mut chance = Chance::of(AUDIT, case);
            let mut child = start(&run, 1 + case % 2);
            if kills < wanted {
                std::thread::sleep(takes.mul_f64(chance.below(1200) as f64 / 1000.0));
                let launcher = children(child.id());
                let ranks: Vec<u32> = launcher.iter().flat_map(|launcher| children(*launcher)).collect();
                let victims = match chance.below(3) {
                    0 => launcher,
                    1 => ranks.into_iter().take(1).collect(),
                    _ => vec![child.id()],
                };
                let is_running = child.try_wait().unwrap().is_none() && !victims.is_empty();
                kills += u32::from(is_running);
                for victim in victims.iter().filter(|_| is_running) {
                    let _ = Command::new("kill").args(["-KILL", &victim.to_string()]).output();
                }
            }
            let code = wait(&mut child);
            let place = format!("kill {kills}, case {case}");
            assert!(!said().contains("panicked") && !said().contains("was skipped"), "{place}: {}", said());
            assert!(code != Some(2), "{place}: refused: {}", said());
            assert_eq!(Job::damaged(&run), Vec::<String>::new(), "{place}");
            assert!(run.join("checkpoints").join(LIVE).exists(), "{place}: it was of a host that lives");
            if code == Some(0) {
                break;
            }
        }
        drop(live);
        remove_unfinished(&run);
        let difference = Job::left(&run).unwrap().difference(&expected);
        assert_eq!(difference, None, "after {kills} kills");
    }
    println!("{kills} kills on two hosts in {runs} runs, each with the bits of an unbroken one");
}

#[test]
fn a_second_job_of_another_host_is_refused_by_name() {
    let job = Job::new();
    let folder = job.path("hosts");
    fs::create_dir(&folder).unwrap();
    if !can_make_hosts(&folder) {
        return;
    }
    let run = job.path("run");
    let more = ["--max-steps", "100000", "--save-steps", "0"];
    let arguments = job.arguments(&run, &more);
    let command: Vec<&str> =
        std::iter::once(env!("CARGO_BIN_EXE_zeroth")).chain(arguments.iter().map(String::as_str)).collect();
    let mut first = on_host(&folder, 1, &command).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(20));
    }
    let second = on_host(&folder, 2, &command).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    let is_refused = said.contains("is in use by another command (process 1 on host host-1)");
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(second.status.code() == Some(2) && is_refused, "{said}");
}
