//! The self test: every kernel against its f64 reference on this machine, in f32, bf16 and f16.

mod distill;
mod encoder_decoder;
mod experts;

use std::marker::PhantomData;

use bytemuck::Zeroable;
use half::{bf16, f16};
use zeroth_base::{ActivationFn, DType};
use zeroth_kernel::{Deviation, SelfTest};

use super::{
    AttentionSaved, Dropout, Master, Moments, Pool, RopeTable, TokenRows, block_squares, convert, dropout,
    embedding, embedding_backward, embedding_backward_tied, gated_activation, gated_activation_backward,
    head_loss, head_loss_backward, head_loss_backward_rounded, head_loss_rounded_scratch, head_loss_scratch,
    head_norm_rope, head_norm_rope_backward, head_norm_rope_scratch, linear, linear_add, linear_db,
    linear_dw, linear_dw_rounded, linear_dx, linear_scratch, logits, logits_scratch, normal, optimize,
    quantize_nf4, reference, rms_norm, rms_norm_backward, rms_norm_residual, rms_norm_scratch, rope,
    rope_angles, rope_backward, sum_ranks, unpack_nf4,
};
use super::{ContextSlices, attention, attention_backward, attention_backward_scratch, attention_scratch};
use super::{cached_attention, cached_attention_scratch};
use zeroth_kernel::{
    AttentionDims, CacheRange, Element, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims,
    LogitsDims, NF4_BLOCK, Nf4Record, RmsNormDims, RopeDims, RowKey,
};

use zeroth_kernel::{DeviceError, Moment, Optimizer, Recipe, StepNumbers};

/// Runs every kernel on random inputs with all threads of this machine. Takes well under a second.
pub fn self_test() -> Result<Vec<SelfTest>, DeviceError> {
    let pool = Pool::start(std::thread::available_parallelism().map_or(1, usize::from))?;
    Ok(self_test_on(&pool))
}

/// [`self_test`] on a given pool.
pub fn self_test_on(pool: &Pool) -> Vec<SelfTest> {
    let mut tests = Vec::new();
    SelfTester::<f32> { pool, tests: &mut tests, seed: 0, storage: PhantomData }.all();
    SelfTester::<bf16> { pool, tests: &mut tests, seed: 0, storage: PhantomData }.all();
    SelfTester::<f16> { pool, tests: &mut tests, seed: 0, storage: PhantomData }.all();
    tests
}

struct SelfTester<'a, T> {
    pool: &'a Pool,
    tests: &'a mut Vec<SelfTest>,
    seed: u64,
    storage: PhantomData<T>,
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

impl<T: Element> SelfTester<'_, T> {
    /// Random numbers as stored, so that the reference gets the kernel's inputs.
    fn random(&mut self, count: usize) -> Vec<T> {
        self.seed += 1;
        let mut values = vec![T::default(); count];
        normal(self.pool, 2024, self.seed, 0, 1.0, &mut values);
        values
    }

    fn compare<A: Element>(&mut self, name: &str, found: &[A], expected: &[f64]) {
        // Rounding to bf16 is off by up to 2^-8 of an element, to f16 by 2^-11, and by less than half of that over many; an f32
        // sum by some parts in 10^7. Gradients of
        // logits and attention weights are rounded to bf16 before they are multiplied. Maximum errors are about twice those seen.
        let rounded = name.starts_with("head_loss dw") || name.starts_with("distill_loss dw");
        let bound = match (A::DTYPE, T::DTYPE) {
            (DType::F32, DType::Bf16) if rounded => Deviation { l2: 3e-3, max: 5e-2 },
            (DType::F32, DType::Bf16) if name.ends_with("dbias") => Deviation { l2: 1e-2, max: 5e-2 },
            (DType::F32, DType::F16) if name.ends_with("dbias") => Deviation { l2: 1e-3, max: 1e-2 },
            (DType::F32, DType::F32) if name.ends_with("dbias") => Deviation { l2: 1e-5, max: 5e-5 },
            (DType::Bf16, _) if name.starts_with("attention") => Deviation { l2: 3.5e-3, max: 8e-2 },
            (DType::Bf16, _) => Deviation { l2: 3e-3, max: 2e-2 },
            (DType::F16, _) => Deviation { l2: 4e-4, max: 1e-2 },
            (DType::F32, DType::F32) => Deviation { l2: 2e-6, max: 5e-5 },
            (DType::F32, _) => Deviation { l2: 1e-5, max: 1e-3 },
        };
        let deviation = Deviation::of(&wide(found), expected);
        let (Deviation { l2: error, max: max_error }, ok) = (deviation, deviation.is_within(bound));
        self.tests.push(SelfTest { name: format!("{name} {}", T::DTYPE), error, max_error, ok });
    }

    fn all(&mut self) {
        self.linear();
        self.embedding();
        self.rms_norm();
        self.rope();
        self.attention();
        self.gated_activations();
        self.head_loss();
        self.dropout();
        self.optimizers();
        self.squares();
        self.sums_and_casts();
        self.nf4();
        self.logits();
        self.head_norm_rope();
        self.cached_attention();
        self.adapter();
        self.experts();
        self.encoder_decoder();
        self.distill_loss();
    }

    fn linear(&mut self) {
        let dims = LinearDims::new(201, 300, 275);
        let (x, w) = (self.random(201 * 300), self.random(275 * 300));
        let (bias, dy) = (self.random(275), self.random(201 * 275));
        let mut scratch = vec![0.0; linear_scratch(dims, self.pool.threads())];
        let mut y = vec![T::default(); dy.len()];
        linear(self.pool, dims, &x, &w, Some(&bias), &mut y, &mut scratch);
        self.compare("linear", &y, &reference::linear(dims, &wide(&x), &wide(&w), Some(&wide(&bias))));
        let mut dx = vec![T::default(); x.len()];
        let (mut dw, mut db) = (vec![0.0f32; w.len()], vec![0.0f32; bias.len()]);
        linear_dx(self.pool, dims, 1.0, &dy, &w, &mut dx, false, &mut scratch);
        linear_dw(self.pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
        linear_db(self.pool, dims, &dy, &mut db, &mut scratch);
        let mut once = w.clone();
        linear_dw_rounded(self.pool, dims, 1.0, &dy, &x, &mut once, &mut scratch);
        let expected = reference::linear_backward(dims, &wide(&x), &wide(&w), &wide(&dy));
        self.compare("linear dx", &dx, &expected[0]);
        self.compare("linear dw", &dw, &expected[1]);
        self.compare("linear dw once", &once, &expected[1]);
        self.compare("linear db", &db, &expected[2]);
    }

    /// The matmuls of a low-rank adapter: y plus the scaled product, and the scaled gradients.
    fn adapter(&mut self) {
        for rank in [3, 16] {
            let (dims, scale) = (LinearDims::new(201, rank, 275), 0.3f32);
            let (x, w) = (self.random(201 * rank), self.random(275 * rank));
            let (before, dy) = (self.random(201 * 275), self.random(201 * 275));
            let mut scratch = vec![0.0; linear_scratch(dims, self.pool.threads())];
            let mut y = before.clone();
            linear_add(self.pool, dims, scale, &x, &w, &mut y, &mut scratch);
            let product = reference::linear(dims, &wide(&x), &wide(&w), None);
            let sums = wide(&before).into_iter().zip(product);
            let expected: Vec<f64> = sums.map(|(before, sum)| before + f64::from(scale) * sum).collect();
            self.compare(&format!("linear_add rank {rank}"), &y, &expected);
            let (mut dx, mut dw, mut once) = (x.clone(), vec![0.0f32; w.len()], w.clone());
            linear_dx(self.pool, dims, scale, &dy, &w, &mut dx, false, &mut scratch);
            linear_dw(self.pool, dims, scale, &dy, &x, &mut dw, &mut scratch);
            linear_dw_rounded(self.pool, dims, scale, &dy, &x, &mut once, &mut scratch);
            let [mut expected_dx, mut expected_dw, _] =
                reference::linear_backward(dims, &wide(&x), &wide(&w), &wide(&dy));
            for value in expected_dx.iter_mut().chain(&mut expected_dw) {
                *value *= f64::from(scale);
            }
            self.compare(&format!("linear_add dx rank {rank}"), &dx, &expected_dx);
            self.compare(&format!("linear_add dw rank {rank}"), &dw, &expected_dw);
            self.compare(&format!("linear_add dw once rank {rank}"), &once, &expected_dw);
        }
    }

    fn embedding(&mut self) {
        let dims = EmbeddingDims::new(50, 70);
        let ids: Vec<i32> = (0..131).map(|i| if i % 10 == 9 { -1 } else { i * i % 50 }).collect();
        let (table, dy) = (self.random(50 * 70), self.random(131 * 70));
        let mut y = vec![T::default(); dy.len()];
        embedding(self.pool, dims, &ids, &table, &mut y);
        self.compare("embedding", &y, &reference::embedding(dims, &ids, &wide(&table)));
        let mut dtable = vec![0.0f32; table.len()];
        embedding_backward(self.pool, dims, &ids, &dy, &mut dtable);
        self.compare("embedding backward", &dtable, &reference::embedding_backward(dims, &ids, &wide(&dy)));
    }

    fn rms_norm(&mut self) {
        let dims = RmsNormDims::new(131, 77, 1e-5);
        let count = 131 * 77;
        let (x, residual, w) = (self.random(count), self.random(count), self.random(77));
        let (dy, past) = (self.random(count), self.random(count));
        let (mut h, mut y, mut rstd) = (vec![T::default(); count], vec![T::default(); count], vec![0.0; 131]);
        rms_norm_residual(self.pool, dims, &x, &residual, &w, &mut h, &mut y, &mut rstd);
        let sum: Vec<f64> = wide(&x).iter().zip(wide(&residual)).map(|(x, r)| x + r).collect();
        self.compare("rms_norm h", &h, &sum);
        let [expected, rstds] = reference::rms_norm(dims, &wide(&h), &wide(&w));
        // Two roundings, as in transformers.
        self.compare("rms_norm y", &y, &expected);
        self.compare("rms_norm rstd", &rstd, &rstds);
        rms_norm(self.pool, dims, &h, &w, &mut y, &mut rstd);
        self.compare("rms_norm without residual", &y, &expected);
        let (mut dh, mut dw) = (vec![T::default(); count], vec![0.0f32; 77]);
        let mut scratch = vec![0.0; rms_norm_scratch(dims)];
        rms_norm_backward(
            self.pool,
            dims,
            &dy,
            &h,
            &rstd,
            &w,
            Some(&past),
            Some(&mut dh),
            Some(&mut dw),
            &mut scratch,
        );
        let [mut expected, weights] = reference::rms_norm_backward(dims, &wide(&h), &wide(&w), &wide(&dy));
        expected.iter_mut().zip(wide(&past)).for_each(|(dh, past)| *dh += past);
        self.compare("rms_norm dh", &dh, &expected);
        self.compare("rms_norm dw", &dw, &weights);
    }

    fn rope(&mut self) {
        let dims = RopeDims::new(37, 3, 20, 16);
        let table = RopeTable::plain(1e4, 16);
        let positions: Vec<i32> = (0..37).map(|i| i * 11).collect();
        let (mut cos, mut sin) = (vec![0.0; 37 * 8], vec![0.0; 37 * 8]);
        rope_angles(self.pool, &table, &positions, &mut cos, &mut sin);
        let x = self.random(37 * 60);
        let mut y = x.clone();
        rope(self.pool, dims, &cos, &sin, &mut y);
        self.compare("rope", &y, &reference::rope(dims, &cos, &sin, 1.0, &wide(&x)));
        let mut y = x.clone();
        rope_backward(self.pool, dims, &cos, &sin, &mut y);
        self.compare("rope backward", &y, &reference::rope(dims, &cos, &sin, -1.0, &wide(&x)));
    }

    fn head_norm_rope(&mut self) {
        let rope = RopeDims::new(37, 5, 20, 16);
        let dims = HeadNormRopeDims { rope, eps: 1e-5 };
        let (x, w, dy) = (self.random(37 * 100), self.random(20), self.random(37 * 100));
        let positions: Vec<i32> = (0..37).map(|i| i * 11).collect();
        let (mut cos, mut sin) = (vec![0.0; 37 * 8], vec![0.0; 37 * 8]);
        rope_angles(self.pool, &RopeTable::plain(1e4, 16), &positions, &mut cos, &mut sin);
        let (mut y, mut rstd) = (x.clone(), vec![0.0; 37 * 5]);
        head_norm_rope(self.pool, dims, &x, &w, &cos, &sin, &mut y, &mut rstd);
        let [expected, rstds] = reference::head_norm_rope(dims, &wide(&x), &wide(&w), &cos, &sin);
        self.compare("head_norm_rope", &y, &expected);
        self.compare("head_norm_rope rstd", &rstd, &rstds);
        let (mut dh, mut dw) = (x.clone(), vec![0.0f32; 20]);
        let mut scratch = vec![0.0; head_norm_rope_scratch(dims)];
        head_norm_rope_backward(
            self.pool,
            dims,
            &dy,
            &x,
            &rstd,
            &w,
            &cos,
            &sin,
            Some(&mut dh),
            Some(&mut dw),
            &mut scratch,
        );
        let [expected, _] =
            reference::head_norm_rope_backward(dims, &wide(&x), &wide(&w), &cos, &sin, &wide(&dy));
        self.compare("head_norm_rope dh", &dh, &expected);
        // The gradient of w sums what was rounded after the inverse rotation.
        let mut back = dy;
        rope_backward(self.pool, rope, &cos, &sin, &mut back);
        let [_, expected] = reference::rms_norm_backward(dims.norm(), &wide(&x), &wide(&w), &wide(&back));
        self.compare("head_norm_rope dw", &dw, &expected);
    }

    fn attention(&mut self) {
        for (name, window) in [("attention", None), ("attention with a window", Some(50))] {
            let dims = AttentionDims::new(330, 4, 2, 24, window, 0.3);
            let starts = [0, 7, 7, 210, 320];
            let (q, k, v) = (self.random(330 * 96), self.random(330 * 48), self.random(330 * 48));
            let dout = self.random(330 * 96);
            let (mut out, mut lse) = (vec![T::default(); q.len()], vec![0.0; 4 * 330]);
            let mut scratch = vec![0.0; attention_scratch(&dims, self.pool.threads())];
            attention(
                self.pool,
                &dims,
                &ContextSlices::new(&starts),
                &q,
                &k,
                &v,
                &mut out,
                &mut lse,
                &mut scratch,
            );
            let [expected, lses] = reference::attention(&dims, &starts, &wide(&q), &wide(&k), &wide(&v));
            self.compare(name, &out, &expected);
            self.compare(&format!("{name} lse"), &lse, &lses);
            let mut grads =
                [vec![T::default(); q.len()], vec![T::default(); k.len()], vec![T::default(); k.len()]];
            let [dq, dk, dv] = &mut grads;
            let mut scratch = vec![0.0; attention_backward_scratch(&dims, self.pool.threads())];
            let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
            attention_backward(
                self.pool,
                &dims,
                &ContextSlices::new(&starts),
                saved,
                &dout,
                dq,
                dk,
                dv,
                None,
                &mut scratch,
            );
            let (q, k, v, dout) = (wide(&q), wide(&k), wide(&v), wide(&dout));
            let expected = reference::attention_backward(&dims, &starts, &q, &k, &v, &dout);
            for ((part, found), expected) in ["dq", "dk", "dv"].iter().zip(&grads).zip(&expected) {
                self.compare(&format!("{name} {part}"), found, expected);
            }
        }
    }

    fn cached_attention(&mut self) {
        // One key, more than a tile, and padding.
        let ranges = [(0, 1), (1, 300), (0, 0), (300, 330)].map(|(first, end)| CacheRange { first, end });
        for (name, window) in [("cached attention", None), ("cached attention with a window", Some(50))] {
            let dims = AttentionDims::new(4, 4, 2, 24, window, 0.3);
            let (q, k, v) = (self.random(4 * 96), self.random(330 * 48), self.random(330 * 48));
            let mut out = vec![T::default(); q.len()];
            let mut scratch = vec![0.0; cached_attention_scratch(&dims, self.pool.threads())];
            cached_attention(self.pool, &dims, 330, &ranges, None, &q, [&k, &v], &mut out, &mut scratch);
            let expected = reference::cached_attention(&dims, &ranges, None, &wide(&q), &wide(&k), &wide(&v));
            self.compare(name, &out, &expected);
        }
    }

    fn gated_activations(&mut self) {
        let (gate, up, dy) = (self.random(9001), self.random(9001), self.random(9001));
        for activation in ActivationFn::ALL {
            let name = activation.name();
            let mut y = vec![T::default(); 9001];
            gated_activation(self.pool, activation, &gate, &up, &mut y);
            let (gate64, up64) = (wide(&gate), wide(&up));
            self.compare(name, &y, &reference::gated_activation(activation, &gate64, &up64));
            let mut dup = y.clone();
            gated_activation_backward(self.pool, activation, &dy, &gate, &up, &mut y, &mut dup);
            let [expected_gate, expected_up] =
                reference::gated_activation_backward(activation, &gate64, &up64, &wide(&dy));
            self.compare(&format!("{name} dgate"), &y, &expected_gate);
            self.compare(&format!("{name} dup"), &dup, &expected_up);
        }
    }

    fn head_loss(&mut self) {
        let dims = HeadLossDims::new(40, 50, 301);
        let labels: Vec<i32> = (0..40).map(|i| if i % 4 == 0 { -100 } else { i * 7 }).collect();
        let (x, w) = (self.random(40 * 50), self.random(301 * 50));
        let mut scratch = vec![0.0; head_loss_scratch(dims, self.pool.threads())];
        let (mut dx, mut dw) = (vec![T::default(); x.len()], vec![0.0f32; w.len()]);
        let evaluated = head_loss(self.pool, dims, &x, &w, &labels, &mut scratch);
        let trained = head_loss_backward(
            self.pool,
            dims,
            &x,
            &w,
            &labels,
            0.125,
            Some(&mut dx),
            Some(&mut dw),
            true,
            &mut scratch,
        );
        let (loss, [expected_dx, expected_dw]) =
            reference::head_loss(dims, &wide(&x), &wide(&w), &labels, 0.125);
        self.compare("head_loss", &[evaluated as f32, trained as f32], &[loss, loss]);
        self.compare("head_loss dx", &dx, &expected_dx);
        self.compare("head_loss dw", &dw, &expected_dw);
        dw.fill(f32::NAN);
        head_loss_backward(
            self.pool,
            dims,
            &x,
            &w,
            &labels,
            0.125,
            Some(&mut dx),
            Some(&mut dw),
            false,
            &mut scratch,
        );
        self.compare("head_loss dw written", &dw, &expected_dw);
        self.tied_head(dims, &x, &w, &labels, &expected_dw);
    }

    /// The gradient of a tied embedding, rounded by the head and the embedding.
    fn tied_head(&mut self, dims: HeadLossDims, x: &[T], w: &[T], labels: &[i32], of_head: &[f64]) {
        let HeadLossDims { rows, hidden, vocab, .. } = dims;
        let ids: Vec<i32> = (0..40).map(|i| if i % 10 == 9 { -1 } else { i * i % 90 }).collect();
        let mut scratch = vec![0.0; head_loss_rounded_scratch(dims, self.pool.threads())];
        let (mut dx, mut dw) = (x.to_vec(), w.to_vec());
        let mut waiting = vec![f32::NAN; rows * hidden];
        let own = Some(TokenRows { ids: &ids, rows: &mut waiting });
        head_loss_backward_rounded(
            self.pool,
            dims,
            x,
            w,
            labels,
            0.125,
            Some(&mut dx),
            &mut dw,
            own,
            &mut scratch,
        );
        let dims = EmbeddingDims::new(vocab, hidden);
        embedding_backward_tied(self.pool, dims, &ids, x, &mut waiting, &mut dw);
        let mut expected = reference::embedding_backward(dims, &ids, &wide(x));
        expected.iter_mut().zip(of_head).for_each(|(sum, of_head)| *sum += of_head);
        self.compare("head_loss dw tied", &dw, &expected);
    }

    fn logits(&mut self) {
        // Five sequences, the second empty; logits of a sixth are zero.
        let dims = LogitsDims::new(40, 6, 50, 301);
        let starts = [0, 7, 7, 8, 30, 38];
        let (x, w) = (self.random(40 * 50), self.random(301 * 50));
        let mut scratch = vec![0.0; logits_scratch(dims, self.pool.threads())];
        let mut found = vec![f32::NAN; 6 * 301];
        logits(self.pool, dims, &starts, &x, &w, &mut found, &mut scratch);
        self.compare("logits", &found, &reference::logits(dims, &starts, &wide(&x), &wide(&w)));
    }

    fn dropout(&mut self) {
        let setting = Dropout { probability: 0.1, seed: 1 << 40, op: 9 };
        let keys: Vec<RowKey> =
            (0..70).map(|i| RowKey { sample: u64::from(i / 9) << 30, position: i % 9, epoch: 3 }).collect();
        let x = self.random(70 * 13);
        let mut y = vec![T::default(); x.len()];
        dropout(self.pool, setting, &keys, [13, 13], &x, &mut y);
        self.compare("dropout", &y, &reference::dropout(setting, &keys, 13, &wide(&x)));
    }

    fn optimizers(&mut self) {
        for (optimizer, recipe) in [
            (Optimizer::AdamW, Recipe { beta2: 0.95, weight_decay: [0.1; 2], ..Recipe::default() }),
            (Optimizer::Adam, Recipe { bias_correction: 0, weight_decay: [0.1; 2], ..Recipe::default() }),
            (Optimizer::Sgd, Recipe { weight_decay: [0.1; 2], ..Recipe::default() }),
            (Optimizer::Sgd, Recipe { momentum: 0.9, nesterov: 1, ..Recipe::default() }),
            (Optimizer::Lion, Recipe { beta2: 0.99, weight_decay: [0.1; 2], ..Recipe::default() }),
            (Optimizer::Adagrad, Recipe { lr_decay: 0.1, weight_decay: [0.1; 2], ..Recipe::default() }),
            (Optimizer::AdEmaMix, Recipe { t_beta3: 5, weight_decay: [0.1; 2], ..Recipe::default() }),
        ] {
            let master: Vec<f32> = self.random(9000).iter().map(|value| value.to_f32()).collect();
            let (mut exact, mut exact_moments) = (wide(&master), Moment::ALL.map(|_| vec![0.0; 9000]));
            let (mut p, mut moments) = (master, Moment::ALL.map(|_| vec![0.0; 9000]));
            let mut weights = vec![T::default(); 9000];
            for step in 1..=3 {
                let grads = self.random(9000);
                let numbers = StepNumbers::new(&recipe, 0, step, 1e-2, 0.5, 0.25);
                let buffers = moments.each_mut().map(|moment| Some(&mut moment[..]));
                optimize::<T, f32, T>(
                    self.pool,
                    optimizer,
                    &numbers,
                    &grads,
                    Master::F32(&mut p),
                    Moments { buffers, rounding: None },
                    Some(&mut weights),
                );
                let grads: Vec<f64> = wide(&grads).iter().map(|grad| grad * 0.125).collect();
                let moments = exact_moments.each_mut().map(|moment| &mut moment[..]);
                reference::optimize(optimizer, &recipe, step, 1e-2, &grads, &mut exact, moments);
            }
            self.compare(&format!("{optimizer:?} master"), &p, &exact);
            for &moment in optimizer.moments() {
                let name = format!("{optimizer:?} {} moment", moment.name());
                self.compare(&name, &moments[moment as usize], &exact_moments[moment as usize]);
            }
            self.compare(&format!("{optimizer:?} weights"), &weights, &exact);
        }
    }

    fn squares(&mut self) {
        let stored = self.random(9000);
        let mut sums = vec![0.0; 5];
        block_squares(self.pool, &stored, &mut sums);
        let found: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
        let expected: Vec<f64> =
            wide(&stored).chunks(2048).map(|block| block.iter().map(|x| x * x).sum()).collect();
        self.compare("block_squares", &found, &expected);
    }

    fn sums_and_casts(&mut self) {
        let ranks = [self.random(20_000), self.random(20_000), self.random(20_000)];
        let expected: Vec<f64> =
            (0..20_000).map(|i| ranks.iter().map(|r| f64::from(r[i].to_f32())).sum()).collect();
        let mut sum = vec![0.0f32; 20_000];
        sum_ranks(self.pool, &ranks.concat(), &mut sum, false);
        self.compare("sum_ranks", &sum, &expected);
        let mut narrow = vec![T::default(); 20_000];
        convert(self.pool, &sum, &mut narrow);
        self.compare("convert", &narrow, &expected);
    }

    fn nf4(&mut self) {
        let count = 3 * Nf4Record::ELEMENTS + 101;
        let elements = self.random(count);
        let mut records = vec![Nf4Record::zeroed(); count.div_ceil(Nf4Record::ELEMENTS)];
        quantize_nf4(self.pool, &elements, &mut records);
        let expected: Vec<f64> = wide(&elements).chunks(NF4_BLOCK).flat_map(reference::nf4).collect();
        let mut found = vec![T::default(); count];
        unpack_nf4(self.pool, &records, &mut found);
        self.compare("nf4", &found, &expected);
    }
}
