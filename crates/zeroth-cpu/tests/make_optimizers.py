"""Writes optimizers.json: weights that PyTorch's optimizers reach in up to 2,000 steps.

    python tests/make_optimizers.py

Needs torch (2.15 wrote the file that is here). Weights start at `start(i)` and get the gradients `gradient(t, i)` below,
rounded to f32; both are written down in tests/optimizers.rs too. Everything is computed in float64; the largest distance of
PyTorch's own float32 run is written beside it. Lion is not in torch: its update is that of the paper and of DeepSpeed's
kernels, in float64. AdEMAMix is not either: its update is that of the paper; pytorch_optimizer 4.1 reaches the same
weights.
"""

import json
import math
import struct
from pathlib import Path

import torch

COUNT = 6
STEPS = [1, 2, 10, 100, 1000, 2000]


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def start(i):
    return f32(2.0 + 0.5 * math.sin(1.0 + i))


def gradient(t, i):
    return f32((math.sin(0.7 * t + 1.3 * i) + 0.4 * math.sin(0.013 * t * (i + 1)) + 0.05) * 10.0 ** -(i % 3))


class Lion:
    def __init__(self, params, lr, betas, weight_decay):
        self.params, self.lr, self.betas, self.decay = params, lr, betas, weight_decay
        self.moments = [torch.zeros_like(p) for p in params]

    def step(self):
        beta1, beta2 = self.betas
        for p, m in zip(self.params, self.moments):
            p.data.mul_(1 - self.lr * self.decay)
            p.data.sub_(self.lr * torch.sign(beta1 * m + (1 - beta1) * p.grad))
            m.copy_(beta2 * m + (1 - beta2) * p.grad)


class AdEMAMix:
    """Algorithm 1 of the paper (arXiv 2409.03137) with its schedules of alpha and beta3."""

    def __init__(self, params, lr, betas, alpha, eps, weight_decay, t_alpha=None, t_beta3=None):
        self.params, self.lr, self.betas, self.eps, self.decay = params, lr, betas, eps, weight_decay
        self.alpha, self.t_alpha, self.t_beta3, self.t = alpha, t_alpha, t_beta3, 0
        self.moments = [[torch.zeros_like(p) for _ in range(3)] for p in params]

    def step(self):
        self.t += 1
        (beta1, beta2, beta3), alpha = self.betas, self.alpha
        if self.t_alpha:
            alpha = min(self.t * alpha / self.t_alpha, alpha)
        if self.t_beta3:
            done, ln1, ln3 = self.t / self.t_beta3, math.log(beta1), math.log(beta3)
            beta3 = min(math.exp(ln1 * ln3 / ((1 - done) * ln3 + done * ln1)), beta3)
        for p, (m1, m2, v) in zip(self.params, self.moments):
            m1.copy_(beta1 * m1 + (1 - beta1) * p.grad)
            m2.copy_(beta3 * m2 + (1 - beta3) * p.grad)
            v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
            m_hat, v_hat = m1 / (1 - beta1**self.t), v / (1 - beta2**self.t)
            p.data.sub_(self.lr * ((m_hat + alpha * m2) / (v_hat.sqrt() + self.eps) + self.decay * p.data))


class Uncorrected:
    """DeepSpeed's bias_correction false: AdamW without the two divisions."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params, self.lr, self.betas, self.eps, self.decay = params, lr, betas, eps, weight_decay
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]

    def step(self):
        beta1, beta2 = self.betas
        for p, (m, v) in zip(self.params, self.moments):
            p.data.mul_(1 - self.lr * self.decay)
            m.copy_(beta1 * m + (1 - beta1) * p.grad)
            v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
            p.data.sub_(self.lr * m / (v.sqrt() + self.eps))


def run(make, settings, dtype):
    weights = torch.tensor([start(i) for i in range(COUNT)], dtype=dtype, requires_grad=True)
    optimizer = make([weights], **settings)
    reached = []
    for t in range(1, STEPS[-1] + 1):
        weights.grad = torch.tensor([gradient(t, i) for i in range(COUNT)], dtype=dtype)
        optimizer.step()
        if t in STEPS:
            reached.append(weights.tolist())
    return reached


# Lion's step is its rate, whatever the gradient: with a power of 2 the weights of f32 can follow it.
CASES = [
    ("AdamW", torch.optim.AdamW, {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}),
    ("AdamW", torch.optim.AdamW, {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}),
    ("Adam", torch.optim.Adam, {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
    ("Adam", torch.optim.Adam, {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": 0.02}),
    ("Uncorrected", Uncorrected, {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "dampening": 0.3}),
    ("SGD", torch.optim.SGD, {"lr": 5e-4, "momentum": 0.95, "nesterov": True, "weight_decay": 0.01}),
    ("Lion", Lion, {"lr": 2.0**-13, "betas": [0.9, 0.99], "weight_decay": 0.1}),
    ("Lion", Lion, {"lr": 2.0**-11, "betas": [0.95, 0.98], "weight_decay": 0.0}),
    ("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    (
        "Adagrad",
        torch.optim.Adagrad,
        {"lr": 2e-2, "eps": 1e-8, "lr_decay": 1e-3, "initial_accumulator_value": 0.1, "weight_decay": 0.01},
    ),
    ("AdEMAMix", AdEMAMix, {"lr": 3e-4, "betas": [0.9, 0.999, 0.9999], "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.1}),
    (
        "AdEMAMix",
        AdEMAMix,
        {
            "lr": 1e-4,
            "betas": [0.9, 0.95, 0.999],
            "alpha": 8.0,
            "eps": 1e-8,
            "weight_decay": 0.01,
            "t_alpha": 1500,
            "t_beta3": 1200,
        },
    ),
]


def main():
    cases = []
    for name, make, settings in CASES:
        exact, rounded = run(make, settings, torch.float64), run(make, settings, torch.float32)
        apart = max(
            abs(a - b) / abs(b) for one, other in zip(rounded, exact) for a, b in zip(one, other)
        )
        cases.append({"optimizer": name, "settings": settings, "steps": STEPS, "weights": exact, "float32": apart})
        print(name, settings, apart)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (Path(__file__).parent / "optimizers.json").write_text(f"[\n{lines}\n]\n")


main()
