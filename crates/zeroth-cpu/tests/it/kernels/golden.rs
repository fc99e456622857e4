//! Against PyTorch and transformers in fp32. The files are written by `make_golden_ops.py`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use zeroth_base::ActivationFn;
use zeroth_cpu::*;
use zeroth_kernel::*;
use zeroth_kernel::{Optimizer, Recipe, StepNumbers};

/// Distance that a kernel may be from PyTorch, relative to the length of the tensor or, where that is next to nothing (the
/// gradient of a score that stands alone), to 0.1.
const NEAR: f64 = 1e-5;

/// One golden file, in the safetensors format.
struct Golden {
    name: String,
    header: Value,
    data: Vec<u8>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden-ops")
}

/// All files of an op, on every path of this machine. `test` gets a pool and says nothing unless it is wrong.
fn each(op: &str, files: usize, test: impl Fn(&Pool, &Golden)) {
    let mut found = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if name.split('-').next() != Some(op) {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let golden = Golden { name, header, data: bytes[8 + length..].to_vec() };
        for &path in Isa::available() {
            test(&Pool::on_isa(2, path).unwrap(), &golden);
        }
        found += 1;
    }
    assert_eq!(found, files, "golden files of {op}");
}

impl Golden {
    fn words(&self, tensor: &str, dtype: &str) -> impl Iterator<Item = [u8; 4]> {
        let entry = &self.header[tensor];
        assert_eq!(entry["dtype"], dtype, "{tensor} of {}", self.name);
        let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        self.data[at(0)..at(1)].as_chunks::<4>().0.iter().copied()
    }

    fn f32(&self, tensor: &str) -> Vec<f32> {
        self.words(tensor, "F32").map(f32::from_le_bytes).collect()
    }

    fn i32(&self, tensor: &str) -> Vec<i32> {
        self.words(tensor, "I32").map(i32::from_le_bytes).collect()
    }

    fn shape(&self, tensor: &str) -> Vec<usize> {
        let sizes = self.header[tensor]["shape"].as_array().unwrap();
        sizes.iter().map(|size| size.as_u64().unwrap() as usize).collect()
    }

    fn near(&self, tensor: &str, found: &[f32]) {
        self.near_by(tensor, found, NEAR);
    }

    fn near_by(&self, tensor: &str, found: &[f32], bound: f64) {
        let expected = self.f32(tensor);
        assert_eq!(found.len(), expected.len(), "{tensor} of {}", self.name);
        let square = |value: f64| value * value;
        let distance: f64 = found.iter().zip(&expected).map(|(a, b)| square(f64::from(a - b))).sum();
        let length: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
        let error = (distance / length.max(1e-2)).sqrt();
        assert!(error <= bound, "{tensor} of {} is off by {error:e}", self.name);
    }
}

#[test]
fn linear_and_its_gradients_agree_with_pytorch() {
    each("linear", 3, |pool, golden| {
        let (x, w, bias, dy) = (golden.f32("x"), golden.f32("w"), golden.f32("bias"), golden.f32("dy"));
        let (rows, shape) = (golden.shape("x")[0], golden.shape("w"));
        let dims = LinearDims::new(rows, shape[1], shape[0]);
        let mut scratch = vec![0.0; linear_scratch(dims, 2)];
        let mut y = vec![0.0; dy.len()];
        linear(pool, dims, &x, &w, Some(&bias), &mut y, &mut scratch);
        golden.near("y", &y);
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; bias.len()]);
        linear_dx(pool, dims, 1.0, &dy, &w, &mut dx, false, &mut scratch);
        linear_dw(pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
        linear_db(pool, dims, &dy, &mut db, &mut scratch);
        golden.near("dx", &dx);
        golden.near("dw", &dw);
        golden.near("db", &db);
        // Without a bias; and added to what is there.
        linear(pool, dims, &x, &w, None, &mut y, &mut scratch);
        y.chunks_exact_mut(bias.len()).for_each(|y| y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
        golden.near("y", &y);
        linear_dx(pool, dims, 1.0, &dy, &w, &mut dx, true, &mut scratch);
        linear_dw(pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
        golden.near("dx", &dx.iter().map(|dx| dx / 2.0).collect::<Vec<_>>());
        golden.near("dw", &dw.iter().map(|dw| dw / 2.0).collect::<Vec<_>>());
    });
}

#[test]
fn embedding_and_its_gradient_agree_with_pytorch() {
    each("embedding", 2, |pool, golden| {
        let (ids, table, dy) = (golden.i32("ids"), golden.f32("table"), golden.f32("dy"));
        let dims = EmbeddingDims::new(golden.shape("table")[0], golden.shape("table")[1]);
        let (mut y, mut dtable) = (vec![0.0; dy.len()], vec![0.0; table.len()]);
        embedding(pool, dims, &ids, &table, &mut y);
        embedding_backward(pool, dims, &ids, &dy, &mut dtable);
        golden.near("y", &y);
        golden.near("dtable", &dtable);
    });
}

#[test]
fn rms_norm_agrees_with_transformers_to_a_millionth() {
    each("rms_norm", 3, |pool, golden| {
        let (x, residual, w) = (golden.f32("x"), golden.f32("residual"), golden.f32("w"));
        let (dy, past) = (golden.f32("dy"), golden.f32("past"));
        let dims = RmsNormDims::new(golden.shape("x")[0], w.len(), 1e-6);
        let (mut h, mut y, mut rstd) = (vec![0.0; x.len()], vec![0.0; x.len()], vec![0.0; dims.rows]);
        rms_norm_residual(pool, dims, &x, &residual, &w, &mut h, &mut y, &mut rstd);
        golden.near_by("h", &h, 0.0);
        golden.near_by("y", &y, 1e-6);
        let (mut dh, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        let mut scratch = vec![0.0; rms_norm_scratch(dims)];
        rms_norm_backward(
            pool,
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
        golden.near("dh", &dh);
        golden.near("dw", &dw);
        rms_norm(pool, dims, &h, &w, &mut y, &mut rstd);
        golden.near_by("y", &y, 1e-6);
    });
}

#[test]
fn rope_and_its_gradient_agree_with_transformers() {
    each("rope", 3, |pool, golden| {
        let (positions, mut x, mut dy) = (golden.i32("positions"), golden.f32("x"), golden.f32("dy"));
        let shape = golden.shape("x");
        let dims = RopeDims::new(shape[0], shape[1], shape[2], shape[2]);
        let table =
            RopeTable { inv_freq: golden.f32("inv_freq"), attention_scaling: golden.f32("scaling")[0] };
        let (mut cos, mut sin) = (vec![0.0; shape[0] * shape[2] / 2], vec![0.0; shape[0] * shape[2] / 2]);
        rope_angles(pool, &table, &positions, &mut cos, &mut sin);
        rope(pool, dims, &cos, &sin, &mut x);
        rope_backward(pool, dims, &cos, &sin, &mut dy);
        // Angles up to 3,000 in f32: the last place of a frequency moves them by some 1e-4.
        golden.near_by("y", &x, 5e-5);
        golden.near_by("dx", &dy, 5e-5);
    });
}

#[test]
fn attention_and_its_gradients_agree_with_pytorch() {
    each("attention", 5, |pool, golden| {
        let sizes: Vec<usize> = golden.i32("sizes").iter().map(|&size| size as usize).collect();
        let starts: Vec<u32> = golden.i32("starts").iter().map(|&start| start as u32).collect();
        let dims = AttentionDims::new(
            golden.shape("q")[0],
            sizes[0],
            sizes[1],
            sizes[2],
            (sizes[3] > 0).then_some(sizes[3]),
            (sizes[2] as f32).powf(-0.5),
        );
        let (q, k, v, dout) = (golden.f32("q"), golden.f32("k"), golden.f32("v"), golden.f32("dout"));
        // What was there before must not show through, padding included.
        let (mut out, mut lse) = (vec![7.0; q.len()], vec![7.0; dims.heads * dims.rows]);
        let mut scratch = vec![0.0; attention_scratch(&dims, 2).max(attention_backward_scratch(&dims, 2))];
        attention(pool, &dims, &ContextSlices::new(&starts), &q, &k, &v, &mut out, &mut lse, &mut scratch);
        golden.near("out", &out);
        golden.near("lse", &lse);
        let (mut dq, mut dk, mut dv) = (vec![7.0; q.len()], vec![7.0; k.len()], vec![7.0; v.len()]);
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        attention_backward(
            pool,
            &dims,
            &ContextSlices::new(&starts),
            saved,
            &dout,
            &mut dq,
            &mut dk,
            &mut dv,
            None,
            &mut scratch,
        );
        golden.near("dq", &dq);
        golden.near("dk", &dk);
        golden.near("dv", &dv);
    });
}

#[test]
fn gated_activations_and_their_gradients_agree_with_pytorch() {
    for activation in [ActivationFn::Silu, ActivationFn::Gelu, ActivationFn::GeluTanh] {
        each(activation.name(), 2, |pool, golden| {
            let (gate, up, dy) = (golden.f32("gate"), golden.f32("up"), golden.f32("dy"));
            let [mut y, mut dgate, mut dup] = [(); 3].map(|()| vec![0.0; dy.len()]);
            gated_activation(pool, activation, &gate, &up, &mut y);
            gated_activation_backward(pool, activation, &dy, &gate, &up, &mut dgate, &mut dup);
            golden.near("y", &y);
            golden.near("dgate", &dgate);
            golden.near("dup", &dup);
        });
    }
}

#[test]
fn head_loss_and_its_gradients_agree_with_pytorch() {
    each("head_loss", 3, |pool, golden| {
        let (x, w, labels, scale) =
            (golden.f32("x"), golden.f32("w"), golden.i32("labels"), golden.f32("scale")[0]);
        let dims = HeadLossDims::new(labels.len(), golden.shape("w")[1], golden.shape("w")[0]);
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        let mut scratch = vec![0.0; head_loss_scratch(dims, 2)];
        let loss = head_loss_backward(
            pool,
            dims,
            &x,
            &w,
            &labels,
            scale,
            Some(&mut dx),
            Some(&mut dw),
            true,
            &mut scratch,
        );
        golden.near("loss", &[loss as f32]);
        golden.near("dx", &dx);
        golden.near("dw", &dw);
    });
}

#[test]
fn twenty_clipped_steps_of_adamw_agree_with_pytorch() {
    each("adamw", 1, |pool, golden| {
        let (mut p, grads) = (golden.f32("start"), golden.f32("grads"));
        let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        let recipe = Recipe { beta2: 0.95, weight_decay: [0.1; 2], ..Recipe::default() };
        let (mut weights, mut norms) = (Vec::new(), Vec::new());
        for (step, grads) in grads.chunks_exact(p.len()).enumerate() {
            let mut sums = vec![0.0; 1];
            block_squares(pool, grads, &mut sums);
            let mut total = ExactSum::default();
            total.add(sums[0]);
            let norm = total.total().unwrap().sqrt();
            let clip = (1.0 / (norm + 1e-6)).min(1.0) as f32;
            let numbers = StepNumbers::new(&recipe, 0, step as u64 + 1, 1e-2, 1.0, clip);
            let moments = Moments { buffers: [Some(&mut m), Some(&mut v), None], rounding: None };
            optimize::<f32, f32, f32>(
                pool,
                Optimizer::AdamW,
                &numbers,
                grads,
                Master::F32(&mut p),
                moments,
                None,
            );
            weights.extend_from_slice(&p);
            norms.push(norm as f32);
        }
        golden.near("weights", &weights);
        golden.near("norms", &norms);
    });
}
