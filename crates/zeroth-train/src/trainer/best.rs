//! The best evaluation of a run, and early stopping, with the rules of Hugging Face's trainer.

use crate::checkpoint::{BestEntry, Evaluated, Manifest};
use crate::job::{BestPolicy, Evaluation, Job};
use crate::report::EvalMetrics;
use crate::resume::data_hash;

impl Evaluation {
    /// Hash of the data.
    fn data(&self) -> String {
        data_hash(&self.samples)
    }
}

impl Job {
    /// How evaluations are compared, if they are.
    pub fn best_policy(&self) -> Option<BestPolicy> {
        self.evaluation.as_ref()?.best
    }

    /// The record of a checkpoint, if what follows can be compared with it. Where nothing follows, it stays whatever the data is.
    fn comparable<'a>(&self, policy: &BestPolicy, manifest: &'a Manifest) -> Option<&'a BestEntry> {
        let (entry, evaluation) = (manifest.best.as_ref()?, self.evaluation.as_ref()?);
        let data = if manifest.step >= self.steps { entry.data.clone() } else { Some(evaluation.data()) };
        policy.difference(entry, &data.unwrap_or_default()).is_none().then_some(entry)
    }

    /// Whether nothing remains to be trained after this checkpoint: all steps are done, or early stopping ended the
    /// run there.
    pub fn is_complete(&self, manifest: &Manifest) -> bool {
        let is_exhausted = |policy: BestPolicy| {
            self.comparable(&policy, manifest).is_some_and(|entry| policy.is_exhausted(entry))
        };
        manifest.step >= self.steps || self.best_policy().is_some_and(is_exhausted)
    }

    /// The step of the best checkpoint that a checkpoint records, if it is the one to export.
    pub fn best_step(&self, manifest: &Manifest) -> Option<u64> {
        let policy = self.best_policy().filter(|policy| policy.load_at_end)?;
        self.comparable(&policy, manifest)?.saved.map(|saved| saved.step)
    }

    /// Compares the evaluations that follow with those of a checkpoint. Without a flag that asks for it, a checkpoint's record is
    /// continued where the evaluations are of the same data.
    pub(crate) fn best_tracker(&self, from: Option<&Manifest>) -> Option<BestTracker> {
        let evaluation = self.evaluation.as_ref()?;
        let record = from.and_then(|manifest| manifest.best.as_ref());
        let Some(policy) = evaluation.best else {
            let policy = BestPolicy::of_record(record?)?;
            let entry = self.comparable(&policy, from?)?.clone();
            return Some(BestTracker::new(policy, entry, &evaluation.data()));
        };
        let comparable = from.and_then(|manifest| self.comparable(&policy, manifest));
        let data = evaluation.data();
        let mut tracker =
            BestTracker::new(policy, comparable.cloned().unwrap_or_else(|| policy.start(&data)), &data);
        if let Some(record) = record.filter(|_| comparable.is_none()) {
            tracker.restarted = policy.difference(record, &data).map(|why| match record.evaluated {
                Some(Evaluated { step, value }) => {
                    format!(
                        "{why}: the best model is chosen anew (it was step {step}, {} {value:.4})",
                        record.metric
                    )
                }
                None => format!("{why}: the best model is chosen anew"),
            });
        }
        Some(tracker)
    }
}

/// Compares the evaluations of a run as they come. All ranks see the same losses and decide alike.
#[derive(Debug)]
pub(crate) struct BestTracker {
    policy: BestPolicy,
    entry: BestEntry,
    /// The evaluation of the current step.
    current: Option<Evaluated>,
    /// Why the record of the checkpoint is not continued.
    restarted: Option<String>,
}

impl BestTracker {
    /// Continues a record with evaluations of this data.
    fn new(policy: BestPolicy, entry: BestEntry, data: &str) -> Self {
        let entry = BestEntry { data: Some(data.to_owned()), ..entry };
        Self { policy, entry, current: None, restarted: None }
    }

    /// Why the record of the checkpoint is not continued.
    pub(crate) fn restarted(&self) -> Option<&str> {
        self.restarted.as_deref()
    }

    /// Takes an evaluation into account. Returns whether it is the best so far.
    ///
    /// As in Hugging Face's callback, patience compares with the best before this evaluation, whatever the threshold
    /// let pass earlier. A value that is not finite is never better.
    pub(crate) fn observe(&mut self, metrics: &EvalMetrics) -> bool {
        let (step, value) = (metrics.step, self.policy.metric.of(metrics));
        let (best, policy) = (self.entry.evaluated, self.policy);
        let is_best = value.is_finite() && best.is_none_or(|best| policy.is_better(value, best.value));
        let counts = is_best && best.is_none_or(|best| (value - best.value).abs() > policy.threshold);
        self.entry.stale = if counts { 0 } else { self.entry.stale + 1 };
        let evaluated = Evaluated { step, value };
        self.current = value.is_finite().then_some(evaluated);
        if is_best {
            self.entry.evaluated = Some(evaluated);
        }
        is_best
    }

    /// The state to save with `step`, which is a candidate for the best checkpoint if it was evaluated.
    pub(crate) fn saved_at(&mut self, step: u64) -> &BestEntry {
        let policy = self.policy;
        let better = self.current.filter(|current| {
            let best = self.entry.saved;
            current.step == step && best.is_none_or(|best| policy.is_better(current.value, best.value))
        });
        self.entry.saved = better.or(self.entry.saved);
        &self.entry
    }

    /// The best checkpoint, if the model is to be exported from it.
    pub(crate) fn to_export(&self) -> Option<Evaluated> {
        self.entry.saved.filter(|_| self.policy.load_at_end)
    }

    /// Whether the model is to be exported from the best checkpoint.
    pub(crate) fn exports_best(&self) -> bool {
        self.policy.load_at_end
    }

    /// Forgets a best checkpoint that no longer exists.
    pub(crate) fn forget_saved(&mut self) {
        self.entry.saved = None;
    }

    /// Whether early stopping ends the run.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.policy.is_exhausted(&self.entry)
    }

    /// Why early stopping ends the run.
    pub(crate) fn reason(&self) -> String {
        let (metric, stale) = (self.policy.metric.name(), self.entry.stale);
        let evaluations = zeroth_base::counted(stale, "evaluation");
        let by = if self.policy.threshold > 0.0 {
            format!(" by more than {}", self.policy.threshold)
        } else {
            String::new()
        };
        match self.entry.evaluated {
            Some(Evaluated { step, value }) => {
                format!("{metric} has not improved{by} in {evaluations} (best {value:.4} at step {step})")
            }
            None => format!("{metric} was not finite in {evaluations}"),
        }
    }

    /// The best checkpoint in words.
    pub(crate) fn describe(&self, best: Evaluated) -> String {
        format!(
            "step {}, the best checkpoint by {} ({:.4})",
            best.step,
            self.policy.metric.name(),
            best.value
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::BestMetric;

    fn policy() -> BestPolicy {
        BestPolicy {
            metric: BestMetric::EvalLoss,
            greater_is_better: false,
            load_at_end: true,
            patience: Some(2),
            threshold: 0.0,
        }
    }

    fn found(step: u64, eval_loss: f64) -> EvalMetrics {
        EvalMetrics {
            step,
            eval_loss,
            loss_parts: [None; zeroth_kernel::LOSSES],
            eval_perplexity: eval_loss.exp(),
            eval_tokens: 1,
            samples_seen: step,
        }
    }

    /// For each loss, whether it is the best so far; and the evaluations without improvement after each.
    fn observed(policy: BestPolicy, losses: &[f64]) -> (Vec<bool>, Vec<u64>) {
        let mut tracker = BestTracker::new(policy, policy.start("data"), "data");
        let each =
            (1..).zip(losses).map(|(step, loss)| (tracker.observe(&found(step, *loss)), tracker.entry.stale));
        each.unzip()
    }

    #[test]
    fn patience_counts_evaluations_without_improvement() {
        let (best, stale) = observed(policy(), &[3.0, 2.0, 2.0, 1.9, 2.5, f64::NAN]);
        assert_eq!(best, [true, true, false, true, false, false]);
        assert_eq!(stale, [0, 0, 1, 0, 1, 2]);
        let (best, _) = observed(BestPolicy { greater_is_better: true, ..policy() }, &[3.0, 2.0, 4.0]);
        assert_eq!(best, [true, false, true]);
    }

    #[test]
    fn small_improvements_move_the_best_but_use_up_patience() {
        // As in Hugging Face: 2.95 is the best although it does not count, and 2.85 is compared with it.
        let (best, stale) = observed(BestPolicy { threshold: 0.1, ..policy() }, &[3.0, 2.95, 2.86, 2.7]);
        assert_eq!(best, [true; 4]);
        assert_eq!(stale, [0, 1, 2, 0]);
    }

    #[test]
    fn only_saved_evaluations_are_exported() {
        let mut tracker = BestTracker::new(policy(), policy().start("data"), "data");
        tracker.observe(&found(1, 1.0));
        tracker.observe(&found(2, 2.0));
        assert_eq!(tracker.saved_at(2).saved, Some(Evaluated { step: 2, value: 2.0 }));
        // A step that was saved on request, without an evaluation.
        assert_eq!(tracker.saved_at(3).saved.unwrap().step, 2);
        tracker.observe(&found(4, 1.5));
        assert_eq!(tracker.saved_at(4).saved.unwrap().step, 4);
        assert_eq!(tracker.to_export().unwrap().step, 4);
        assert_eq!(tracker.entry.evaluated.unwrap().step, 1);
        assert!(tracker.is_exhausted());
        assert_eq!(tracker.reason(), "eval_loss has not improved in 2 evaluations (best 1.0000 at step 1)");
    }
}
