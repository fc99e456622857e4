//! Samples one token from its logits.

use zeroth_base::philox4x32;

use super::Generation;

/// Domain separation: keeps these random numbers apart from shuffling, dropout and weight initialisation with the
/// same seed.
const PURPOSE: u32 = 0x5341_4d50; // "SAMP"

/// Where a token is drawn: what its random number depends on, besides the seed.
#[derive(Debug, Clone, Copy)]
struct Draw {
    /// Index of its sequence in the request, whatever the batch it is decoded in.
    sequence: u64,
    /// Number of tokens before it.
    position: u32,
}

/// Samples the token after `text`, prompt included, of the request's sequence of this index. All logits must be finite.
pub(super) fn choose(logits: &[f32], generation: &Generation, sequence: usize, text: &[i32]) -> i32 {
    // Positions are 32 bits wide in every kernel.
    let draw = Draw { sequence: sequence as u64, position: text.len() as u32 };
    if generation.repetition_penalty == 1.0 {
        return choose_at(logits, generation, draw);
    }
    let mut penalised = logits.to_vec();
    penalise(&mut penalised, generation.repetition_penalty, text);
    choose_at(&penalised, generation, draw)
}

/// Makes tokens of the text less likely, however often they occur in it.
pub(super) fn penalise(logits: &mut [f32], penalty: f64, text: &[i32]) {
    if penalty == 1.0 {
        return;
    }
    let penalty = penalty as f32;
    let mut seen: Vec<i32> = text.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        let Some(logit) = usize::try_from(id).ok().and_then(|id| logits.get_mut(id)) else { continue };
        *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
    }
}

fn choose_at(logits: &[f32], generation: &Generation, draw: Draw) -> i32 {
    if generation.temperature == 0.0 {
        return largest(logits);
    }
    let (order, chances) = candidates(logits, generation);
    let mut left = uniform(generation.seed, draw) * chances.iter().sum::<f64>();
    for (&id, &chance) in order.iter().zip(&chances) {
        if left < chance {
            return id as i32;
        }
        left -= chance;
    }
    // Rounding may leave a remainder.
    order[chances.len() - 1] as i32
}

/// All tokens by falling probability, and the probabilities of those that may be drawn, relative to the first's.
fn candidates(logits: &[f32], generation: &Generation) -> (Vec<usize>, Vec<f64>) {
    // Sorted by probability, ties by id, so the order is the same on every machine.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_unstable_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if let Some(top_k) = generation.top_k {
        order.truncate(usize::try_from(top_k).unwrap_or(usize::MAX));
    }
    let peak = f64::from(logits[order[0]]);
    let mut chances: Vec<f64> =
        order.iter().map(|&id| ((f64::from(logits[id]) - peak) / generation.temperature).exp()).collect();
    if let Some(top_p) = generation.top_p {
        let enough = top_p * chances.iter().sum::<f64>();
        let mut so_far = 0.0;
        let kept = chances.iter().take_while(|&&chance| {
            let needed = so_far < enough;
            so_far += chance;
            needed
        });
        chances.truncate(kept.count());
    }
    if let Some(min_p) = generation.min_p {
        // The first is 1, and never below.
        let kept = chances.iter().take_while(|&&chance| chance >= min_p).count();
        chances.truncate(kept);
    }
    (order, chances)
}

fn largest(logits: &[f32]) -> i32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as i32
}

/// A uniform number in [0, 1) with 53 random bits.
fn uniform(seed: u64, Draw { sequence, position }: Draw) -> f64 {
    let counter = [position, sequence as u32, PURPOSE, (sequence >> 32) as u32];
    let words = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: Generation = Generation {
        max_new_tokens: 1,
        temperature: 0.0,
        top_k: None,
        top_p: None,
        min_p: None,
        repetition_penalty: 1.0,
        seed: 7,
        stops: Vec::new(),
    };
    const LOGITS: [f32; 5] = [0.5, 2.0, -1.0, 2.0, 1.0];

    fn at(sequence: u64, position: u32) -> Draw {
        Draw { sequence, position }
    }

    fn shares(generation: &Generation) -> [f64; 5] {
        let mut counts = [0.0; 5];
        for position in 0..40_000 {
            counts[choose_at(&LOGITS, generation, at(0, position)) as usize] += 1.0 / 40_000.0;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_largest_logit_and_breaks_ties_by_id() {
        assert_eq!(choose_at(&LOGITS, &GREEDY, at(0, 0)), 1);
        let narrow = [
            Generation { temperature: 3.0, top_k: Some(1), ..GREEDY },
            Generation { temperature: 0.7, top_p: Some(1e-9), ..GREEDY },
        ];
        for generation in narrow {
            assert!(
                (0..100).all(|position| choose_at(&LOGITS, &generation, at(0, position)) == 1),
                "{generation:?}"
            );
        }
    }

    #[test]
    fn sampling_frequencies_match_the_softmax() {
        for temperature in [0.5, 1.0, 2.0] {
            let found = shares(&Generation { temperature, ..GREEDY });
            let total: f64 = LOGITS.iter().map(|logit| (f64::from(*logit) / temperature).exp()).sum();
            for (id, logit) in LOGITS.iter().enumerate() {
                let expected = (f64::from(*logit) / temperature).exp() / total;
                // Five standard deviations of 40,000 draws are at most 0.0125.
                assert!((found[id] - expected).abs() < 0.0125, "{temperature} {id}: {found:?} {expected}");
            }
        }
    }

    #[test]
    fn top_k_and_top_p_truncate_and_keep_proportions() {
        // The probabilities are 0.379, 0.379, 0.139, 0.084 and 0.019.
        let three = shares(&Generation { temperature: 1.0, top_k: Some(3), ..GREEDY });
        assert_eq!((three[0], three[2]), (0.0, 0.0));
        assert!((three[4] - 0.1554).abs() < 0.0125, "{three:?}");
        // The top two sum to 0.757, the top three to 0.897.
        assert_eq!(shares(&Generation { temperature: 1.0, top_p: Some(0.75), ..GREEDY })[4], 0.0);
        let three = shares(&Generation { temperature: 1.0, top_p: Some(0.76), ..GREEDY });
        assert!(three[4] > 0.1 && three[0] == 0.0 && three[2] == 0.0, "{three:?}");
    }

    #[test]
    fn draws_depend_on_seed_sequence_and_position_alone() {
        let draw = |seed, place| choose_at(&LOGITS, &Generation { temperature: 1.0, seed, ..GREEDY }, place);
        let text =
            |seed, sequence| (0..64).map(|position| draw(seed, at(sequence, position))).collect::<Vec<_>>();
        assert_eq!(text(1, 0), text(1, 0));
        assert_ne!(text(1, 0), text(2, 0));
        assert_ne!(text(1, 0), text(1 << 32 | 1, 0), "the upper half of the seed matters");
        assert_ne!(text(1, 0), text(1, 1));
        assert_ne!(text(1, 0), text(1, 1 << 32), "the upper half of the index matters");
        assert!((0..1000).all(|position| (0.0..1.0).contains(&uniform(3, at(position.into(), position)))));
        // Neighbours in one direction are no neighbours in the other.
        let numbers = (0..32).flat_map(|sequence| (0..32).map(move |position| at(sequence, position)));
        let mut bits: Vec<u64> = numbers.map(|place| uniform(3, place).to_bits()).collect();
        bits.sort_unstable();
        bits.dedup();
        assert_eq!(bits.len(), 32 * 32);
    }

    /// Compares with `tests/golden/sampling.json`, made by `tests/make_sampling.py` with transformers' logits processors.
    #[test]
    fn probabilities_are_those_of_transformers() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/golden/sampling.json")).unwrap();
        let number = |value: &serde_json::Value| value.as_f64();
        let mut kept = Vec::new();
        for case in golden["cases"].as_array().unwrap() {
            let list = |key: &str| case[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
            let mut logits: Vec<f32> = list("logits").map(|logit| logit as f32).collect();
            let text: Vec<i32> = list("text").map(|id| id as i32).collect();
            let generation = Generation {
                temperature: number(&case["temperature"]).unwrap(),
                top_k: case["top_k"].as_u64(),
                top_p: number(&case["top_p"]),
                min_p: number(&case["min_p"]),
                repetition_penalty: number(&case["repetition_penalty"]).unwrap(),
                ..GREEDY
            };
            penalise(&mut logits, generation.repetition_penalty, &text);
            assert_eq!(largest(&logits), case["greedy"].as_i64().unwrap() as i32, "{case}");
            let (order, chances) = candidates(&logits, &generation);
            let total: f64 = chances.iter().sum();
            let mut found = vec![0.0; logits.len()];
            order.iter().zip(&chances).for_each(|(id, chance)| found[*id] = chance / total);
            for (id, (found, expected)) in found.iter().zip(list("probabilities")).enumerate() {
                assert_eq!(*found == 0.0, expected == 0.0, "{id} of {case}");
                assert!((found - expected).abs() < 2e-6, "{id}: {found} and not {expected} of {case}");
            }
            kept.push(chances.len());
        }
        assert!(kept.len() >= 12 && kept.contains(&1) && kept.iter().any(|count| *count > 20), "{kept:?}");
    }
}
