//! Gradients of the kernels against central differences of the plain versions, in f64.

use zeroth_base::{ActivationFn, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;

/// Central differences of `loss` around `at`, one element after the other.
fn differences(at: &[f32], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut point: Vec<f64> = at.iter().map(|&x| f64::from(x)).collect();
    let step = 1e-5;
    (0..point.len())
        .map(|i| {
            let middle = point[i];
            point[i] = middle + step;
            let above = loss(&point);
            point[i] = middle - step;
            let below = loss(&point);
            point[i] = middle;
            (above - below) / (2.0 * step)
        })
        .collect()
}

fn near(name: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let distance: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let length: f64 = expected.iter().map(|b| b * b).sum();
    let error = (distance / length).sqrt();
    assert!(error < 3e-6, "{name} is off by {error:e}");
}

fn random(name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    normal(&Pool::new(1), 3, name_key(name), 0, 1.0, &mut values);
    values
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum()
}

#[test]
fn linear_gradients_match_finite_differences() {
    let (pool, dims) = (Pool::new(2), LinearDims::new(5, 7, 9));
    let (x, w, bias, dy) = (random("x", 35), random("w", 63), random("b", 9), random("dy", 45));
    let mut scratch = vec![0.0; linear_scratch(dims, 2)];
    let (mut dx, mut dw, mut db) = (vec![0.0; 35], vec![0.0; 63], vec![0.0; 9]);
    linear_dx(&pool, dims, 1.0, &dy, &w, &mut dx, false, &mut scratch);
    linear_dw(&pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
    linear_db(&pool, dims, &dy, &mut db, &mut scratch);
    let (x64, w64) = (wide(&x), wide(&w));
    near("dx", &dx, &differences(&x, |x| dot(&reference::linear(dims, x, &w64, None), &dy)));
    near("dw", &dw, &differences(&w, |w| dot(&reference::linear(dims, &x64, w, None), &dy)));
    near("db", &db, &differences(&bias, |b| dot(&reference::linear(dims, &x64, &w64, Some(b)), &dy)));
}

#[test]
fn embedding_gradient_matches_finite_differences() {
    let (pool, dims) = (Pool::new(2), EmbeddingDims::new(6, 5));
    let ids = [2, 0, -1, 2, 5, 2];
    let (table, dy) = (random("table", 30), random("dy", 30));
    let mut dtable = vec![0.0; 30];
    embedding_backward(&pool, dims, &ids, &dy, &mut dtable);
    near("dtable", &dtable, &differences(&table, |table| dot(&reference::embedding(dims, &ids, table), &dy)));
}

#[test]
fn rms_norm_gradients_match_finite_differences_for_rows_and_heads() {
    let pool = Pool::new(2);
    for dims in [RmsNormDims::new(5, 9, 1e-2), RmsNormDims::per_head(3, 4, 6, 1e-2)] {
        let count = dims.rows * dims.width;
        let (h, w, dy, past) =
            (random("h", count), random("w", dims.width), random("dy", count), random("p", count));
        let (mut y, mut rstd) = (vec![0.0; count], vec![0.0; dims.rows]);
        rms_norm(&pool, dims, &h, &w, &mut y, &mut rstd);
        let (mut dh, mut dw) = (vec![0.0; count], vec![0.0; dims.width]);
        let mut scratch = vec![0.0; rms_norm_scratch(dims)];
        rms_norm_backward(
            &pool,
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
        let (h64, w64) = (wide(&h), wide(&w));
        let loss = |h: &[f64], w: &[f64]| dot(&reference::rms_norm(dims, h, w)[0], &dy) + dot(h, &past);
        near("dh", &dh, &differences(&h, |h| loss(h, &w64)));
        near("dw", &dw, &differences(&w, |w| loss(&h64, w)));
        dw.fill(0.0);
        rms_norm_backward(&pool, dims, &dy, &h, &rstd, &w, None, Some(&mut dh), Some(&mut dw), &mut scratch);
        near("dh alone", &dh, &differences(&h, |h| dot(&reference::rms_norm(dims, h, &w64)[0], &dy)));
    }
}

#[test]
fn rope_gradient_matches_finite_differences_for_partial_rotation() {
    let (pool, dims) = (Pool::new(2), RopeDims::new(4, 2, 8, 6));
    let table = RopeTable::plain(100.0, 6);
    let (mut cos, mut sin) = (vec![0.0; 12], vec![0.0; 12]);
    rope_angles(&pool, &table, &[0, 1, 7, 3], &mut cos, &mut sin);
    let (x, dy) = (random("x", 64), random("dy", 64));
    let mut dx = dy.clone();
    rope_backward(&pool, dims, &cos, &sin, &mut dx);
    near("dx", &dx, &differences(&x, |x| dot(&reference::rope(dims, &cos, &sin, 1.0, x), &dy)));
}

#[test]
fn head_norm_rope_gradients_match_finite_differences() {
    let pool = Pool::new(2);
    for (head_dim, rotated) in [(8, 6), (6, 6)] {
        let rope = RopeDims::new(4, 3, head_dim, rotated);
        let (dims, count) = (HeadNormRopeDims { rope, eps: 1e-2 }, 12 * head_dim);
        let (mut cos, mut sin) = (vec![0.0; 12], vec![0.0; 12]);
        rope_angles(&pool, &RopeTable::plain(100.0, rotated), &[0, 1, 7, 3], &mut cos, &mut sin);
        let (h, w, dy) = (random("h", count), random("w", head_dim), random("dy", count));
        let (mut y, mut rstd) = (vec![0.0; count], vec![0.0; 12]);
        head_norm_rope(&pool, dims, &h, &w, &cos, &sin, &mut y, &mut rstd);
        let (mut dh, mut dw) = (vec![0.0; count], vec![0.0; head_dim]);
        let mut scratch = vec![0.0; head_norm_rope_scratch(dims)];
        head_norm_rope_backward(
            &pool,
            dims,
            &dy,
            &h,
            &rstd,
            &w,
            &cos,
            &sin,
            Some(&mut dh),
            Some(&mut dw),
            &mut scratch,
        );
        let (h64, w64) = (wide(&h), wide(&w));
        let loss = |h: &[f64], w: &[f64]| dot(&reference::head_norm_rope(dims, h, w, &cos, &sin)[0], &dy);
        near("dh", &dh, &differences(&h, |h| loss(h, &w64)));
        near("dw", &dw, &differences(&w, |w| loss(&h64, w)));
    }
}

#[test]
fn attention_gradients_match_finite_differences() {
    let pool = Pool::new(2);
    for (heads, kv_heads, window) in [(4, 2, None), (3, 1, Some(3)), (2, 2, Some(1))] {
        let dims = AttentionDims::new(12, heads, kv_heads, 6, window, 0.5);
        let starts = [0, 2, 11];
        let (q, dout) = (random("q", 72 * heads), random("dout", 72 * heads));
        let (k, v) = (random("k", 72 * kv_heads), random("v", 72 * kv_heads));
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; heads * 12]);
        let mut scratch = vec![0.0; attention_scratch(&dims, 2).max(attention_backward_scratch(&dims, 2))];
        attention(&pool, &dims, &ContextSlices::new(&starts), &q, &k, &v, &mut out, &mut lse, &mut scratch);
        let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        attention_backward(
            &pool,
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
        let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
        let loss =
            |q: &[f64], k: &[f64], v: &[f64]| dot(&reference::attention(&dims, &starts, q, k, v)[0], &dout);
        if window == Some(1) {
            // A query that sees itself alone has one weight, 1, whatever its score is.
            assert!(dq.iter().chain(&dk).all(|grad| grad.abs() < 1e-5));
        } else {
            near("dq", &dq, &differences(&q, |q| loss(q, &k64, &v64)));
            near("dk", &dk, &differences(&k, |k| loss(&q64, k, &v64)));
        }
        near("dv", &dv, &differences(&v, |v| loss(&q64, &k64, v)));
    }
}

/// Biases, dropout with its own mask in both directions, and sequences of keys of other lengths, one of them empty.
#[test]
fn attention_gradients_with_a_context_match_finite_differences() {
    let pool = Pool::new(2);
    let plain = AttentionDims::new(12, 4, 2, 6, None, 0.5);
    let cross = AttentionDims { kv_rows: 15, causal: false, ..plain };
    for (dims, kv_starts) in [
        (AttentionDims { max_distance: Some(3), ..plain }, None),
        (AttentionDims { max_distance: Some(3), causal: false, ..plain }, None),
        (cross, Some(&[1, 8, 8, 14][..])),
    ] {
        let (q, dout) = (random("q", 12 * 24), random("dout", 12 * 24));
        let (k, v) = (random("k", dims.kv_rows * 12), random("v", dims.kv_rows * 12));
        let bias = dims.max_distance.map(|_| random("bias", 4 * dims.distances()));
        let keys: Vec<_> = (0..12).map(|at| RowKey { sample: 5, position: at, epoch: 2 }).collect();
        let dropout = Some(WeightDropout { probability: 0.25, seed: 8, op: 1, keys: &keys });
        let context =
            ContextSlices { kv_starts, bias: bias.as_deref(), dropout, ..ContextSlices::new(&[0, 2, 4, 11]) };
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; 48]);
        let mut scratch = vec![0.0; attention_scratch(&dims, 2).max(attention_backward_scratch(&dims, 2))];
        attention(&pool, &dims, &context, &q, &k, &v, &mut out, &mut lse, &mut scratch);
        let (mut dq, mut dk, mut dv, mut dbias) = (q.clone(), k.clone(), v.clone(), bias.clone());
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let to = dbias.as_mut().map(|to| BiasGradOut { to, add: false });
        attention_backward(&pool, &dims, &context, saved, &dout, &mut dq, &mut dk, &mut dv, to, &mut scratch);
        let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
        let loss = |context: &ContextSlices<'_>, q: &[f64], k: &[f64], v: &[f64]| {
            dot(&reference::attention_in(&dims, context, q, k, v)[0], &dout)
        };
        near("dq", &dq, &differences(&q, |q| loss(&context, q, &k64, &v64)));
        near("dk", &dk, &differences(&k, |k| loss(&context, &q64, k, &v64)));
        near("dv", &dv, &differences(&v, |v| loss(&context, &q64, &k64, v)));
        if let (Some(bias), Some(dbias)) = (&bias, &dbias) {
            // The context holds f32: differences of powers of two, whose sums with the biases are nearly exact.
            let step = 2f32.powi(-7);
            let expected: Vec<f64> = (0..bias.len())
                .map(|at| {
                    let moved = |by: f32| {
                        let mut bias = bias.clone();
                        bias[at] += by;
                        let exact = f64::from(bias[at]);
                        (loss(&ContextSlices { bias: Some(&bias), ..context }, &q64, &k64, &v64), exact)
                    };
                    let ((above, high), (below, low)) = (moved(step), moved(-step));
                    (above - below) / (high - low)
                })
                .collect();
            let deviation = Deviation::of(&wide(dbias), &expected);
            assert!(deviation.is_within(Deviation { l2: 1e-4, max: 1e-3 }), "dbias: {deviation:?}");
        }
    }
}

#[test]
fn gated_activation_gradients_match_finite_differences() {
    let pool = Pool::new(2);
    let (gate, up, dy) = (random("gate", 50), random("up", 50), random("dy", 50));
    let (mut dgate, mut dup) = (vec![0.0; 50], vec![0.0; 50]);
    for activation in ActivationFn::ALL {
        gated_activation_backward(&pool, activation, &dy, &gate, &up, &mut dgate, &mut dup);
        let loss = |gate: &[f64], up: &[f64]| dot(&reference::gated_activation(activation, gate, up), &dy);
        near("dgate", &dgate, &differences(&gate, |gate| loss(gate, &wide(&up))));
        near("dup", &dup, &differences(&up, |up| loss(&wide(&gate), up)));
    }
}

#[test]
fn head_loss_gradients_match_finite_differences() {
    let (pool, dims) = (Pool::new(2), HeadLossDims::new(5, 7, 11));
    let labels = [3, -100, 10, 0, -1];
    let (x, w) = (random("x", 35), random("w", 77));
    let (mut dx, mut dw) = (vec![0.0; 35], vec![0.0; 77]);
    let mut scratch = vec![0.0; head_loss_scratch(dims, 2)];
    head_loss_backward(&pool, dims, &x, &w, &labels, 0.25, Some(&mut dx), Some(&mut dw), true, &mut scratch);
    let loss = |x: &[f64], w: &[f64]| 0.25 * reference::head_loss(dims, x, w, &labels, 1.0).0;
    near("dx", &dx, &differences(&x, |x| loss(x, &wide(&w))));
    near("dw", &dw, &differences(&w, |w| loss(&wide(&x), w)));
}

#[test]
fn the_gradient_of_dropout_has_the_mask_of_forward() {
    let pool = Pool::new(2);
    let setting = Dropout { probability: 0.4, seed: 8, op: 2 };
    let keys: Vec<RowKey> =
        (0..60).map(|i| RowKey { sample: i / 10, position: (i % 10) as u32, epoch: 1 }).collect();
    let (x, dy) = (random("x", 60 * 11), random("dy", 60 * 11));
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    dropout(&pool, setting, &keys, [11, 11], &x, &mut y);
    dropout(&pool, setting, &keys, [11, 11], &dy, &mut dx);
    near("dx", &dx, &differences(&x, |x| dot(&reference::dropout(setting, &keys, 11, x), &dy)));
    let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
    assert!((dropped - 0.4).abs() < 0.06, "{dropped}");
    // Another epoch, op or seed drops other elements.
    let later: Vec<RowKey> = keys.iter().map(|key| RowKey { epoch: 2, ..*key }).collect();
    for (other, keys) in
        [(setting, &later), (Dropout { op: 3, ..setting }, &keys), (Dropout { seed: 9, ..setting }, &keys)]
    {
        dropout(&pool, other, keys, [11, 11], &x, &mut dx);
        assert_ne!(y, dx);
    }
}
