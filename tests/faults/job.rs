//! A small job on two ranks: its folders, command line, and the results of an undisturbed run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::kinds::copied;

/// Total steps and save interval. Two checkpoints are kept, so older ones are removed.
pub(crate) const STEPS: u64 = 12;
pub(crate) const SAVE_STEPS: u64 = 2;

/// The job in its own folder.
pub(crate) struct Job {
    pub(crate) folder: tempfile::TempDir,
    model: PathBuf,
    pub(crate) data: PathBuf,
    /// Flags of its kind.
    flags: Vec<String>,
}

/// Numbers of a line of metrics.jsonl that do not depend on time.
const COMPUTED: [&str; 8] =
    ["loss", "grad_norm", "lr", "eval_loss", "ce_loss", "kd_loss", "aux_loss", "samples_seen"];

/// The results of a run, bit by bit.
#[derive(PartialEq)]
pub(crate) struct Left {
    /// Step, and its numbers as written: each step once, in order.
    steps: Vec<(u64, String)>,
    /// The model and the resumable state, by file.
    files: Vec<(String, Vec<u8>)>,
}

impl Job {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (model, data) = (folder.path().join("model"), folder.path().join("rows.jsonl"));
        fs::create_dir(&model).unwrap();
        let config = json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
        });
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        fs::write(model.join("generation_config.json"), "{}").unwrap();
        let row = |row: u64| {
            let ids: Vec<u64> = (0..16).map(|at| (row * 37 + at * 11 + at * at) % 256).collect();
            json!({ "input_ids": ids }).to_string() + "\n"
        };
        fs::write(&data, (0..40).map(row).collect::<String>()).unwrap();
        let job = Self { folder, model, data, flags: Vec::new() };
        job.write_weights();
        job
    }

    /// A job over a golden folder, which it copies.
    pub(crate) fn over(golden: &Path, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (model, data) = copied(golden, folder.path());
        let job = Self { folder, model, data, flags: Vec::new() };
        job.with(&["--max-length", "40", "--fp32", "true"]).with(flags)
    }

    /// A job that learns few rows by heart: the loss on others falls first and rises later.
    pub(crate) fn overfitted() -> Self {
        let job = Self::new();
        let rows = fs::read_to_string(&job.data).unwrap();
        let rows: Vec<&str> = rows.lines().collect();
        let held_out = job.path("held-out.jsonl");
        fs::write(&job.data, rows[..4].join("\n")).unwrap();
        fs::write(&held_out, rows[4..].join("\n")).unwrap();
        job.with(&["--eval-data", held_out.to_str().unwrap(), "--eval-steps", "2", "--fp32", "true"]).with(&[
            "--learning-rate",
            "1e-2",
            "--lr-scheduler-type",
            "constant",
            "--weight-decay",
            "0",
        ])
    }

    /// With more flags.
    pub(crate) fn with(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }

    /// Writes weight files, so that reading them can fail.
    fn write_weights(&self) {
        let run = self.path("weights");
        let ended =
            crate::inject::zeroth(&self.arguments(&run, &["--max-steps", "1"]), &self.cache("weights"));
        assert_eq!(ended.code, 0, "{}", ended.said);
        fs::copy(run.join("model/model.safetensors"), self.model.join("model.safetensors")).unwrap();
        fs::remove_dir_all(run).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A separate token cache per run, so that creating it is part of the run.
    pub(crate) fn cache(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}-cache"))
    }

    /// `zeroth train … --resume auto` into a folder.
    pub(crate) fn arguments(&self, run: &Path, more: &[&str]) -> Vec<String> {
        let (steps, saves) = (STEPS.to_string(), SAVE_STEPS.to_string());
        let path = |path: &Path| path.to_str().expect("paths of this test are UTF-8").to_owned();
        let typed = [
            "train",
            "--device",
            "cpu",
            "--model",
            &path(&self.model),
            "--data",
            &path(&self.data),
            "--output",
            &path(run),
            "--ranks",
            "2",
            "--deepspeed",
            "zero3",
            "--max-steps",
            &steps,
            "--save-steps",
            &saves,
            "--save-total-limit",
            "2",
            "--per-device-train-batch-size",
            "2",
            "--threads-per-rank",
            "2",
            "--logging-steps",
            "1",
            "--resume",
            "auto",
        ]
        .map(str::to_owned);
        let more = more.iter().map(|word| (*word).to_owned());
        typed.into_iter().chain(self.flags.iter().cloned()).chain(more).collect()
    }

    /// Reads the results of a run, or the problem with them.
    pub(crate) fn left(run: &Path) -> Result<Left, String> {
        let metrics = fs::read_to_string(run.join("metrics.jsonl"))
            .map_err(|error| format!("metrics.jsonl: {error}"))?;
        let line = |line: &str| {
            let line: Value = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
            let step = line["step"].as_u64().ok_or_else(|| format!("no step: {line}"))?;
            let known = COMPUTED.iter().filter(|name| line.get(**name).is_some());
            let numbers: Vec<String> = known.map(|name| format!("{name} {}", line[*name])).collect();
            Ok((step, numbers.join(", ")))
        };
        let steps = metrics.lines().map(line).collect::<Result<Vec<_>, String>>()?;
        let newest = Self::newest_step(run).ok_or("no checkpoint")?;
        let part = |rank: u32| format!("checkpoints/step-{newest}/rank-0000{rank}-of-00002.safetensors");
        let model = fs::read_dir(run.join("model")).map_err(|error| format!("model: {error}"))?;
        let model = model.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        // The export record names its checkpoint, which contains a timestamp.
        let model = model.filter(|name| name != "export.json").map(|name| format!("model/{name}"));
        let mut names: Vec<String> = model.chain([part(0), part(1)]).collect();
        names.sort();
        Ok(Left { steps, ..Left::of_files(run, names)? })
    }

    /// The step of a run's newest checkpoint.
    pub(crate) fn newest_step(run: &Path) -> Option<u64> {
        let entries = fs::read_dir(run.join("checkpoints")).ok()?.flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max()
    }

    /// Every folder named like a checkpoint must be valid.
    pub(crate) fn damaged(run: &Path) -> Vec<String> {
        let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
        let steps = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"step-"));
        let problems =
            steps.filter_map(|entry| zeroth::train::checkpoint::verify_folder(&entry.path()).err());
        problems.flatten().map(|problem| problem.to_string()).collect()
    }
}

impl Left {
    /// The contents of files.
    pub(crate) fn of_files(folder: &Path, names: Vec<String>) -> Result<Self, String> {
        let read = |name: String| {
            let bytes = fs::read(folder.join(&name)).map_err(|error| format!("{name}: {error}"))?;
            Ok((name, bytes))
        };
        Ok(Self { steps: Vec::new(), files: names.into_iter().map(read).collect::<Result<_, String>>()? })
    }

    /// The first difference to `expected`.
    pub(crate) fn difference(&self, expected: &Self) -> Option<String> {
        if self.steps != expected.steps {
            let differs = self.steps.iter().zip(&expected.steps).find(|(found, expected)| found != expected);
            return Some(format!(
                "{} steps and not {}, first {differs:?}",
                self.steps.len(),
                expected.steps.len()
            ));
        }
        let names = |left: &Self| left.files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        if names(self) != names(expected) {
            return Some(format!("files {:?} and not {:?}", names(self), names(expected)));
        }
        let other = self.files.iter().zip(&expected.files).find(|(found, expected)| found != expected);
        other.map(|((name, _), _)| format!("other bytes in {name}"))
    }

    /// The weights of its model.
    pub(crate) fn model(&self) -> &[u8] {
        let model = self.files.iter().find(|(name, _)| name == "model/model.safetensors");
        &model.expect("a run writes its model").1
    }
}
