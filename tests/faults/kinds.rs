//! The kinds of jobs that are killed: what each trains, or makes, and what it leaves.

use std::fs;
use std::path::{Path, PathBuf};

use super::inject::zeroth;
use super::job::{Job, Left};

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It trains every weight of a small model.
    Full,
    /// Adapters over a base.
    Lora,
    /// Adapters over a base in nf4.
    QLora,
    /// A mixture of experts, with its auxiliary loss.
    Experts,
    /// A teacher beside the student.
    Distillation,
    /// A student that learns from a teacher cache.
    FromCache,
    /// `distill cache` makes one; the same command goes on with it.
    MakingCache,
    /// Pairs of a source and a target.
    EncoderDecoder,
    /// The model of the best evaluation, which is not the last.
    BestModel,
    /// A run that ends before its last step, as it no longer improves.
    EarlyStopping,
    /// `checkpoint export` of a run's last step.
    Export,
    /// `checkpoint export --merge` of a run's adapter.
    Merge,
}

impl Kind {
    /// How many there are beside the first.
    pub(crate) const OTHERS: u32 = Self::Merge as u32;

    /// A job of this kind.
    pub(crate) fn job(self) -> Job {
        let at = |name: &str| golden().join(name);
        let job = match self {
            Self::Full => Job::new(),
            Self::Lora | Self::Merge => {
                Job::over(&at("qwen3-tied"), &["--train-type", "lora", "--lora-rank", "4"])
            }
            Self::Export => Job::over(&at("qwen3-tied"), &[]),
            Self::QLora => {
                let nf4 = ["--train-type", "lora", "--lora-rank", "4", "--quantize", "nf4"];
                Job::over(&at("qwen3-tied"), &nf4)
            }
            Self::Experts => Job::over(&at("moe/mixtral-aux-3-layers"), &["--deepspeed", "zero2"]),
            Self::Distillation => {
                let teacher = at("kd/teacher");
                Job::over(&at("kd/student"), &["--teacher", teacher.to_str().unwrap()])
            }
            Self::FromCache | Self::MakingCache => Job::over(&at("kd/student"), &[]),
            Self::EncoderDecoder => Job::over(&at("t5/t5-relu-tied"), &[]),
            Self::BestModel | Self::EarlyStopping => Job::overfitted(),
        };
        match self {
            Self::FromCache => {
                let cache = job.path("teacher-cache");
                let made = zeroth(&Self::MakingCache.arguments(&job, &cache), &job.cache("making"));
                assert_eq!(made.code, 0, "{}", made.said);
                job.with(&["--kd-cache", cache.to_str().unwrap()])
            }
            Self::Export | Self::Merge => {
                let trained = zeroth(&job.arguments(&job.path(TRAINED), &[]), &job.cache("training"));
                assert_eq!(trained.code, 0, "{}", trained.said);
                job
            }
            Self::BestModel => job.with(&["--load-best-model-at-end"]),
            Self::EarlyStopping => job.with(&["--early-stopping-patience", "1"]),
            _ => job,
        }
    }

    /// The command that starts it, and goes on with it after a kill.
    pub(crate) fn arguments(self, job: &Job, output: &Path) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let (trained, to) = (job.path(TRAINED), output.to_str().expect("paths of this test are UTF-8"));
        let adapter = trained.join("model");
        match self {
            Self::MakingCache => {}
            Self::Export => {
                return words(&["checkpoint", "export", trained.to_str().unwrap(), "--output", to]);
            }
            Self::Merge => {
                let adapter = adapter.to_str().unwrap();
                return words(&["checkpoint", "export", adapter, "--merge", "--output", to]);
            }
            _ => return job.arguments(output, &[]),
        }
        let teacher = golden().join("kd/teacher");
        let path = |path: &Path| path.to_str().expect("paths of this test are UTF-8").to_owned();
        let [teacher, data, output] = [&teacher, &job.data, output].map(path);
        let flags = ["--top-k", "7", "--max-length", "40", "--fp32", "--device", "cpu", "--threads", "2"];
        let command = ["distill", "cache", "--teacher", &teacher, "--data", &data, "--output", &output];
        command.into_iter().chain(flags).map(str::to_owned).collect()
    }

    /// Whether it writes a model from a run, and refuses one that is complete.
    pub(crate) fn is_export(self) -> bool {
        matches!(self, Self::Export | Self::Merge)
    }

    /// What its command has left.
    pub(crate) fn left(self, output: &Path) -> Result<Left, String> {
        if self != Self::MakingCache && !self.is_export() {
            return Job::left(output);
        }
        let entries = fs::read_dir(output).map_err(|error| format!("{}: {error}", output.display()))?;
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        // A process that was killed after all was done leaves its lock, which is void.
        names.retain(|name| name != ".lock");
        names.sort();
        Left::of_files(output, names)
    }

    /// Whether an unbroken job is one of this kind: the best step is not the last, or steps are left.
    pub(crate) fn check(self, output: &Path) {
        let export = || -> serde_json::Value {
            serde_json::from_slice(&fs::read(output.join("model/export.json")).unwrap()).unwrap()
        };
        let newest = Job::newest_step(output);
        match self {
            Self::BestModel => {
                let best = export()["step"].as_u64();
                assert!(
                    best.is_some_and(|best| Some(best) < newest),
                    "the best step is {best:?} of {newest:?}"
                );
            }
            Self::EarlyStopping => {
                assert!(newest.is_some_and(|step| step < super::job::STEPS), "it ended at step {newest:?}");
            }
            _ => {}
        }
    }
}

/// The run that is exported.
pub(crate) const TRAINED: &str = "trained";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// A copy of a golden folder's model and rows.
pub(crate) fn copied(golden: &Path, folder: &Path) -> (PathBuf, PathBuf) {
    let (model, data) = (folder.join("model"), folder.join("rows.jsonl"));
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), model.join(name)).unwrap();
    }
    fs::write(model.join("generation_config.json"), "{}").unwrap();
    fs::copy(golden.join("data.jsonl"), &data).unwrap();
    (model, data)
}
