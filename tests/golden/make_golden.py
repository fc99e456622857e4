"""Golden training runs: tiny models of five families, 20 AdamW steps each, by PyTorch and transformers in fp32. In two of them
every second parameter is frozen.

    python tests/golden/make_golden.py           # writes every folder beside this file, then checks what it wrote
    python tests/golden/make_golden.py --check   # reads the committed files and computes step 1 of every run again
    python tests/golden/make_golden.py --final   # trains the committed models again and writes final.safetensors alone
    python tests/golden/make_golden.py NAME...   # the same for these folders alone

Needs Python 3.11 with torch, transformers and safetensors in an environment of its own, outside the repository; the
README says which versions made the committed files and what is in them.

Every number has two witnesses. The committed one is transformers with eager attention, one row at a time, on one
thread. The second, `Second` below, shares no code with it: it reads config.json and model.safetensors by itself and
computes forward, clipping and AdamW in float64. The script stops where the two differ by more than AGREEMENT.
"""

import copy
import json
import math
import pathlib
import platform
import random
import re
import sys
import tempfile

import torch
import transformers
import safetensors
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 20
RECIPE = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}
# Name, samples of a step, schedule, warm-up steps. 12 and 20 are there for 3 and 5 ranks.
RUNS = [
    ("batch-4-cosine", 4, "cosine", 3),
    ("batch-4-constant", 4, "constant", 0),
    ("batch-12-cosine", 12, "cosine", 3),
    ("batch-16-cosine", 16, "cosine", 3),
    ("batch-20-cosine", 20, "cosine", 3),
]
# Relative difference allowed between fp32 transformers and the float64 witness: losses and norms of step 1, a
# parameter's gradient at step 1 (some are small differences of large terms), everything after that.
AGREEMENT, AGREEMENT_OF_GRADIENTS, AGREEMENT_OF_RUNS = 1e-6, 5e-6, 1e-5
# An element of the final weights, relative to the root mean square of its tensor.
AGREEMENT_OF_WEIGHTS = 1e-5
# The patterns of transformers' Trainer for what weight decay leaves alone.
UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
# Models up to this many parameters get files with their whole gradients of step 1 and their whole final weights.
WHOLE_GRADIENTS = 17_000


def rope(kind, theta, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def sizes(vocabulary, hidden, mlp, blocks, heads, kv_heads, head_dim, **more):
    head = {} if head_dim is None else {"head_dim": head_dim}
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "bos_token_id": None,
        "eos_token_id": None,
        **head,
        **more,
    }


# Folder: family, config. Rows have up to 40 tokens, so 40 positions are "long enough" and 16 are not.
MODELS = {
    "llama-one-kv-head": ("llama", sizes(
        53, 24, 40, 2, heads=3, kv_heads=1, head_dim=None, max_position_embeddings=64, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_parameters=rope("default", 10000.0))),
    "llama-biases-tied": ("llama", sizes(
        61, 32, 44, 2, heads=4, kv_heads=2, head_dim=12, max_position_embeddings=256, tie_word_embeddings=True,
        attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5,
        rope_parameters=rope("llama3", 10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=32))),
    "llama-dynamic": ("llama", sizes(
        45, 30, 34, 2, heads=5, kv_heads=5, head_dim=6, max_position_embeddings=16, tie_word_embeddings=False,
        rope_parameters=rope("dynamic", 10000.0, factor=3.0))),
    "mistral-window": ("mistral", sizes(
        59, 36, 38, 2, heads=6, kv_heads=2, head_dim=10, max_position_embeddings=128, tie_word_embeddings=False,
        sliding_window=7, rope_parameters=rope("linear", 1000.0, factor=2.5))),
    "mistral-no-window-tied": ("mistral", sizes(
        51, 24, 29, 3, heads=2, kv_heads=2, head_dim=12, max_position_embeddings=64, tie_word_embeddings=True,
        sliding_window=None, rms_norm_eps=1e-5, rope_parameters=rope("default", 500000.0))),
    "qwen2-yarn-tied": ("qwen2", sizes(
        71, 28, 33, 3, heads=2, kv_heads=1, head_dim=None, max_position_embeddings=256, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=9, max_window_layers=1,
        rope_parameters=rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0,
                             beta_slow=1.0))),
    "qwen3-tied": ("qwen3", sizes(
        67, 24, 37, 2, heads=4, kv_heads=2, head_dim=10, max_position_embeddings=64, tie_word_embeddings=True,
        rms_norm_eps=1e-2, rope_parameters=rope("default", 1000000.0))),
    "qwen3-biases-yarn": ("qwen3", sizes(
        43, 64, 24, 2, heads=2, kv_heads=2, head_dim=12, max_position_embeddings=120, tie_word_embeddings=False,
        attention_bias=True,
        rope_parameters=rope("yarn", 1000.0, factor=3.0, original_max_position_embeddings=40, beta_fast=4.0,
                             beta_slow=1.0, truncate=False, mscale=1.0, mscale_all_dim=0.5))),
    "ministral-layer-types": ("ministral", sizes(
        57, 32, 28, 3, heads=4, kv_heads=2, head_dim=6, max_position_embeddings=64, tie_word_embeddings=True,
        sliding_window=5, layer_types=["sliding_attention", "full_attention", "full_attention"],
        rms_norm_eps=1e-5, rope_parameters=rope("default", 10000.0))),
    "llama-gelu-tanh": ("llama", sizes(
        47, 26, 35, 2, heads=2, kv_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
        hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-5, rope_parameters=rope("default", 10000.0))),
    "qwen3-gelu-tied": ("qwen3", sizes(
        55, 28, 39, 2, heads=2, kv_heads=2, head_dim=10, max_position_embeddings=64, tie_word_embeddings=True,
        hidden_act="gelu", rms_norm_eps=1e-5, rope_parameters=rope("default", 10000.0))),
    "qwen3-half-frozen": ("qwen3", sizes(
        49, 26, 31, 2, heads=3, kv_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
        rms_norm_eps=1e-5, rope_parameters=rope("default", 10000.0))),
    "llama-biases-half-frozen": ("llama", sizes(
        63, 20, 27, 2, heads=4, kv_heads=2, head_dim=6, max_position_embeddings=64, tie_word_embeddings=True,
        attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5, rope_parameters=rope("default", 10000.0))),
}
# The models of which every second parameter is frozen, by name in alphabetical order: the remainder of the frozen places. The
# embedding and not the head of the first one is frozen; the second one's tied embedding is.
FROZEN = {"qwen3-half-frozen": 1, "llama-biases-half-frozen": 0}


# --- The data ---------------------------------------------------------------------------------------------------------

def make_rows(vocabulary, seed):
    """Rows of 3 to 40 tokens that can be learnt in part (mostly one fixed successor a token), masked in five ways.

    The number of rows is a multiple of no batch, so that epochs end within a step."""
    rng = random.Random(seed)
    successor = [rng.randrange(vocabulary) for _ in range(vocabulary)]
    rows = []
    for place in range(83):
        length = rng.choice([3, 40, rng.randint(3, 12), rng.randint(3, 40), rng.randint(20, 40)])
        ids = [rng.randrange(vocabulary)]
        while len(ids) < length:
            ids.append(successor[ids[-1]] if rng.random() < 0.7 else rng.randrange(vocabulary))
        labels = list(ids)
        match place % 5:
            case 0:  # a prompt, then an answer
                prompt = rng.randint(1, length - 1)
                labels = [-100] * prompt + ids[prompt:]
            case 1:  # one trained token: the first that can be, the last, or any
                keep = rng.choice([1, length - 1, rng.randint(1, length - 1)])
                labels = [label if at == keep else -100 for at, label in enumerate(ids)]
            case 2:  # everything; the first label has nothing before it and is not trained
                pass
            case 3:  # holes
                labels = [label if rng.random() < 0.6 else -100 for label in ids]
                labels[rng.randint(1, length - 1)] = rng.randrange(vocabulary)
            case 4:  # targets that are not the next input
                labels = [rng.randrange(vocabulary) if rng.random() < 0.2 else label for label in ids]
        assert len(labels) == length and trained([{"labels": labels}]) > 0
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trained(rows):
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def samples(rows, batch, step):
    return [rows[place % len(rows)] for place in range(step * batch, (step + 1) * batch)]


# --- The first witness: transformers ----------------------------------------------------------------------------------

def make_model(family, fields, seed):
    """A model whose every part matters: norms are not 1, biases not 0, attention not uniform. Every second one speaks
    softly, so that some of its gradient norms are below the limit for clipping."""
    loudness = 1.0 if seed % 2 else 0.3
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **copy.deepcopy(fields)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_((loudness if name == "model.norm.weight" else 1.0) * (1.0 + 0.2 * noise))
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_((0.25 if model.config.tie_word_embeddings else 0.6) * noise)
            else:
                weight.copy_(1.2 / math.sqrt(weight.shape[1]) * noise)
    return model


def frozen_names(folder):
    names = sorted(load_file(folder / "model.safetensors"))
    return names[FROZEN[folder.name]::2] if folder.name in FROZEN else []


def load_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    frozen = frozen_names(folder)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    return model.train()


def backward(model, rows):
    """Adds the gradients of a step; its loss. A row is a batch of one: positions from 0, nothing seen of other rows."""
    total, loss = trained(rows), 0.0
    for row in rows:
        # transformers keeps the frequencies of the longest row met by a dynamic rope; a new one has met none.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        part = model(input_ids=ids, labels=labels, num_items_in_batch=total, use_cache=False).loss
        part.backward()
        loss += part.item()
    return loss


def train(folder, rows, batch, schedule, warmup, steps=STEPS):
    model = load_model(folder)
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], UNDECAYED))
    named = list(model.named_parameters())
    updated = [(n, p) for n, p in named if p.requires_grad]
    groups = [
        {"params": [p for n, p in updated if n in decayed], "weight_decay": RECIPE["weight_decay"]},
        {"params": [p for n, p in updated if n not in decayed], "weight_decay": 0.0},
    ]
    betas = (RECIPE["adam_beta1"], RECIPE["adam_beta2"])
    optimizer = torch.optim.AdamW(
        groups, lr=RECIPE["learning_rate"], betas=betas, eps=RECIPE["adam_epsilon"], foreach=False, fused=False)
    scheduler = transformers.get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS)
    run = {"loss": [], "grad_norm": [], "lr": [], "tokens": [], "trained_tokens": []}
    for step in range(steps):
        taken = samples(rows, batch, step)
        optimizer.zero_grad()
        run["loss"].append(backward(model, taken))
        if step == 0:
            first = {name: weight.grad.clone() for name, weight in updated}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["max_grad_norm"], foreach=False)
        run["grad_norm"].append(norm.item())
        run["lr"].append(scheduler.get_last_lr()[0])
        run["tokens"].append(sum(len(row["input_ids"]) for row in taken))
        run["trained_tokens"].append(trained(taken))
        optimizer.step()
        scheduler.step()
    final = {name: weight.detach().double() for name, weight in named}
    start = load_file(folder / "model.safetensors")
    assert all(torch.equal(final[name], start[name].double()) for name in frozen_names(folder))
    return run, first, final, sorted(name for name, _ in named if name not in decayed)


# --- The second witness: written from the formulas, in float64 --------------------------------------------------------

class Second:
    """The llama family from its files alone. It knows nothing of transformers."""

    def __init__(self, folder, change=None):
        self.config = json.loads((folder / "config.json").read_text())
        if change:
            change(self.config)
        frozen = frozen_names(folder)
        self.weights = {
            name: weight.double().requires_grad_(name not in frozen)
            for name, weight in load_file(folder / "model.safetensors").items()}

    def frequencies(self, length):
        """Angles a position turns each pair by, and what cosine and sine are multiplied by."""
        given, d = self.config["rope_parameters"], self.head_dim()
        theta, factor = given["rope_theta"], given.get("factor")
        plain = [theta ** (-2 * i / d) for i in range(d // 2)]
        match given["rope_type"]:
            case "default":
                return plain, 1.0
            case "linear":
                return [f / factor for f in plain], 1.0
            case "dynamic":
                most = self.config["max_position_embeddings"]
                grown = theta * (factor * max(length, most) / most - (factor - 1)) ** (d / (d - 2))
                return [grown ** (-2 * i / d) for i in range(d // 2)], 1.0
            case "llama3":
                low, high = given["low_freq_factor"], given["high_freq_factor"]
                turns = [given["original_max_position_embeddings"] * f / (2 * math.pi) for f in plain]
                kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
                return [f * (k + (1 - k) / factor) for f, k in zip(plain, kept)], 1.0
            case "yarn":
                place = lambda turns: d * math.log(
                    given["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
                low, high = place(given["beta_fast"]), place(given["beta_slow"])
                if given.get("truncate", True):
                    low, high = math.floor(low), math.ceil(high)
                low, high = max(low, 0), min(high, d - 1)
                kept = [1 - min(1.0, max(0.0, (i - low) / (high - low))) for i in range(d // 2)]
                scale = lambda by: 0.1 * by * math.log(factor) + 1.0
                by = (given["mscale"], given["mscale_all_dim"]) if "mscale" in given else (1.0, 0.0)
                return [f * (k + (1 - k) / factor) for f, k in zip(plain, kept)], scale(by[0]) / scale(by[1])

    def head_dim(self):
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def window(self, block):
        kinds = self.config.get("layer_types") or ["sliding_attention"] * self.config["num_hidden_layers"]
        return self.config.get("sliding_window") if kinds[block] == "sliding_attention" else None

    def linear(self, name, x):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name, x):
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        return x / (mean_square + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def turned(self, x, angle, scale):
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        cos, sin = angle.cos() * scale, angle.sin() * scale
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def attention(self, block, x):
        name, length, d = f"model.layers.{block}.self_attn", x.shape[0], self.head_dim()
        q, k, v = (self.linear(f"{name}.{part}_proj", x).view(length, -1, d) for part in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        frequencies, scale = self.frequencies(length)
        at = torch.arange(length).double()
        angle = at[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        back = at[:, None] - at[None, :]
        hidden = (back < 0) | (back >= (self.window(block) or math.inf))
        heads, group = [], q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            query, key = (self.turned(y, angle, scale) for y in (q[:, head], k[:, head // group]))
            score = (query @ key.T / math.sqrt(d)).masked_fill(hidden, -math.inf)
            heads.append(torch.softmax(score, -1) @ v[:, head // group])
        return self.linear(f"{name}.o_proj", torch.cat(heads, -1))

    def activated(self, x):
        match self.config["hidden_act"]:
            case "silu":
                return x / (1 + torch.exp(-x))
            case "gelu":
                return x * (1 + torch.erf(x / math.sqrt(2))) / 2
            case "gelu_pytorch_tanh":
                return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2

    def mlp(self, block, x):
        name = f"model.layers.{block}.mlp"
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", self.activated(gate) * self.linear(f"{name}.up_proj", x))

    def logits(self, row):
        x = self.weights["model.embed_tokens.weight"][row["input_ids"]]
        for block in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{block}"
            x = x + self.attention(block, self.norm(f"{name}.input_layernorm", x))
            x = x + self.mlp(block, self.norm(f"{name}.post_attention_layernorm", x))
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return self.norm("model.norm", x) @ self.weights[head].T

    def loss(self, rows):
        total = 0.0
        for row in rows:
            logits = self.logits(row)
            for at, label in enumerate(row["labels"][1:]):
                if label != -100:
                    total = total + torch.logsumexp(logits[at], 0) - logits[at, label]
        return total / trained(rows)

    def gradients(self, rows):
        loss = self.loss(rows)
        updated = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        return loss.item(), dict(zip(updated, torch.autograd.grad(loss, list(updated.values()))))

    def train(self, rows, batch, lrs, undecayed, steps=STEPS):
        b1, b2 = RECIPE["adam_beta1"], RECIPE["adam_beta2"]
        m, v = ({name: torch.zeros_like(weight) for name, weight in self.weights.items()} for _ in range(2))
        run = {"loss": [], "grad_norm": []}
        for step in range(steps):
            loss, grads = self.gradients(samples(rows, batch, step))
            norm = math.sqrt(sum((grad * grad).sum().item() for grad in grads.values()))
            clip, lr = min(1.0, RECIPE["max_grad_norm"] / (norm + 1e-6)), lrs[step]
            for name, grad in grads.items():
                m[name] = b1 * m[name] + (1 - b1) * clip * grad
                v[name] = b2 * v[name] + (1 - b2) * (clip * grad) ** 2
                mean, square = m[name] / (1 - b1 ** (step + 1)), v[name] / (1 - b2 ** (step + 1))
                decay = 0.0 if name in undecayed else RECIPE["weight_decay"]
                weight = self.weights[name].detach() * (1 - lr * decay)
                weight -= lr * mean / (square.sqrt() + RECIPE["adam_epsilon"])
                self.weights[name] = weight.requires_grad_()
            run["loss"].append(loss)
            run["grad_norm"].append(norm)
        return run


# --- What the two must show -------------------------------------------------------------------------------------------

def apart(found, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def gradients_apart(found, expected):
    """The largest relative L2 distance over the parameters."""
    assert found.keys() == expected.keys()
    return max(((found[n].double() - expected[n].double()).norm() / expected[n].double().norm()).item() for n in found)


def norms_apart(found, expected):
    return max(apart([found[n].norm().item()], [expected[n].norm().item()]) for n in expected)


def check_slope(folder, rows):
    """The second witness's gradients against its own losses: the slope along a random direction."""
    second, h = Second(folder), 1e-6
    _, grads = second.gradients(rows)
    generator = torch.Generator().manual_seed(5)
    way = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in second.weights.items()}
    start = {n: w.detach() for n, w in second.weights.items()}
    losses = []
    for sign in (1, -1):
        second.weights = {n: start[n] + (sign * h * way[n] if n in grads else 0) for n in start}
        losses.append(second.loss(rows).item())
    slope = (losses[0] - losses[1]) / (2 * h)
    expected = sum((grads[n] * way[n]).sum().item() for n in grads)
    assert abs(slope - expected) <= 1e-6 * abs(expected), (folder.name, slope, expected)


def mistakes(config):
    """Ways to be wrong that the files of this model must show, as changes of its config."""
    given = config["rope_parameters"]
    if given["rope_type"] != "default":
        yield "unscaled rope", lambda c: c["rope_parameters"].update(rope_type="default")
    if given["rope_type"] == "yarn":
        yield "yarn without its attention factor", lambda c: c["rope_parameters"].update(mscale=1.0, mscale_all_dim=1.0)
        yield "yarn truncated the other way", lambda c: c["rope_parameters"].update(
            truncate=not given.get("truncate", True))
    if given["rope_type"] == "dynamic":
        grown = given["rope_theta"] * (given["factor"] * 40 / 16 - given["factor"] + 1) ** (6 / 4)
        yield "dynamic rope of the longest row for all", lambda c: c["rope_parameters"].update(
            rope_type="default", rope_theta=grown)
    yield "another theta", lambda c: c["rope_parameters"].update(rope_theta=given["rope_theta"] * 1.5)
    if config.get("sliding_window"):
        for by in (-1, 1):
            yield f"window {by:+}", lambda c, by=by: c.update(sliding_window=c["sliding_window"] + by)
    if len(set(config.get("layer_types") or [])) > 1:
        yield "layer types reversed", lambda c: c["layer_types"].reverse()
    if config["hidden_act"] != "silu":
        other = "gelu" if config["hidden_act"] == "gelu_pytorch_tanh" else "gelu_pytorch_tanh"
        for act in ("silu", other):
            yield f"{act} instead of {config['hidden_act']}", lambda c, act=act: c.update(hidden_act=act)
    if config["rms_norm_eps"] >= 1e-3:
        yield "norm epsilon 1e-6", lambda c: c.update(rms_norm_eps=1e-6)


def check_sensitivity(folder, rows):
    """A golden file that a mistake passes is worth nothing: each must move the gradients far beyond the 1e-5 of
    the tests."""
    _, right = Second(folder).gradients(rows)
    for name, change in mistakes(Second(folder).config):
        _, wrong = Second(folder, change).gradients(rows)
        distance = gradients_apart(wrong, right)
        print(f"    {name}: gradients move by {distance:.1e}")
        assert distance > 1e-4, (folder.name, name)


# --- Writing and checking ---------------------------------------------------------------------------------------------

def write_json(path, tree):
    text = json.dumps(tree, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    # A parameter's numbers on one line.
    text = re.sub(r"\{[^{}]*\"(?:norm|sum)\"[^{}]*\}", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.write_text(text + "\n")


def sampled(grad, seed):
    """The norm, and eight values: the largest and seven others that are not zero."""
    flat = grad.flatten()
    others = [i for i in flat.nonzero().flatten().tolist() if i != flat.abs().argmax().item()]
    places = sorted([flat.abs().argmax().item(), *random.Random(seed).sample(others, min(7, len(others)))])
    return {"norm": grad.double().norm().item(), "places": places, "values": flat[places].tolist()}


def make(name, seed):
    family, fields = MODELS[name]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        make_model(family, fields, seed).save_pretrained(scratch)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())
    rows = make_rows(fields["vocab_size"], seed)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parameters = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())

    print(f"{name}: {parameters} parameters")
    check_slope(folder, samples(rows, 4, 0))
    check_sensitivity(folder, samples(rows, 4, 0))
    runs = []
    for label, batch, schedule, warmup in RUNS:
        run, first, final, undecayed = train(folder, rows, batch, schedule, warmup)
        witness = Second(folder)
        second = witness.train(rows, batch, run["lr"], undecayed)
        distance = {key: apart(run[key], second[key]) for key in second}
        distance["final_norm"] = norms_apart(final, witness.weights)
        assert max(apart(run[key][:1], second[key][:1]) for key in second) < AGREEMENT, (name, label, distance)
        assert max(distance.values()) < AGREEMENT_OF_RUNS, (name, label, distance)
        if schedule == "constant":
            wrong = Second(folder)
            wrong.train(rows, batch, run["lr"], undecayed=[])
            moved = norms_apart(wrong.weights, witness.weights)
            print(f"    decay on everything: a final norm moves by {moved:.1e}")
            assert moved > 10 * AGREEMENT_OF_RUNS, (name, moved)
        clipped = sum(norm > RECIPE["max_grad_norm"] for norm in run["grad_norm"])
        print(f"  {label}: loss {run['loss'][0]:.4f} to {run['loss'][-1]:.4f}, norms {min(run['grad_norm']):.2f} to "
              f"{max(run['grad_norm']):.2f}, {clipped} clipped; apart {distance}")
        runs.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup, **run,
            "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
        if batch == 4 and schedule == "cosine":
            whole = parameters <= WHOLE_GRADIENTS
            gradients = {n: sampled(grad, f"{seed} {n}") for n, grad in first.items()}
            assert gradients_apart(first, Second(folder).gradients(samples(rows, batch, 0))[1]) < AGREEMENT_OF_GRADIENTS
            if whole:
                (folder / "grads.safetensors").write_bytes(save(first))
                write_final(folder, final, witness.weights)
            else:
                for file in ("grads.safetensors", "final.safetensors"):
                    (folder / file).unlink(missing_ok=True)
    write_json(folder / "steps.json", {
        "model": name,
        "parameters": parameters,
        "made_with": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "safetensors": safetensors.__version__},
        "recipe": {"steps": STEPS, **RECIPE, "undecayed": undecayed},
        **({"frozen": frozen_names(folder)} if name in FROZEN else {}),
        "gradients_of_step_1": {"run": "batch-4-cosine", "whole": whole, "parameters": gradients},
        "runs": runs,
    })


def write_final(folder, final, witness):
    """The weights after the last step of batch-4-cosine. Both witnesses must agree on every element."""
    distance = max(((final[n] - w).abs().max() / w.square().mean().sqrt()).item() for n, w in witness.items())
    print(f"    final weights: an element is at most {distance:.1e} of its tensor's RMS apart")
    assert distance < AGREEMENT_OF_WEIGHTS, (folder.name, distance)
    (folder / "final.safetensors").write_bytes(save({n: w.float() for n, w in final.items()}))


def make_final(name):
    """final.safetensors from the committed files: the run must be the one of steps.json."""
    folder = HERE / name
    steps = json.loads((folder / "steps.json").read_text())
    if not steps["gradients_of_step_1"]["whole"]:
        return
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    written = next(run for run in steps["runs"] if run["name"] == "batch-4-cosine")
    run, _, final, undecayed = train(folder, rows, 4, "cosine", written["warmup_steps"])
    assert max(apart(run[key], written[key]) for key in ("loss", "grad_norm")) < AGREEMENT_OF_RUNS, name
    second = Second(folder)
    second.train(rows, 4, run["lr"], undecayed)
    print(name)
    write_final(folder, final, second.weights)


def check(name):
    """Step 1 of every run of the committed files, by both witnesses, and the gradients."""
    folder = HERE / name
    steps = json.loads((folder / "steps.json").read_text())
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    again_apart, second_apart, gradient_apart = [], [], []
    for run in steps["runs"]:
        again, first, _, undecayed = train(folder, rows, run["batch"], run["schedule"], run["warmup_steps"], steps=1)
        second = Second(folder).train(rows, run["batch"], run["lr"], undecayed, steps=1)
        assert undecayed == steps["recipe"]["undecayed"] and frozen_names(folder) == steps.get("frozen", [])
        assert all(len(run[key]) == STEPS for key in again)
        assert all(again[key] == run[key][:1] for key in ("lr", "tokens", "trained_tokens"))
        again_apart += [apart(again[key], run[key][:1]) for key in second]
        second_apart += [apart(second[key], run[key][:1]) for key in second]
        if run["name"] != steps["gradients_of_step_1"]["run"]:
            continue
        _, true = Second(folder).gradients(samples(rows, run["batch"], 0))
        kept = steps["gradients_of_step_1"]["parameters"]
        assert kept.keys() == first.keys() == true.keys()
        for n, entry in kept.items():
            values = torch.tensor(entry["values"], dtype=torch.float64)
            for grads in (first, true):
                gradient_apart.append(apart([grads[n].double().norm().item()], [entry["norm"]]))
                gradient_apart.append((grads[n].flatten()[entry["places"]] - values).norm().item() / entry["norm"])
        assert (folder / "grads.safetensors").exists() == steps["gradients_of_step_1"]["whole"]
        assert (folder / "final.safetensors").exists() == steps["gradients_of_step_1"]["whole"]
        if steps["gradients_of_step_1"]["whole"]:
            final = load_file(folder / "final.safetensors")
            assert final.keys() == run["final"].keys()
            norms = {n: final[n].double().norm().item() for n in final}
            assert apart(norms.values(), [run["final"][n]["norm"] for n in norms]) < AGREEMENT, name
            stored = load_file(folder / "grads.safetensors")
            gradient_apart += [gradients_apart(first, stored), gradients_apart(true, stored)]
    print(f"{name}: step 1 of {len(steps['runs'])} runs as written; transformers apart by {max(again_apart):.1e}, "
          f"the second witness by {max(second_apart):.1e}, gradients of either by {max(gradient_apart):.1e}")
    assert max(again_apart + second_apart) < AGREEMENT and max(gradient_apart) < AGREEMENT_OF_GRADIENTS, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if flags not in ([], ["--check"], ["--final"]) or not MODELS.keys() >= set(names):
        sys.exit(__doc__)
    if flags == ["--final"]:
        for model in names or MODELS:
            make_final(model)
    if not flags:
        for seed, model in enumerate(MODELS):
            if not names or model in names:
                make(model, seed)
    for model in names or MODELS:
        check(model)
