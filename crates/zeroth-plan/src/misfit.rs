//! A job that fits no budget: what is missing, and the single changes that would fit.

use zeroth_base::format_bytes;
use zeroth_kernel::ByTier;
use zeroth_program::{FrozenPlacement, Offload, Recompute};

use crate::budget::Budget;
use crate::sizing::{Sizing, SizingError};

/// A budget that no choice of settings fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// The kind of memory, for messages.
    pub of: &'static str,
    /// The least that a rank needs over all choices.
    pub needed: u64,
    /// The budget.
    pub given: u64,
    /// The part of `needed` that the process takes in addition to the plan.
    pub overhead: u64,
    /// Single changes that would fit, each with the bytes it needs per rank in each tier, overhead included.
    pub remedies: Vec<(String, ByTier<u64>)>,
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let process = match self.overhead {
            0 => String::new(),
            overhead => format!(", {} of it beside the plan for the process itself,", format_bytes(overhead)),
        };
        write!(
            f,
            "a rank needs at least {} of {}{} and {} are given: {} are missing ({} and {} bytes)",
            format_bytes(self.needed),
            self.of,
            process,
            format_bytes(self.given),
            format_bytes(self.needed - self.given),
            self.needed,
            self.given
        )?;
        if self.remedies.is_empty() {
            return write!(f, "; no single change fits: more ranks, or a smaller model");
        }
        write!(f, ". One of these would do:")?;
        for (change, needed) in &self.remedies {
            let parts =
                needed.iter().map(|(tier, bytes)| format!("{} on the {}", format_bytes(*bytes), tier.name()));
            write!(f, "\n  {change}: {}", parts.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

/// A candidate change.
type Change<'a> = Box<dyn Fn(&mut Sizing<'a>) + 'a>;

impl<'a> Sizing<'a> {
    /// Single changes of the user's settings that fit.
    pub(crate) fn remedies(&mut self, budget: Budget) -> Result<Vec<(String, ByTier<u64>)>, SizingError> {
        let asked = (self.settings, self.shape, self.row_sizes.clone());
        let block = Recompute::EVERY_BLOCK;
        let optimizer = Offload { optimizer: Some(1.0), ..asked.0.offload };
        let both = Offload { parameters: Some(u64::MAX), ..optimizer };
        let halvings = self.shape.micro_batch.trailing_zeros();
        let mut changes: Vec<(String, Change<'a>)> = Vec::new();
        if asked.0.recompute == Recompute::Nothing {
            let change = move |sizing: &mut Self| sizing.settings.recompute = block;
            changes.push(("zeroth.recompute \"block\"".to_owned(), Box::new(change)));
        }
        if asked.0.offload.update_window.is_some_and(|window| window > 0) {
            let change = |sizing: &mut Self| sizing.settings.offload.update_window = Some(0);
            changes.push(("zeroth.update_window 0, or none at all".to_owned(), Box::new(change)));
        }
        if halvings > 0 {
            let changes_loss =
                if self.balances_micro_batches()? { " (balances experts in smaller batches)" } else { "" };
            let name = format!(
                "train_micro_batch_size_per_gpu {} with gradient_accumulation_steps {}{changes_loss}",
                asked.1.micro_batch >> halvings,
                asked.1.accumulation << halvings
            );
            changes.push((name, Box::new(move |sizing: &mut Self| sizing.halve_micro_batch(halvings))));
        }
        if asked.0.frozen == FrozenPlacement::Whole && asked.1.ranks > 1 {
            let change = |sizing: &mut Self| sizing.settings.frozen = FrozenPlacement::Sharded;
            changes.push(("zeroth.frozen \"sharded\"".to_owned(), Box::new(change)));
        }
        for stage in asked.0.stage + 1..=3 {
            let change = move |sizing: &mut Self| sizing.settings.stage = stage;
            changes.push((format!("zero_optimization.stage {stage}"), Box::new(change)));
        }
        if asked.0.offload.optimizer.is_none() {
            let (stage, name) = (asked.0.stage.max(2), "offload_optimizer to cpu");
            let change = move |sizing: &mut Self| {
                (sizing.settings.stage, sizing.settings.offload) = (stage, optimizer);
            };
            changes.push((format!("{name} (stage {stage})"), Box::new(change)));
        }
        if asked.0.offload.parameters.is_none() {
            let change =
                move |sizing: &mut Self| (sizing.settings.stage, sizing.settings.offload) = (3, both);
            changes
                .push(("offload_optimizer and offload_param to cpu (stage 3)".to_owned(), Box::new(change)));
            let change = move |sizing: &mut Self| {
                (sizing.settings.stage, sizing.settings.offload, sizing.settings.recompute) =
                    (3, both, block);
            };
            let name = "offload_optimizer and offload_param to cpu (stage 3) with zeroth.recompute \"block\"";
            changes.push((name.to_owned(), Box::new(change)));
        }
        let mut fitting = Vec::new();
        for (name, change) in changes {
            change(self);
            let compiled = self.compile()?;
            if budget.shortfall(self.data, &compiled).is_none() {
                fitting.push((name, budget.needed(self.data, &compiled)));
            }
            (self.settings, self.shape) = (asked.0, asked.1);
            self.row_sizes.clone_from(&asked.2);
        }
        fitting.extend(self.teacher_remedies(budget)?);
        if fitting.is_empty() {
            fitting.extend(self.more_ranks(budget)?);
            (self.settings, self.shape) = (asked.0, asked.1);
        }
        Ok(fitting)
    }

    /// The fewest ranks, doubling the present number, that fit with everything offloaded and blocks recomputed.
    fn more_ranks(&mut self, budget: Budget) -> Result<Option<(String, ByTier<u64>)>, SizingError> {
        self.settings.stage = 3;
        self.settings.offload.optimizer = Some(1.0);
        self.settings.offload.parameters = Some(u64::MAX);
        self.settings.recompute = Recompute::EVERY_BLOCK;
        let there = self.shape.ranks;
        for ranks in [2, 4, 8, 16, 32].map(|times| times * there) {
            self.shape.ranks = ranks;
            let compiled = self.compile()?;
            if budget.shortfall(self.data, &compiled).is_none() {
                let name = format!(
                    "{ranks} ranks with as much memory each, offload_optimizer and offload_param to cpu (stage 3) and \
                     zeroth.recompute \"block\""
                );
                return Ok(Some((name, budget.needed(self.data, &compiled))));
            }
        }
        Ok(None)
    }
}
