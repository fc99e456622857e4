//! f64 reference implementations of every kernel.

use zeroth_base::{GatedActivation, philox4x32};

use super::Dropout;
use zeroth_kernel::{
    AttentionDims, CacheRange, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims,
    RmsNormDims, RopeDims, RowKey,
};
use zeroth_kernel::{MOMENTS, Optimizer, Recipe};

/// y = x · wᵀ + bias.
pub fn linear(dims: LinearDims, x: &[f64], w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = Vec::with_capacity(dims.rows * dims.outputs);
    for x in x.chunks_exact(dims.inputs) {
        for (o, w) in w.chunks_exact(dims.inputs).enumerate() {
            y.push(dot(x, w) + bias.map_or(0.0, |bias| bias[o]));
        }
    }
    y
}

/// dx, dw and db of [`linear`].
pub fn linear_backward(dims: LinearDims, x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let LinearDims { inputs, outputs, .. } = dims;
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; outputs]);
    for (r, dy) in dy.chunks_exact(outputs).enumerate() {
        for (o, dy) in dy.iter().enumerate() {
            db[o] += dy;
            for i in 0..inputs {
                dx[r * inputs + i] += dy * w[o * inputs + i];
                dw[o * inputs + i] += dy * x[r * inputs + i];
            }
        }
    }
    [dx, dw, db]
}

/// Embedding lookup; zeros for a negative id.
pub fn embedding(dims: EmbeddingDims, ids: &[i32], table: &[f64]) -> Vec<f64> {
    let row = |&id: &i32| match usize::try_from(id) {
        Ok(id) => table[id * dims.width..][..dims.width].to_vec(),
        Err(_) => vec![0.0; dims.width],
    };
    ids.iter().flat_map(row).collect()
}

/// The gradient of the table.
pub fn embedding_backward(dims: EmbeddingDims, ids: &[i32], dy: &[f64]) -> Vec<f64> {
    let mut dtable = vec![0.0; dims.vocab * dims.width];
    for (id, dy) in ids.iter().zip(dy.chunks_exact(dims.width)) {
        if let Ok(id) = usize::try_from(*id) {
            add(&mut dtable[id * dims.width..][..dims.width], dy);
        }
    }
    dtable
}

/// y and rstd of the norm of h.
pub fn rms_norm(dims: RmsNormDims, h: &[f64], w: &[f64]) -> [Vec<f64>; 2] {
    let (mut y, mut rstds) = (Vec::new(), Vec::new());
    for h in h.chunks_exact(dims.width) {
        let rstd = 1.0 / (dot(h, h) / dims.width as f64 + f64::from(dims.eps)).sqrt();
        y.extend(h.iter().zip(w).map(|(h, w)| h * rstd * w));
        rstds.push(rstd);
    }
    [y, rstds]
}

/// dh and dw of [`rms_norm`].
pub fn rms_norm_backward(dims: RmsNormDims, h: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let [_, rstds] = rms_norm(dims, h, w);
    let (mut dh, mut dw) = (Vec::new(), vec![0.0; dims.width]);
    for ((h, dy), rstd) in h.chunks_exact(dims.width).zip(dy.chunks_exact(dims.width)).zip(rstds) {
        let along = (0..dims.width).map(|i| dy[i] * w[i] * h[i] * rstd).sum::<f64>() / dims.width as f64;
        for i in 0..dims.width {
            dh.push(rstd * (dy[i] * w[i] - h[i] * rstd * along));
            dw[i] += dy[i] * h[i] * rstd;
        }
    }
    [dh, dw]
}

/// x rotated by `sign` times the angles.
pub fn rope(dims: RopeDims, cos: &[f32], sin: &[f32], sign: f64, x: &[f64]) -> Vec<f64> {
    let (half, mut y) = (dims.rotated / 2, x.to_vec());
    for row in 0..dims.rows {
        for head in 0..dims.heads {
            let at = (row * dims.heads + head) * dims.head_dim;
            for i in 0..half {
                let (cos, sin) = (f64::from(cos[row * half + i]), sign * f64::from(sin[row * half + i]));
                y[at + i] = x[at + i] * cos - x[at + half + i] * sin;
                y[at + half + i] = x[at + half + i] * cos + x[at + i] * sin;
            }
        }
    }
    y
}

/// y and rstd: the norm of each head of x, rotated.
pub fn head_norm_rope(
    dims: HeadNormRopeDims,
    x: &[f64],
    w: &[f64],
    cos: &[f32],
    sin: &[f32],
) -> [Vec<f64>; 2] {
    let [normed, rstd] = rms_norm(dims.norm(), x, w);
    [rope(dims.rope, cos, sin, 1.0, &normed), rstd]
}

/// dh and dw of [`head_norm_rope`].
pub fn head_norm_rope_backward(
    dims: HeadNormRopeDims,
    h: &[f64],
    w: &[f64],
    cos: &[f32],
    sin: &[f32],
    dy: &[f64],
) -> [Vec<f64>; 2] {
    rms_norm_backward(dims.norm(), h, w, &rope(dims.rope, cos, sin, -1.0, dy))
}

/// The softmax weights that one query gives its keys, and lse: `(first key, weights, lse)`.
fn weights(
    dims: &AttentionDims,
    starts: &[u32],
    q: &[f64],
    k: &[f64],
    row: usize,
    head: usize,
) -> Option<(usize, Vec<f64>, f64)> {
    let sequence = starts.windows(2).find(|pair| (pair[0]..pair[1]).contains(&(row as u32)))?[0] as usize;
    let first = sequence.max((row + 1).saturating_sub(dims.window.unwrap_or(usize::MAX)));
    let q = head_of(dims, q, dims.heads, row, head);
    let kv_head = head * dims.kv_heads / dims.heads;
    let scores = (first..=row)
        .map(|key| dot(q, head_of(dims, k, dims.kv_heads, key, kv_head)) * f64::from(dims.scale));
    let scores: Vec<f64> = scores.collect();
    let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = peak + scores.iter().map(|score| (score - peak).exp()).sum::<f64>().ln();
    Some((first, scores.iter().map(|score| (score - lse).exp()).collect(), lse))
}

fn head_of<'a>(dims: &AttentionDims, data: &'a [f64], heads: usize, row: usize, head: usize) -> &'a [f64] {
    &data[(row * heads + head) * dims.head_dim..][..dims.head_dim]
}

/// out and lse.
pub fn attention(dims: &AttentionDims, starts: &[u32], q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 2] {
    let (mut out, mut lses) = (vec![0.0; q.len()], vec![0.0; dims.heads * dims.rows]);
    for row in 0..dims.rows {
        for head in 0..dims.heads {
            let Some((first, weights, lse)) = weights(dims, starts, q, k, row, head) else { continue };
            lses[head * dims.rows + row] = lse;
            let kv_head = head * dims.kv_heads / dims.heads;
            for (key, weight) in weights.iter().enumerate() {
                let v = head_of(dims, v, dims.kv_heads, first + key, kv_head);
                for i in 0..dims.head_dim {
                    out[(row * dims.heads + head) * dims.head_dim + i] += weight * v[i];
                }
            }
        }
    }
    [out, lses]
}

/// Attention of each row over the cached rows of its range.
pub fn cached_attention(
    dims: &AttentionDims,
    ranges: &[CacheRange],
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Vec<f64> {
    let mut out = Vec::with_capacity(q.len());
    for (row, range) in ranges.iter().enumerate() {
        let (end, window) = (range.end as usize, dims.window.unwrap_or(usize::MAX));
        let keys = (range.first as usize).max(end.saturating_sub(window))..end;
        for head in 0..dims.heads {
            let (q, kv_head) = (head_of(dims, q, dims.heads, row, head), head * dims.kv_heads / dims.heads);
            let of = |data, key| head_of(dims, data, dims.kv_heads, key, kv_head);
            let scores: Vec<f64> =
                keys.clone().map(|key| dot(q, of(k, key)) * f64::from(dims.scale)).collect();
            let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..dims.head_dim).map(|i| {
                let sum: f64 = keys.clone().zip(&weights).map(|(key, weight)| weight * of(v, key)[i]).sum();
                if keys.is_empty() { 0.0 } else { sum / total }
            }));
        }
    }
    out
}

/// dq, dk and dv of [`attention`].
pub fn attention_backward(
    dims: &AttentionDims,
    starts: &[u32],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> [Vec<f64>; 3] {
    let head_dim = dims.head_dim;
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in 0..dims.rows {
        for head in 0..dims.heads {
            let Some((first, weights, _)) = weights(dims, starts, q, k, row, head) else { continue };
            let kv_head = head * dims.kv_heads / dims.heads;
            let at = (row * dims.heads + head) * head_dim;
            let dout = &dout[at..at + head_dim];
            let dweights: Vec<f64> = (0..weights.len())
                .map(|key| dot(dout, head_of(dims, v, dims.kv_heads, first + key, kv_head)))
                .collect();
            let delta = dot(&weights, &dweights);
            for (key, weight) in weights.iter().enumerate() {
                let key_at = ((first + key) * dims.kv_heads + kv_head) * head_dim;
                let dscore = weight * (dweights[key] - delta) * f64::from(dims.scale);
                for i in 0..head_dim {
                    dq[at + i] += dscore * k[key_at + i];
                    dk[key_at + i] += dscore * q[at + i];
                    dv[key_at + i] += weight * dout[i];
                }
            }
        }
    }
    [dq, dk, dv]
}

/// f(gate) · up, f the activation.
pub fn gated_activation(activation: GatedActivation, gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(gate, up)| activation.value(*gate) * up).collect()
}

/// dgate and dup of [`gated_activation`].
pub fn gated_activation_backward(
    activation: GatedActivation,
    gate: &[f64],
    up: &[f64],
    dy: &[f64],
) -> [Vec<f64>; 2] {
    let dgate = |i: usize| dy[i] * up[i] * activation.slope(gate[i]);
    let dup = |i: usize| dy[i] * activation.value(gate[i]);
    [(0..dy.len()).map(dgate).collect(), (0..dy.len()).map(dup).collect()]
}

/// The sum of losses, dx and dw.
pub fn head_loss(
    dims: HeadLossDims,
    x: &[f64],
    w: &[f64],
    labels: &[i32],
    scale: f64,
) -> (f64, [Vec<f64>; 2]) {
    let shape = LinearDims { rows: dims.rows, inputs: dims.hidden, outputs: dims.vocab };
    let mut grads = linear(shape, x, w, None);
    let mut loss = 0.0;
    for (logits, &label) in grads.chunks_exact_mut(dims.vocab).zip(labels) {
        let Ok(label) = usize::try_from(label) else {
            logits.fill(0.0);
            continue;
        };
        let peak = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = peak + logits.iter().map(|logit| (logit - peak).exp()).sum::<f64>().ln();
        loss += lse - logits[label];
        for logit in logits.iter_mut() {
            *logit = (*logit - lse).exp() * scale;
        }
        logits[label] -= scale;
    }
    let [dx, dw, _] = linear_backward(shape, x, w, &grads);
    (loss, [dx, dw])
}

/// The last row of each sequence · wᵀ; zeros for an empty or missing sequence.
pub fn logits(dims: LogitsDims, starts: &[u32], x: &[f64], w: &[f64]) -> Vec<f64> {
    let mut logits = Vec::with_capacity(dims.sequences * dims.vocab);
    for sequence in 0..dims.sequences {
        let ends = starts.windows(2).nth(sequence).filter(|ends| ends[0] < ends[1]);
        let row = ends.map(|ends| &x[(ends[1] as usize - 1) * dims.hidden..][..dims.hidden]);
        let project = |weights| row.map_or(0.0, |row| dot(row, weights));
        logits.extend(w.chunks_exact(dims.hidden).map(project));
    }
    logits
}

/// Dropout element by element, each with the key of its own row.
pub fn dropout(dropout: Dropout, keys: &[RowKey], width: usize, x: &[f64]) -> Vec<f64> {
    let kept = |(at, x): (usize, &f64)| {
        let (key, column) = (keys[at / width], at % width);
        let seed = [dropout.seed as u32, (dropout.seed >> 32) as u32];
        let row = philox4x32([key.epoch, dropout.op, key.sample as u32, (key.sample >> 32) as u32], seed);
        let words = philox4x32([(column / 4) as u32, key.position, row[2], row[3]], [row[0], row[1]]);
        let uniform = f64::from(words[column % 4]) / 4_294_967_296.0;
        if uniform < f64::from(dropout.probability) {
            0.0
        } else {
            x / (1.0 - f64::from(dropout.probability))
        }
    };
    x.iter().enumerate().map(kept).collect()
}

/// One optimizer step as its paper or PyTorch defines it: updates weights and moments in place. Weight decay is that of group 0.
pub fn optimize(
    optimizer: Optimizer,
    recipe: &Recipe,
    step: u64,
    rate: f64,
    grads: &[f64],
    p: &mut [f64],
    [m, v, slow]: [&mut [f64]; MOMENTS],
) {
    let Recipe { beta1, beta2, eps, momentum, dampening, lr_decay, weight_decay: [decay, _], .. } = *recipe;
    let correction = |beta: f64| if recipe.bias_correction == 0 { 1.0 } else { 1.0 - beta.powf(step as f64) };
    for (i, &g) in grads.iter().enumerate() {
        let decoupled = matches!(optimizer, Optimizer::AdamW | Optimizer::Lion | Optimizer::AdEmaMix);
        let g = if decoupled { g } else { g + decay * p[i] };
        if decoupled {
            p[i] -= rate * decay * p[i];
        }
        match optimizer {
            Optimizer::AdamW | Optimizer::Adam => {
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                p[i] -= rate * m[i] / correction(beta1) / ((v[i] / correction(beta2)).sqrt() + eps);
            }
            Optimizer::Sgd if momentum == 0.0 => p[i] -= rate * g,
            Optimizer::Sgd => {
                m[i] = if step == 1 { g } else { momentum * m[i] + (1.0 - dampening) * g };
                p[i] -= rate * if recipe.nesterov == 0 { m[i] } else { g + momentum * m[i] };
            }
            Optimizer::Lion => {
                let along = beta1 * m[i] + (1.0 - beta1) * g;
                p[i] -= rate * if along == 0.0 { 0.0 } else { along.signum() };
                m[i] = beta2 * m[i] + (1.0 - beta2) * g;
            }
            Optimizer::Adagrad => {
                v[i] += g * g;
                p[i] -= rate / (1.0 + (step - 1) as f64 * lr_decay) * g / (v[i].sqrt() + eps);
            }
            Optimizer::AdEmaMix => {
                let Recipe { beta3, alpha, t_alpha, t_beta3, .. } = *recipe;
                let done = |steps| if steps == 0 { 1.0 } else { (step as f64 / steps as f64).min(1.0) };
                let (done, alpha, ln1, ln3) = (done(t_beta3), alpha * done(t_alpha), beta1.ln(), beta3.ln());
                let beta3 = (ln1 * ln3 / ((1.0 - done) * ln3 + done * ln1)).exp();
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                slow[i] = beta3 * slow[i] + (1.0 - beta3) * g;
                let along = m[i] / correction(beta1) + alpha * slow[i];
                p[i] -= rate * along / ((v[i] / correction(beta2)).sqrt() + eps);
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}
