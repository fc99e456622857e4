//! Beam search over one prompt, with the rules of transformers 5: of the `(1 + end tokens) × beams` most likely continuations of
//! all beams, those that end are finished if they are among the first `beams`, and the first `beams` others go on. The finished
//! ones with the best scores are kept. A score is the sum of log-probabilities over `length ^ length_penalty`.

use super::{End, Generated};

/// When a search with as many finished hypotheses as beams ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EarlyStopping {
    /// Once the best running beam, at its present length, scores no better than the worst finished one.
    #[default]
    Heuristic,
    /// At once.
    Always,
    /// Once no running beam can score better at any length.
    Never,
}

/// Parameters of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSettings {
    /// Number of beams; 1 is no beam search.
    pub beams: usize,
    /// Exponent of the length that scores are divided by.
    pub length_penalty: f64,
    /// When it ends.
    pub early_stopping: EarlyStopping,
}

impl Default for BeamSettings {
    fn default() -> Self {
        Self { beams: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic }
    }
}

/// A beam: the tokens so far, and the sum of their log-probabilities.
#[derive(Debug, Clone, PartialEq)]
struct Beam {
    ids: Vec<i32>,
    score: f32,
}

/// A continuation of a beam by one token.
#[derive(Debug, Clone, Copy, PartialEq)]
struct BeamCandidate {
    score: f32,
    beam: usize,
    id: i32,
}

/// The state of a beam search.
#[derive(Debug, Clone)]
pub(super) struct BeamSearch {
    settings: BeamSettings,
    max_new_tokens: usize,
    stops: Vec<i32>,
    /// The best first.
    running: Vec<Beam>,
    /// Finished hypotheses with their scores, the best first; as many as beams at most.
    finished: Vec<(f32, Generated)>,
    is_done: bool,
}

impl BeamSearch {
    /// Starts with one beam without tokens.
    pub(super) fn new(settings: BeamSettings, max_new_tokens: u64, stops: &[i32]) -> Self {
        let max_new_tokens = usize::try_from(max_new_tokens).unwrap_or(usize::MAX);
        Self {
            settings,
            max_new_tokens,
            stops: stops.to_vec(),
            running: vec![Beam { ids: Vec::new(), score: 0.0 }],
            finished: Vec::new(),
            is_done: max_new_tokens == 0,
        }
    }

    /// New tokens of the beams that go on; none once the search has ended.
    pub(super) fn running(&self) -> impl Iterator<Item = &[i32]> {
        let running = if self.is_done { &[][..] } else { &self.running };
        running.iter().map(|beam| &beam.ids[..])
    }

    /// Takes the log-probabilities of the next token of every running beam, in order.
    pub(super) fn advance(&mut self, log_probs: &[Vec<f32>]) {
        let beams = self.settings.beams;
        let candidates = most_likely(&self.running, log_probs, (1 + self.stops.len()).max(2) * beams);
        let length = self.running.first().map_or(0, |beam| beam.ids.len()) + 1;
        let is_full = length >= self.max_new_tokens;
        let mut next = Vec::with_capacity(beams);
        for (rank, candidate) in candidates.into_iter().enumerate() {
            let BeamCandidate { score, beam, id } = candidate;
            let is_stop = self.stops.contains(&id);
            if is_stop || is_full {
                if rank < beams {
                    let ids = self.running[beam].ids.iter().copied().chain([id]).collect();
                    let end = if is_stop { End::Stop(id) } else { End::Length };
                    self.finish(score / self.divisor(length), Generated { ids, end });
                }
            } else if next.len() < beams {
                let ids = self.running[beam].ids.iter().copied().chain([id]).collect();
                next.push(Beam { ids, score });
            }
        }
        self.running = next;
        self.is_done = self.running.is_empty() || !self.may_improve(length);
    }

    /// Keeps a finished hypothesis if it is among the best.
    fn finish(&mut self, score: f32, hypothesis: Generated) {
        let place = self.finished.partition_point(|(known, _)| *known >= score);
        self.finished.insert(place, (score, hypothesis));
        self.finished.truncate(self.settings.beams);
    }

    /// Whether running beams of this length may still score better than the worst finished hypothesis.
    fn may_improve(&self, length: usize) -> bool {
        let (Some(best), Some((worst, _))) = (self.running.first(), self.finished.last()) else {
            return true;
        };
        if self.finished.len() < self.settings.beams {
            return true;
        }
        match self.settings.early_stopping {
            EarlyStopping::Always => false,
            EarlyStopping::Never if self.settings.length_penalty > 0.0 => {
                best.score / self.divisor(self.max_new_tokens) > *worst
            }
            EarlyStopping::Heuristic | EarlyStopping::Never => best.score / self.divisor(length) > *worst,
        }
    }

    fn divisor(&self, length: usize) -> f32 {
        (length as f64).powf(self.settings.length_penalty) as f32
    }

    /// The best hypothesis, once the search has ended.
    pub(super) fn best(&self) -> Option<Generated> {
        let found = self.finished.first().map(|(_, hypothesis)| hypothesis.clone());
        self.is_done.then(|| found.unwrap_or(Generated { ids: Vec::new(), end: End::Length }))
    }
}

/// The most likely continuations, the best first; among equals, those of better beams and lower ids.
fn most_likely(running: &[Beam], log_probs: &[Vec<f32>], count: usize) -> Vec<BeamCandidate> {
    let mut best: Vec<BeamCandidate> = Vec::with_capacity(count + 1);
    for (beam, (from, log_probs)) in running.iter().zip(log_probs).enumerate() {
        for (id, log_prob) in log_probs.iter().enumerate() {
            let score = from.score + log_prob;
            if best.len() == count && best.last().is_some_and(|last| last.score >= score) {
                continue;
            }
            let place = best.partition_point(|known| known.score >= score);
            best.insert(place, BeamCandidate { score, beam, id: id as i32 });
            best.truncate(count);
        }
    }
    best
}

/// Log-probabilities of logits.
pub(super) fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let peak = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = logits.iter().map(|logit| (f64::from(*logit) - peak).exp()).sum();
    let shift = peak + total.ln();
    logits.iter().map(|logit| (f64::from(*logit) - shift) as f32).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeroth_base::philox4x32;

    use super::*;

    /// Log-probabilities of the token after `ids`, of a model that is nothing but chance.
    fn model(seed: u32, vocab: usize, ids: &[i32]) -> Vec<f32> {
        let mut hash = seed;
        for id in ids {
            hash = philox4x32([hash, *id as u32, 7, 0], [seed, 1])[0];
        }
        let logit = |token: usize| {
            let word = philox4x32([hash, token as u32, 9, 0], [seed, 2])[0];
            f64::from(word) as f32 / u32::MAX as f32 * 6.0
        };
        log_softmax(&(0..vocab).map(logit).collect::<Vec<_>>())
    }

    fn searched(
        settings: BeamSettings,
        max_new: u64,
        stops: &[i32],
        seed: u32,
        vocab: usize,
    ) -> (f32, Generated) {
        let mut search = BeamSearch::new(settings, max_new, stops);
        while search.best().is_none() {
            let log_probs: Vec<Vec<f32>> = search.running().map(|ids| model(seed, vocab, ids)).collect();
            search.advance(&log_probs);
        }
        (search.finished[0].0, search.best().unwrap())
    }

    /// The best of all sequences that end with a stop or have `max_new` tokens.
    fn brute_force(penalty: f64, max_new: usize, stops: &[i32], seed: u32, vocab: usize) -> (f32, Vec<i32>) {
        let mut best = (f32::NEG_INFINITY, Vec::new());
        let mut open = vec![Beam { ids: Vec::new(), score: 0.0 }];
        while let Some(Beam { ids, score }) = open.pop() {
            for (id, log_prob) in model(seed, vocab, &ids).into_iter().enumerate() {
                let longer: Vec<i32> = ids.iter().copied().chain([id as i32]).collect();
                let score = score + log_prob;
                if stops.contains(&(id as i32)) || longer.len() == max_new {
                    let scaled = score / (longer.len() as f64).powf(penalty) as f32;
                    if scaled > best.0 {
                        best = (scaled, longer);
                    }
                } else {
                    open.push(Beam { ids: longer, score });
                }
            }
        }
        best
    }

    /// As many beams as there are prefixes find what is best of all.
    #[test]
    fn a_search_with_enough_beams_is_exhaustive() {
        let (vocab, max_new, stops) = (4, 4, [0]);
        for seed in 0..40 {
            for penalty in [0.0, 0.5, 1.0, 2.0] {
                let settings = BeamSettings {
                    beams: 256,
                    length_penalty: penalty,
                    early_stopping: EarlyStopping::Never,
                };
                let (score, found) = searched(settings, max_new, &stops, seed, vocab);
                let (best, expected) = brute_force(penalty, max_new as usize, &stops, seed, vocab);
                assert_eq!((score, found.ids), (best, expected), "seed {seed}, penalty {penalty}");
            }
        }
    }

    /// A second implementation of transformers' loop, with its tensors of fixed sizes and scores of -1e9.
    fn as_transformers(
        settings: BeamSettings,
        max_new: usize,
        stops: &[i32],
        seed: u32,
        vocab: usize,
    ) -> Vec<i32> {
        const NONE: f32 = -1e9;
        let BeamSettings { beams, length_penalty, early_stopping } = settings;
        let keep = (1 + stops.len()).max(2) * beams;
        let mut running: Vec<(f32, Vec<i32>)> = vec![(NONE, Vec::new()); beams];
        running[0].0 = 0.0;
        let mut done: Vec<(f32, Vec<i32>, bool)> = vec![(NONE, Vec::new(), false); beams];
        let mut may_improve = true;
        loop {
            let length = running[0].1.len() + 1;
            let mut all: Vec<(f32, Vec<i32>)> = Vec::new();
            for (score, ids) in &running {
                for (id, log_prob) in model(seed, vocab, ids).into_iter().enumerate() {
                    all.push((score + log_prob, ids.iter().copied().chain([id as i32]).collect()));
                }
            }
            all.sort_by(|one, next| next.0.total_cmp(&one.0));
            all.truncate(keep);
            let hits: Vec<bool> =
                all.iter().map(|(_, ids)| stops.contains(ids.last().unwrap()) || length == max_new).collect();
            let was_full =
                done.iter().all(|(.., is_done)| *is_done) && early_stopping == EarlyStopping::Always;
            let mut merged = done.clone();
            for (rank, ((score, ids), hit)) in all.iter().zip(&hits).enumerate() {
                let finishes = *hit && rank < beams;
                let mut score = score / (length as f64).powf(length_penalty) as f32;
                for blocked in [was_full, !may_improve, !finishes] {
                    score += if blocked { NONE } else { 0.0 };
                }
                merged.push((score, ids.clone(), finishes));
            }
            merged.sort_by(|one, next| next.0.total_cmp(&one.0));
            merged.truncate(beams);
            done = merged;
            let mut next: Vec<(f32, Vec<i32>)> = all
                .into_iter()
                .zip(&hits)
                .map(|((score, ids), hit)| (if *hit { score + NONE } else { score }, ids))
                .collect();
            next.sort_by(|one, next| next.0.total_cmp(&one.0));
            next.truncate(beams);
            running = next;
            let at = match early_stopping {
                EarlyStopping::Never if length_penalty > 0.0 => max_new,
                _ => length,
            };
            let possible = running[0].0 / (at as f64).powf(length_penalty) as f32;
            let worst = done.iter().map(|(score, ..)| *score).fold(f32::INFINITY, f32::min);
            may_improve &= done.iter().any(|(.., is_done)| possible > if *is_done { worst } else { NONE });
            let is_open =
                !(done.iter().all(|(.., is_done)| *is_done) && early_stopping == EarlyStopping::Always);
            if !(may_improve && is_open && !hits.iter().all(|hit| *hit)) {
                return done[0].1.clone();
            }
        }
    }

    proptest! {
        #[test]
        fn searches_are_those_of_transformers(
            (seed, beams, max_new) in (any::<u32>(), 2_usize..5, 1_usize..9),
            (penalty, early, stops) in (0_usize..5, 0_usize..3, 0_usize..3),
        ) {
            let settings = BeamSettings {
                beams,
                length_penalty: [-1.0, 0.0, 0.7, 1.0, 2.0][penalty],
                early_stopping: [EarlyStopping::Heuristic, EarlyStopping::Always, EarlyStopping::Never][early],
            };
            let stops = &[3, 11][..stops];
            let (_, found) = searched(settings, max_new as u64, stops, seed, 30);
            prop_assert_eq!(found.ids, as_transformers(settings, max_new, stops, seed, 30));
        }
    }

    #[test]
    fn nothing_is_searched_without_new_tokens() {
        let search = BeamSearch::new(BeamSettings { beams: 3, ..BeamSettings::default() }, 0, &[1]);
        assert_eq!(search.best(), Some(Generated { ids: Vec::new(), end: End::Length }));
        assert_eq!(search.running().count(), 0);
    }
}
