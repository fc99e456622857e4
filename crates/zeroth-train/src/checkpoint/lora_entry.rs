//! What a checkpoint says about adapters and their base, of which it holds no weights.

use serde::{Deserialize, Serialize};
use zeroth_model::{Lora, LoraTargets};

use super::exact;
use crate::job::LoraJob;

/// A checkpoint's adapters and their base, of which it holds no weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraEntry {
    /// Inner width of the adapters.
    pub rank: u64,
    /// Numerator of their scale.
    #[serde(with = "exact")]
    pub alpha: f64,
    /// Whether alpha is divided by the root of the rank.
    #[serde(default)]
    pub rslora: bool,
    /// Dropout on their input.
    #[serde(with = "exact")]
    pub dropout: f64,
    /// The modules that have one, as PEFT writes them.
    pub target_modules: TargetsEntry,
    /// Whether the base's linear layers were kept in nf4.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quantized: bool,
    /// The base.
    pub base: BaseEntry,
}

/// `target_modules`: `all-linear` or a regular expression, or names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetsEntry {
    /// `all-linear`, or a regular expression.
    One(String),
    /// Names.
    Names(Vec<String>),
}

/// The identity of a base.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BaseEntry {
    /// Its folder or Hub name when the run started.
    pub name: String,
    /// Its number of parameters.
    pub total: u64,
    /// Hash of all its weights, taken while they were loaded.
    pub hash: String,
    /// Hash of the first weights of each tensor, which is known before anything is loaded.
    pub sample: String,
}

/// `all-linear`, as PEFT writes it.
const ALL_LINEAR: &str = "all-linear";

impl From<&LoraTargets> for TargetsEntry {
    fn from(targets: &LoraTargets) -> Self {
        match targets {
            LoraTargets::AllLinear => Self::One(ALL_LINEAR.to_owned()),
            LoraTargets::Pattern(pattern) => Self::One(pattern.clone()),
            LoraTargets::Named(names) => Self::Names(names.clone()),
        }
    }
}

impl LoraEntry {
    /// The entry of a run; the base's identity is set once it is known.
    pub(crate) fn of(job: &LoraJob) -> Self {
        let Lora { rank, alpha, rslora, dropout, targets } = &job.lora;
        Self {
            rank: *rank,
            alpha: *alpha,
            rslora: *rslora,
            dropout: *dropout,
            target_modules: targets.into(),
            quantized: job.quantized,
            base: BaseEntry { name: job.base.clone(), ..BaseEntry::default() },
        }
    }

    /// The adapters that it describes.
    pub fn lora(&self) -> Lora {
        let targets = match &self.target_modules {
            TargetsEntry::One(all) if all == ALL_LINEAR => LoraTargets::AllLinear,
            TargetsEntry::One(pattern) => LoraTargets::Pattern(pattern.clone()),
            TargetsEntry::Names(names) => LoraTargets::Named(names.clone()),
        };
        let Self { rank, alpha, rslora, dropout, .. } = *self;
        Lora { rank, alpha, rslora, dropout, targets }
    }
}

#[cfg(test)]
mod tests {
    use zeroth_model::LoraInit;

    use super::*;

    #[test]
    fn entries_round_trip_through_json() {
        for targets in [
            LoraTargets::AllLinear,
            LoraTargets::Pattern(r".*\.q_proj".to_owned()),
            LoraTargets::Named(vec!["q_proj".to_owned()]),
        ] {
            let lora = Lora { rank: 4, alpha: 0.1, rslora: true, dropout: 0.3, targets };
            let job = LoraJob {
                lora: lora.clone(),
                init: LoraInit::Kaiming,
                adapter: None,
                base: "base".to_owned(),
                random_base: false,
                quantized: false,
                allows_other_base: false,
            };
            let entry = LoraEntry::of(&job);
            let read: LoraEntry = serde_json::from_str(&serde_json::to_string(&entry).unwrap()).unwrap();
            assert_eq!((&read, read.lora()), (&entry, lora));
        }
    }
}
