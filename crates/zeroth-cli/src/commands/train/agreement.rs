//! Settings that all ranks must agree on: under an external launcher, each rank reads its own command line.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zeroth::comm::{Comm, OpName};
use zeroth::job::{ResolvedJob, collectives_asked, rank_differences};
use zeroth::train::Distillation;
use zeroth::train::checkpoint::DistillEntry;

use super::startup_summary;
use super::strategies::interval_json;
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;

/// Everything that determines what is trained, in which order, and which collectives run.
pub(super) fn of(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> Map<String, Value> {
    let job = &resolved_job.job;
    let reading = &arguments.reading;
    let agreed = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ranks": resolved_job.ranks,
        "--device": format!("{:?}", resolved_job.device).to_lowercase(),
        "the way GPUs exchange data (ZEROTH_GPU_COLLECTIVES)": collectives_asked(resolved_job.device),
        "--model": resolved_path(&job.folder),
        "--output": resolved_path(&arguments.output),
        "--data": arguments.data,
        "--eval-data": arguments.eval_data,
        "--columns": reading.columns,
        "--system": reading.system,
        "--max-length": resolved_job.reading.max_length(),
        "pairs (--source-prefix, --source-lang, --target-lang, --max-source-length, --max-target-length)":
            resolved_job.reading.pairs().map(|pairs| format!("{pairs:?}")),
        "--truncation-strategy": format!("{:?}", reading.truncation_strategy).to_lowercase(),
        "--packing": arguments.packing,
        "--max-train-samples": arguments.max_train_samples,
        "--seed": job.seed,
        "--data-seed": job.data_seed,
        "--shuffle": job.order.is_shuffled(),
        "--max-skipped-steps": arguments.max_skipped_steps,
        "--save-steps": interval_json(resolved_job.strategies.saving),
        "--save-strategy best": resolved_job.strategies.saves_best,
        "--save-dtype": job.export_dtype().to_string(),
        "--save-only-model": arguments.evaluation.save_only_model,
        "--eval-steps": job.evaluation.as_ref().map(|evaluation| interval_json(evaluation.interval)),
        "--per-device-eval-batch-size": arguments.evaluation.per_device_eval_batch_size,
        "--split-dataset-ratio": arguments.evaluation.split_ratio(),
        "the best model and early stopping": job.best_policy(),
        "adapters (--lora-rank, --lora-alpha, --target-modules)": job.lora.as_ref().map(|lora| format!("{lora:?}")),
        "distillation (--teacher, --kd-alpha, --kd-temperature, --kd-beta, --kd-squared, --kd-cache, --kd-tail)":
            job.objective.distillation().map(|distillation| json!(DistillEntry::of(distillation))),
        "the teacher cache (--kd-cache)": cache_identity(resolved_job),
        "placement of the teacher (--teacher-deepspeed)": format!("{:?}", job.settings.teacher),
        "config.json of the teacher": job.objective.distillation().and_then(Distillation::model).map(|model| format!("{:?}", model.config)),
        "steps of the run (--max-steps, --num-train-epochs)": job.steps,
        "config": resolved_job.resolved.to_json(),
        "config.json of the model": resolved_job.inputs.model,
        "rows of micro-batches": startup_summary::rows_json(job),
        "hash of the data": format!("{:016x}", job.samples.hash()),
        "hash of the evaluation data":
            job.evaluation.as_ref().map(|evaluation| format!("{:016x}", evaluation.samples.hash())),
    });
    match agreed {
        Value::Object(map) => map,
        _ => unreachable!("constructed as an object above"),
    }
}

/// What the cache of a run on several ranks holds: each may have a copy of its own.
fn cache_identity(resolved_job: &ResolvedJob) -> Option<String> {
    let cache = resolved_job.job.objective.distillation()?.cache().filter(|_| resolved_job.ranks > 1)?;
    // Reading its records fails for the same reason, with that error.
    Some(cache.identity().unwrap_or_else(|error| error.to_string()))
}

/// Fails if this rank has resolved something else than rank 0.
pub(super) fn check(
    rank: usize,
    own: &Map<String, Value>,
    of_rank_0: &Map<String, Value>,
) -> anyhow::Result<()> {
    let Some(Difference { path, own, of_rank_0 }) = first_difference("", own, of_rank_0) else {
        return Ok(());
    };
    anyhow::bail!(
        "{path} is {of_rank_0} on rank 0 and {own} on rank {rank}: all ranks must agree; start them with the \
         same flags, config and model"
    )
}

struct Difference {
    path: String,
    own: String,
    of_rank_0: String,
}

fn first_difference(
    above: &str,
    own: &Map<String, Value>,
    of_rank_0: &Map<String, Value>,
) -> Option<Difference> {
    let shown = |value: Option<&Value>| value.map_or_else(|| "absent".to_owned(), ToString::to_string);
    let only_own = own.keys().filter(|key| !of_rank_0.contains_key(*key));
    of_rank_0.keys().chain(only_own).find_map(|key| {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        match (own.get(key), of_rank_0.get(key)) {
            (own, of_rank_0) if own == of_rank_0 => None,
            (Some(Value::Object(own)), Some(Value::Object(of_rank_0))) => {
                first_difference(&path, own, of_rank_0)
            }
            (own, of_rank_0) => Some(Difference { path, own: shown(own), of_rank_0: shown(of_rank_0) }),
        }
    })
}

/// Why a rank cannot take part, shared with the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) exit: Exit,
    pub(super) why: String,
}

/// What a rank tells the others before the first step.
#[derive(Serialize, Deserialize)]
struct RankReadiness {
    /// The exit code and the reason of a rank that cannot take part.
    refusal: Option<(u8, String)>,
    /// What it may differ in.
    facts: Map<String, Value>,
}

/// Shares whether this rank can take part. If one cannot, all exit with its code, and rank 0 prints why; if all can, it notes
/// what they differ in.
pub(super) fn exchange(
    comm: &dyn Comm,
    own: Result<&Map<String, Value>, &Refusal>,
) -> anyhow::Result<Option<Exit>> {
    let own = match own {
        Ok(facts) => RankReadiness { refusal: None, facts: facts.clone() },
        Err(Refusal { exit, why }) => {
            RankReadiness { refusal: Some((*exit as u8, why.clone())), facts: Map::new() }
        }
    };
    let all = comm
        .gather_texts(OpName::new(0, "agreement", 0), &serde_json::to_string(&own)?)
        .context("ranks could not exchange their settings")?;
    let all: Vec<RankReadiness> = all
        .iter()
        .map(|report| serde_json::from_str(report))
        .collect::<Result<_, _>>()
        .context("a rank of another version of zeroth has joined")?;
    if let Some((code, why)) = all.iter().find_map(|report| report.refusal.as_ref()) {
        if comm.rank() == 0 {
            output::error(why);
        }
        return Ok(Some(Exit::of_code(&code.to_string())));
    }
    if comm.rank() == 0 {
        let facts: Vec<&Map<String, Value>> = all.iter().map(|report| &report.facts).collect();
        for note in rank_differences(&facts) {
            output::note(&format!("note: {note}"));
        }
    }
    Ok(None)
}

/// An absolute path with symlinks resolved, the same before and after its folders are created.
fn resolved_path(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    match there {
        Some((above, whole)) => match path.strip_prefix(above) {
            Ok(missing) if missing.as_os_str().is_empty() => whole,
            Ok(missing) => whole.join(missing),
            Err(_) => path,
        },
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolved_paths_do_not_depend_on_existence() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let path = link.join("runs/first");
        let before = resolved_path(&path);
        std::fs::create_dir_all(&path).unwrap();
        assert_eq!(before, resolved_path(&path));
        assert_eq!(before, folder.path().canonicalize().unwrap().join("runs/first"));
        assert!(resolved_path(Path::new("relative/run")).is_absolute());
    }

    fn map(value: &Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let zero =
            map(&json!({"--seed": 42, "config": {"optimizer": {"params": {"lr": 0.001}}, "bf16": true}}));
        assert!(check(3, &zero.clone(), &zero).is_ok());
        let mut own = zero.clone();
        own["config"]["optimizer"]["params"]["lr"] = json!(0.5);
        assert_eq!(
            check(3, &own, &zero).unwrap_err().to_string(),
            "config.optimizer.params.lr is 0.001 on rank 0 and 0.5 on rank 3: all ranks must agree; start them \
             with the same flags, config and model"
        );
        own["--seed"] = json!(7);
        assert!(
            check(3, &own, &zero).unwrap_err().to_string().starts_with("--seed is 42 on rank 0 and 7 on ")
        );
        own = zero.clone();
        own.insert("--packing".to_owned(), json!(true));
        assert!(
            check(1, &own, &zero)
                .unwrap_err()
                .to_string()
                .starts_with("--packing is absent on rank 0 and true")
        );
    }
}
