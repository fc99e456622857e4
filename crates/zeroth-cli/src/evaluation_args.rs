//! Flags of the training loop: when it evaluates, saves and logs, the best model, and early stopping.

use clap::{Args, ValueEnum};
use zeroth::job::StepCount;
use zeroth::train::BestMetric;

use crate::value_args::whole;

/// The flags as given.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Evaluation, checkpoints and logging, with Hugging Face's names")]
pub(crate) struct EvaluationArgs {
    /// When to evaluate: no, every --eval-steps, or after each epoch [default: steps if there is evaluation data]
    #[arg(long, alias = "evaluation-strategy", value_enum, value_name = "WHEN")]
    pub(crate) eval_strategy: Option<StrategyArg>,
    /// When to save: no (the model alone, at the end), every --save-steps, after each epoch, or after each evaluation
    /// that is the best so far [default: steps]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) save_strategy: Option<SaveStrategyArg>,
    /// When to print a progress line when not on a terminal: no, every --logging-steps, or after each epoch
    /// [default: steps]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) logging_strategy: Option<StrategyArg>,
    /// Micro-batch size per rank in evaluations [default: that of training]
    #[arg(long, value_name = "N", value_parser = whole(1..=1 << 32))]
    pub(crate) per_device_eval_batch_size: Option<u64>,
    /// Share of the samples of --data to evaluate on instead of --eval-data, chosen by --data-seed: 0.01 for one in a hundred, 0 for none
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = ratio)]
    pub(crate) split_dataset_ratio: Option<f64>,
    /// Export the model of the best evaluated checkpoint instead of the last one
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) load_best_model_at_end: bool,
    /// The metric of the best model [default: loss]
    #[arg(long, value_enum, value_name = "METRIC")]
    pub(crate) metric_for_best_model: Option<MetricArg>,
    /// Whether a larger metric is better [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) greater_is_better: Option<bool>,
    /// Stop after N evaluations in a row without an improvement of the metric
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) early_stopping_patience: Option<u64>,
    /// The change of the metric that counts as an improvement for --early-stopping-patience must exceed X [default: 0]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = threshold)]
    pub(crate) early_stopping_threshold: Option<f64>,
    /// Save weights without optimizer state: smaller checkpoints that can be exported, but not resumed from
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) save_only_model: bool,
}

impl EvaluationArgs {
    /// The share of the samples that is held out, if any is.
    pub(crate) fn split_ratio(&self) -> Option<f64> {
        self.split_dataset_ratio.filter(|ratio| *ratio > 0.0)
    }
}

/// When something recurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyArg {
    /// Not at all
    No,
    /// Every N steps
    Steps,
    /// After each epoch
    Epoch,
}

/// When to save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SaveStrategyArg {
    /// Not at all
    No,
    /// Every N steps
    Steps,
    /// After each epoch
    Epoch,
    /// After each evaluation that is the best so far
    Best,
}

/// The metric of the best model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MetricArg {
    /// The evaluation loss
    Loss,
    /// The same
    #[value(name = "eval_loss")]
    EvalLoss,
    /// Its exponential
    Perplexity,
    /// The same
    #[value(name = "eval_perplexity")]
    EvalPerplexity,
}

impl MetricArg {
    pub(crate) fn metric(self) -> BestMetric {
        match self {
            Self::Loss | Self::EvalLoss => BestMetric::EvalLoss,
            Self::Perplexity | Self::EvalPerplexity => BestMetric::EvalPerplexity,
        }
    }
}

/// Parses steps, or a share of all steps; 0 included.
pub(crate) fn steps_or_zero(text: &str) -> Result<StepCount, String> {
    let number: f64 = text.parse().map_err(|_| "is not a number".to_owned())?;
    match number {
        0.0 => Ok(StepCount::Count(0)),
        share if 0.0 < share && share < 1.0 => Ok(StepCount::Share(share)),
        // Numbers below 2^53 are exact.
        steps if (1.0..9.0e15).contains(&steps) && steps.fract() == 0.0 => Ok(StepCount::Count(steps as u64)),
        _ => Err("must be a whole number of steps, or a share of all steps between 0 and 1".to_owned()),
    }
}

/// The same, of at least 1.
pub(crate) fn steps(text: &str) -> Result<StepCount, String> {
    match steps_or_zero(text)? {
        StepCount::Count(0) => Err("must be at least 1, or a share of all steps between 0 and 1".to_owned()),
        steps => Ok(steps),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be at least 0 and below 1, as in 0.01; 0 holds nothing out".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

fn threshold(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) => Err("must be a finite number of at least 0".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counts_or_shares() {
        assert_eq!(steps("500"), Ok(StepCount::Count(500)));
        assert_eq!(steps("1e3"), Ok(StepCount::Count(1000)));
        assert_eq!(steps("0.1").map(|share| share.of(31)), Ok(4));
        assert_eq!(steps("0.001").map(|share| share.of(10)), Ok(1));
        assert_eq!(steps_or_zero("0"), Ok(StepCount::Count(0)));
        for wrong in ["0", "-1", "1.5", "nan", "inf", "1e300", "x", ""] {
            assert!(steps(wrong).is_err(), "{wrong}");
        }
    }
}
