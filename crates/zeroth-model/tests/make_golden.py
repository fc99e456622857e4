#!/usr/bin/env python3
"""Writes golden/transformers-N.json: what transformers makes of configs/*/config.json.

The tests compare our parameter tables with these files. Run once with transformers 4 and once with 5:

    python make_golden.py

Needs torch, transformers, safetensors and peft; with transformers 4 also accelerate and deepspeed. Models are built on the meta
device, so the large ones need no memory. For each config:

  parameters, tensors   how many elements and tensors; a tied tensor counts once
  fnv                   64-bit FNV-1a of the sorted lines "name [shape]\n"; tiny models are saved for it, and the names
                        and shapes are those of the file on disk
  list                  those lines (tiny models, transformers 4)
  largest_module        most elements that one module holds itself: DeepSpeed's largest layer
  decayed               elements that the Hugging Face Trainer applies weight decay to
  active                parameters that get a gradient from one token (tiny mixtures of experts)
  hidden_size           what `model.config.hidden_size` answers
  rope, windows         the rope parameters as transformers 5 normalizes them, the attention window of every block
  lora                  what peft adds with rank 4: for all-linear, and for a list of names

and under `auto`, for some models that are not ours, the part of their config with sizes in it and the hidden size from
which the Trainer fills a DeepSpeed config (transformers 4).

Two facts decide which version is asked what:
  - transformers 5 keeps the experts of a block fused in memory and splits them when it saves. Its names and modules
    in memory are then not those on disk, so only counts are taken from it for the large mixtures.
  - transformers 5 builds every T5 with a tied head, even where config.json says false; it keeps an own head where the
    weights on disk have one. T5 with an own head is therefore asked of transformers 4 only.
"""

import json
import math
import pathlib
import tempfile
import types

import safetensors
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer

HERE = pathlib.Path(__file__).parent
MAJOR = int(transformers.__version__.split(".")[0])
LORA_RANK = 4
LORA_NAMES = {"t5": ["q", "v"], "mixtral": ["q_proj", "w1", "w3"], "default": ["q_proj", "v_proj", "down_proj"]}
LORA_LARGE = {"Qwen3-8B", "Llama-3.2-1B", "t5-base"}
AUTO_TYPES = ["bart", "distilbert", "gpt2", "llava", "mobilevit", "qwen2_vl", "sam", "segformer", "whisper"]
AUTO_FIELDS = ["model_type", "hidden_size", "hidden_sizes", "d_model", "n_embd", "dim", "text_config"]
# A config.json as transformers 5 writes it. The older version does not know its names.
NEWER = ".transformers-5"


def build(config):
    """A model on the meta device, with its weights tied."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    return model


def lines(named_shapes):
    return sorted(f"{name} {list(shape)}" for name, shape in named_shapes)


def fnv_of_lines(lines):
    value = 0xCBF29CE484222325
    for byte in "".join(line + "\n" for line in lines).encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def on_disk(config):
    """Names and shapes in the safetensors file that this model is saved as."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        auto.from_config(config).save_pretrained(folder)
        with safetensors.safe_open(f"{folder}/model.safetensors", "pt") as file:
            return [(name, file.get_slice(name).get_shape()) for name in file.keys()]


def windows(model):
    """The attention window of every block; null is full attention."""
    blocks = model.model.layers
    if model.config.model_type in ("mistral", "mixtral"):
        return [model.config.sliding_window] * len(blocks)
    return [getattr(block.self_attn, "sliding_window", None) for block in blocks]


def active(config):
    """Elements of the parameters that one token's loss reaches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.tensor([[1]])).logits.sum().backward()
    return sum(p.numel() for p in model.parameters() if p.grad is not None)


def lora(config, named_as):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    found = {}
    for what, targets in (("all-linear", "all-linear"), ("named", LORA_NAMES.get(named_as, LORA_NAMES["default"]))):
        model = get_peft_model(build(config), LoraConfig(r=LORA_RANK, target_modules=targets))
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
        found[what] = {
            "targets": targets,
            "parameters": sum(t.numel() for t in state.values()),
            "tensors": len(state),
            "fnv": fnv_of_lines(lines((name, t.shape) for name, t in state.items())),
        }
    return found


def golden(folder):
    raw = json.loads((folder / "config.json").read_text())
    own_head = raw["model_type"] in ("t5", "mt5") and raw.get("tie_word_embeddings") is False
    if own_head if MAJOR >= 5 else folder.name.endswith(NEWER):
        return None
    config = AutoConfig.from_pretrained(folder)
    config.dtype = None
    tiny = folder.name.startswith("tiny-")
    model = build(config)
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    decay = set(Trainer.get_decay_parameter_names(None, model))
    entry = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "decayed": sum(p.numel() for name, p in model.named_parameters() if name in decay),
        "hidden_size": config.hidden_size,
    }
    fused = any(name.endswith("experts.gate_up_proj") for name, _ in shapes)
    if not fused:
        entry["largest_module"] = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    if tiny:
        saved = on_disk(config)
        if not fused and lines(saved) != lines(shapes):
            raise SystemExit(f"{folder.name}: the names in memory are not those on disk")
        shapes = saved
        if MAJOR == 4:
            entry["list"] = lines(shapes)
    if tiny or not fused:
        entry["tensors"] = len(shapes)
        entry["fnv"] = fnv_of_lines(lines(shapes))
    if MAJOR >= 5 and not config.is_encoder_decoder:
        entry["rope"] = config.rope_parameters
    if not config.is_encoder_decoder:
        entry["windows"] = windows(model)
    if MAJOR == 4 and tiny and raw["model_type"] == "qwen3_moe":
        entry["active"] = active(config)
    # Experts are adapted as parameters of the fused model, which transformers 5 has.
    of_lora = MAJOR >= 5 if raw["model_type"] in ("qwen3_moe", "mixtral") else MAJOR == 4
    if of_lora and (tiny or folder.name in LORA_LARGE):
        entry["lora"] = lora(config, raw["model_type"])
    return entry


def sizes(config):
    """The fields of a config that could be its hidden size."""
    kept = {field: value for field, value in config.items() if field in AUTO_FIELDS}
    return {field: sizes(value) if isinstance(value, dict) else value for field, value in kept.items()}


def auto(model_type):
    """What `auto` bucket sizes are derived from: the Trainer sets reduce_bucket_size to its square."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = transformers.CONFIG_MAPPING[model_type]()
    asked = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    arguments = types.SimpleNamespace(get_warmup_steps=lambda steps: 1)
    try:
        asked.trainer_config_finalize(arguments, types.SimpleNamespace(config=config), 1)
        hidden_size = math.isqrt(asked.get_value("zero_optimization.reduce_bucket_size"))
    except ValueError:
        hidden_size = None
    return {"config": sizes(config.to_dict()), "hidden_size": hidden_size}


def main():
    models = {}
    for folder in sorted((HERE / "configs").iterdir()):
        entry = golden(folder)
        if entry is not None:
            models[folder.name] = entry
    out = HERE / "golden" / f"transformers-{MAJOR}.json"
    out.parent.mkdir(exist_ok=True)
    facts = {"transformers": transformers.__version__, "lora_rank": LORA_RANK, "models": models}
    if MAJOR == 4:
        facts["auto"] = {model_type: auto(model_type) for model_type in AUTO_TYPES}
    out.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
