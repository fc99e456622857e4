//! f64 reference implementations of every kernel. Those of ops are the graph's, with the kernels' dimensions.

use zeroth_base::philox4x32;
use zeroth_graph::reference;
pub use zeroth_graph::reference::{
    activation, activation_backward, gated_activation, gated_activation_backward, position_bias,
    position_bias_backward,
};

use super::{ContextSlices, Dropout, WeightDropout};
use zeroth_kernel::{
    AttentionDims, CacheRange, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims,
    NF4_CODEBOOK, RmsNormDims, RopeDims, RowKey,
};
use zeroth_kernel::{MOMENTS, Optimizer, Recipe};

/// y = x · wᵀ + bias.
pub fn linear(dims: LinearDims, x: &[f64], w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    reference::linear(x, w, bias, dims.inputs)
}

/// dx, dw and db of [`linear`].
pub fn linear_backward(dims: LinearDims, x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    reference::linear_backward(x, w, dy, dims.inputs)
}

/// Embedding lookup; zeros for a negative id.
pub fn embedding(dims: EmbeddingDims, ids: &[i32], table: &[f64]) -> Vec<f64> {
    reference::embedding(&wide(ids), table, dims.width)
}

/// The gradient of the table.
pub fn embedding_backward(dims: EmbeddingDims, ids: &[i32], dy: &[f64]) -> Vec<f64> {
    reference::embedding_backward(&wide(ids), dy, dims.vocab * dims.width)
}

/// y and rstd of the norm of h.
pub fn rms_norm(dims: RmsNormDims, h: &[f64], w: &[f64]) -> [Vec<f64>; 2] {
    reference::rms_norm(h, w, f64::from(dims.eps))
}

/// dh and dw of [`rms_norm`].
pub fn rms_norm_backward(dims: RmsNormDims, h: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let [_, rstd] = rms_norm(dims, h, w);
    reference::rms_norm_backward(h, &rstd, w, dy)
}

/// x rotated by `sign` times the angles.
pub fn rope(dims: RopeDims, cos: &[f32], sin: &[f32], sign: f64, x: &[f64]) -> Vec<f64> {
    let cos: Vec<f64> = cos.iter().map(|cos| f64::from(*cos)).collect();
    let sin: Vec<f64> = sin.iter().map(|sin| sign * f64::from(*sin)).collect();
    reference::rope(x, dims.heads, dims.head_dim, &cos, &sin)
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

/// The factor of the softmax weight of a key of its sequence, for a row of q and a head.
pub fn weight_factor(dropout: &WeightDropout<'_>, row: usize, head: usize, key: usize) -> f64 {
    let seed = [dropout.seed as u32, (dropout.seed >> 32) as u32];
    let RowKey { sample, position, epoch } = dropout.keys[row];
    let own = philox4x32([epoch, dropout.op, sample as u32, (sample >> 32) as u32], seed);
    let counter = (4 * (key / 32) + key % 8 / 2) as u32;
    let words = philox4x32([counter, position, own[2], own[3] ^ head as u32], [own[0], own[1]]);
    let word = words[key % 32 / 8];
    let bits = if key.is_multiple_of(2) { word & 0xffff } else { word >> 16 };
    let probability = f64::from(dropout.probability);
    if f64::from(bits) < (probability * 65_536.0).round() { 0.0 } else { 1.0 / (1.0 - probability) }
}

/// Calls `compute` with the graph's attention of these dimensions and this context.
fn with_attention<R>(
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    compute: impl FnOnce(reference::Attention<'_>) -> R,
) -> R {
    let AttentionDims { heads, kv_heads, head_dim, causal, window, scale, .. } = *dims;
    let ends = |starts: &[u32]| starts.iter().map(|start| *start as usize).collect::<Vec<_>>();
    let (starts, kv_starts) = (ends(context.starts), ends(context.kv_starts.unwrap_or(context.starts)));
    let bias: Option<Vec<f64>> = context.bias.map(|bias| bias.iter().map(|bias| f64::from(*bias)).collect());
    let factor = context
        .dropout
        .map(|dropout| move |row: usize, head: usize, key: usize| weight_factor(&dropout, row, head, key));
    compute(reference::Attention {
        heads,
        kv_heads,
        head_dim,
        causal,
        window,
        scale: f64::from(scale),
        starts: &starts,
        kv_starts: &kv_starts,
        bias: bias.as_deref(),
        dropout: factor.as_ref().map(|factor| factor as _),
    })
}

/// out, and lse as the kernels store it: [heads, rows].
pub fn attention(dims: &AttentionDims, starts: &[u32], q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 2] {
    attention_in(dims, &ContextSlices::new(starts), q, k, v)
}

/// [`attention`] with a context.
pub fn attention_in(
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> [Vec<f64>; 2] {
    let [out, lse] = with_attention(dims, context, |attention| reference::attention(attention, q, k, v));
    let by_head = |at: usize| lse[at % dims.rows * dims.heads + at / dims.rows];
    [out, (0..lse.len()).map(by_head).collect()]
}

/// Attention of each row over the cached rows of its range.
pub fn cached_attention(
    dims: &AttentionDims,
    ranges: &[CacheRange],
    bias: Option<&[f32]>,
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
            // The query has the position of the last key.
            let bias_of = |key: usize| {
                let (Some(bias), Some(most)) = (bias, dims.max_distance) else { return 0.0 };
                let distance = (key + most).saturating_sub(end - 1);
                f64::from(bias[head * dims.distances() + distance])
            };
            let score = |key: usize| dot(q, of(k, key)) * f64::from(dims.scale) + bias_of(key);
            let scores: Vec<f64> = keys.clone().map(score).collect();
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

fn head_of<'a>(dims: &AttentionDims, data: &'a [f64], heads: usize, row: usize, head: usize) -> &'a [f64] {
    &data[(row * heads + head) * dims.head_dim..][..dims.head_dim]
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
    let [dq, dk, dv, _] = attention_in_backward(dims, &ContextSlices::new(starts), q, k, v, dout);
    [dq, dk, dv]
}

/// dq, dk, dv and the gradient of the biases of [`attention_in`]; the last is empty without biases.
pub fn attention_in_backward(
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> [Vec<f64>; 4] {
    with_attention(dims, context, |attention| reference::attention_backward(attention, q, k, v, dout))
}

/// The sum of losses, dx and dw.
pub fn head_loss(_: HeadLossDims, x: &[f64], w: &[f64], labels: &[i32], scale: f64) -> (f64, [Vec<f64>; 2]) {
    reference::head_loss(x, w, &wide(labels), scale)
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

/// What nf4 makes of a block: the nearest value of the codebook times the largest magnitude. Only for blocks without an
/// element between two values, whose code would depend on a rounding.
pub fn nf4(block: &[f64]) -> Vec<f64> {
    let most = block.iter().fold(0.0f64, |most, element| element.abs().max(most));
    let nearest = |element: &f64| {
        let distance = |value: f64| (value * most - element).abs();
        let values = NF4_CODEBOOK.map(f64::from);
        let nearest = values.into_iter().min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
        nearest.unwrap_or(0.0) * most
    };
    block.iter().map(nearest).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn wide(numbers: &[i32]) -> Vec<i64> {
    numbers.iter().map(|number| i64::from(*number)).collect()
}
