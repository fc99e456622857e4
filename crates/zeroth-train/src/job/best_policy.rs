//! How evaluations are compared, and what follows from it: the options of Hugging Face's trainer.

use crate::checkpoint::BestEntry;
use crate::report::EvalMetrics;

/// The metric by which evaluations are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum BestMetric {
    EvalLoss,
    EvalPerplexity,
}

impl BestMetric {
    /// Its name in metrics.jsonl.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EvalLoss => "eval_loss",
            Self::EvalPerplexity => "eval_perplexity",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::EvalLoss, Self::EvalPerplexity].into_iter().find(|metric| metric.name() == name)
    }

    pub(crate) fn of(self, metrics: &EvalMetrics) -> f64 {
        match self {
            Self::EvalLoss => metrics.eval_loss,
            Self::EvalPerplexity => metrics.eval_perplexity,
        }
    }
}

/// What follows from comparing evaluations.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct BestPolicy {
    /// The metric.
    pub metric: BestMetric,
    /// Whether a larger value is better.
    pub greater_is_better: bool,
    /// Whether the exported model is that of the best checkpoint.
    pub load_at_end: bool,
    /// Evaluations without improvement after which the run ends.
    pub patience: Option<u64>,
    /// An improvement by no more than this does not count for `patience`.
    pub threshold: f64,
}

impl BestPolicy {
    pub(crate) fn is_better(&self, value: f64, than: f64) -> bool {
        if self.greater_is_better { value > than } else { value < than }
    }

    /// Whether a run at this state has used up its patience.
    pub(crate) fn is_exhausted(&self, entry: &BestEntry) -> bool {
        self.patience.is_some_and(|patience| entry.stale >= patience)
    }

    pub(crate) fn start(&self, data: &str) -> BestEntry {
        BestEntry {
            metric: self.metric.name().to_owned(),
            greater_is_better: self.greater_is_better,
            evaluated: None,
            saved: None,
            stale: 0,
            data: Some(data.to_owned()),
        }
    }

    /// Why evaluations of this data cannot be compared with those of a record.
    pub(crate) fn difference(&self, entry: &BestEntry, data: &str) -> Option<String> {
        let metric = self.metric.name();
        if entry.metric != metric {
            return Some(format!(
                "evaluations are compared by {metric}, those of the checkpoint by {}",
                entry.metric
            ));
        }
        if entry.greater_is_better != self.greater_is_better {
            return Some(format!("--greater-is-better is {}", self.greater_is_better));
        }
        let is_other = entry.data.as_deref().is_some_and(|saved| saved != data);
        is_other.then(|| "the evaluation data is not that of the checkpoint".to_owned())
    }

    /// That of a record, which is kept where nothing asks for the best model.
    pub(crate) fn of_record(entry: &BestEntry) -> Option<Self> {
        Some(Self {
            metric: BestMetric::from_name(&entry.metric)?,
            greater_is_better: entry.greater_is_better,
            load_at_end: false,
            patience: None,
            threshold: 0.0,
        })
    }
}
