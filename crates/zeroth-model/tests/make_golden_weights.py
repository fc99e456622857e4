#!/usr/bin/env python3
"""Writes weights/*/: tiny models saved by transformers, and golden/weights.json: what is in them.

The tests read the folders with our reader and compare. Run with transformers 5:

    python make_golden_weights.py

Needs torch, transformers and safetensors. For each tensor of each folder:

  first, last, sum   some elements as they are in f32, and the sum of all finite ones
  f32, bf16          64-bit FNV-1a of the bytes of the whole tensor, converted by torch

The first elements of each embedding are numbers that are hard to convert: zeros of both signs, subnormal ones, the
largest, infinite ones, and those half-way between two bf16 numbers.
"""

import json
import math
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
SIZES = dict(
    hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=10, head_dim=4,
    max_position_embeddings=64,
)
HARD = [0.0, -0.0, 1e-45, -3e-39, 6e-8, 1.00390625, 1.01171875, -1.00390625, 65504.0, 3.4e38, math.inf, -math.inf]
FOLDERS = {
    "one-f32": ("llama", torch.float32, None, dict(num_key_value_heads=1, tie_word_embeddings=False)),
    "one-bf16": ("qwen3", torch.bfloat16, None, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "one-f16": ("qwen2", torch.float16, None, dict(num_key_value_heads=2, tie_word_embeddings=False)),
    "sharded-bf16": ("mistral", torch.bfloat16, "1KB", dict(num_key_value_heads=1, tie_word_embeddings=False)),
    "sharded-f32": ("qwen3", torch.float32, "2KB", dict(num_key_value_heads=1, tie_word_embeddings=True)),
}


def fnv(tensor):
    data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def shown(value):
    """JSON has no infinities."""
    return value if math.isfinite(value) else str(value)


def main():
    torch.manual_seed(7)
    facts = {}
    for name, (model_type, dtype, shard, more) in FOLDERS.items():
        folder = HERE / "weights" / name
        shutil.rmtree(folder, ignore_errors=True)
        config = AutoConfig.for_model(model_type, **SIZES, **more)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
            model.get_input_embeddings().weight.view(-1)[: len(HARD)] = torch.tensor(HARD).to(dtype)
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        files = sorted(folder.glob("*.safetensors"))
        assert (len(files) > 1) == (shard is not None), files
        tensors = {}
        for file in files:
            for key, stored in load_file(file).items():
                assert stored.dtype == dtype
                values = stored.float().flatten()
                tensors[key] = {
                    "first": [shown(v) for v in values[:4].tolist()],
                    "last": [shown(v) for v in values[-2:].tolist()],
                    "sum": math.fsum(v for v in values.tolist() if math.isfinite(v)),
                    "f32": fnv(values),
                    "bf16": fnv(values.to(torch.bfloat16)),
                }
        facts[name] = {"dtype": str(dtype).removeprefix("torch."), "files": len(files), "tensors": tensors}
    out = {"transformers": transformers.__version__, "torch": torch.__version__, "folders": facts}
    (HERE / "golden" / "weights.json").write_text(json.dumps(out, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
