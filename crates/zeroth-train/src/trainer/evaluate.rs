//! Evaluation: every rank computes its share of the data, and all ranks take part in every micro-batch.

use zeroth_engine::{Engine, StreamBatch};

use super::error::TrainError;
use crate::data::{Batches, SampleOrder, TokenBatch};
use crate::job::{Evaluation, Job};
use crate::report::EvalMetrics;

/// The mean loss over the trained tokens of the evaluation data, equal on all ranks.
pub(crate) fn evaluate(
    job: &Job,
    evaluation: &Evaluation,
    engine: &mut Engine<'_>,
    buffer: &mut TokenBatch,
    step: u64,
) -> Result<EvalMetrics, TrainError> {
    let samples = &evaluation.samples;
    let shape = evaluation.shape(job.shape);
    let batches = Batches::new(samples, SampleOrder::new(samples.count(), None), shape)
        .with_decoder_start(job.decoder_start);
    let count = samples.count().get();
    let mut loss = 0.0;
    for round in 0..count.div_ceil(shape.train_batch()) {
        let first = shape.position(round, 0, engine.rank());
        // The last round may have fewer samples, or none, for this rank.
        let own = count.saturating_sub(first).min(shape.micro_batch);
        batches.fill_some(first, own, buffer)?;
        loss +=
            buffer.view_streams(|streams| engine.evaluate_streams(&StreamBatch { streams, inputs: &[] }))?;
    }
    // Summed in rank order, so every rank gets the same bits.
    let loss: f64 = engine.all_gather(step, "evaluation", &loss)?.iter().sum();
    let totals = samples.totals();
    let eval_loss = loss / totals.trained_tokens.max(1) as f64;
    Ok(EvalMetrics {
        step,
        eval_loss,
        eval_perplexity: eval_loss.exp(),
        eval_tokens: totals.tokens,
        samples_seen: step * job.shape.train_batch(),
    })
}
