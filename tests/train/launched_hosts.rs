//! `zeroth launch`: hosts of a hostfile, with a script in place of ssh that runs the command on this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::{cache, golden, metrics, text, train, written};

const FLAGS: [&str; 8] =
    ["--deepspeed", "zero3", "--max-steps", "6", "--save-steps", "3", "--threads-per-rank", "1"];

/// A folder with `ssh` in it. It keeps what it was called with in `calls`, and its process id in `shells`. What it runs goes on
/// when it is killed, as on another host, and reads the end of its input then.
fn shell(folder: &Path) -> PathBuf {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let ssh = bin.join("ssh");
    let script = format!(
        "#!/bin/sh
echo $$ >>{0}/shells
echo \"$@\" >>{0}/calls
while [ $# -gt 2 ]; do shift; done
mkfifo {0}/input-$$
exec 3<&0
setsid sh -c \"$2\" <{0}/input-$$ &
remote=$!
cat <&3 >{0}/input-$$ &
wait $remote
code=$?
kill $!
exit $code
",
        folder.display()
    );
    fs::write(&ssh, script).unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
    bin
}

/// `zeroth launch` of a training run.
fn launch(folder: &Path, launcher: &[&str], run: &Path, more: &[&str]) -> Command {
    let model = golden("llama-one-kv-head");
    let data = model.join("data.jsonl");
    let path = format!("{}:{}", shell(folder).display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
    command
        .arg("launch")
        .args(launcher)
        .args(["--", "train", "--device", "cpu", "--shuffle", "false"])
        .args(["--model", text(&model), "--data", text(&data), "--output", text(run)])
        .args(more)
        .env("PATH", path)
        .env("ZEROTH_CACHE", cache())
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn said(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stderr).into_owned()
}

/// The same run by `train`.
fn expected(folder: &Path) -> PathBuf {
    let run = folder.join("own");
    train("llama-one-kv-head", &run, &[&FLAGS[..], &["--ranks", "2"]].concat()).assert_done();
    run
}

fn assert_same(one: &Path, other: &Path) {
    let losses = |run: &Path| metrics(run).iter().map(|line| line["loss"].to_string()).collect::<Vec<_>>();
    assert_eq!(losses(one), losses(other));
    for file in ["model/model.safetensors", "checkpoints/step-6/rank-00001-of-00002.safetensors"] {
        assert!(fs::read(one.join(file)).unwrap() == fs::read(other.join(file)).unwrap(), "{file}");
    }
}

/// Processes whose command line names a run.
fn processes(run: &Path) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let names_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text(run))
    };
    pids.filter(names_it).collect()
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_mins(2), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run of many steps on one host over ssh, after its third.
fn long_run(folder: &Path, run: &Path) -> Child {
    let hosts = written(folder, "hosts.txt", &["worker slots=2"]);
    let flags =
        ["--deepspeed", "zero3", "--max-steps", "100000", "--save-steps", "0", "--save-strategy", "steps"];
    let child = launch(folder, &["--hostfile", text(&hosts)], run, &flags).spawn().unwrap();
    let steps = || fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count();
    wait_until("three steps", || steps() >= 3);
    child
}

fn signal(process: u32, name: &str) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

#[test]
fn a_launched_host_trains_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let own = expected(folder.path());
    let hosts = written(folder.path(), "hosts.txt", &["# one host", "worker slots=4\r", "other slots=1"]);
    let over_ssh = ["--hostfile", text(&hosts), "--include", "worker:0,1", "--ssh-port", "2222"];
    let here = ["--no-ssh", "--nnodes", "1", "--node-rank", "0", "--master-addr", "localhost"];
    let here = [&here[..], &["--nproc-per-node", "2"]].concat();
    // Needs no ssh: it becomes `train`.
    let local = written(folder.path(), "local.txt", &["localhost slots=2"]);
    let local = ["--hostfile", text(&local)];
    for (name, launcher) in [("ssh", &over_ssh[..]), ("here", &here), ("local", &local)] {
        let run = folder.path().join(name);
        let ended = launch(folder.path(), launcher, &run, &FLAGS).output().unwrap();
        assert!(ended.status.success(), "{name}: {}", said(&ended));
        assert_same(&own, &run);
        assert!(processes(&run).is_empty());
    }
    let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
    assert_eq!(calls.lines().count(), 1);
    assert!(calls.contains("-o BatchMode=yes") && calls.contains("-p 2222 worker cd "), "{calls}");
    assert!(!calls.contains("ZEROTH_JOB_TOKEN") && !calls.contains("ZEROTH_CACHE"), "{calls}");
}

#[test]
fn ctrl_c_saves_on_the_host_and_leaves_no_process() {
    let folder = tempfile::tempdir().unwrap();
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let run = folder.path().join(name);
        let child = long_run(folder.path(), &run);
        signal(child.id(), name);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(code), "{}", said(&ended));
        let steps = metrics(&run).len();
        assert!(run.join(format!("checkpoints/step-{steps}/manifest.json")).exists(), "{}", said(&ended));
        assert!(processes(&run).is_empty());
    }
}

#[test]
fn a_killed_ssh_or_launcher_lets_ranks_save_and_end() {
    let folder = tempfile::tempdir().unwrap();
    for what in ["ssh", "launcher"] {
        let run = folder.path().join(what);
        let mut child = long_run(folder.path(), &run);
        let shells = fs::read_to_string(folder.path().join("shells")).unwrap();
        let shell = shells.lines().last().unwrap().parse().unwrap();
        signal(if what == "ssh" { shell } else { child.id() }, "-KILL");
        let ended = child.wait().unwrap();
        assert_eq!(ended.code(), (what == "ssh").then_some(1), "{what}");
        wait_until("no process is left", || processes(&run).is_empty());
        let steps = metrics(&run).len();
        assert!(run.join(format!("checkpoints/step-{steps}/manifest.json")).exists(), "{what}");
    }
}

#[test]
fn a_killed_rank_starts_the_job_again_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let own = expected(folder.path());
    let run = folder.path().join("again");
    let hosts = written(folder.path(), "hosts.txt", &["worker slots=2"]);
    let launcher = ["--hostfile", text(&hosts), "--max-restarts", "1"];
    let child = launch(folder.path(), &launcher, &run, &FLAGS).spawn().unwrap();
    wait_until("a checkpoint", || run.join("checkpoints/step-3/manifest.json").exists());
    let is_rank = |pid: &u32| {
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&variables).contains("LOCAL_RANK=1\0")
    };
    if let Some(rank) = processes(&run).into_iter().find(is_rank) {
        let _ = Command::new("kill").args(["-KILL", &rank.to_string()]).status();
    }
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", said(&ended));
    assert_same(&own, &run);
}

#[test]
fn wrong_hosts_and_commands_are_refused_before_anything_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let two = written(folder.path(), "two.txt", &["n1 slots=1", "n2 slots=1"]);
    let bad = written(folder.path(), "bad.txt", &["n1 slots=1", "n1 slots=2"]);
    let local = written(folder.path(), "local.txt", &["10.1.2.3 slots=1", "localhost slots=1"]);
    for (launcher, more, words) in [
        (
            &["--hostfile", text(&bad)][..],
            &[][..],
            "bad.txt: line 2: n1 is listed a second time, first in line 1",
        ),
        (&["--hostfile", text(&two), "--include", "n3"], &[], "two.txt has no host \"n3\""),
        (&["--hostfile", text(&local)], &[], "local.txt: line 2: localhost is "),
        (
            &["--hostfile", text(&two)],
            &[],
            "CPU ranks on several hosts need an MPI launcher: give --launcher openmpi",
        ),
        (&["--hostfile", text(&two)], &["--max-stepz", "1"], "`zeroth train` has no flag --max-stepz"),
        (&["--hostfile", text(&two), "--nnodes", "2", "--no-ssh"], &[], "--hostfile and --nnodes: "),
        (
            &["--no-ssh", "--nnodes", "1", "--node-rank", "1", "--master-addr", "a"],
            &[],
            "--node-rank is 1, but there is 1 host",
        ),
        (&["--no-ssh", "--nnodes", "1"], &[], "--nnodes needs --master-addr"),
    ] {
        let ended = launch(folder.path(), launcher, &run, more).output().unwrap();
        assert_eq!(ended.status.code(), Some(2), "{launcher:?}: {}", said(&ended));
        assert!(said(&ended).contains(words), "{launcher:?}: {}", said(&ended));
    }
    assert!(!folder.path().join("calls").exists() && !run.exists());
}

#[test]
fn a_dry_run_for_hosts_compiles_their_groups_and_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let hosts = ["--hosts", "2", "--ranks-per-host", "2"];
    let ended = train("qwen3-tied", &output, &[&hosts[..], &["--dry-run"]].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("2 ranks a host, in groups of 2: a host receives"), "{}", ended.stderr);
    let dumped = train("qwen3-tied", &output, &[&hosts[..], &["--dump-program"]].concat());
    assert!(dumped.stdout.contains("ranks 4 in groups of 2"), "{}", dumped.stdout);
    let refused = train("qwen3-tied", &output, &hosts);
    assert_eq!(refused.code, 2);
    assert!(
        refused.stderr.contains("add --dry-run, or start ranks on several hosts with zeroth launch"),
        "{}",
        refused.stderr
    );
}
