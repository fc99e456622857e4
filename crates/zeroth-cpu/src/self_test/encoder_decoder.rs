//! Attention with a context, biases of positions, activations without a gate, and sums with a limit.

use zeroth_base::{ActivationFn, PositionBuckets};
use zeroth_kernel::{AttentionDims, CacheRange, Element, MAX_CLAMPED, PositionBiasDims, RmsNormDims, RowKey};

use super::{SelfTester, wide};
use crate::{
    AttentionSaved, BiasGradOut, ContextSlices, WeightDropout, activation, activation_backward, attention,
    attention_backward, attention_backward_scratch, attention_scratch, cached_attention,
    cached_attention_scratch, normal, position_bias, position_bias_backward, reference, rms_norm_residual,
    scale,
};

/// Rows of q and their sequences: empty ones, some of several tiles, and padding behind.
const ROWS: usize = 330;
const STARTS: [u32; 6] = [0, 7, 7, 210, 215, 320];
/// Rows of k and v and their sequences in cross attention: one without keys, one without queries, and padding before and behind.
const KV_ROWS: usize = 290;
const KV_STARTS: [u32; 6] = [2, 60, 75, 205, 205, 280];

impl<T: Element> SelfTester<'_, T> {
    pub(super) fn encoder_decoder(&mut self) {
        let causal = AttentionDims::new(ROWS, 4, 2, 24, None, 0.3);
        let encoder = AttentionDims { causal: false, ..causal };
        let cross = AttentionDims { kv_rows: KV_ROWS, ..encoder };
        for (name, dims, drops) in [
            ("attention with biases", AttentionDims { max_distance: Some(20), ..causal }, false),
            ("attention of an encoder", encoder, false),
            (
                "attention of an encoder with biases",
                AttentionDims { max_distance: Some(128), ..encoder },
                true,
            ),
            ("attention to an encoder", cross, false),
            ("attention to an encoder with dropout", cross, true),
        ] {
            self.attention_in(name, dims, drops);
        }
        self.cached_biases();
        self.position_biases();
        self.activations();
        self.limited_sums();
    }

    /// Numbers that stay f32.
    fn words(&mut self, count: usize) -> Vec<f32> {
        self.seed += 1;
        let mut values = vec![0.0; count];
        normal(self.pool, 2024, self.seed, 0, 0.5, &mut values);
        values
    }

    fn attention_in(&mut self, name: &str, dims: AttentionDims, drops: bool) {
        let AttentionDims { kv_rows, heads, .. } = dims;
        let keys: Vec<RowKey> = (0..ROWS as u32)
            .map(|row| RowKey { sample: u64::from(row / 40) << 31, position: row % 40, epoch: 1 })
            .collect();
        let bias = dims.max_distance.map(|_| self.words(heads * dims.distances()));
        let dropout = drops.then_some(WeightDropout { probability: 0.2, seed: 9 << 31, op: 4, keys: &keys });
        let context = ContextSlices {
            starts: &STARTS,
            kv_starts: (kv_rows != ROWS).then_some(&KV_STARTS),
            bias: bias.as_deref(),
            dropout,
        };
        let (q, dout) = (self.random(ROWS * dims.q_width()), self.random(ROWS * dims.q_width()));
        let [k, v] = [0; 2].map(|_| self.random(kv_rows * dims.kv_width()));
        let (mut out, mut lse) = (vec![T::default(); q.len()], vec![0.0; heads * ROWS]);
        let mut scratch = vec![0.0; attention_scratch(&dims, self.pool.threads())];
        attention(self.pool, &dims, &context, &q, &k, &v, &mut out, &mut lse, &mut scratch);
        let [q64, k64, v64] = [&q, &k, &v].map(|values| wide(values));
        let [expected, lses] = reference::attention_in(&dims, &context, &q64, &k64, &v64);
        self.compare(name, &out, &expected);
        self.compare(&format!("{name} lse"), &lse, &lses);
        let mut grads = [&q, &k, &v].map(|of| vec![T::default(); of.len()]);
        let mut sums = bias.as_ref().map(|bias| vec![0.0; bias.len()]);
        let [dq, dk, dv] = &mut grads;
        let dbias = sums.as_mut().map(|to| BiasGradOut { to, add: false });
        let mut scratch = vec![0.0; attention_backward_scratch(&dims, self.pool.threads())];
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        attention_backward(self.pool, &dims, &context, saved, &dout, dq, dk, dv, dbias, &mut scratch);
        let [dq, dk, dv, dbias] =
            reference::attention_in_backward(&dims, &context, &q64, &k64, &v64, &wide(&dout));
        for ((part, found), expected) in ["dq", "dk", "dv"].iter().zip(&grads).zip([dq, dk, dv]) {
            self.compare(&format!("{name} {part}"), found, &expected);
        }
        if let Some(found) = sums {
            self.compare(&format!("{name} dbias"), &found, &dbias);
        }
    }

    fn cached_biases(&mut self) {
        let ranges = [(0, 1), (1, 300), (0, 0), (300, 330)].map(|(first, end)| CacheRange { first, end });
        for (name, causal, max_distance) in [
            ("cached attention with biases", true, Some(20)),
            ("cached attention to an encoder", false, None),
        ] {
            let dims = AttentionDims { causal, max_distance, ..AttentionDims::new(4, 4, 2, 24, None, 0.3) };
            let bias = max_distance.map(|_| self.words(4 * dims.distances()));
            let (q, k, v) = (self.random(4 * 96), self.random(330 * 48), self.random(330 * 48));
            let mut out = vec![T::default(); q.len()];
            let mut scratch = vec![0.0; cached_attention_scratch(&dims, self.pool.threads())];
            let bias = bias.as_deref();
            cached_attention(self.pool, &dims, 330, &ranges, bias, &q, [&k, &v], &mut out, &mut scratch);
            let expected = reference::cached_attention(&dims, &ranges, bias, &wide(&q), &wide(&k), &wide(&v));
            self.compare(name, &out, &expected);
        }
    }

    fn position_biases(&mut self) {
        for bidirectional in [true, false] {
            let buckets = PositionBuckets { buckets: 32, max_distance: 128, bidirectional };
            let dims = PositionBiasDims { buckets, heads: 5 };
            let (w, dtable) = (self.random(32 * 5), self.words(257 * 5));
            let (mut table, mut dw) = (vec![0.0; dtable.len()], vec![0.0; w.len()]);
            position_bias(dims, &w, &mut table);
            position_bias_backward(dims, &dtable, &mut dw);
            self.compare("position bias", &table, &reference::position_bias(buckets, &wide(&w)));
            let expected = reference::position_bias_backward(buckets, &wide(&dtable));
            self.compare("position bias backward", &dw, &expected);
        }
    }

    fn activations(&mut self) {
        let (x, dy) = (self.random(9001), self.random(9001));
        let (mut y, mut dx) = (x.clone(), x.clone());
        for f in ActivationFn::ALL {
            activation(self.pool, f, &x, &mut y);
            activation_backward(self.pool, f, &dy, &x, &mut dx);
            self.compare(f.plain_name(), &y, &reference::activation(f, &wide(&x)));
            let expected = reference::activation_backward(f, &wide(&x), &wide(&dy));
            self.compare(f.plain_backward_name(), &dx, &expected);
        }
        let factor = 0.3f32;
        scale(self.pool, factor, &x, &mut y);
        let expected: Vec<f64> = wide(&x).into_iter().map(|x| f64::from(factor) * x).collect();
        self.compare("scale", &y, &expected);
    }

    /// h of sums that f16 does not hold.
    fn limited_sums(&mut self) {
        let (rows, width) = (40, 77);
        let dims = RmsNormDims { clamp: true, ..RmsNormDims::new(rows, width, 1e-5) };
        let [x, residual] = [0; 2].map(|_| {
            let large = |x: f32| T::from_f32((30_000.0 * x).clamp(-65_000.0, 65_000.0));
            self.words(rows * width).into_iter().map(large).collect::<Vec<T>>()
        });
        let w = self.random(width);
        let (mut h, mut y, mut rstd) = (x.clone(), x.clone(), vec![0.0; rows]);
        rms_norm_residual(self.pool, dims, &x, &residual, &w, &mut h, &mut y, &mut rstd);
        let most = f64::from(MAX_CLAMPED);
        let sums = wide(&x).into_iter().zip(wide(&residual)).map(|(x, r)| (x + r).clamp(-most, most));
        let sums: Vec<f64> = sums.collect();
        debug_assert!(sums.iter().any(|sum| sum.abs() == most), "sums beyond the limit");
        self.compare("rms_norm with a limit", &h, &sums);
        let [expected, _] = reference::rms_norm(dims, &wide(&h), &wide(&w));
        self.compare("rms_norm y with a limit", &y, &expected);
    }
}
