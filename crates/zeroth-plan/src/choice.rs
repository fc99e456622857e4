//! The settings that a fit chose.

use serde::{Serialize as _, Serializer};
use zeroth_base::format_bytes;
use zeroth_config::resolve::Choice;
use zeroth_config::schema::{Recompute, UpdatedBy};

use crate::sizing::Sizing;

impl Sizing<'_> {
    /// The settings that differ from those of the job that was asked for.
    pub(crate) fn choices(&self, Self { settings: asked, shape, .. }: &Self) -> Vec<Choice> {
        let chosen = &self.settings;
        let mut choices = Vec::new();
        if chosen.recompute != asked.recompute {
            choices.push(Choice::Recompute(chosen.recompute));
        }
        if chosen.prefetch != asked.prefetch {
            choices.push(Choice::Prefetch(chosen.prefetch));
        }
        if chosen.frozen != asked.frozen {
            choices.push(Choice::Frozen(chosen.frozen));
        }
        if let (Some(window), None) = (chosen.offload.update_window, asked.offload.update_window) {
            choices.push(Choice::UpdateWindow(window));
        }
        if let (Some(by), None) = (chosen.offload.updated_by, asked.offload.updated_by) {
            choices.push(Choice::UpdatedBy(by));
        }
        if self.shape != *shape {
            let (micro_batch, accumulation) = (self.shape.micro_batch, self.shape.accumulation);
            choices.push(Choice::Batch { micro_batch, accumulation });
        }
        choices
    }
}

/// Writes choices as a list of keys and values.
pub(crate) fn serialize<S: Serializer>(choices: &[Choice], serializer: S) -> Result<S::Ok, S::Error> {
    Choice::to_json(choices).serialize(serializer)
}

/// The choices in a few words, as in `recompute 12 of 36 blocks, prefetch off`; empty where nothing was chosen. Where
/// frozen parameters are is said elsewhere.
pub fn summary(choices: &[Choice], blocks: u64) -> String {
    let words = choices.iter().filter_map(|choice| match *choice {
        Choice::Recompute(Recompute::Block { blocks: Some(some), .. }) => {
            Some(format!("recompute {some} of {blocks} blocks"))
        }
        Choice::Recompute(Recompute::Block { blocks: None, .. }) => Some("recompute all blocks".to_owned()),
        Choice::Recompute(Recompute::NormSwiGlu) => Some("recompute norms and SwiGLU".to_owned()),
        Choice::Recompute(policy @ (Recompute::Nothing | Recompute::Attention)) => {
            Some(format!("recompute {}", policy.word()))
        }
        Choice::Prefetch(_) => Some("prefetch off".to_owned()),
        Choice::UpdateWindow(window) => Some(format!("update window {}", format_bytes(window))),
        Choice::UpdatedBy(UpdatedBy::Host) => Some("update on the host".to_owned()),
        Choice::UpdatedBy(UpdatedBy::Device) | Choice::Frozen(_) => None,
        Choice::Batch { micro_batch, accumulation } => {
            Some(format!("micro-batch {micro_batch} × {accumulation} accumulated"))
        }
    });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use zeroth_config::schema::FrozenPlacement;

    use super::*;

    #[test]
    fn choices_are_summed_up_in_words() {
        let recompute =
            |blocks| Choice::Recompute(Recompute::Block { blocks, checkpoints: None, offloaded: false });
        for (of, words) in [
            (&[][..], ""),
            (&[Choice::Frozen(FrozenPlacement::Whole)], ""),
            (&[Choice::Recompute(Recompute::NormSwiGlu)], "recompute norms and SwiGLU"),
            (&[recompute(Some(12))], "recompute 12 of 36 blocks"),
            (
                &[recompute(None), Choice::Prefetch(0), Choice::UpdateWindow(701_000_000)],
                "recompute all blocks, prefetch off, update window 701 MB",
            ),
            (&[Choice::Batch { micro_batch: 4, accumulation: 2 }], "micro-batch 4 × 2 accumulated"),
        ] {
            assert_eq!(summary(of, 36), words);
        }
    }

    #[test]
    fn choices_are_written_as_keys_and_values() {
        let some = Recompute::Block { blocks: Some(3), checkpoints: None, offloaded: false };
        let written = Choice::to_json(&[Choice::Recompute(some), Choice::Frozen(FrozenPlacement::Sharded)]);
        assert_eq!(
            written.to_string(),
            r#"[{"key":"zeroth.recompute","value":"block"},{"key":"zeroth.recompute_blocks","value":3},"#
                .to_owned()
                + r#"{"key":"zeroth.frozen","value":"sharded"}]"#
        );
    }
}
