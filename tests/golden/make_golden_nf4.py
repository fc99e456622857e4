#!/usr/bin/env python3
"""Golden files of nf4: codes, scales and dequantised values by bitsandbytes, on the CPU.

Needs: torch 2.15.0, bitsandbytes 0.50.2, safetensors 0.8.0. Writes tests/golden/nf4/cases.safetensors, a tensor for each part of a
case: `CASE.elements` (bf16 or f32: what is quantised), `CASE.codes`, `CASE.scales` (blocks of 64, no double quantisation)
and `CASE.unpacked` (in the dtype of the elements).
"""

import importlib.metadata
import math
import pathlib

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file

VERSIONS = {name: importlib.metadata.version(name) for name in ["bitsandbytes", "torch"]}


def normal(count, std=0.02):
    return torch.randn(count) * std


def heavy_tails(count):
    """Like a trained matrix: most elements small, a few very large ones, some zeros and equal ones."""
    elements = torch.distributions.StudentT(3.0).sample((count,)) * 0.01
    elements[::97] = 0.0
    elements[1::131] = 0.015625
    elements[5::1009] *= 40
    elements[64:128] = 0.0  # a block of zeros
    return elements


def midpoints(count):
    """Exact midpoints of neighbouring values, and the floats beside them, in blocks whose scale is a power of 2."""
    code = bnb.get_4bit_type("nf4", device="cpu")
    middle = (code[:-1] + code[1:]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(to)) for to in (math.inf, -math.inf))
    block = torch.cat([middle, up, down, code, torch.tensor([1.0, -1.0, 0.0])])
    assert len(block) == 64
    return torch.cat([block * 2.0**power for power in range(-20, 20)])[:count]


def denormal(count):
    """Subnormal numbers, of which some blocks have nothing larger; and the smallest divisor of bitsandbytes, 1e-38."""
    elements = normal(count, 1.0)
    scale = torch.tensor([1e-38, 3e-39, 1e-42, 1e-45, 2e-38, 1e-36, 1e-37])
    blocks = [block * scale[at % len(scale)] for at, block in enumerate(elements.split(64))]
    return torch.cat(blocks)


def one_sided(count):
    """The largest magnitude is negative in some blocks and positive in others."""
    elements = normal(count).abs()
    elements[64:128] *= -1
    return elements


CASES = {
    "normal": lambda: normal(2048 + 640),
    "heavy_tails": lambda: heavy_tails(2 * 2048),
    "midpoints": lambda: midpoints(40 * 64),
    "denormal": lambda: denormal(14 * 64),
    "one_sided": lambda: one_sided(192),
    "short": lambda: normal(2048 + 100),  # a short last block, of an even length
    "odd": lambda: normal(2048 + 33),  # one of an odd length
    "one": lambda: torch.tensor([-0.25]),
    "short_zeros": lambda: torch.cat([normal(64), torch.zeros(7)]),
    "short_denormal": lambda: torch.cat([normal(64), normal(9, 1e-40)]),
}


def main():
    out = {}
    for name, make in CASES.items():
        for dtype, suffix in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
            torch.manual_seed(len(out))
            elements = make().to(dtype)
            codes, state = bnb.quantize_4bit(
                elements, blocksize=64, quant_type="nf4", compress_statistics=False
            )
            unpacked = bnb.dequantize_4bit(codes, state)
            assert state.absmax.dtype == torch.float32 and unpacked.dtype == dtype
            case = f"{name}.{suffix}"
            out[f"{case}.elements"] = elements
            out[f"{case}.codes"] = codes.reshape(-1)
            out[f"{case}.scales"] = state.absmax
            out[f"{case}.unpacked"] = unpacked.reshape(-1)
    folder = pathlib.Path(__file__).parent / "nf4"
    folder.mkdir(exist_ok=True)
    save_file(out, folder / "cases.safetensors", {**VERSIONS, "backend": "cpu"})


if __name__ == "__main__":
    main()
