//! A rank that is killed on one of several hosts over MPI: survivors name it and end, and the run goes on from its newest
//! checkpoint with the same bits.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::mpi_jobs::{LAUNCHERS, command, command_of, of_golden, outcome, run};
use super::running::Running;
use super::{text, train, written};
use crate::namespaces::Hosts;

const MODEL: &str = "llama-one-kv-head";

/// Enough steps to be killed in their middle.
const FLAGS: [&str; 10] = [
    "--fp32",
    "true",
    "--learning-rate",
    "1e-3",
    "--max-steps",
    "300",
    "--save-steps",
    "20",
    "--per-device-train-batch-size",
    "2",
];

/// A script that runs a rank and keeps its exit code in `ends`. MPICH sends SIGUSR1 to process groups.
fn keeping_exit_codes(folder: &Path) -> String {
    let path = folder.join("rank.sh");
    let script = format!(
        "#!/bin/sh\ntrap '' USR1\n{} \"$@\"\ncode=$?\necho \"rank ${{OMPI_COMM_WORLD_RANK-$PMI_RANK}} exit $code\" >>{}/ends\nexit $code\n",
        env!("CARGO_BIN_EXE_zeroth"),
        folder.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    text(&path).to_owned()
}

/// Kills a rank on its host, by the number that MPI's launcher gave it.
fn kill(hosts: &Hosts, host: usize, rank: usize) {
    let line = format!(
        "for p in /proc/[0-9]*; do grep -qs '^zeroth' $p/comm && tr '\\0' '\\n' <$p/environ | grep -qxE \
         '(PMI_RANK|OMPI_COMM_WORLD_RANK)={rank}' && kill -KILL ${{p#/proc/}} && echo killed; done; true"
    );
    let said = hosts.shell(host, &line);
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "killed");
}

#[test]
fn survivors_name_a_killed_rank_and_a_resumed_run_has_the_same_bits() {
    let mut expected = None;
    for launcher in LAUNCHERS {
        let Some(hosts) = Hosts::up(2, &[launcher]) else { continue };
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("run");
        let flags = [&FLAGS[..], &["--deepspeed", "zero3", "--resume", "auto"]].concat();
        let arguments = of_golden(MODEL, &output, &flags);
        let script = keeping_exit_codes(folder.path());
        let mut command_line = command_of(&hosts, launcher, "2,2", &script, &arguments);
        // MPICH ends all ranks with the first otherwise.
        let options = if launcher == "mpich" { "-disable-auto-cleanup" } else { "" };
        command_line.env("MPIRUN_OPTIONS", options);
        let mut running = Running::spawn(folder.path(), command_line);
        running.wait_for_steps(&output, 45);
        let began = Instant::now();
        kill(&hosts, 2, 3);
        let (status, _) = running.end(Duration::from_secs(20));
        let said = running.said();
        assert!(status.is_some_and(|status| !status.success()), "{launcher}: {said}");
        assert!(began.elapsed() < Duration::from_secs(10), "{launcher}: {:?}", began.elapsed());
        // MPICH's daemon kills the other ranks of the host, too.
        let survivors = if launcher == "mpich" { &[0, 1][..] } else { &[0, 1, 2] };
        let ends = fs::read_to_string(folder.path().join("ends")).unwrap();
        let host = hosts.host_name(2);
        for rank in survivors {
            let of_rank = said.lines().find(|line| line.contains(&format!("rank {rank} was in step ")));
            let names = of_rank.is_some_and(|line| {
                line.contains("rank 3 (host ") && line.contains(&host) && line.contains(", op ")
            });
            assert!(names, "{launcher}: rank {rank}: {said}");
        }
        // mpirun may end the script before it has written.
        let codes: Vec<&str> = ends.lines().filter(|line| !line.starts_with("rank 3 ")).collect();
        let failed = codes.iter().all(|line| line.ends_with(" exit 1"));
        assert!(failed && !codes.is_empty(), "{launcher}: {ends}");
        run(folder.path(), command(&hosts, launcher, "2,2", &arguments));
        let found = outcome(&output, "model.safetensors");
        let expected = expected.get_or_insert_with(|| {
            let own = folder.path().join("own");
            let config = r#"{"zero_optimization": {"stage": 3}, "zeroth": {"sum_group": 2}}"#;
            let config = written(folder.path(), "groups.json", &[config]);
            let flags = [&FLAGS[..], &["--ranks", "4", "--deepspeed", text(&config)]].concat();
            train(MODEL, &own, &flags).assert_done();
            outcome(&own, "model.safetensors")
        });
        assert_eq!(found.0, expected.0, "{launcher}");
        assert!(found.1 == expected.1, "{launcher}: other weights");
    }
}
