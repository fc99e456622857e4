//! What a checkpoint says about a distillation and its teacher, of which it holds no weights.

use serde::{Deserialize, Serialize};
use zeroth_model::ModelFunction;

use super::exact;
use super::lora_entry::BaseEntry;
use crate::distill::{Distillation, TeacherSource};

/// A checkpoint's distillation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DistillEntry {
    /// The divergence's share of the loss.
    #[serde(with = "exact")]
    pub alpha: f64,
    /// The temperature of both distributions.
    #[serde(with = "exact")]
    pub temperature: f64,
    /// Which divergence, as TRL's GKD counts.
    #[serde(with = "exact")]
    pub beta: f64,
    /// Whether the divergence is multiplied by the squared temperature.
    pub squared: bool,
    /// The teacher.
    pub teacher: BaseEntry,
    /// What the teacher computes from its weights; checkpoints of earlier versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher_function: Option<ModelFunction>,
    /// Whether the teacher's linear layers were kept in nf4.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quantized: bool,
    /// The cache that stands for the teacher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheEntry>,
}

/// The cache of a distillation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEntry {
    /// Ids of a token.
    pub k: u64,
    /// Whether the mass that it lacks is one more bucket.
    pub tail: bool,
}

impl DistillEntry {
    /// The entry of a run; the identity of a teacher with weights is set once it is known.
    pub fn of(job: &Distillation) -> Self {
        let (teacher, teacher_function, quantized, cache) = match &job.teacher {
            TeacherSource::Weights(teacher) => {
                let (name, total) = (teacher.name.clone(), teacher.table.total());
                let entry = BaseEntry { name, total, ..BaseEntry::default() };
                (entry, Some(teacher.function()), teacher.quantized, None)
            }
            TeacherSource::Cache { cache, tail } => {
                let manifest = cache.manifest();
                let entry = CacheEntry { k: manifest.k, tail: *tail };
                (manifest.teacher.clone(), manifest.function.clone(), manifest.quantized, Some(entry))
            }
        };
        Self {
            alpha: job.alpha,
            temperature: job.spec.temperature,
            beta: job.spec.beta,
            squared: job.spec.squared,
            teacher,
            teacher_function,
            quantized,
            cache,
        }
    }

    /// How a command differs from a checkpoint in what changes the loss, one phrase each. Hashes that are not known yet do not
    /// count.
    pub(crate) fn differences(saved: Option<&Self>, now: Option<&Self>) -> Vec<String> {
        let (saved, now) = match (saved, now) {
            (None, None) => return Vec::new(),
            (Some(saved), None) => {
                let name = &saved.teacher.name;
                return vec![format!(
                    "this command has no distillation, the checkpoint is distilled from {name} with --kd-alpha {}",
                    saved.alpha
                )];
            }
            (None, Some(now)) => {
                return vec![format!(
                    "this command distils with --kd-alpha {}, the checkpoint is of plain training",
                    now.alpha
                )];
            }
            (Some(saved), Some(now)) => (saved, now),
        };
        let mut differences = Vec::new();
        let mut compare = |flag: &str, now: String, saved: String| {
            if now != saved {
                differences.push(format!("{flag} is {now}, that of the checkpoint {saved}"));
            }
        };
        compare("--kd-alpha", now.alpha.to_string(), saved.alpha.to_string());
        compare("--kd-temperature", now.temperature.to_string(), saved.temperature.to_string());
        compare("--kd-beta", now.beta.to_string(), saved.beta.to_string());
        compare("--kd-squared", now.squared.to_string(), saved.squared.to_string());
        let nf4 = |quantized: bool| if quantized { "nf4" } else { "none" }.to_owned();
        compare("--teacher-quantize", nf4(now.quantized), nf4(saved.quantized));
        let cache = |cache: Option<CacheEntry>| match cache {
            Some(CacheEntry { k, tail }) => {
                format!("of k {k} with --kd-tail {}", if tail { "bucket" } else { "renormalize" })
            }
            None => "none".to_owned(),
        };
        compare("--kd-cache", cache(now.cache), cache(saved.cache));
        let differs = |now: &str, saved: &str| !now.is_empty() && !saved.is_empty() && now != saved;
        let (new, old) = (&now.teacher, &saved.teacher);
        if new.total != old.total || differs(&new.sample, &old.sample) || differs(&new.hash, &old.hash) {
            differences.push(format!(
                "the teacher {} has other weights ({}) than {} of the checkpoint ({})",
                new.name,
                if new.hash.is_empty() { &new.sample } else { &new.hash },
                old.name,
                if new.hash.is_empty() { &old.sample } else { &old.hash },
            ));
        }
        if let (Some(now), Some(saved)) = (&now.teacher_function, &saved.teacher_function) {
            let fields = now.differences(saved, "the checkpoint");
            differences.extend(fields.into_iter().map(|field| format!("the teacher's {field}")));
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> DistillEntry {
        DistillEntry {
            alpha: 0.3,
            temperature: 2.0,
            beta: 0.1,
            squared: true,
            teacher: BaseEntry {
                name: "teacher".to_owned(),
                total: 8,
                hash: "a".to_owned(),
                sample: "b".to_owned(),
            },
            teacher_function: None,
            quantized: false,
            cache: Some(CacheEntry { k: 20, tail: true }),
        }
    }

    #[test]
    fn entries_round_trip_and_name_what_differs() {
        let saved = entry();
        let read: DistillEntry = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
        assert_eq!(read, saved);
        let differences = |change: &dyn Fn(&mut DistillEntry)| {
            let mut now = entry();
            change(&mut now);
            DistillEntry::differences(Some(&saved), Some(&now)).join("; ")
        };
        assert_eq!(differences(&|_| ()), "");
        // Its folder may have another name, and its hash need not be known yet.
        assert_eq!(
            differences(&|now| (now.teacher.name, now.teacher.hash) = ("x".to_owned(), String::new())),
            ""
        );
        assert_eq!(differences(&|now| now.alpha = 0.5), "--kd-alpha is 0.5, that of the checkpoint 0.3");
        assert_eq!(
            differences(&|now| (now.temperature, now.squared) = (1.0, false)),
            "--kd-temperature is 1, that of the checkpoint 2; --kd-squared is false, that of the checkpoint true"
        );
        assert_eq!(
            differences(&|now| now.cache = None),
            "--kd-cache is none, that of the checkpoint of k 20 with --kd-tail bucket"
        );
        assert!(differences(&|now| now.teacher.hash = "c".to_owned()).contains("other weights (c)"));
        assert!(DistillEntry::differences(Some(&saved), None)[0].contains("no distillation"));
        assert!(DistillEntry::differences(None, Some(&saved))[0].contains("plain training"));
    }
}
