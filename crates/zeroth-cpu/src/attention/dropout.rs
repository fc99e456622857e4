//! Dropout of softmax weights without a stored mask: see [`zeroth_kernel::AttentionDropout`].

use std::ops::Range;

use zeroth_base::{halves, philox4x32, philox4x32_lanes};
use zeroth_kernel::{AttentionDropout, RowKey};

use super::blocking::KEYS;
use crate::check_len;

/// Keys whose bits come from four consecutive counters.
const GROUP: usize = 32;
/// Counters of a tile of keys.
const COUNTERS: usize = KEYS / GROUP * 4;

/// One dropout of softmax weights of a model.
#[derive(Debug, Clone, Copy)]
pub struct WeightDropout<'a> {
    /// The probability that a weight is zeroed; the others are divided by 1 - probability.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The number of this op among the model's dropouts.
    pub op: u32,
    /// One key per row of q.
    pub keys: &'a [RowKey],
}

impl WeightDropout<'_> {
    #[track_caller]
    pub(super) fn check(&self, rows: usize) {
        check_len("keys", self.keys.len(), rows);
        assert!(
            (0.0..1.0).contains(&self.probability),
            "weights are dropped with a probability of {}, which is not from 0 to less than 1",
            self.probability
        );
    }
}

/// The dropout of one head.
#[derive(Clone, Copy)]
pub(super) struct HeadDropout<'a> {
    setting: WeightDropout<'a>,
    head: u32,
    threshold: u32,
    scale: f32,
}

impl<'a> HeadDropout<'a> {
    pub(super) fn new(setting: WeightDropout<'a>, head: usize) -> Self {
        Self {
            setting,
            head: head as u32,
            threshold: AttentionDropout::threshold(setting.probability),
            scale: 1.0 / (1.0 - setting.probability),
        }
    }

    pub(super) const fn head(&self) -> u32 {
        self.head
    }

    pub(super) const fn op(&self) -> u32 {
        self.setting.op
    }

    pub(super) const fn seed(&self) -> [u32; 2] {
        halves(self.setting.seed)
    }

    /// The keys of rows of q.
    pub(super) fn keys(&self, rows: Range<usize>) -> &'a [RowKey] {
        &self.setting.keys[rows]
    }

    /// A weight is dropped where its 16 bits are below this.
    pub(super) const fn threshold(&self) -> u32 {
        self.threshold
    }

    /// The factor of weights that are kept.
    pub(super) const fn scale(&self) -> f32 {
        self.scale
    }

    /// The factors of the weights of a row of q for the tile of keys from `first` on, a position in their sequence and a
    /// multiple of [`GROUP`].
    #[inline(always)]
    pub(super) fn factors(&self, row: usize, first: usize) -> [f32; KEYS] {
        let key = self.setting.keys[row];
        let [low, high] = halves(key.sample);
        let own = philox4x32([key.epoch, self.setting.op, low, high], halves(self.setting.seed));
        let first = (first / GROUP * 4) as u32;
        let counters = [
            std::array::from_fn(|counter| first + counter as u32),
            [key.position; COUNTERS],
            [own[2]; COUNTERS],
            [own[3] ^ self.head; COUNTERS],
        ];
        let words = philox4x32_lanes(counters, [own[0], own[1]]);
        let mut factors = [0.0; KEYS];
        for (group, factors) in factors.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            for (word, factors) in words.iter().zip(factors.as_chunks_mut::<8>().0) {
                let word = &word[4 * group..][..4];
                for (key, factor) in factors.iter_mut().enumerate() {
                    let bits = word[key / 2] >> (16 * (key % 2)) & 0xffff;
                    *factor = if bits < self.threshold { 0.0 } else { self.scale };
                }
            }
        }
        factors
    }
}
