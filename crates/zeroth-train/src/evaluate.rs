//! The loss on data that is not trained on: every rank takes its share, and all ranks take part in every micro-batch.

use zeroth_comm::OpName;
use zeroth_step::run::{Engine, RunError};

use crate::{BatchShape, Batches, Evaluation, EvaluationLine, Job, MicroBatch, Order};

/// The mean loss over the trained tokens of the evaluation data, the same on all ranks.
pub(crate) fn evaluate(
    job: &Job,
    evaluation: &Evaluation,
    engine: &mut Engine<'_>,
    buffer: &mut MicroBatch,
    step: u64,
) -> Result<EvaluationLine, RunError> {
    let samples = &evaluation.samples;
    let shape = BatchShape { accumulation: 1, ..job.shape };
    let batches = Batches::new(samples, Order::new(samples.count(), None), shape);
    let count = samples.count().get();
    let mut loss = 0.0;
    for round in 0..count.div_ceil(shape.train_batch()) {
        let first = shape.position(round, 0, engine.rank());
        // The last round ends with the data: what lies beyond belongs to nobody.
        let own = count.saturating_sub(first).min(shape.micro_batch);
        batches.fill_some(first, own, buffer);
        loss += engine.evaluate(&buffer.view())?;
    }
    let loss = summed(engine, step, loss)?;
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

/// Every rank's number added in rank order.
fn summed(engine: &Engine<'_>, step: u64, own: f64) -> Result<f64, RunError> {
    let Some(comm) = engine.comm() else { return Ok(own) };
    let (counts, own) = (vec![8; comm.world()], own.to_le_bytes());
    let mut all = vec![0; 8 * comm.world()];
    let met = comm.all_gather(OpName::new(step, "evaluation", 0), &own, &mut all, &counts);
    met.and_then(zeroth_comm::Handle::wait).map_err(|source| RunError::Comm {
        step,
        op: "evaluation".to_owned(),
        source,
    })?;
    Ok(all.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).sum())
}
