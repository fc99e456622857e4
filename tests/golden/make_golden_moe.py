"""Golden runs of mixture-of-experts models: qwen3_moe and mixtral, 20 AdamW steps each, by transformers and PEFT in fp32.

    python tests/golden/make_golden_moe.py           # writes every folder under moe/ beside this file
    python tests/golden/make_golden_moe.py --check   # reads the committed files and computes step 1 of every run again
    python tests/golden/make_golden_moe.py NAME...   # the same for these folders alone

Needs what make_golden_lora.py needs; steps.json says which versions made the committed files.

As in make_golden.py every number has two witnesses: transformers (or PEFT), and the float64 one of that file with routing
and experts added by their formulas. No token of any step may be close to choosing another expert: rounding must not be
able to change a route. A seed with a smaller margin than MARGIN is passed over.

The golden numbers have the names and shapes of transformers 5: the experts of a block are two tensors, [experts, 2F, H]
and [experts, H, F]. model.safetensors has those on the Hub, per expert (mixtral: under block_sparse_moe). Adapters of
experts are named after these tensors, A [experts, rank, in] and B [experts, out, rank]; adapter_model.safetensors has
PEFT's names and layout.
"""

import copy
import itertools
import json
import math
import pathlib
import platform
import sys
import tempfile

import make_golden as golden
import peft
import safetensors
import torch
import transformers
from make_golden import rope, sizes
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

HERE = pathlib.Path(__file__).resolve().parent / "moe"
RUNS = [run for run in golden.RUNS if run[2] == "cosine"]
# The smallest difference of router logits allowed between the last expert chosen and the first one not chosen.
MARGIN = 1e-5
RANK, ALPHA = 2, 3
PREFIX = "base_model.model."


def moe(fields, experts=8, chosen=2, width=10, **more):
    return {**fields, "num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width, **more}


def mixtral(fields, experts=8, chosen=2, **more):
    return {**fields, "num_local_experts": experts, "num_experts_per_tok": chosen, **more}


PLAIN = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_parameters": rope("default", 10000.0)}
MODELS = {
    "qwen3-moe-normalized": ("qwen3_moe", moe(sizes(
        53, 20, 26, 2, heads=3, kv_heads=1, head_dim=8, tie_word_embeddings=False, **PLAIN), norm_topk_prob=True)),
    "qwen3-moe-unnormalized-tied": ("qwen3_moe", moe(sizes(
        61, 18, 22, 2, heads=2, kv_heads=2, head_dim=10, tie_word_embeddings=True, **PLAIN), experts=7, chosen=3,
        norm_topk_prob=False)),
    "qwen3-moe-sparse-step": ("qwen3_moe", moe(sizes(
        45, 16, 21, 4, heads=2, kv_heads=1, head_dim=8, tie_word_embeddings=False, **PLAIN), norm_topk_prob=True,
        decoder_sparse_step=2)),
    "qwen3-moe-mlp-only": ("qwen3_moe", moe(sizes(
        47, 22, 25, 3, heads=2, kv_heads=1, head_dim=6, tie_word_embeddings=True, **PLAIN), norm_topk_prob=True,
        mlp_only_layers=[1], attention_bias=True)),
    "qwen3-moe-aux-1-layer": ("qwen3_moe", moe(sizes(
        43, 20, 24, 1, heads=2, kv_heads=1, head_dim=8, tie_word_embeddings=False, **PLAIN), norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=0.05)),
    "mixtral-no-window": ("mixtral", mixtral(sizes(
        55, 20, 11, 2, heads=2, kv_heads=1, head_dim=None, tie_word_embeddings=False, sliding_window=None, **PLAIN))),
    "mixtral-window-tied": ("mixtral", mixtral(sizes(
        51, 24, 13, 2, heads=4, kv_heads=2, head_dim=6, tie_word_embeddings=True, sliding_window=7, **PLAIN),
        experts=5, chosen=2)),
    "mixtral-aux-3-layers": ("mixtral", mixtral(sizes(
        49, 16, 9, 3, heads=2, kv_heads=1, head_dim=8, tie_word_embeddings=False, sliding_window=None, **PLAIN),
        output_router_logits=True, router_aux_loss_coef=0.02)),
}
# Models whose whole gradients and final weights are kept.
WHOLE = ["qwen3-moe-normalized", "mixtral-window-tied", "qwen3-moe-aux-1-layer"]
# The same weights with one tensor for all experts of a block, as transformers writes them on request.
FUSED = {"qwen3-moe-normalized-fused": "qwen3-moe-normalized", "mixtral-no-window-fused": "mixtral-no-window"}
CASES = {
    f"lora/{base}-{targets}": (base, targets) for base in ("qwen3-moe-normalized", "mixtral-no-window")
    for targets in ("all", "qv-experts")
}


def has_aux(folder):
    return json.loads((folder / "config.json").read_text())["output_router_logits"]


def runs_of(folder):
    # The auxiliary loss belongs to a micro-batch, so its step is one micro-batch on one rank.
    return [run for run in RUNS if run[1] in (4, 12)] if has_aux(folder) else RUNS


# --- The first witness: transformers and PEFT -------------------------------------------------------------------------

def make_model(family, fields, seed):
    """Every part matters: norms are not 1, biases not 0, routers choose clearly and differently for every token."""
    config = AutoConfig.for_model(family, **copy.deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_((0.5 if name == "model.norm.weight" else 1.0) * (1.0 + 0.2 * noise))
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_((0.25 if model.config.tie_word_embeddings else 0.6) * noise)
            else:
                loudness = 2.0 if name.endswith("mlp.gate.weight") else 1.2
                weight.copy_(loudness / math.sqrt(weight.shape[-1]) * noise)
    return model


def load_model(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32).train()


class Margins:
    """The smallest distance to another choice of experts seen by any router."""

    def __init__(self, model):
        self.smallest, self.chosen = math.inf, model.config.num_experts_per_tok
        self.mask = None
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.see)

    def see(self, _module, _inputs, outputs):
        logits = outputs[0].detach()
        if self.mask is not None:
            logits = logits[self.mask.flatten().bool()]
        ordered = logits.sort(-1, descending=True).values
        gap = (ordered[:, self.chosen - 1] - ordered[:, self.chosen]).min().item()
        self.smallest = min(self.smallest, gap)


def backward_together(model, rows, margins):
    """One micro-batch of padded rows; its loss with the auxiliary one, and the latter alone."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = lambda key, by: torch.tensor([row[key] + [by] * (longest - len(row[key])) for row in rows])
    margins.mask = torch.tensor([[int(at < len(row["input_ids"])) for at in range(longest)] for row in rows])
    out = model(input_ids=padded("input_ids", 0), labels=padded("labels", -100), attention_mask=margins.mask,
                num_items_in_batch=golden.trained(rows), use_cache=False)
    out.loss.backward()
    return out.loss.item(), out.aux_loss.item()


def train_model(model, named, decayed, rows, batch, schedule, warmup, steps, layout=lambda name, grad: grad):
    """20 steps over the parameters `named`; `layout` turns a gradient into the layout of the files."""
    recipe, margins = golden.RECIPE, Margins(model)
    aux = model.config.output_router_logits
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": recipe["weight_decay"]},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    betas = (recipe["adam_beta1"], recipe["adam_beta2"])
    optimizer = torch.optim.AdamW(
        groups, lr=recipe["learning_rate"], betas=betas, eps=recipe["adam_epsilon"], foreach=False, fused=False)
    scheduler = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=golden.STEPS)
    run = {"loss": [], "grad_norm": [], "lr": [], "tokens": [], "trained_tokens": [], **({"aux_loss": []} if aux else {})}
    for step in range(steps):
        taken = golden.samples(rows, batch, step)
        optimizer.zero_grad()
        if aux:
            loss, of_routers = backward_together(model, taken, margins)
            run["aux_loss"].append(of_routers)
        else:
            loss = golden.backward(model, taken)
        run["loss"].append(loss)
        for _, weight in named:
            # An expert without tokens in the whole step.
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if step == 0:
            first = {name: layout(name, weight.grad.clone()) for name, weight in named}
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], recipe["max_grad_norm"], foreach=False)
        run["grad_norm"].append(norm.item())
        run["lr"].append(scheduler.get_last_lr()[0])
        run["tokens"].append(sum(len(row["input_ids"]) for row in taken))
        run["trained_tokens"].append(golden.trained(taken))
        optimizer.step()
        scheduler.step()
    final = {name: layout(name, weight.detach().double()) for name, weight in named}
    return run, first, final, margins.smallest


def train(folder, rows, batch, schedule, warmup, steps=golden.STEPS):
    model = load_model(folder)
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], golden.UNDECAYED))
    named = list(model.named_parameters())
    found = train_model(model, named, decayed, rows, batch, schedule, warmup, steps)
    return *found, sorted(name for name, _ in named if name not in decayed)


# --- The second witness -----------------------------------------------------------------------------------------------

class Second(golden.Second):
    """qwen3_moe and mixtral from their files alone, with experts of a block in one tensor."""

    def __init__(self, folder, change=None):
        super().__init__(folder, change)
        self.mixtral = self.config["model_type"] == "mixtral"
        parts = ("w1", "w3", "w2") if self.mixtral else ("gate_proj", "up_proj", "down_proj")
        plain = {name.replace(".block_sparse_moe.", ".mlp."): weight.detach() for name, weight in self.weights.items()}
        for block in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{block}.mlp.experts"
            if f"{name}.0.{parts[0]}.weight" not in plain:
                continue
            count = self.config["num_local_experts"]
            gate, up, down = (
                torch.stack([plain.pop(f"{name}.{e}.{part}.weight") for e in range(count)]) for part in parts)
            plain[f"{name}.gate_up_proj"] = torch.cat([gate, up], 1)
            plain[f"{name}.down_proj"] = down
        self.weights = {name: weight.requires_grad_() for name, weight in plain.items()}

    def window(self, block):
        return self.config.get("sliding_window")

    def expert(self, name, part, place):
        return self.weights[f"{name}.{part}"][place]

    def mlp(self, block, x):
        name = f"model.layers.{block}.mlp"
        if f"{name}.gate.weight" not in self.weights:
            return super().mlp(block, x)
        logits = self.linear(f"{name}.gate", x)
        chances = torch.softmax(logits, -1)
        self.chances.append(chances)
        y = []
        for row, chance in zip(x, chances):
            chosen = sorted(range(len(chance)), key=lambda e: -chance[e].item())[: self.config["num_experts_per_tok"]]
            total = sum(chance[e] for e in chosen) if self.mixtral or self.config["norm_topk_prob"] else 1.0
            self.counts[chosen] += 1
            out = 0.0
            for e in chosen:
                gate, up = (self.expert(f"{name}.experts", "gate_up_proj", e) @ row).chunk(2)
                down = self.expert(f"{name}.experts", "down_proj", e)
                out = out + chance[e] / total * (down @ (self.activated(gate) * up))
            y.append(out)
        return torch.stack(y)

    def loss(self, rows):
        self.chances, self.counts = [], torch.zeros(self.config["num_local_experts"], dtype=torch.float64)
        loss = super().loss(rows)
        if self.config["output_router_logits"]:
            chances = torch.cat(self.chances)
            balance = len(self.counts) * (self.counts / len(chances) * chances.mean(0)).sum()
            loss = loss + self.config["router_aux_loss_coef"] * balance
        return loss


def mistakes(config):
    """Ways to be wrong that the files of this model must show, as changes of its config."""
    if config["model_type"] != "mixtral":
        yield "the other norm_topk_prob", lambda c: c.update(norm_topk_prob=not c["norm_topk_prob"])
    yield "one expert less", lambda c: c.update(num_experts_per_tok=c["num_experts_per_tok"] - 1)
    if config["output_router_logits"]:
        yield "no auxiliary loss", lambda c: c.update(output_router_logits=False)
    if config.get("sliding_window"):
        yield "window +1", lambda c: c.update(sliding_window=c["sliding_window"] + 1)


# --- Models -----------------------------------------------------------------------------------------------------------

def write_model(name, seed):
    family, fields = MODELS[name]
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(family, fields, seed)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())
    for fused in (fused for fused, base in FUSED.items() if base == name):
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch, save_original_format=False)
            (HERE / fused).mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                (HERE / fused / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())
    rows = golden.make_rows(fields["vocab_size"], seed)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, rows


def first_seed(name, start):
    """The first seed whose runs all keep MARGIN."""
    for seed in itertools.count(start, 100):
        folder, rows = write_model(name, seed)
        smallest = min(train(folder, rows, *run[1:])[3] for run in runs_of(folder))
        print(f"{name}: seed {seed}, margin {smallest:.1e}")
        if smallest >= MARGIN:
            return seed


def make(name, start):
    seed = first_seed(name, start)
    folder, rows = HERE / name, golden.make_rows(MODELS[name][1]["vocab_size"], seed)
    parameters = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    _, right = Second(folder).gradients(golden.samples(rows, 4, 0))
    for mistake, change in mistakes(Second(folder).config):
        _, wrong = Second(folder, change).gradients(golden.samples(rows, 4, 0))
        assert golden.gradients_apart(wrong, right) > 1e-4, (name, mistake)
    runs = []
    for label, batch, schedule, warmup in runs_of(folder):
        run, first, final, margin, undecayed = train(folder, rows, batch, schedule, warmup)
        # The float64 witness is slow, one token at a time: all of the smallest run, three steps of the others.
        steps = golden.STEPS if batch == 4 else 3
        witness = Second(folder)
        second = witness.train(rows, batch, run["lr"], undecayed, steps=steps)
        distance = {key: golden.apart(run[key][:steps], second[key]) for key in second}
        if batch == 4:
            distance["final_norm"] = golden.norms_apart(final, witness.weights)
            true = Second(folder).gradients(golden.samples(rows, batch, 0))[1]
            assert golden.gradients_apart(first, true) < golden.AGREEMENT_OF_GRADIENTS, name
            gradients = {n: golden.sampled(grad, f"{seed} {n}") for n, grad in first.items()}
            if name in WHOLE:
                (folder / "grads.safetensors").write_bytes(save(first))
                golden.write_final(folder, final, witness.weights)
        assert max(distance.values()) < golden.AGREEMENT_OF_RUNS and margin >= MARGIN, (name, label, distance, margin)
        runs.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup, "margin": margin, **run,
            "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
    print(f"{name}: {parameters} parameters, loss {runs[0]['loss'][0]:.4f} to {runs[0]['loss'][-1]:.4f}, {distance}")
    golden.write_json(folder / "steps.json", {
        "model": name,
        "parameters": parameters,
        "made_with": made_with(),
        "recipe": {"steps": golden.STEPS, **golden.RECIPE, "undecayed": undecayed},
        "gradients_of_step_1": {"run": "batch-4-cosine", "whole": name in WHOLE, "parameters": gradients},
        "runs": runs,
    })


def made_with():
    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "peft": peft.__version__, "safetensors": safetensors.__version__}


# --- Adapters ---------------------------------------------------------------------------------------------------------

def adapter_config(case):
    base, targets = CASES[case]
    if targets == "all":
        chosen = {"target_modules": "all-linear"}
    else:
        experts = ["w1", "w2", "w3"] if base.startswith("mixtral") else ["gate_proj", "up_proj", "down_proj"]
        chosen = {"target_modules": ["q_proj", "v_proj", *experts]}
    return LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, use_rslora=targets != "all", **chosen)


def write_adapter(folder, case, seed):
    model = get_peft_model(load_model(HERE / CASES[case][0]), adapter_config(case))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                inputs = RANK if "lora_B" in name else weight.shape[1]
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) / math.sqrt(inputs))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        written = json.loads((pathlib.Path(scratch) / "adapter_config.json").read_text())
        # The folder this was made in is nobody's business.
        written["base_model_name_or_path"] = CASES[case][0]
        for key in ("target_modules", "target_parameters"):
            written[key] = sorted(written[key])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        file = "adapter_model.safetensors"
        (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())


def own_name(name):
    """Without what PEFT adds. Its nested wrappers say which parameter is meant: the inner one is gate_up_proj."""
    name = name.removeprefix(PREFIX).replace(".default.weight", ".weight")
    name = name.replace(".experts.base_layer.lora_", ".experts.gate_up_proj.lora_")
    return name.replace(".experts.lora_", ".experts.down_proj.lora_")


def by_expert(name, matrix, experts):
    """B of all experts, [out, rank × experts] in PEFT's files, as [experts, out, rank]."""
    if ".experts." not in name or "lora_B" not in name:
        return matrix
    return matrix.reshape(matrix.shape[0], -1, experts).permute(2, 0, 1).contiguous()


def train_adapter(folder, case, rows, batch, schedule, warmup, steps=golden.STEPS):
    base = load_model(HERE / CASES[case][0])
    model = PeftModel.from_pretrained(base, folder, is_trainable=True).train()
    named = [(own_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    layout = lambda name, grad: by_expert(name, grad, base.config.num_local_experts)
    inner = model.base_model.model
    return train_model(inner, named, {n for n, _ in named}, rows, batch, schedule, warmup, steps, layout)


class SecondAdapter(Second):
    """W + scale · B · A for every adapted matrix."""

    def __init__(self, folder, case):
        super().__init__(HERE / CASES[case][0])
        config = json.loads((folder / "adapter_config.json").read_text())
        self.scale = config["lora_alpha"] / (math.sqrt(RANK) if config["use_rslora"] else RANK)
        # Rank and alpha of the fused projection are doubled; rslora divides by the root of the doubled rank.
        self.scale_of_fused = 2 * config["lora_alpha"] / (math.sqrt(2 * RANK) if config["use_rslora"] else 2 * RANK)
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}
        experts = self.config["num_local_experts"]
        for name, weight in load_file(folder / "adapter_model.safetensors").items():
            name = own_name(name)
            if ".experts." in name and "lora_A" in name:
                self.weights[name] = weight.double().reshape(experts, -1, weight.shape[-1]).requires_grad_()
            else:
                self.weights[name] = by_expert(name, weight.double(), experts).requires_grad_()

    def linear(self, name, x):
        y, a = super().linear(name, x), f"{name}.lora_A.weight"
        if a not in self.weights:
            return y
        return y + self.scale * (x @ self.weights[a].T) @ self.weights[f"{name}.lora_B.weight"].T

    def expert(self, name, part, place):
        a, b = (self.weights[f"{name}.{part}.lora_{which}.weight"][place] for which in "AB")
        scale = self.scale_of_fused if part == "gate_up_proj" else self.scale
        return super().expert(name, part, place) + scale * b @ a


def make_adapter(case, start):
    folder, base = HERE / case, HERE / CASES[case][0]
    rows = [json.loads(line) for line in (base / "data.jsonl").read_text().splitlines()]
    chosen = [run for run in RUNS if run[1] in (4, 12, 20)]
    for seed in itertools.count(start, 100):
        write_adapter(folder, case, seed)
        smallest = min(train_adapter(folder, case, rows, *run[1:])[3] for run in chosen)
        print(f"{case}: seed {seed}, margin {smallest:.1e}")
        if smallest >= MARGIN:
            break
    runs = []
    for label, batch, schedule, warmup in chosen:
        run, first, final, margin = train_adapter(folder, case, rows, batch, schedule, warmup)
        steps = golden.STEPS if batch == 4 else 3
        witness = SecondAdapter(folder, case)
        second = witness.train(rows, batch, run["lr"], [], steps=steps)
        distance = {key: golden.apart(run[key][:steps], second[key]) for key in second}
        if batch == 4:
            distance["final_norm"] = golden.norms_apart(final, {n: witness.weights[n] for n in final})
            true = SecondAdapter(folder, case).gradients(golden.samples(rows, batch, 0))[1]
            first = {n: grad.reshape(true[n].shape) for n, grad in first.items()}
            assert golden.gradients_apart(first, true) < golden.AGREEMENT_OF_GRADIENTS, case
            gradients = {n: golden.sampled(grad, f"{seed} {n}") for n, grad in first.items()}
        assert max(distance.values()) < golden.AGREEMENT_OF_RUNS, (case, label, distance)
        runs.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup, "margin": margin, **run,
            "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
    print(f"{case}: loss {runs[0]['loss'][0]:.4f} to {runs[0]['loss'][-1]:.4f}, {distance}")
    golden.write_json(folder / "steps.json", {
        "base": f"moe/{CASES[case][0]}",
        "made_with": made_with(),
        "recipe": {"steps": golden.STEPS, **golden.RECIPE},
        "gradients_of_step_1": {"run": "batch-4-cosine", "parameters": gradients},
        "runs": runs,
    })


def check(name):
    folder = HERE / name
    steps = json.loads((folder / "steps.json").read_text())
    data = HERE / CASES[name][0] if name in CASES else folder
    rows = [json.loads(line) for line in (data / "data.jsonl").read_text().splitlines()]
    distance = 0.0
    for run in steps["runs"]:
        given = (rows, run["batch"], run["schedule"], run["warmup_steps"], 1)
        if name in CASES:
            again, second = train_adapter(folder, name, *given)[0], SecondAdapter(folder, name)
        else:
            again, second = train(folder, *given)[0], Second(folder)
        second = second.train(rows, run["batch"], run["lr"], steps["recipe"].get("undecayed", []), steps=1)
        for found in (again, second):
            distance = max(distance, *(golden.apart(found[key], run[key][:1]) for key in ("loss", "grad_norm")))
    print(f"{name}: step 1 of {len(steps['runs'])} runs as written, apart by {distance:.1e}")
    assert distance < golden.AGREEMENT_OF_GRADIENTS, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or [*MODELS, *CASES]
    if flags not in ([], ["--check"]) or not {*MODELS, *CASES} >= set(names):
        sys.exit(__doc__)
    for seed, name in enumerate([*MODELS, *CASES]):
        if name not in names:
            continue
        if flags:
            check(name)
        else:
            (make_adapter if name in CASES else make)(name, seed)
