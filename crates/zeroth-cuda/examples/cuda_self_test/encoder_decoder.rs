//! The kernels of encoder-decoders against their f64 references: attention with a context, biases of positions, activations without a
//! gate, and sums within a limit.

use bytemuck::cast_slice;
use zeroth_base::{ActivationFn, DType, PositionBuckets};
use zeroth_cpu::{ContextSlices, CpuDevice, Pool, WeightDropout, reference};
use zeroth_kernel::{
    AttentionContext, AttentionDims, AttentionDropout, BiasGrad, ByTier, CONFORMANCE_ARENA, CacheRange,
    DeviceError, Kernel, MAX_CLAMPED, PositionBiasDims, RmsNormDims, RowKey, conformance,
};

use crate::harness::{Harness, Outcome, POISON, add, from_bytes, narrow, to_bytes};

/// Attention with a context.
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    heads: [usize; 2],
    head_dim: usize,
    causal: bool,
    window: Option<usize>,
    starts: &'static [u32],
    /// Rows of k and v, and their sequences.
    cross: Option<(usize, &'static [u32])>,
    max_distance: Option<usize>,
    probability: f32,
}

/// An encoder of several tiles, with an empty sequence and padding on both sides.
const ENCODER: Case = Case {
    rows: 420,
    heads: [2, 2],
    head_dim: 64,
    causal: false,
    window: None,
    starts: &[3, 40, 40, 73, 400],
    cross: None,
    max_distance: None,
    probability: 0.0,
};
const DECODER: Case = Case { causal: true, ..ENCODER };
/// Sequences of other lengths, one of them without keys and one without queries.
const CROSS: Case =
    Case { cross: Some((390, &[0, 150, 170, 170, 380])), starts: &[3, 40, 40, 73, 400], ..ENCODER };

const CASES: &[Case] = &[
    ENCODER,
    Case { max_distance: Some(128), ..ENCODER },
    Case { probability: 0.1, ..ENCODER },
    Case { max_distance: Some(128), probability: 0.1, head_dim: 128, ..ENCODER },
    Case { max_distance: Some(20), probability: 0.5, head_dim: 128, heads: [4, 2], ..ENCODER },
    Case { max_distance: Some(160), probability: 0.1, head_dim: 40, ..ENCODER },
    Case { max_distance: Some(60), probability: 0.1, head_dim: 256, ..ENCODER },
    // Beyond what the kernels on tensor cores keep in shared memory, and a head that they do not support.
    Case { max_distance: Some(300), probability: 0.1, ..ENCODER },
    Case { max_distance: Some(30), probability: 0.1, head_dim: 36, ..ENCODER },
    Case { max_distance: Some(128), ..DECODER },
    Case { max_distance: Some(128), probability: 0.1, head_dim: 128, ..DECODER },
    Case { max_distance: Some(70), probability: 0.1, window: Some(90), ..DECODER },
    Case { probability: 0.3, window: Some(90), heads: [4, 1], ..DECODER },
    CROSS,
    Case { probability: 0.1, head_dim: 128, ..CROSS },
    Case { probability: 0.1, heads: [4, 2], ..CROSS },
    Case { max_distance: Some(25), probability: 0.1, head_dim: 256, ..CROSS },
    // The shape of a training run.
    Case {
        rows: 1024,
        starts: &[0, 512, 1024],
        max_distance: Some(128),
        probability: 0.1,
        head_dim: 128,
        ..ENCODER
    },
];

impl Harness {
    pub(crate) fn encoder_decoder(&mut self) -> Outcome {
        for case in CASES {
            for dbias in [Some(false), Some(true), None] {
                if dbias.is_none() || case.max_distance.is_some() {
                    self.attention_with_context(case, dbias)?;
                }
            }
        }
        self.cached_attention_with_biases()?;
        self.position_biases()?;
        self.activations()?;
        self.limited_norm()
    }

    /// Forward and backward; `dbias`: whether the gradient of the biases is added to others.
    fn attention_with_context(&mut self, case: &Case, dbias: Option<bool>) -> Outcome {
        let Case { rows, heads: [heads, kv_heads], head_dim, causal, window, starts, .. } = *case;
        let (kv_rows, kv_starts) = case.cross.unwrap_or((rows, starts));
        let plain =
            AttentionDims::new(rows, heads, kv_heads, head_dim, window, 0.8 / (head_dim as f32).sqrt());
        let dims = AttentionDims { kv_rows, causal, max_distance: case.max_distance, ..plain };
        let shape = format!("{case:?}, dbias {dbias:?}");
        let (q, dy) = (self.random(rows * dims.q_width()), self.random(rows * dims.q_width()));
        let (k, v) = (self.random(kv_rows * dims.kv_width()), self.random(kv_rows * dims.kv_width()));
        let bias = narrow(&self.random_of(DType::F32, heads * dims.distances()));
        let key = |row: usize| RowKey { sample: (row as u64 / 9) << 31, position: row as u32 % 9, epoch: 3 };
        let keys: Vec<RowKey> = (0..rows).map(key).collect();
        let (probability, seed, op) = (case.probability, 1 << 40 | 5, 9);
        let slices = ContextSlices {
            starts,
            kv_starts: case.cross.map(|(_, starts)| starts),
            bias: case.max_distance.map(|_| bias.as_slice()),
            dropout: (probability > 0.0).then_some(WeightDropout { probability, seed, op, keys: &keys }),
        };
        let [y, lse] = reference::attention_in(&dims, &slices, &q, &k, &v);
        let [dq, dk, dv, bias_grad] = reference::attention_in_backward(&dims, &slices, &q, &k, &v, &dy);
        // Rows of no sequence must not affect results.
        let padded = |values: &[f64], width: usize, starts: &[u32]| {
            let mut values = values.to_vec();
            values[..starts[0] as usize * width].fill(f64::NAN);
            values[starts[starts.len() - 1] as usize * width..].fill(f64::NAN);
            values
        };
        let context = |harness: &mut Self| -> Result<AttentionContext, DeviceError> {
            // The count, the entries, and unused capacity after them.
            let table = |starts: &[u32]| [&[starts.len() as u32], starts, &[7, 3]].concat();
            Ok(AttentionContext {
                starts: harness.upload(cast_slice(&table(starts)))?,
                kv_starts: case
                    .cross
                    .map(|(_, starts)| harness.upload(cast_slice(&table(starts))))
                    .transpose()?,
                bias: case.max_distance.map(|_| harness.upload(cast_slice(&bias))).transpose()?,
                dropout: match slices.dropout {
                    Some(_) => {
                        let keys = harness.upload(cast_slice(&keys))?;
                        Some(AttentionDropout { probability, seed, op, keys })
                    }
                    None => None,
                },
            })
        };
        let [q, dy] = [q, dy].map(|values| padded(&values, dims.q_width(), starts));
        let [k, v] = [k, v].map(|values| padded(&values, dims.kv_width(), kv_starts));
        if dbias != Some(true) {
            let outputs =
                [self.stored(self.dtype, y.clone(), 2.0), self.stored(DType::F32, lse.clone(), 2.0)];
            let kernel = Kernel::Attention {
                dims,
                context: context(self)?,
                q: self.upload_values(&q)?,
                k: self.upload_values(&k)?,
                v: self.upload_values(&v)?,
                y: outputs[0].span,
                lse: outputs[1].span,
            };
            self.case(&shape, kernel, &outputs)?;
        }
        let mut outputs = [dq, dk, dv].map(|grads| self.stored(self.dtype, grads, 2.0)).to_vec();
        // Gradients of scores are differences with the row sums of the rounded y.
        let factor = 4.0 * self.bound(self.dtype) / self.bound(DType::F32);
        match dbias {
            Some(true) => outputs.push(self.accumulated(&bias_grad, factor)),
            Some(false) => outputs.push(self.stored(DType::F32, bias_grad, factor)),
            None => {}
        }
        let kernel = Kernel::AttentionBackward {
            dims,
            context: context(self)?,
            q: self.upload_values(&q)?,
            k: self.upload_values(&k)?,
            v: self.upload_values(&v)?,
            y: self.upload_values(&y)?,
            lse: self.upload_f32(&lse)?,
            dy: self.upload_values(&dy)?,
            dq: outputs[0].span,
            dk: outputs[1].span,
            dv: outputs[2].span,
            dbias: dbias.map(|add| BiasGrad { to: outputs[3].span, add }),
        };
        self.case(&shape, kernel, &outputs)
    }

    fn cached_attention_with_biases(&mut self) -> Outcome {
        let (rows, cached, heads, kv_heads, head_dim) = (4, 500, 4, 2, 64);
        let plain = AttentionDims::new(rows, heads, kv_heads, head_dim, None, 0.1);
        let dims = AttentionDims { max_distance: Some(128), ..plain };
        let ranges = [(0, 1), (1, 300), (300, 300), (300, 500)].map(|(first, end)| CacheRange { first, end });
        let q = self.random(rows * dims.q_width());
        let (k, v) = (self.random(cached * dims.kv_width()), self.random(cached * dims.kv_width()));
        let bias = narrow(&self.random_of(DType::F32, heads * dims.distances()));
        let y = reference::cached_attention(&dims, &ranges, Some(&bias), &q, &k, &v);
        let y = self.stored(self.dtype, y, 2.0);
        let kernel = Kernel::CachedAttention {
            dims,
            cached,
            ranges: self.upload(cast_slice(&ranges))?,
            bias: Some(self.upload(cast_slice(&bias))?),
            q: self.upload_values(&q)?,
            k: self.upload_values(&k)?,
            v: self.upload_values(&v)?,
            y: y.span,
        };
        self.case("biases", kernel, &[y])
    }

    fn position_biases(&mut self) -> Outcome {
        for (buckets, max_distance, bidirectional) in
            [(32, 128, true), (32, 128, false), (7, 20, true), (2, 1, false)]
        {
            let (buckets, heads) = (PositionBuckets { buckets, max_distance, bidirectional }, 33);
            let (dims, shape) = (PositionBiasDims { buckets, heads }, format!("{buckets:?}"));
            let distances = buckets.distances() as usize;
            let bucket = |at: usize| buckets.of(at as i64 - max_distance as i64) as usize;
            let w = self.random(buckets.buckets as usize * heads);
            let entry = |at: usize| w[bucket(at % distances) * heads + at / distances];
            let table: Vec<f64> = (0..heads * distances).map(entry).collect();
            let expected = to_bytes(DType::F32, &table);
            let table = self.exact(vec![POISON; expected.len()], expected);
            let w = self.upload_values(&w)?;
            self.case(&shape, Kernel::PositionBias { dims, w, table: table.span }, &[table])?;
            let dtable = self.random_of(DType::F32, heads * distances);
            let mut dw = vec![0.0; buckets.buckets as usize * heads];
            for (at, grad) in dtable.iter().enumerate() {
                dw[bucket(at % distances) * heads + at / distances] += grad;
            }
            let dw = self.accumulated(&dw, 1.0);
            let kernel =
                Kernel::PositionBiasBackward { dims, dtable: self.upload_f32(&dtable)?, dw: dw.span };
            self.case(&shape, kernel, &[dw])?;
        }
        Ok(())
    }

    fn activations(&mut self) -> Outcome {
        for count in [1, 4096, 9001] {
            let shape = count.to_string();
            let (x, dy) = (self.random(count), self.random(count));
            for activation in ActivationFn::ALL {
                let y = self.overwritten(x.iter().map(|x| activation.value(*x)).collect());
                let kernel = Kernel::Activation { activation, x: self.upload_values(&x)?, y: y.span };
                self.case(&shape, kernel, &[y])?;
                let dx = x.iter().zip(&dy).map(|(x, dy)| dy * activation.slope(*x)).collect();
                let dx = self.overwritten(dx);
                let (dy, x) = (self.upload_values(&dy)?, self.upload_values(&x)?);
                self.case(&shape, Kernel::ActivationBackward { activation, dy, x, dx: dx.span }, &[dx])?;
            }
            let factor = 0.03125 * 1.1;
            let y = self.overwritten(x.iter().map(|x| x * f64::from(factor)).collect());
            let kernel = Kernel::Scale { factor, x: self.upload_values(&x)?, y: y.span };
            self.case(&shape, kernel, &[y])?;
        }
        Ok(())
    }

    /// Sums beyond what fp16 holds, for both kernels of norms.
    fn limited_norm(&mut self) -> Outcome {
        for (rows, width) in [(5, 20), (33, 1024)] {
            let dims = RmsNormDims { clamp: true, ..RmsNormDims::new(rows, width, 1e-6) };
            let large =
                |values: Vec<f64>| values.iter().map(|value| value.clamp(-2.0, 2.0) * 30_000.0).collect();
            let [x, residual]: [Vec<f64>; 2] = [0; 2].map(|_| large(self.random(rows * width)));
            let [x, residual] =
                [x, residual].map(|values| from_bytes(self.dtype, &to_bytes(self.dtype, &values)));
            let (w, limit) = (self.random(width), f64::from(MAX_CLAMPED));
            let sums: Vec<f64> = add(&x, &residual).iter().map(|sum| sum.clamp(-limit, limit)).collect();
            let h = from_bytes(self.dtype, &to_bytes(self.dtype, &sums));
            let [y, _] = reference::rms_norm(dims, &h, &w);
            let (rstd, outputs) =
                (self.allocate(4 * rows), [self.overwritten(h), self.stored(self.dtype, y, 2.0)]);
            let [h, y] = [0, 1].map(|number| outputs[number].span);
            let (x, residual, w) =
                (self.upload_values(&x)?, self.upload_values(&residual)?, self.upload_values(&w)?);
            let kernel = Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd };
            self.case(&format!("{rows}x{width}, limited"), kernel, &outputs)?;
        }
        Ok(())
    }

    /// The shared conformance test, against the CPU: the cases of `zeroth doctor`.
    pub(crate) fn conformance(&mut self) -> Outcome {
        let pool = Pool::start(std::thread::available_parallelism().map_or(1, usize::from))?;
        let mut reference = CpuDevice::on_pool(pool, ByTier::on_device(CONFORMANCE_ARENA))?;
        let tests = conformance(&mut self.device, &mut reference)?;
        for test in tests.iter().filter(|test| !test.ok) {
            println!(
                "conformance of {}: {:.2e}, max error {:.2e} FAILED",
                test.name, test.error, test.max_error
            );
        }
        let wrong = tests.iter().filter(|test| !test.ok).count();
        println!("conformance: {wrong} of {} checks failed", tests.len());
        self.failures += wrong;
        self.next = 0;
        Ok(())
    }
}
