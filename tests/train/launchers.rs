//! Ranks of external launchers train to the same bits as ranks of zeroth's launcher.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{cache, golden, metrics, text, train};

const FLAGS: [&str; 6] = ["--deepspeed", "zero3", "--max-steps", "6", "--save-steps", "3"];

/// Arguments of one rank.
fn arguments(output: &Path) -> Vec<String> {
    let model = golden("llama-one-kv-head");
    let data = model.join("data.jsonl");
    let named = ["train", "--device", "cpu", "--shuffle", "false", "--threads-per-rank", "1"];
    let places = ["--model", text(&model), "--data", text(&data), "--output", text(output)];
    named.into_iter().chain(places).chain(FLAGS).map(str::to_owned).collect()
}

/// A run of two ranks of zeroth's launcher.
fn expected(folder: &Path) -> std::path::PathBuf {
    let run = folder.join("own");
    train("llama-one-kv-head", &run, &[&FLAGS[..], &["--ranks", "2", "--threads-per-rank", "1"]].concat())
        .assert_done();
    run
}

fn assert_same(one: &Path, other: &Path) {
    let losses = |run: &Path| metrics(run).iter().map(|line| line["loss"].to_string()).collect::<Vec<_>>();
    assert_eq!(losses(one), losses(other));
    for file in ["model/model.safetensors", "checkpoints/step-6/rank-00001-of-00002.safetensors"] {
        assert!(fs::read(one.join(file)).unwrap() == fs::read(other.join(file)).unwrap(), "{file}");
    }
}

/// Two ranks with torchrun's environment variables.
fn as_torchrun(output: &Path, port: &str) -> [Child; 2] {
    ["0", "1"].map(|rank| {
        Command::new(env!("CARGO_BIN_EXE_zeroth"))
            .args(arguments(output))
            .envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29400"), ("TORCHELASTIC_RUN_ID", port)])
            .env("ZEROTH_CACHE", cache())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    })
}

#[test]
fn torchrun_ranks_train_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let own = expected(folder.path());
    let run = folder.path().join("torchrun");
    for rank in as_torchrun(&run, &format!("{}", std::process::id())) {
        let ended = rank.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    assert_same(&own, &run);
}

#[test]
fn a_refusal_of_rank_0_ends_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    fs::write(&run, "a file is in the way").unwrap();
    let ranks = as_torchrun(&run, &format!("{}1", std::process::id()));
    let ended = ranks.map(|rank| rank.wait_with_output().unwrap());
    let said = ended.each_ref().map(|rank| String::from_utf8_lossy(&rank.stderr).into_owned());
    assert_eq!(ended.map(|rank| rank.status.code()), [Some(2), Some(2)], "{said:?}");
    assert!(said[0].contains("is a file: --output must be a folder"), "{said:?}");
    assert!(!said[1].contains("error"), "one says it: {said:?}");
}

#[test]
fn mpirun_ranks_train_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let mut own = None;
    for (program, more) in
        [("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe"][..]), ("mpiexec.hydra", &[])]
    {
        let run = folder.path().join(program);
        let started = Command::new(program)
            .args(more)
            .args(["-n", "2", env!("CARGO_BIN_EXE_zeroth")])
            .args(arguments(&run))
            .env("ZEROTH_CACHE", cache())
            .output();
        let Ok(ended) = started else {
            println!("skipped: {program} is not installed (apt-get install openmpi-bin mpich)");
            continue;
        };
        assert!(ended.status.success(), "{program}: {}", String::from_utf8_lossy(&ended.stderr));
        assert_same(own.get_or_insert_with(|| expected(folder.path())), &run);
    }
}
