//! The loss on data that is not trained on: every rank takes its share, and all ranks take part in every micro-batch.

use zeroth_engine::Engine;

use crate::meeting::tell_all;
use crate::{BatchShape, Batches, Evaluation, EvaluationLine, Job, MicroBatch, Order, TrainError};

/// The mean loss over the trained tokens of the evaluation data, the same on all ranks.
pub(crate) fn evaluate(
    job: &Job,
    evaluation: &Evaluation,
    engine: &mut Engine<'_>,
    buffer: &mut MicroBatch,
    step: u64,
) -> Result<EvaluationLine, TrainError> {
    let samples = &evaluation.samples;
    let shape = BatchShape { accumulation: 1, ..job.shape };
    let batches = Batches::new(samples, Order::new(samples.count(), None), shape);
    let count = samples.count().get();
    let mut loss = 0.0;
    for round in 0..count.div_ceil(shape.train_batch()) {
        let first = shape.position(round, 0, engine.rank());
        // The last round ends with the data: what lies beyond belongs to nobody.
        let own = count.saturating_sub(first).min(shape.micro_batch);
        batches.fill_some(first, own, buffer)?;
        loss += engine.evaluate(&buffer.view())?;
    }
    // Added in rank order: the same sum on every rank.
    let loss: f64 = tell_all(engine, step, "evaluation", &loss)?.iter().sum();
    let totals = samples.totals();
    let eval_loss = loss / totals.trained_tokens.max(1) as f64;
    Ok(EvaluationLine {
        step,
        eval_loss,
        eval_perplexity: eval_loss.exp(),
        eval_tokens: totals.tokens,
        samples_seen: step * job.shape.train_batch(),
    })
}
