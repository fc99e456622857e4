//! What a resumed run does otherwise than the run of its checkpoint: keys of the config, and flags that no key has.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::checkpoint::Manifest;
use crate::job::{BestPolicy, Job};

/// A setting that changed since a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingChange {
    /// The path of a key, or a flag.
    pub name: String,
    /// Its value then.
    pub before: String,
    /// Its value now.
    pub now: String,
}

impl std::fmt::Display for SettingChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} → {}", self.name, self.before, self.now)
    }
}

/// Config changes since the checkpoint, one per key. Keys derived from the number of ranks are omitted.
pub fn config_changes(before: &Value, now: &Value) -> Vec<SettingChange> {
    const FOLLOWS: [&str; 2] = ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
    let (mut old, mut new) = (BTreeMap::new(), BTreeMap::new());
    flatten("", before, &mut old);
    flatten("", now, &mut new);
    for follows in FOLLOWS {
        old.remove(follows);
        new.remove(follows);
    }
    differences(&old, &new)
}

fn differences(old: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> Vec<SettingChange> {
    let shown = |value: Option<&String>| value.map_or_else(|| "absent".to_owned(), Clone::clone);
    let only_new = new.keys().filter(|name| !old.contains_key(*name));
    let mut names: Vec<&String> = old.keys().chain(only_new).collect();
    names.sort_unstable();
    let changed = names.into_iter().filter(|name| old.get(*name) != new.get(*name));
    changed
        .map(|name| SettingChange {
            name: name.clone(),
            before: shown(old.get(name)),
            now: shown(new.get(name)),
        })
        .collect()
}

fn flatten(path: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, into);
            }
        }
        other => _ = into.insert(path.to_owned(), other.to_string()),
    }
}

impl Job {
    /// Flags that no key of the config has, and that decide what the steps of a run do, with their values.
    pub(crate) fn step_flags(&self) -> BTreeMap<String, String> {
        let mut flags = BTreeMap::new();
        let mut set = |flag: &str, value: String| _ = flags.insert(flag.to_owned(), value);
        set("steps of the run (--max-steps, --num-train-epochs)", self.steps.to_string());
        set("--max-skipped-steps", self.recipe.tolerated.to_string());
        if let Some(lora) = &self.lora {
            set("--lora-dropout", lora.lora.dropout.to_string());
            set("--quantize", if lora.quantized { "nf4" } else { "none" }.to_owned());
        }
        if let Some((BestPolicy { patience: Some(patience), threshold, .. }, evaluation)) =
            self.best_policy().zip(self.evaluation.as_ref())
        {
            set("--early-stopping-patience", patience.to_string());
            set("--early-stopping-threshold", threshold.to_string());
            set("--eval-steps", evaluation.interval.to_string());
        }
        flags
    }

    /// Flags that changed since a checkpoint. One of an earlier version has those of its adapters only.
    pub fn flag_changes(&self, manifest: &Manifest) -> Vec<SettingChange> {
        let mut now = self.step_flags();
        if !manifest.flags.is_empty() {
            return differences(&manifest.flags, &now);
        }
        let mut before = BTreeMap::new();
        if let Some(saved) = &manifest.lora {
            before.insert("--lora-dropout".to_owned(), saved.dropout.to_string());
            before.insert("--quantize".to_owned(), if saved.quantized { "nf4" } else { "none" }.to_owned());
        }
        now.retain(|flag, _| before.contains_key(flag));
        differences(&before, &now)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changes_are_listed_by_full_path() {
        let before = json!({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2});
        let now = json!({"zero_optimization": {"stage": 2, "overlap_comm": true}, "gradient_clipping": 1.0,
                         "train_micro_batch_size_per_gpu": 1});
        let changes: Vec<String> = config_changes(&before, &now).iter().map(ToString::to_string).collect();
        assert_eq!(
            changes,
            ["zero_optimization.overlap_comm: absent → true", "zero_optimization.stage: 3 → 2"]
        );
    }
}
