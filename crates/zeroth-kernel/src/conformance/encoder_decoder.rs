//! The cases of encoder-decoders: attention with and without a causal mask, to other sequences, with biases and dropout; biases
//! of positions; activations without a gate; and norms with a limit.

use bytemuck::cast_slice;
use zeroth_base::{ActivationFn, DType, PositionBuckets, normal_at};

use super::{Output, Pair, ROWS, encode};
use crate::{
    AttentionContext, AttentionDims, AttentionDropout, BiasGrad, CacheRange, DeviceError, Kernel,
    PositionBiasDims, Queue, RmsNormDims, RowKey, Span,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// An attention with its sequences.
struct Case<'a> {
    causal: bool,
    window: Option<usize>,
    head_dim: usize,
    rows: usize,
    starts: &'a [u32],
    /// Rows of k and v and their sequences, in cross attention.
    cross: Option<(usize, &'a [u32])>,
    max_distance: Option<usize>,
    probability: Option<f32>,
}

/// Sequences with one of one row and an empty one, and padding behind.
const STARTS: &[u32] = &[0, 30, 31, 31, 80];

/// Attention of a decoder to its own sequences.
const DECODER: Case<'_> = Case {
    causal: true,
    window: None,
    head_dim: 64,
    rows: ROWS,
    starts: STARTS,
    cross: None,
    max_distance: None,
    probability: None,
};

/// Attention of an encoder.
const ENCODER: Case<'_> = Case { causal: false, ..DECODER };

/// More rows than those of q, with padding before and behind; and sequences one of which has no keys, where q has a sequence without
/// queries, too.
const CROSS: Option<(usize, &[u32])> = Some((217, &[3, 53, 53, 60, 210]));

const CASES: &[Case<'_>] = &[
    Case { max_distance: Some(8), ..DECODER },
    Case { max_distance: Some(128), head_dim: 40, window: Some(20), ..DECODER },
    Case { max_distance: Some(16), probability: Some(0.1), head_dim: 128, ..DECODER },
    Case { probability: Some(0.25), ..DECODER },
    ENCODER,
    Case { starts: &[0, ROWS as u32], head_dim: 128, ..ENCODER },
    Case { max_distance: Some(8), ..ENCODER },
    Case { max_distance: Some(1), head_dim: 40, ..ENCODER },
    // Several tiles of queries and keys.
    Case { rows: 310, starts: &[0, 8, 305], max_distance: Some(128), head_dim: 128, ..ENCODER },
    Case { rows: 310, starts: &[2, 300], max_distance: Some(20), probability: Some(0.1), ..ENCODER },
    Case { cross: CROSS, ..ENCODER },
    Case { cross: CROSS, head_dim: 128, ..ENCODER },
    Case { cross: CROSS, head_dim: 40, probability: Some(0.25), ..ENCODER },
    Case { rows: 290, starts: &[0, 290], cross: Some((5, &[1, 4])), probability: Some(0.1), ..ENCODER },
];

impl Pair<'_> {
    pub(super) fn encoder_decoder(&mut self) -> Result<(), DeviceError> {
        for case in CASES {
            // A device may have another kernel for sequences of one length.
            let is_equal = case.cross.is_none() && case.starts == [0, case.rows as u32];
            self.device.equal_sequences(is_equal.then_some(case.rows));
            self.attention_case(case)?;
        }
        self.device.equal_sequences(None);
        self.attention_of_caches()?;
        self.position_biases()?;
        self.activations()?;
        self.limited_norm()
    }

    /// Forward, and backward with and without a destination of the gradient of biases.
    fn attention_case(&mut self, case: &Case<'_>) -> Result<(), DeviceError> {
        let Case { causal, window, head_dim, rows, max_distance, .. } = *case;
        let kv_rows = case.cross.map_or(rows, |(kv_rows, _)| kv_rows);
        let plain = AttentionDims::new(rows, HEADS, KV_HEADS, head_dim, window, 0.125);
        let dims = AttentionDims { kv_rows, causal, max_distance, ..plain };
        let dtype = self.dtype;
        let seed = self.seed;
        let (context, [q, k, v]) = self.operands_of(case, &dims);
        let (y, lse) = (self.like(q), self.empty(4 * HEADS * rows));
        let kernel = Kernel::Attention { dims, context, q, k, v, y, lse };
        self.compare(kernel, &[Output::Rounded(dtype), Output::Rounded(DType::F32)])?;
        // Backward reads outputs of its own forward: those of the reference.
        let [y_bytes, lse_bytes] = [self.downloaded(y)?, self.downloaded(lse)?];
        let adds: &[Option<bool>] = if max_distance.is_some() { &[Some(false), Some(true)] } else { &[None] };
        for add in adds {
            self.seed = seed;
            let (context, [q, k, v]) = self.operands_of(case, &dims);
            let (y, lse) = (self.given(&y_bytes), self.given(&lse_bytes));
            let dy = self.random(rows * dims.q_width());
            let (dq, dk, dv) = (self.like(q), self.like(k), self.like(v));
            let dbias = add.map(|add| {
                let count = HEADS * dims.distances();
                let to = if add { self.words(count) } else { self.empty(4 * count) };
                BiasGrad { to, add }
            });
            let kernel = Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias };
            // Gradients of scores may be rounded before they are multiplied, and those of a query add up to 0.
            let dbias = dbias.map(|_| Output::RoundedTerms(DType::F32));
            let outputs = [Output::RoundedTerms(dtype); 3].into_iter().chain(dbias);
            self.compare(kernel, &outputs.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn downloaded(&mut self, span: Span) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; span.bytes as usize];
        self.reference.download(Queue::Compute, span, &mut bytes)?;
        Ok(bytes)
    }

    /// The context, q, k and v: the same ones from the same seed.
    fn operands_of(&mut self, case: &Case<'_>, dims: &AttentionDims) -> (AttentionContext, [Span; 3]) {
        let mut table = |starts: &[u32]| {
            let counted: Vec<u32> = [starts.len() as u32].into_iter().chain(starts.iter().copied()).collect();
            self.given(cast_slice(&counted))
        };
        let starts = table(case.starts);
        let kv_starts = case.cross.map(|(_, starts)| table(starts));
        let bias = case.max_distance.map(|_| self.words(HEADS * dims.distances()));
        let dropout = case.probability.map(|probability| {
            let keys: Vec<RowKey> = (0..dims.rows as u32)
                .map(|row| RowKey { sample: u64::from(row / 31) << 30, position: row % 31, epoch: 3 })
                .collect();
            AttentionDropout { probability, seed: 77 << 30, op: 5, keys: self.given(cast_slice(&keys)) }
        });
        let q = self.random(dims.rows * dims.q_width());
        let [k, v] = [0; 2].map(|_| self.random(dims.kv_rows * dims.kv_width()));
        (AttentionContext { starts, kv_starts, bias, dropout }, [q, k, v])
    }

    /// Decoding: with biases, and to the keys of an encoder.
    fn attention_of_caches(&mut self) -> Result<(), DeviceError> {
        let (rows, cached) = (5, 410);
        let ranges = [(0, 1), (1, 310), (0, 0), (310, 330), (330, 410)];
        let ranges = ranges.map(|(first, end)| CacheRange { first, end });
        for (causal, head_dim, max_distance) in
            [(true, 64, Some(128)), (true, 40, Some(16)), (false, 64, None), (false, 128, None)]
        {
            let plain = AttentionDims::new(rows, HEADS, KV_HEADS, head_dim, None, 0.125);
            let dims = AttentionDims { causal, max_distance, ..plain };
            let ranges = self.given(cast_slice(&ranges));
            let bias = max_distance.map(|_| self.words(HEADS * dims.distances()));
            let q = self.random(rows * dims.q_width());
            let [k, v] = [0; 2].map(|_| self.random(cached * dims.kv_width()));
            let y = self.like(q);
            let kernel = Kernel::CachedAttention { dims, cached, ranges, bias, q, k, v, y };
            self.compare(kernel, &[Output::Rounded(self.dtype)])?;
        }
        Ok(())
    }

    fn position_biases(&mut self) -> Result<(), DeviceError> {
        for (buckets, max_distance, bidirectional) in [(32, 128, true), (32, 128, false), (8, 16, true)] {
            let dims = PositionBiasDims {
                buckets: PositionBuckets { buckets, max_distance, bidirectional },
                heads: 5,
            };
            let (by_bucket, by_distance) = (buckets as usize * 5, dims.buckets.distances() as usize * 5);
            let (w, table) = (self.random(by_bucket), self.empty(4 * by_distance));
            self.compare(Kernel::PositionBias { dims, w, table }, &[Output::Exact])?;
            let (dtable, dw) = (self.words(by_distance), self.words(by_bucket));
            let kernel = Kernel::PositionBiasBackward { dims, dtable, dw };
            self.compare(kernel, &[Output::Rounded(DType::F32)])?;
        }
        Ok(())
    }

    fn activations(&mut self) -> Result<(), DeviceError> {
        let (count, dtype) = (5_003, self.dtype);
        for activation in ActivationFn::ALL {
            let x = self.random(count);
            let y = self.like(x);
            self.compare(Kernel::Activation { activation, x, y }, &[Output::Rounded(dtype)])?;
            let (dy, x) = (self.random(count), self.random(count));
            let dx = self.like(x);
            let kernel = Kernel::ActivationBackward { activation, dy, x, dx };
            self.compare(kernel, &[Output::Rounded(dtype)])?;
        }
        let x = self.random(count);
        let y = self.like(x);
        self.compare(Kernel::Scale { factor: 0.044_194_174, x, y }, &[Output::Exact])
    }

    /// Sums beyond what f16 holds.
    fn limited_norm(&mut self) -> Result<(), DeviceError> {
        if self.dtype != DType::F16 {
            return Ok(());
        }
        let width = 120;
        let dims = RmsNormDims { clamp: true, ..RmsNormDims::new(ROWS, width, 1e-6) };
        let [x, residual] = [1, 2].map(|name| {
            let large = |at| (normal_at(4096, name, at) * 30_000.0).clamp(-65_504.0, 65_504.0) as f32;
            let values: Vec<f32> = (0..(ROWS * width) as u64).map(large).collect();
            self.given(&encode(DType::F16, &values))
        });
        let w = self.random(width);
        let (h, y, rstd) = (self.like(x), self.like(x), self.empty(4 * ROWS));
        let kernel = Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd };
        self.compare(kernel, &[Output::Exact, Output::Rounded(DType::F16), Output::Rounded(DType::F32)])
    }
}
