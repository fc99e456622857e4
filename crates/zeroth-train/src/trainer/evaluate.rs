//! Evaluation: every rank computes its share of the data, and all ranks take part in every micro-batch.

use zeroth_engine::{Engine, StreamBatch};
use zeroth_graph::LossPart;
use zeroth_kernel::LOSSES;
use zeroth_program::Program;

use super::error::TrainError;
use crate::data::{Batches, SampleOrder, TokenBatch};
use crate::job::{Evaluation, Job};
use crate::report::{EvalMetrics, LossParts};

/// The sum of the loss, and those of its parts.
type Sums = [f64; 1 + LOSSES];

/// The mean loss over the trained tokens of the evaluation data with its parts, equal on all ranks.
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
    let mut own_sums: Sums = [0.0; 1 + LOSSES];
    for round in 0..count.div_ceil(shape.train_batch()) {
        let first = shape.position(round, 0, engine.rank());
        // The last round may have fewer samples, or none, for this rank.
        let own = count.saturating_sub(first).min(shape.micro_batch);
        batches.fill_some(first, own, buffer)?;
        let parts =
            buffer.view_streams(|streams| engine.evaluate_parts(&StreamBatch { streams, inputs: &[] }))?;
        let weighted = engine.compiled().program.evaluated_weights.iter().zip(parts);
        own_sums[0] += weighted.map(|(weight, part)| weight * part).sum::<f64>();
        own_sums[1..].iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
    let totals = samples.totals();
    let tokens = totals.trained_tokens.max(1) as f64;
    // Summed in rank order, so every rank gets the same bits.
    let of_ranks = engine.all_gather(step, "evaluation", &own_sums)?;
    let mean = |place: usize| of_ranks.iter().map(|sums| sums[place]).sum::<f64>() / tokens;
    let eval_loss = mean(0);
    let Program { losses, evaluated_weights, .. } = &engine.compiled().program;
    Ok(EvalMetrics {
        step,
        eval_loss,
        loss_parts: evaluated_parts(losses, evaluated_weights, |part| mean(1 + part)),
        eval_perplexity: eval_loss.exp(),
        eval_tokens: totals.tokens,
        samples_seen: step * job.shape.train_batch(),
    })
}

/// The parts that count in an evaluation, with their names; a loss of one part has none.
fn evaluated_parts(losses: &[LossPart], weights: &[f64], mean: impl Fn(usize) -> f64) -> LossParts {
    let counts = || (0..losses.len()).filter(|part| weights[*part] != 0.0);
    let mut named = counts().filter(|_| counts().count() > 1).map(|part| (losses[part].name, mean(part)));
    std::array::from_fn(|_| named.next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_where_several_are_evaluated() {
        let losses = [LossPart::CROSS_ENTROPY, LossPart { name: "aux_loss", weight: 0.5 }];
        let name = LossPart::CROSS_ENTROPY.name;
        let of =
            |weights: &[f64]| evaluated_parts(&losses[..weights.len()], weights, |part| part as f64 + 2.0);
        assert_eq!(of(&[1.0]), [None; LOSSES]);
        // A student is evaluated without its teacher.
        assert_eq!(of(&[1.0, 0.0]), [None; LOSSES]);
        let [first, second, rest @ ..] = of(&[1.0, 0.5]);
        assert_eq!((first, second), (Some((name, 2.0)), Some(("aux_loss", 3.0))));
        assert!(rest.iter().all(Option::is_none));
    }
}
