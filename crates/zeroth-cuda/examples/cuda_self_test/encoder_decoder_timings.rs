//! Timings of encoder-decoders, with the shapes of T5-3B and eight pairs of 512 and 512 tokens.

use bytemuck::cast_slice;
use zeroth_base::{ActivationFn, DType, PositionBuckets};
use zeroth_kernel::{
    AttentionContext, AttentionDims, AttentionDropout, BiasGrad, DeviceError, Kernel, PositionBiasDims,
    RowKey, Span,
};

use crate::harness::{Harness, Outcome, Work};

const SEQUENCES: usize = 8;
const LENGTH: usize = 512;
const ROWS: usize = SEQUENCES * LENGTH;
const HEADS: usize = 32;
const HEAD_DIM: usize = 128;
const D_MODEL: usize = 1024;
const D_FF: usize = 16_384;

impl Harness {
    pub(crate) fn time_encoder_decoder(&mut self) -> Outcome {
        for (name, causal, crosses) in
            [("encoder", false, false), ("decoder", true, false), ("cross", false, true)]
        {
            for dropped in [false, true] {
                self.time_context(name, causal, crosses, dropped)?;
            }
        }
        self.time_feed_forward()
    }

    fn row_keys(&mut self) -> Result<Span, DeviceError> {
        let key =
            |row: usize| RowKey { sample: (row / LENGTH) as u64, position: (row % LENGTH) as u32, epoch: 0 };
        let keys: Vec<RowKey> = (0..ROWS).map(key).collect();
        self.upload(cast_slice(&keys))
    }

    fn time_context(&mut self, name: &str, causal: bool, crosses: bool, dropped: bool) -> Outcome {
        let biased = !crosses;
        let max_distance = biased.then_some(128);
        let plain = AttentionDims::new(ROWS, HEADS, HEADS, HEAD_DIM, None, 1.0);
        let dims = AttentionDims { causal, max_distance, ..plain };
        let elements = ROWS * dims.q_width();
        let mut starts = vec![SEQUENCES as u32 + 1];
        starts.extend((0..=SEQUENCES).map(|sequence| (sequence * LENGTH) as u32));
        let starts = self.upload(cast_slice(&starts))?;
        let bias = if biased { Some(self.filled(DType::F32, HEADS * dims.distances())?) } else { None };
        let dropout = if dropped {
            Some(AttentionDropout { probability: 0.1, seed: 1, op: 0, keys: self.row_keys()? })
        } else {
            None
        };
        let context = AttentionContext { starts, kv_starts: crosses.then_some(starts), bias, dropout };
        let (q, k) = (self.filled(DType::Bf16, elements)?, self.filled(DType::Bf16, elements)?);
        let (v, dy) = (self.filled(DType::Bf16, elements)?, self.filled(DType::Bf16, elements)?);
        let [y, dq, dk, dv] = [(); 4].map(|()| self.allocate(2 * elements));
        let lse = self.allocate(4 * HEADS * ROWS);
        let dbias = biased.then(|| BiasGrad { to: self.allocate(4 * HEADS * dims.distances()), add: false });
        // Two matmuls over [length, length, head_dim], or half of it, per head and sequence.
        let whole = 4.0 * (ROWS * LENGTH) as f64 * (HEADS * HEAD_DIM) as f64;
        let flops = if causal { whole / 2.0 } else { whole };
        let shape = format!("{name}, 8x512, 32 heads of 128, dropout {dropped}");
        self.time(&shape, Work::Flops(flops), Kernel::Attention { dims, context, q, k, v, y, lse })?;
        let kernel = Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias };
        self.time(&shape, Work::Flops(2.5 * flops), kernel)?;
        if biased && !dropped {
            let kernel =
                Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias: None };
            self.time(&format!("{shape}, frozen biases"), Work::Flops(2.5 * flops), kernel)?;
        }
        self.next = 0;
        Ok(())
    }

    fn time_feed_forward(&mut self) -> Outcome {
        let count = ROWS * D_FF;
        let (x, dy) = (self.filled(DType::Bf16, count)?, self.filled(DType::Bf16, count)?);
        let (y, keys, bytes) = (self.allocate(2 * count), self.row_keys()?, 2.0 * count as f64);
        for activation in [ActivationFn::Relu, ActivationFn::GeluTanh] {
            let kernel = Kernel::Activation { activation, x, y };
            self.time("4096x16384", Work::Bytes(2.0 * bytes), kernel)?;
            let kernel = Kernel::ActivationBackward { activation, dy, x, dx: y };
            self.time("4096x16384", Work::Bytes(3.0 * bytes), kernel)?;
        }
        let (probability, width, row_stride) = (0.1, D_FF, D_FF);
        let kernel = Kernel::Dropout { probability, seed: 1, op: 0, width, row_stride, keys, x, y };
        self.time("4096x16384", Work::Bytes(2.0 * bytes), kernel)?;
        self.next = 0;
        let count = ROWS * D_MODEL;
        let (x, y) = (self.filled(DType::Bf16, count)?, self.allocate(2 * count));
        self.time("4096x1024", Work::Bytes(4.0 * count as f64), Kernel::Scale { factor: 0.03125, x, y })?;
        let buckets = PositionBuckets { buckets: 32, max_distance: 128, bidirectional: true };
        let (dims, distances) = (PositionBiasDims { buckets, heads: HEADS }, buckets.distances() as usize);
        let w = self.filled(DType::Bf16, 32 * HEADS)?;
        let (table, dw) = (self.filled(DType::F32, HEADS * distances)?, self.filled(DType::F32, 32 * HEADS)?);
        let bytes = (4 * HEADS * distances) as f64;
        self.time("32 heads", Work::Bytes(bytes), Kernel::PositionBias { dims, w, table })?;
        let kernel = Kernel::PositionBiasBackward { dims, dtable: table, dw };
        self.time("32 heads", Work::Bytes(bytes), kernel)
    }
}
