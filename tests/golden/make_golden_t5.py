"""Golden runs of encoder-decoders: T5, T5 v1.1 and mT5, 20 AdamW steps each, by transformers and PEFT in fp32.

    python tests/golden/make_golden_t5.py           # writes every folder under t5/ beside this file
    python tests/golden/make_golden_t5.py --check   # reads the committed files and computes step 1 of every run again
    python tests/golden/make_golden_t5.py NAME...   # the same for these folders alone

Needs what make_golden_lora.py needs; steps.json says which versions made the committed files.

As in make_golden.py every number has two witnesses: transformers (or PEFT), and the float64 one of that file with the model
of T5 written from its formulas. The slope of relu jumps at 0: no input of it in any step may be so close to 0 that rounding
could change its sign. A seed with a smaller margin than MARGINS is passed over.
"""

import copy
import itertools
import json
import math
import pathlib
import platform
import random
import sys
import tempfile

import make_golden as golden
import peft
import safetensors
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.trainer_pt_utils import get_parameter_names

HERE = pathlib.Path(__file__).resolve().parent / "t5"
# The smallest input of relu in runs of 4 samples, whose final weights are compared element by element, and in the others.
MARGINS = {4: 5e-6, None: 5e-7}
RANK, ALPHA = 4, 6
PREFIX = "base_model.model."


def sizes(vocabulary, hidden, width, mlp, blocks, heads, buckets, distance, feed_forward, **more):
    encoder, decoder = blocks
    return {
        "vocab_size": vocabulary, "d_model": hidden, "d_kv": width, "d_ff": mlp, "num_layers": encoder,
        "num_decoder_layers": decoder, "num_heads": heads, "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": distance, "feed_forward_proj": feed_forward, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True, **more,
    }


# Folder: family, config.
MODELS = {
    "t5-relu-tied": ("t5", sizes(47, 20, 6, 13, (2, 3), 3, 8, 16, "relu")),
    "t5-v1_1": ("t5", sizes(53, 18, 8, 22, (3, 1), 2, 6, 12, "gated-gelu", tie_word_embeddings=False)),
    "mt5": ("mt5", sizes(61, 14, 6, 19, (1, 2), 2, 32, 128, "gated-gelu", tie_word_embeddings=False,
                         decoder_start_token_id=2)),
    "t5-gelu-half-frozen": ("t5", sizes(43, 16, 10, 21, (2, 2), 2, 10, 20, "gelu")),
    "t5-gated-silu": ("t5", sizes(51, 12, 4, 17, (1, 1), 4, 8, 9, "gated-silu", tie_word_embeddings=False,
                                  layer_norm_epsilon=1e-2, pad_token_id=3)),
}
WHOLE = ["t5-relu-tied", "t5-v1_1", "t5-gelu-half-frozen"]
golden.FROZEN["t5-gelu-half-frozen"] = 0
TARGETS = {"all": "all-linear", "qv": ["q", "v"]}
CASES = {f"lora/t5-relu-tied-{targets}": ("t5-relu-tied", targets) for targets in TARGETS}
RUNS_OF_ADAPTERS = [run for run in golden.RUNS if run[2] == "cosine" and run[1] in (4, 12, 20)]


# --- The data ---------------------------------------------------------------------------------------------------------

def make_rows(config, seed):
    """Pairs of uneven lengths that can be learnt in part: a target goes through its source, one fixed successor a token."""
    rng, vocabulary = random.Random(seed), config["vocab_size"]
    special = {config["decoder_start_token_id"], config["pad_token_id"], config["eos_token_id"]}
    words = [token for token in range(vocabulary) if token not in special]
    successor = dict(zip(words, rng.sample(words, len(words))))
    rows = []
    for place in range(83):
        length = rng.choice([2, 40, rng.randint(2, 12), rng.randint(3, 40)])
        source = [rng.choice(words) for _ in range(length - 1)]
        length = rng.choice([1, 30, rng.randint(1, 8), rng.randint(2, 30)])
        target = [successor[source[at % len(source)]] for at in range(length - 1)]
        target = [token if rng.random() < 0.8 else rng.choice(words) for token in target]
        labels = [*target, config["eos_token_id"]]
        match place % 4:
            case 0:  # one trained token
                keep = rng.randrange(length)
                labels = [label if at == keep else -100 for at, label in enumerate(labels)]
            case 1:  # holes
                labels = [label if rng.random() < 0.6 else -100 for label in labels]
                labels[rng.randrange(length)] = rng.choice(words)
            case _:  # everything
                pass
        rows.append({"input_ids": [*source, config["eos_token_id"]], "labels": labels})
    assert all(trained([row]) > 0 for row in rows)
    return rows


def trained(rows):
    return sum(label != -100 for row in rows for label in row["labels"])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


# --- The first witness: transformers and PEFT -------------------------------------------------------------------------

def write_model(name, seed):
    """A model whose every part matters: norms are not 1, attention and its biases not uniform."""
    family, fields = MODELS[name]
    folder, loudness = HERE / name, 1.0 if name in ("t5-v1_1", "t5-gated-silu") else 0.5
    config = AutoConfig.for_model(family, **copy.deepcopy(fields))
    model = AutoModelForSeq2SeqLM.from_config(config)
    generator, weights = torch.Generator().manual_seed(seed), {}
    for key, weight in model.named_parameters():
        noise, inputs = torch.randn(weight.shape, generator=generator), weight.shape[-1]
        if key.endswith("norm.weight"):
            weights[key] = (loudness if key == "decoder.final_layer_norm.weight" else 1.0) * (1.0 + 0.2 * noise)
        elif "relative_attention_bias" in key:
            weights[key] = noise
        elif key == "shared.weight":
            weights[key] = noise
        else:
            scale = config.d_kv ** -0.5 if key.endswith(".q.weight") else 1.0
            weights[key] = 1.2 * scale / math.sqrt(inputs) * noise
    if not fields["tie_word_embeddings"]:
        noise = torch.randn(weights["shared.weight"].shape, generator=generator)
        weights["lm_head.weight"] = 1.2 / math.sqrt(config.d_model) * noise
    folder.mkdir(parents=True, exist_ok=True)
    # As published: transformers 5 would say that every head is tied.
    written = {
        "architectures": [type(model).__name__], "model_type": family, "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, **fields}
    golden.write_json(folder / "config.json", dict(sorted(written.items())))
    (folder / "model.safetensors").write_bytes(save({key: weights[key].contiguous() for key in sorted(weights)}))


def load_model(folder):
    model, found = AutoModelForSeq2SeqLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    own_head = "lm_head.weight" in load_file(folder / "model.safetensors")
    assert (model.lm_head.weight is not model.shared.weight) == own_head
    frozen = golden.frozen_names(folder)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    return model.train()


class Margin:
    """The smallest input of relu so far."""

    def __init__(self, model):
        self.smallest = math.inf
        for module in model.modules():
            if isinstance(module, torch.nn.ReLU):
                module.register_forward_hook(self.look)

    def look(self, module, inputs, output):
        self.smallest = min(self.smallest, inputs[0].detach().abs().min().item())


def backward(model, rows):
    """Adds the gradients of a step; its loss. A row is a batch of one, without padding."""
    total, loss = trained(rows), 0.0
    for row in rows:
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        logits = model(input_ids=ids, labels=labels, use_cache=False).logits
        part = torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum") / total
        part.backward()
        loss += part.item()
    return loss


def train_model(model, named, decayed, rows, batch, schedule, warmup, steps):
    """Trains these parameters of a model."""
    recipe, margin = golden.RECIPE, Margin(model)
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": recipe["weight_decay"]},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe["learning_rate"], betas=(recipe["adam_beta1"], recipe["adam_beta2"]),
        eps=recipe["adam_epsilon"], foreach=False, fused=False)
    scheduler = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=golden.STEPS)
    run = {"loss": [], "grad_norm": [], "lr": [], "tokens": [], "trained_tokens": []}
    for step in range(steps):
        taken = golden.samples(rows, batch, step)
        optimizer.zero_grad()
        run["loss"].append(backward(model, taken))
        if step == 0:
            first = {name: weight.grad.clone() for name, weight in named}
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], recipe["max_grad_norm"], foreach=False)
        run["grad_norm"].append(norm.item())
        run["lr"].append(scheduler.get_last_lr()[0])
        run["tokens"].append(sum(len(row["input_ids"]) + len(row["labels"]) for row in taken))
        run["trained_tokens"].append(trained(taken))
        optimizer.step()
        scheduler.step()
    return run, first, margin.smallest


def train(folder, rows, batch, schedule, warmup, steps=golden.STEPS):
    model = load_model(folder)
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], golden.UNDECAYED))
    named = list(model.named_parameters())
    updated = [(name, weight) for name, weight in named if weight.requires_grad]
    run, first, margin = train_model(model, updated, decayed, rows, batch, schedule, warmup, steps)
    final = {name: weight.detach().double() for name, weight in named}
    start = load_file(folder / "model.safetensors")
    assert all(torch.equal(final[name], start[name].double()) for name in golden.frozen_names(folder))
    return run, first, final, margin, sorted(name for name, _ in named if name not in decayed)


def stored_name(name):
    """The name in adapter_model.safetensors, without PEFT's prefix and the adapter's own name."""
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def write_adapter(folder, case, seed):
    base, targets = CASES[case]
    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS[targets])
    model = get_peft_model(load_model(HERE / base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        written = json.loads((pathlib.Path(scratch) / "adapter_config.json").read_text())
        # The folder this was made in is nobody's business.
        written["base_model_name_or_path"] = base
        written["target_modules"] = sorted(written["target_modules"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        file = "adapter_model.safetensors"
        (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())


def train_adapter(folder, case, rows, batch, schedule, warmup, steps=golden.STEPS):
    model = PeftModel.from_pretrained(load_model(HERE / CASES[case][0]), folder, is_trainable=True).train()
    named = [(stored_name(name), weight) for name, weight in model.named_parameters() if weight.requires_grad]
    everything = {name for name, _ in named}
    run, first, margin = train_model(
        model.base_model.model, named, everything, rows, batch, schedule, warmup, steps)
    return run, first, {name: weight.detach().double() for name, weight in named}, margin, []


# --- The second witness: written from the formulas, in float64 --------------------------------------------------------

class Second(golden.Second):
    """T5 from its files alone. Mistakes are words in the config's list `mistakes`."""

    def wrong(self, mistake):
        return mistake in self.config.get("mistakes", [])

    def norm(self, name, x):
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        return x / (mean_square + self.config["layer_norm_epsilon"]).sqrt() * self.weights[f"{name}.weight"]

    def activated(self, x):
        match self.config["feed_forward_proj"].removeprefix("gated-"):
            case "relu":
                return x.clamp(min=0)
            case "silu":
                return x / (1 + torch.exp(-x))
            case "gelu" if self.config["feed_forward_proj"] == "gelu":
                return x * (1 + torch.erf(x / math.sqrt(2))) / 2
            case "gelu":
                return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2

    def bucket(self, distance, two_sided):
        """Of a key so far behind (positive) or before the query."""
        buckets, most = (self.config[f"relative_attention_{key}"] for key in ("num_buckets", "max_distance"))
        first = 0
        if two_sided:
            buckets //= 2
            first = buckets if distance > 0 else 0
        far = abs(distance) if two_sided else max(-distance, 0)
        exact = buckets // 2
        if far < exact:
            return first + far
        part = math.log(far / exact) / math.log(most / exact)
        return first + min(exact + int(part * (buckets - exact) + 1e-9), buckets - 1)

    def biases(self, stack, length):
        two_sided = (stack == "encoder") != self.wrong(f"{stack} buckets of the other side")
        table = self.weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        rows = [[self.bucket(key - query, two_sided) for key in range(length)] for query in range(length)]
        return table[torch.tensor(rows)]

    def attention(self, name, x, keys, biases, causal):
        heads = self.config["num_heads"]
        q, k, v = (self.linear(f"{name}.{part}", y).view(len(y), heads, -1) for part, y in zip("qkv", (x, keys, keys)))
        out = []
        for head in range(heads):
            score = q[:, head] @ k[:, head].T
            if self.wrong("scaled scores"):
                score = score / math.sqrt(q.shape[-1])
            if biases is not None:
                score = score + biases[:, :, head]
            if causal:
                hidden = torch.arange(len(keys))[None, :] > torch.arange(len(x))[:, None]
                score = score.masked_fill(hidden, -math.inf)
            out.append(torch.softmax(score, -1) @ v[:, head])
        return self.linear(f"{name}.o", torch.cat(out, -1))

    def feed_forward(self, name, x):
        if f"{name}.wi.weight" in self.weights:
            inner = self.activated(self.linear(f"{name}.wi", x))
        else:
            inner = self.activated(self.linear(f"{name}.wi_0", x)) * self.linear(f"{name}.wi_1", x)
        return self.linear(f"{name}.wo", inner)

    def stack(self, name, ids, encoded=None):
        x = self.weights["shared.weight"][ids]
        biases, causal = self.biases(name, len(ids)), name == "decoder"
        for block in range(self.config["num_layers" if encoded is None else "num_decoder_layers"]):
            at = f"{name}.block.{block}.layer"
            normed = self.norm(f"{at}.0.layer_norm", x)
            x = x + self.attention(f"{at}.0.SelfAttention", normed, normed, biases, causal)
            if encoded is not None:
                cross = self.norm(f"{at}.1.layer_norm", x)
                x = x + self.attention(f"{at}.1.EncDecAttention", cross, encoded, None, self.wrong("causal cross"))
            last = 1 if encoded is None else 2
            normed = self.norm(f"{at}.{last}.layer_norm", x)
            x = x + self.feed_forward(f"{at}.{last}.DenseReluDense", normed)
        return self.norm(f"{name}.final_layer_norm", x)

    def logits(self, row):
        start = self.config["decoder_start_token_id"]
        pad = self.config["pad_token_id"] + self.wrong("another padding")
        inputs = [pad if label == -100 else label for label in row["labels"]]
        inputs = inputs if self.wrong("labels not shifted") else [start, *inputs[:-1]]
        x = self.stack("decoder", inputs, self.stack("encoder", row["input_ids"]))
        if (self.config["model_type"] == "t5" and self.config["tie_word_embeddings"]) != self.wrong("head scale"):
            x = x * self.config["d_model"] ** -0.5
        head = self.weights.get("lm_head.weight", self.weights["shared.weight"])
        return x @ (self.weights["shared.weight"] + 0 * head if self.wrong("tied head") else head).T

    def loss(self, rows):
        total = 0.0
        for row in rows:
            logits = self.logits(row)
            for at, label in enumerate(row["labels"]):
                if label != -100:
                    total = total + torch.logsumexp(logits[at], 0) - logits[at, label]
        return total / trained(rows)


class SecondAdapter(Second):
    """The float64 witness with adapters: y += scale · (x · Aᵀ) · Bᵀ."""

    def __init__(self, folder, case):
        super().__init__(HERE / CASES[case][0])
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in load_file(folder / "adapter_model.safetensors").items():
            self.weights[name.removeprefix(PREFIX)] = weight.double().requires_grad_()

    def linear(self, name, x):
        y, a = super().linear(name, x), f"{name}.lora_A.weight"
        if a not in self.weights:
            return y
        return y + ALPHA / RANK * (x @ self.weights[a].T) @ self.weights[f"{name}.lora_B.weight"].T


def mistakes(config):
    """Ways to be wrong that the files of this model must show, as changes of its config."""
    words = ["scaled scores", "causal cross", "labels not shifted", "head scale", "another padding"]
    words += [f"{stack} buckets of the other side" for stack in ("encoder", "decoder")]
    if not config["tie_word_embeddings"]:
        words.append("tied head")
    for word in words:
        yield word, lambda c, word=word: c.update(mistakes=[word])
    yield "another start", lambda c: c.update(decoder_start_token_id=c["decoder_start_token_id"] + 1)
    yield "another largest distance", lambda c: c.update(
        relative_attention_max_distance=c["relative_attention_max_distance"] * 3 // 2)
    others = {"relu": "gelu", "gelu": "relu", "gated-gelu": "gated-silu", "gated-silu": "gated-gelu"}
    yield "another activation", lambda c: c.update(feed_forward_proj=others[c["feed_forward_proj"]])
    if config["layer_norm_epsilon"] >= 1e-3:
        yield "norm epsilon 1e-6", lambda c: c.update(layer_norm_epsilon=1e-6)


# --- Writing and checking ---------------------------------------------------------------------------------------------

def check_slope(folder, rows):
    """The second witness's gradients against its own losses: the slope along a random direction."""
    second, h = Second(folder), 1e-6
    _, grads = second.gradients(rows)
    generator = torch.Generator().manual_seed(5)
    way = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in grads.items()}
    start = {n: w.detach() for n, w in second.weights.items()}
    losses = []
    for sign in (1, -1):
        second.weights = {n: start[n] + (sign * h * way[n] if n in grads else 0) for n in start}
        losses.append(second.loss(rows).item())
    slope = (losses[0] - losses[1]) / (2 * h)
    expected = sum((grads[n] * way[n]).sum().item() for n in grads)
    assert abs(slope - expected) <= 1e-5 * abs(expected), (folder.name, slope, expected)


def made_with():
    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "peft": peft.__version__, "safetensors": safetensors.__version__}


def first_seed(name, start, write, trial, runs):
    """Writes with the first seed of which no run has an input of relu near 0."""
    for seed in itertools.count(start, 100):
        write(seed)
        kept = True
        for _, batch, schedule, warmup in runs:
            margin = trial(batch, schedule, warmup)[3]
            kept = margin >= MARGINS.get(batch, MARGINS[None])
            if not kept:
                print(f"{name}: seed {seed} passed over, batch {batch} has an input of relu of {margin:.1e}")
                break
        if kept:
            return seed


def run_all(name, runs, train, witness, whole_into=None):
    """The runs with both witnesses, and the sampled gradients of step 1."""
    done = []
    for label, batch, schedule, warmup in runs:
        run, first, final, margin, undecayed = train(batch, schedule, warmup)
        second = witness()
        seen = second.train(train.rows, batch, run["lr"], undecayed)
        distance = {key: golden.apart(run[key], seen[key]) for key in seen}
        distance["final_norm"] = golden.norms_apart(final, {n: second.weights[n] for n in final})
        assert max(golden.apart(run[key][:1], seen[key][:1]) for key in seen) < golden.AGREEMENT, (name, label, distance)
        assert max(distance.values()) < golden.AGREEMENT_OF_RUNS, (name, label, distance)
        if label == "batch-4-cosine":
            true = witness().gradients(golden.samples(train.rows, batch, 0))[1]
            assert golden.gradients_apart(first, true) < golden.AGREEMENT_OF_GRADIENTS, name
            gradients = {n: golden.sampled(grad, f"{name} {n}") for n, grad in first.items()}
            if whole_into:
                (whole_into / "grads.safetensors").write_bytes(save(first))
                golden.write_final(whole_into, final, second.weights)
        norms, clipped = run["grad_norm"], sum(norm > golden.RECIPE["max_grad_norm"] for norm in run["grad_norm"])
        print(f"  {label}: loss {run['loss'][0]:.4f} to {run['loss'][-1]:.4f}, norms {min(norms):.2f} to "
              f"{max(norms):.2f}, {clipped} clipped, margin {margin:.1e}; apart {distance}")
        done.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup,
            **({"margin": margin} if margin < math.inf else {}), **run, "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
    return done, gradients, undecayed


def bound(train, folder, rows, *more):
    """Training of a folder's model, or of its adapter, with its rows."""
    def bound_train(batch, schedule, warmup, steps=golden.STEPS):
        return train(folder, *more, rows, batch, schedule, warmup, steps)
    bound_train.rows = rows
    return bound_train


def make(name, start):
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(MODELS[name][1], start)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first_seed(name, start, lambda seed: write_model(name, seed), bound(train, folder, rows), golden.RUNS)
    parameters = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    print(f"{name}: {parameters} parameters")
    check_slope(folder, golden.samples(rows, 4, 0))
    _, right = Second(folder).gradients(golden.samples(rows, 12, 0))
    for mistake, change in mistakes(Second(folder).config):
        _, wrong = Second(folder, change).gradients(golden.samples(rows, 12, 0))
        distance = golden.gradients_apart(wrong, right)
        print(f"    {mistake}: gradients move by {distance:.1e}")
        assert distance > 1e-4, (name, mistake)
    whole = folder if name in WHOLE else None
    runs, gradients, undecayed = run_all(name, golden.RUNS, bound(train, folder, rows), lambda: Second(folder), whole)
    golden.write_json(folder / "steps.json", {
        "model": name,
        "parameters": parameters,
        "made_with": made_with(),
        "recipe": {"steps": golden.STEPS, **golden.RECIPE, "undecayed": undecayed},
        **({"frozen": golden.frozen_names(folder)} if name in golden.FROZEN else {}),
        "gradients_of_step_1": {"run": "batch-4-cosine", "whole": name in WHOLE, "parameters": gradients},
        "runs": runs,
    })


def make_adapter(case, start):
    folder, rows = HERE / case, rows_of(HERE / CASES[case][0])
    trained_adapter = bound(train_adapter, folder, rows, case)
    first_seed(case, start, lambda seed: write_adapter(folder, case, seed), trained_adapter, RUNS_OF_ADAPTERS)
    print(case)
    witness = lambda: SecondAdapter(folder, case)
    runs, gradients, _ = run_all(case, RUNS_OF_ADAPTERS, trained_adapter, witness)
    golden.write_json(folder / "steps.json", {
        "base": f"t5/{CASES[case][0]}",
        "made_with": made_with(),
        "recipe": {"steps": golden.STEPS, **golden.RECIPE},
        "gradients_of_step_1": {"run": "batch-4-cosine", "parameters": gradients},
        "runs": runs,
    })


def check(name):
    """Step 1 of every run of the committed files, by both witnesses."""
    folder = HERE / name
    if name in CASES:
        rows = rows_of(HERE / CASES[name][0])
        again, witness = bound(train_adapter, folder, rows, name), lambda: SecondAdapter(folder, name)
    else:
        rows = rows_of(folder)
        again, witness = bound(train, folder, rows), lambda: Second(folder)
    steps, distance = json.loads((folder / "steps.json").read_text()), 0.0
    for run in steps["runs"]:
        found, first, _, _, undecayed = again(run["batch"], run["schedule"], run["warmup_steps"], steps=1)
        second = witness().train(rows, run["batch"], run["lr"], undecayed, steps=1)
        assert undecayed == steps["recipe"].get("undecayed", []), name
        assert all(found[key] == run[key][:1] for key in ("lr", "tokens", "trained_tokens")), name
        for seen in (found, second):
            distance = max(distance, *(golden.apart(seen[key], run[key][:1]) for key in ("loss", "grad_norm")))
        if run["name"] == steps["gradients_of_step_1"]["run"]:
            kept = steps["gradients_of_step_1"]["parameters"]
            assert kept.keys() == first.keys(), name
            for n, entry in kept.items():
                norm_apart = golden.apart([first[n].double().norm().item()], [entry["norm"]])
                assert norm_apart < golden.AGREEMENT_OF_GRADIENTS, (name, n)
    print(f"{name}: step 1 of {len(steps['runs'])} runs as written, apart by {distance:.1e}")
    assert distance < golden.AGREEMENT, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    every = [*MODELS, *CASES]
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if flags not in ([], ["--check"]) or not set(every) >= set(names):
        sys.exit(__doc__)
    for place, chosen in enumerate(every):
        if not flags and (not names or chosen in names):
            (make if chosen in MODELS else make_adapter)(chosen, place)
    for chosen in names or every:
        check(chosen)
