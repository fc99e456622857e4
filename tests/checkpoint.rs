//! `zeroth checkpoint`: inspects, verifies and exports valid and damaged checkpoints.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use zeroth::base::DType;
use zeroth::engine::StateKind;
use zeroth::kernel::Moment;
use zeroth::model::{ModelConfig, WeightFiles, read_config, table};
use zeroth::train::ModelFiles;
use zeroth::train::checkpoint::{
    BatchEntry, ControlState, DataEntry, FORMAT_VERSION, Manifest, ModelEntry, ShardPiece, ShardWriter,
    UnfinishedCheckpoint, ZEROTH_VERSION, now,
};

use crate::common::{Ended, zeroth_in};

const STATES: [StateKind; 3] =
    [StateKind::Weights, StateKind::Moment(Moment::First), StateKind::Moment(Moment::Second)];

/// A folder with a new model in `model` and checkpoints of these steps in `run`.
fn with_run(steps: &[u64]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let sizes = "init --family qwen3 --hidden 16 --layers 1 --heads 2 --kv-heads 1 --intermediate-size 32 \
                 --vocab-size 40 --tied --output model";
    let ended = zeroth_in(folder.path(), &sizes.split_whitespace().collect::<Vec<_>>());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    fs::write(folder.path().join("model/tokenizer.json"), "{}").unwrap();
    for step in steps {
        save(folder.path(), *step);
    }
    folder
}

/// Saves the model's weights as a bf16 run with zero moments would.
fn save(folder: &Path, step: u64) {
    let model = folder.join("model");
    let (config, origin) = read_config(&model).unwrap();
    let table = table(&ModelConfig::from_map(&config, &origin).unwrap());
    let weights = WeightFiles::open(&model, &table).unwrap();
    let unfinished = UnfinishedCheckpoint::begin(&folder.join("run/checkpoints"), step).unwrap();
    let pieces = STATES.into_iter().flat_map(|state| {
        table.iter().map(move |parameter| ShardPiece {
            state,
            name: parameter.name.clone(),
            first: 0,
            count: parameter.elements(),
            dtype: DType::F32,
        })
    });
    let mut part = ShardWriter::create(unfinished.path(), 0, 1, pieces.collect()).unwrap();
    for state in STATES {
        for parameter in table.iter() {
            let mut elements = vec![0.0; parameter.elements() as usize];
            if state == StateKind::Weights {
                weights.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
            }
            part.append_f32(&elements).unwrap();
        }
    }
    let written = part.finish().unwrap();
    written.sync().unwrap();
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        zeroth_version: ZEROTH_VERSION.to_owned(),
        created: now(),
        step,
        samples_seen: 8 * step,
        loss: Some(1.25),
        control: ControlState {
            applied: step,
            skipped: 0,
            loss_scale: 1.0,
            iteration: 0,
            last_overflow: -1,
            hysteresis_left: 1,
        },
        seed: 42,
        data: DataEntry { hash: "00".to_owned(), samples: 64, shuffle: true, seed: None },
        batch: BatchEntry { train_batch_size: 8, micro_batch: 2, accumulation: 4 },
        group: None,
        ranks: 1,
        stage: 2,
        dtype: DType::Bf16,
        optimizer: "AdamW".to_owned(),
        moments: DType::F32,
        model: ModelEntry::of("qwen3", &table, |_| true),
        states: STATES.to_vec(),
        weights_only: false,
        best: None,
        lora: None,
        distillation: None,
        config: json!({}),
        flags: BTreeMap::new(),
        files: vec![written.entry().clone()],
    };
    unfinished.commit(manifest, &ModelFiles::read(&model).unwrap()).unwrap();
}

fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn checkpoint(folder: &Path, line: &str) -> Ended {
    let arguments: Vec<&str> = ["checkpoint"].into_iter().chain(line.split_whitespace()).collect();
    let ended = zeroth_in(folder, &arguments);
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

fn result(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

#[test]
fn inspect_shows_one_checkpoint_or_all_of_a_run() {
    let folder = with_run(&[5, 10]);
    let ended = checkpoint(folder.path(), "inspect run/checkpoints/step-10");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    for shown in [
        "1.2500",
        "80 seen, 64 per epoch",
        "1, stage 2",
        "8 samples per step: 2 × 4 × 1 rank",
        "weights, first, second (AdamW, moments in fp32)",
        "rank-00000-of-00001.safetensors",
        "model/tokenizer.json",
    ] {
        assert!(ended.stdout.contains(shown), "{shown}:\n{}", ended.stdout);
    }
    let found = result(&checkpoint(folder.path(), "inspect run/checkpoints/step-10 --format json"));
    assert_eq!((&found["step"], &found["control"]["loss_scale"]), (&10.into(), &"1".into()));
    assert_eq!(found["states"], json!(["weights", "first", "second"]));

    for dir in ["run", "run/checkpoints"] {
        let ended = checkpoint(folder.path(), &format!("inspect {dir}"));
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        let newest: Vec<&str> = ended.stdout.lines().filter(|line| line.ends_with("newest")).collect();
        assert!(newest.len() == 1 && newest[0].starts_with("step-10 "), "{}", ended.stdout);
    }
    fs::remove_file(folder.path().join("run/checkpoints/step-10/model/config.json")).unwrap();
    let ended = checkpoint(folder.path(), "inspect run --format json");
    let found = result(&ended);
    assert_eq!((ended.code, &found["newest"]), (4, &5.into()));
    assert!(
        found["checkpoints"][1]["problem"]
            .as_str()
            .unwrap()
            .contains("config.json is listed in the manifest but missing")
    );
    let ended = checkpoint(folder.path(), "inspect run/checkpoints/step-10");
    assert!(
        ended.code == 4 && ended.stderr.contains("config.json is listed in the manifest but missing"),
        "{}",
        ended.stderr
    );
}

#[test]
fn verify_lists_damaged_files_and_exits_with_4() {
    let folder = with_run(&[5, 10]);
    let ended = checkpoint(folder.path(), "verify run/checkpoints/step-5");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains(" in 3 files verified in "), "{}", ended.stdout);

    let step = folder.path().join("run/checkpoints/step-10");
    damage(&step.join("rank-00000-of-00001.safetensors"));
    damage(&step.join("model/tokenizer.json"));
    let ended = checkpoint(folder.path(), "verify run/checkpoints/step-10");
    assert_eq!(ended.code, 4);
    for damaged in
        ["rank-00000-of-00001.safetensors is damaged: its SHA-256 is ", "tokenizer.json is damaged"]
    {
        assert!(ended.stderr.contains(damaged), "{}", ended.stderr);
    }
    let ended = checkpoint(folder.path(), "verify run --format json");
    let found = result(&ended);
    assert_eq!((ended.code, &found["ok"]), (4, &false.into()));
    assert_eq!(found["checkpoints"][0]["ok"], true);
    assert_eq!(found["checkpoints"][1]["problems"].as_array().unwrap().len(), 2);
}

#[test]
fn export_writes_the_saved_weights_and_picks_the_newest_valid_checkpoint() {
    let folder = with_run(&[5, 10]);
    let ended = checkpoint(folder.path(), "export run/checkpoints/step-10 --output out --format json");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let found = result(&ended);
    assert_eq!((&found["step"], &found["dtype"]), (&10.into(), &"bf16".into()), "16-bit runs give bf16");
    // The weights came from a bf16 model, so the file is identical.
    let weights = |name: &str| fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    assert_eq!(weights("out"), weights("model"));
    assert!(folder.path().join("out/tokenizer.json").exists());

    damage(&folder.path().join("run/checkpoints/step-10/rank-00000-of-00001.safetensors"));
    let ended = checkpoint(folder.path(), "export run/checkpoints/step-10 --output other");
    assert!(ended.code == 4 && ended.stderr.contains("is damaged"), "{}", ended.stderr);
    assert!(!folder.path().join("other").exists());
    let ended = checkpoint(folder.path(), "export run --output other --dtype fp32 --max-shard-size 4KB");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains("after 5 steps") && ended.stdout.contains("in fp32"), "{}", ended.stdout);
    assert!(ended.stderr.contains("skipped: "), "{}", ended.stderr);
    assert!(folder.path().join("other/model.safetensors.index.json").exists());
}

#[test]
fn invalid_checkpoint_paths_exit_with_2() {
    let folder = with_run(&[5]);
    fs::create_dir(folder.path().join("empty")).unwrap();
    for (line, phrase) in [
        ("inspect absent", "is not a checkpoint: it has no manifest.json"),
        ("verify empty", "contains no checkpoint (no step-N folder)"),
        ("verify model", "contains no checkpoint"),
        ("export run", "--output"),
        (
            "export run --output model",
            "is not empty: give another folder, or replace the model in it with --overwrite",
        ),
        ("export run --output new --dtype int8", "int8"),
    ] {
        let ended = checkpoint(folder.path(), line);
        assert_eq!(ended.code, 2, "{line}: {}", ended.stderr);
        assert!(ended.stderr.contains(phrase), "{line}: {}", ended.stderr);
    }
    let ended = checkpoint(folder.path(), "export run --output model --overwrite --dtype fp32");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}
