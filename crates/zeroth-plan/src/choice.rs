//! The settings that a fit chose, for messages, configs and tables.

use serde::Serialize;
use zeroth_base::format_bytes;
use zeroth_program::{FrozenPlacement, Recompute, UpdatedBy};

use crate::sizing::Sizing;

/// A chosen setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub value: serde_json::Value,
}

impl Sizing<'_> {
    /// The settings that differ from those of the job that was asked for.
    pub(crate) fn choices(&self, Self { settings: asked, shape, .. }: &Self) -> Vec<Choice> {
        let mut choices = Vec::new();
        if self.settings.recompute != asked.recompute {
            let value = match self.settings.recompute {
                Recompute::Nothing => "none",
                Recompute::NormSwiGlu => "norm_swiglu",
                Recompute::Attention => "attention",
                Recompute::Block { .. } => "block",
            };
            choices.push(Choice { key: "zeroth.recompute", value: value.into() });
            if let Recompute::Block { blocks: Some(blocks), .. } = self.settings.recompute {
                choices.push(Choice { key: "zeroth.recompute_blocks", value: blocks.into() });
            }
        }
        if self.settings.prefetch != asked.prefetch {
            choices.push(Choice {
                key: "zero_optimization.stage3_prefetch_bucket_size",
                value: self.settings.prefetch.into(),
            });
        }
        if self.settings.frozen != asked.frozen {
            let is_sharded = self.settings.frozen == FrozenPlacement::Sharded;
            let value = if is_sharded { "sharded" } else { "whole" };
            choices.push(Choice { key: "zeroth.frozen", value: value.into() });
        }
        if let (Some(window), None) = (self.settings.offload.update_window, asked.offload.update_window) {
            choices.push(Choice { key: "zeroth.update_window", value: window.into() });
        }
        if let (Some(by), None) = (self.settings.offload.updated_by, asked.offload.updated_by) {
            let value = match by {
                UpdatedBy::Device => "device",
                UpdatedBy::Host => "host",
            };
            choices.push(Choice { key: "zeroth.update", value: value.into() });
        }
        if self.shape != *shape {
            let (micro_batch, accumulation) = (self.shape.micro_batch, self.shape.accumulation);
            choices.push(Choice { key: "train_micro_batch_size_per_gpu", value: micro_batch.into() });
            choices.push(Choice { key: "gradient_accumulation_steps", value: accumulation.into() });
        }
        choices
    }
}

/// The choices in a few words, as in `recompute 12 of 36 blocks, prefetch off`; empty where nothing was chosen. Where
/// frozen parameters are is said elsewhere.
pub fn summary(choices: &[Choice], blocks: u64) -> String {
    let value = |key: &str| choices.iter().find(|choice| choice.key == key).map(|choice| &choice.value);
    let mut words = Vec::new();
    match (value("zeroth.recompute").and_then(|value| value.as_str()), value("zeroth.recompute_blocks")) {
        (Some("block"), Some(some)) => words.push(format!("recompute {some} of {blocks} blocks")),
        (Some("block"), None) => words.push("recompute all blocks".to_owned()),
        (Some("norm_swiglu"), _) => words.push("recompute norms and SwiGLU".to_owned()),
        (Some(policy), _) => words.push(format!("recompute {policy}")),
        (None, _) => {}
    }
    if value("zero_optimization.stage3_prefetch_bucket_size").is_some() {
        words.push("prefetch off".to_owned());
    }
    if let Some(window) = value("zeroth.update_window").and_then(serde_json::Value::as_u64) {
        words.push(format!("update window {}", format_bytes(window)));
    }
    if let Some(by) = value("zeroth.update").and_then(|value| value.as_str()).filter(|by| *by == "host") {
        words.push(format!("update on the {by}"));
    }
    if let (Some(micro_batch), Some(accumulation)) =
        (value("train_micro_batch_size_per_gpu"), value("gradient_accumulation_steps"))
    {
        words.push(format!("micro-batch {micro_batch} × {accumulation} accumulated"));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_summed_up_in_words() {
        let choices = |of: &[(&'static str, serde_json::Value)]| -> Vec<Choice> {
            of.iter().map(|(key, value)| Choice { key, value: value.clone() }).collect()
        };
        for (of, words) in [
            (choices(&[]), ""),
            (choices(&[("zeroth.frozen", "whole".into())]), ""),
            (choices(&[("zeroth.recompute", "norm_swiglu".into())]), "recompute norms and SwiGLU"),
            (
                choices(&[("zeroth.recompute", "block".into()), ("zeroth.recompute_blocks", 12.into())]),
                "recompute 12 of 36 blocks",
            ),
            (
                choices(&[
                    ("zeroth.recompute", "block".into()),
                    ("zero_optimization.stage3_prefetch_bucket_size", 0.into()),
                    ("zeroth.update_window", 701_000_000.into()),
                ]),
                "recompute all blocks, prefetch off, update window 701 MB",
            ),
            (
                choices(&[
                    ("train_micro_batch_size_per_gpu", 4.into()),
                    ("gradient_accumulation_steps", 2.into()),
                ]),
                "micro-batch 4 × 2 accumulated",
            ),
        ] {
            assert_eq!(summary(&of, 36), words);
        }
    }
}
