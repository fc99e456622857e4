"""Rotary frequencies as transformers computes them, for every scaling, to golden/rope.json.

    python crates/zeroth-model/tests/make_golden_rope.py     # needs torch and transformers 5
"""

import json
import pathlib

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# A length beyond the trained one: only the dynamic form reads it.
LENGTH, MAX_POSITIONS = 10_000, 4096
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5,
    },
    "yarn-exact": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25,
        "truncate": False,
    },
}


def table(head_dim, rope):
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=8,
        max_position_embeddings=MAX_POSITIONS, rope_parameters={"rope_theta": 10000.0, **rope},
    )
    if rope["rope_type"] == "default":
        frequencies, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=LENGTH)
    return {"head_dim": head_dim, "rope_parameters": {"rope_theta": 10000.0, **rope},
            "frequencies": [float(f) for f in frequencies], "scale": float(scale)}


tables = {f"{name}-{dim}": table(dim, rope) for dim in (6, 64) for name, rope in ROPES.items()}
golden = {"length": LENGTH, "max_positions": MAX_POSITIONS, "tables": tables}
path = pathlib.Path(__file__).resolve().parent / "golden" / "rope.json"
path.write_text(json.dumps(golden, indent=1) + "\n")
