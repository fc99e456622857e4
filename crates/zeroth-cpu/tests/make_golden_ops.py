"""Writes golden-ops/*.safetensors: what PyTorch and transformers compute for each kernel, forward and gradients, in fp32.

Needs torch, transformers and safetensors. Run it in an environment of its own, from any folder:
    python make_golden_ops.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

OUT = Path(__file__).parent / "golden-ops"


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def save(name, **tensors):
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, OUT / f"{name}.safetensors")


def linear(rows, inputs, outputs):
    x, w, b = leaf(rows, inputs), leaf(outputs, inputs), leaf(outputs)
    y = F.linear(x, w, b)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    save(f"linear-{rows}x{inputs}x{outputs}", x=x, w=w, bias=b, y=y, dy=dy, dx=dx, dw=dw, db=db)


def embedding(rows, vocab, width):
    table, ids = leaf(vocab, width), torch.randint(0, vocab, (rows,), dtype=torch.int32)
    y = F.embedding(ids, table)
    dy = torch.randn_like(y)
    (dtable,) = torch.autograd.grad(y, table, dy)
    save(f"embedding-{rows}x{vocab}x{width}", ids=ids, table=table, y=y, dy=dy, dtable=dtable)


def rms_norm(rows, width):
    norm = LlamaRMSNorm(width, eps=1e-6)
    with torch.no_grad():
        norm.weight.normal_()
    x, residual = leaf(rows, width), leaf(rows, width)
    h = residual + x
    y = norm(h)
    # The residual stream carries h on past the norm.
    dy, past = torch.randn_like(y), torch.randn_like(h)
    dh, dw = torch.autograd.grad((y, h), (x, norm.weight), (dy, past))
    save(f"rms_norm-{rows}x{width}", x=x, residual=residual, w=norm.weight, h=h, y=y, dy=dy, past=past, dh=dh, dw=dw)


def llama(head_dim, rope):
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


# Scaled frequencies and a scale other than 1: what a kernel must not assume.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def rope(rows, heads, head_dim):
    config = llama(head_dim, YARN)
    positions = torch.randint(0, 3000, (1, rows))
    x = leaf(rows, heads, head_dim)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(x, positions)
    y, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    y = y[0].transpose(0, 1)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    table = {"inv_freq": rotary.inv_freq.float(), "scaling": torch.tensor([float(rotary.attention_scaling)])}
    save(f"rope-{rows}x{heads}x{head_dim}", positions=positions[0].int(), x=x, y=y, dy=dy, dx=dx, **table)


def attention(lengths, padding, heads, kv_heads, head_dim, window):
    rows, scale = sum(lengths) + padding, head_dim**-0.5
    q, k, v = leaf(rows, heads, head_dim), leaf(rows, kv_heads, head_dim), leaf(rows, kv_heads, head_dim)
    pieces, lses, first = [], [], 0
    for length in lengths:
        part = slice(first, first + length)
        # As transformers' eager_attention_forward: [batch, heads, rows, head_dim].
        qs, ks, vs = (t[part].transpose(0, 1)[None] for t in (q, k, v))
        ks, vs = repeat_kv(ks, heads // kv_heads), repeat_kv(vs, heads // kv_heads)
        scores = qs @ ks.transpose(2, 3) * scale
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        hidden = (j > i) | ((i - j >= window) if window else torch.zeros_like(j > i))
        scores = scores.masked_fill(hidden, float("-inf"))
        pieces.append((scores.softmax(-1) @ vs)[0].transpose(0, 1))
        lses.append(scores.logsumexp(-1)[0])
        first += length
    out = torch.cat(pieces + [torch.zeros(padding, heads, head_dim)])
    lse = torch.cat(lses + [torch.zeros(heads, padding)], 1)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    sizes = torch.tensor([heads, kv_heads, head_dim, window or 0], dtype=torch.int32)
    save(
        f"attention-{rows}-{heads}-{kv_heads}-{head_dim}-{window or 0}",
        sizes=sizes, starts=starts, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv,
    )


def gated_activation(name, activation, rows, width):
    gate, up = leaf(rows, width), leaf(rows, width)
    with torch.no_grad():
        gate[0, :4] = torch.tensor([100.0, -100.0, 0.0, -20.0])
    y = activation(gate) * up
    dy = torch.randn_like(y)
    dgate, dup = torch.autograd.grad(y, (gate, up), dy)
    save(f"{name}-{rows}x{width}", gate=gate, up=up, y=y, dy=dy, dgate=dgate, dup=dup)


def head_loss(rows, hidden, vocab):
    x, w = leaf(rows, hidden), leaf(vocab, hidden)
    labels = torch.randint(0, vocab, (rows,))
    labels[rows // 2 :: 3] = -100
    loss = F.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="sum")
    scale = 1.0 / max(1, int((labels >= 0).sum()))
    dx, dw = torch.autograd.grad(loss * scale, (x, w))
    save(
        f"head_loss-{rows}x{hidden}x{vocab}",
        x=x, w=w, labels=labels.int(), loss=loss[None], scale=torch.tensor([scale]), dx=dx, dw=dw,
    )


def adamw(count, steps):
    p = torch.nn.Parameter(torch.randn(count))
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    start, grads = p.detach().clone(), torch.randn(steps, count)
    weights, norms = [], []
    for grad in grads:
        p.grad = grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_([p], 1.0))
        optimizer.step()
        weights.append(p.detach().clone())
    save(f"adamw-{count}x{steps}", start=start, grads=grads, weights=torch.stack(weights), norms=torch.stack(norms))


def main():
    torch.manual_seed(20)
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    for shape in [(1, 5, 7), (3, 33, 13), (17, 40, 35)]:
        linear(*shape)
    for shape in [(1, 5, 6), (17, 9, 11)]:
        embedding(*shape)
    for shape in [(1, 6), (3, 64), (17, 35)]:
        rms_norm(*shape)
    for shape in [(1, 1, 6), (3, 2, 64), (17, 3, 6)]:
        rope(*shape)
    attention([1], 0, 2, 2, 6, None)
    attention([3], 0, 2, 1, 64, None)
    attention([1, 9, 5], 2, 4, 2, 6, None)
    attention([11, 2, 4], 0, 3, 3, 6, 3)
    attention([8, 9], 0, 4, 1, 6, 3)
    for shape in [(1, 6), (17, 35)]:
        gated_activation("swiglu", F.silu, *shape)
    for shape in [(1, 6, 9), (3, 20, 37), (17, 13, 50)]:
        head_loss(*shape)
    adamw(37, 20)
    for shape in [(1, 6), (17, 35)]:
        gated_activation("geglu", F.gelu, *shape)
        gated_activation("geglu_tanh", lambda x: F.gelu(x, approximate="tanh"), *shape)


main()
