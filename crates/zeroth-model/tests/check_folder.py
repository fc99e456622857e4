#!/usr/bin/env python3
"""Checks folders made by `zeroth init` with transformers, torch and numpy: programs that we did not write.

    cargo build -p zeroth-cli
    cargo build -p zeroth-model --example read_weights
    python check_folder.py target/debug/zeroth target/debug/examples/read_weights

Needs torch, transformers (4 or 5), safetensors and numpy. For each family, tied and not, in bf16 and fp32, in one file
and in several:

  - from_pretrained of AutoModelForCausalLM, or of AutoModelForSeq2SeqLM for encoder-decoders, loads the folder with no missing, unexpected or mismatched key, in the type
    asked for, and a forward pass gives finite logits;
  - the sizes, the rope and the head that transformers understands are those that were typed;
  - every value that our reader reads is the one that transformers has, bit by bit;
  - every value is the one that the definition gives: Philox, Box and Muller's method and the hash of the name, computed
    here in f64 with numpy's functions.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

SIZES = {
    "--hidden": 48, "--layers": 2, "--heads": 6, "--kv-heads": 2, "--head-dim": 16, "--intermediate-size": 80,
    "--vocab-size": 300, "--max-positions": 512, "--rope-theta": 50000, "--seed": 123456789012345,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "t5", "mt5"]
ENCODER_DECODERS = ["t5", "mt5"]
# What encoder-decoders do not have.
NOT_THEIRS = ["--kv-heads", "--max-positions", "--rope-theta"]


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def philox(counters, key):
    """Philox4x32-10 over an array of counters [n, 4]."""
    words = [counters[:, i].astype(numpy.uint64) for i in range(4)]
    low = numpy.uint64(0xFFFFFFFF)
    shift = numpy.uint64(32)
    key = list(key)
    for _ in range(10):
        a, b = numpy.uint64(0xD2511F53) * words[0], numpy.uint64(0xCD9E8D57) * words[2]
        words = [
            (b >> shift) ^ words[1] ^ numpy.uint64(key[0]),
            b & low,
            (a >> shift) ^ words[3] ^ numpy.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return numpy.stack(words, 1)


def normals(seed, name, count):
    hashed = fnv(name.encode())
    blocks = numpy.arange((count + 3) // 4, dtype=numpy.uint64)
    counters = numpy.zeros((len(blocks), 4), dtype=numpy.uint64)
    counters[:, 0] = blocks
    counters[:, 2], counters[:, 3] = hashed % 2**32, hashed >> 32
    words = philox(counters, (seed % 2**32, seed >> 32))
    # The uniform number is an f32 by definition; what follows is exact.
    uniform = (words[:, 0::2].astype(numpy.float32) + numpy.float32(0.5)).astype(numpy.float64) / 2**32
    radius = numpy.sqrt(-2 * numpy.log(uniform))
    angle = 2 * numpy.pi * words[:, 1::2].astype(numpy.float64) / 2**32
    return numpy.stack([radius * numpy.cos(angle), radius * numpy.sin(angle)], 2).reshape(-1)[:count]


def deviation(family, name):
    """Of T5's _init_weights, with an initializer_factor of 1."""
    width, head = SIZES["--hidden"], SIZES["--head-dim"]
    if family not in ENCODER_DECODERS:
        return 0.02
    match name.split(".")[-2]:
        case "shared" | "lm_head":
            return 1.0
        case "q":
            return (width * head) ** -0.5
        case "o":
            return (SIZES["--heads"] * head) ** -0.5
        case "wo":
            return SIZES["--intermediate-size"] ** -0.5
        case _:
            return width ** -0.5


def defined(family, seed, name, shape):
    if name.endswith("norm.weight"):
        return numpy.ones(shape)
    if name.endswith(".bias"):
        return numpy.zeros(shape)
    return deviation(family, name) * normals(seed, name, int(numpy.prod(shape))).reshape(shape)


def check(zeroth, reader, folder, family, tied, dtype, shard):
    command = [zeroth, "init", "--family", family, "--dtype", dtype, "--output", folder, "--max-shard-size", shard]
    is_pair = family in ENCODER_DECODERS
    sizes = [pair for pair in SIZES.items() if not (is_pair and pair[0] in NOT_THEIRS)]
    command += [str(word) for pair in sizes for word in pair] + (["--tied"] if tied else [])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]

    auto = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype="auto")
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, wrong
    config = model.config
    assert config.model_type == family and config.num_hidden_layers == SIZES["--layers"]
    assert config.hidden_size == SIZES["--hidden"] and config.num_attention_heads == SIZES["--heads"]
    if is_pair:
        assert config.d_kv == SIZES["--head-dim"] and config.num_decoder_layers == SIZES["--layers"]
        assert config.d_ff == SIZES["--intermediate-size"] and config.decoder_start_token_id == 0
        assert config.feed_forward_proj == ("relu" if family == "t5" and tied else "gated-gelu")
        assert getattr(config, "scale_decoder_outputs", False) == (family == "t5" and tied)
        assert (model.lm_head.weight is model.shared.weight) == tied
        logits = model(torch.arange(7)[None], decoder_input_ids=torch.arange(5)[None]).logits
    else:
        assert config.num_key_value_heads == SIZES["--kv-heads"]
        assert config.head_dim == SIZES["--head-dim"] and config.max_position_embeddings == SIZES["--max-positions"]
        rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
        assert rope["rope_theta"] == SIZES["--rope-theta"], rope
        assert config.tie_word_embeddings == tied
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        logits = model(torch.arange(7)[None]).logits
    assert model.dtype == torch_dtype, model.dtype
    assert torch.isfinite(logits).all() and logits.std() > 0

    lines = subprocess.run([reader, folder], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = {line["name"]: line for line in map(json.loads, lines)}
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, tensor in theirs.items():
        values = tensor.detach().float()
        assert ours[name]["shape"] == list(tensor.shape) and ours[name]["dtype"] == dtype
        assert ours[name]["f32"] == f"{fnv(values.numpy().tobytes()):016x}", name
        expected = torch.from_numpy(defined(family, SIZES["--seed"], name, tuple(tensor.shape)))
        # A stored value is off by its own rounding, and by the few last places of our logarithm and sine. Small
        # halves are multiples of 2^-24.
        rounding, least = {"bf16": (2**-8, 1e-8), "fp16": (2**-10, 2**-24), "fp32": (2e-6, 1e-8)}[dtype]
        assert torch.allclose(values.double(), expected, rtol=rounding, atol=least), name
    return len(theirs), len(list(pathlib.Path(folder).glob("*.safetensors")))


def main():
    zeroth, reader = sys.argv[1:3]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for family in FAMILIES:
        for tied, dtype, shard in [(False, "bf16", "5GB"), (True, "fp32", "50KB"), (True, "fp16", "5GB")]:
            with tempfile.TemporaryDirectory() as folder:
                tensors, files = check(zeroth, reader, folder, family, tied, dtype, shard)
            assert (files > 1) == (shard == "50KB")
            print(f"{family}, tied {tied}, {dtype}: {tensors} tensors in {files} files, all equal")


if __name__ == "__main__":
    main()
