"""Golden LoRA runs: adapters over three of the golden models, 20 AdamW steps each, by PEFT in fp32.

    python tests/golden/make_golden_lora.py           # writes every folder under lora/ beside this file
    python tests/golden/make_golden_lora.py --check   # reads the committed files and computes step 1 of every run again

Needs what make_golden.py needs, and peft; steps.json says which versions made the committed files.

B starts at random, so that A has a gradient in step 1. As in make_golden.py every number has two witnesses: PEFT, and the
float64 one of that file with adapters added by their formula.
"""

import json
import math
import pathlib
import platform
import sys
import tempfile

import make_golden as golden
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).resolve().parent / "lora"
BASES = ["llama-biases-tied", "qwen2-yarn-tied", "qwen3-tied"]
RANK, ALPHA = 4, 6
TARGETS = {"all": "all-linear", "qv": ["q_proj", "v_proj"]}
RUNS = [run for run in golden.RUNS if run[2] == "cosine" and run[1] in (4, 12, 20)]
CASES = {
    f"{base}-{targets}{'-rslora' if rslora else ''}": (base, targets, rslora)
    for base in BASES for targets in TARGETS for rslora in (False, True)
}
PREFIX = "base_model.model."


def base_model(base):
    folder = HERE.parent / base
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32)


def write_adapter(folder, case, seed):
    base, targets, rslora = CASES[case]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, use_rslora=rslora,
        target_modules=TARGETS[targets])
    model = get_peft_model(base_model(base), config)
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
        (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        file = "adapter_model.safetensors"
        (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())


def load(folder, case):
    return PeftModel.from_pretrained(base_model(CASES[case][0]), folder, is_trainable=True).train()


def stored_name(name):
    """The name in adapter_model.safetensors, without PEFT's prefix and the adapter's own name."""
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def train(folder, case, rows, batch, schedule, warmup, steps=golden.STEPS):
    model, recipe = load(folder, case), golden.RECIPE
    named = [(stored_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    betas = (recipe["adam_beta1"], recipe["adam_beta2"])
    optimizer = torch.optim.AdamW(
        [p for _, p in named], lr=recipe["learning_rate"], betas=betas, eps=recipe["adam_epsilon"],
        weight_decay=recipe["weight_decay"], foreach=False, fused=False)
    scheduler = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=golden.STEPS)
    run = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(steps):
        optimizer.zero_grad()
        run["loss"].append(golden.backward(model.base_model.model, golden.samples(rows, batch, step)))
        if step == 0:
            first = {name: weight.grad.clone() for name, weight in named}
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], recipe["max_grad_norm"], foreach=False)
        run["grad_norm"].append(norm.item())
        run["lr"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return run, first, {name: weight.detach().double() for name, weight in named}


class Second(golden.Second):
    """The float64 witness with adapters: y += scale · (x · Aᵀ) · Bᵀ."""

    def __init__(self, folder, case):
        base, _, rslora = CASES[case]
        super().__init__(HERE.parent / base)
        self.scale = ALPHA / (math.sqrt(RANK) if rslora else RANK)
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in load_file(folder / "adapter_model.safetensors").items():
            self.weights[name.removeprefix(PREFIX)] = weight.double().requires_grad_()

    def linear(self, name, x):
        y, a = super().linear(name, x), f"{name}.lora_A.weight"
        return y + self.scale * (x @ self.weights[a].T) @ self.weights[f"{name}.lora_B.weight"].T \
            if a in self.weights else y


def rows_of(case):
    return [json.loads(line) for line in (HERE.parent / CASES[case][0] / "data.jsonl").read_text().splitlines()]


def make(case, seed):
    folder, rows, runs = HERE / case, rows_of(case), []
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter(folder, case, seed)
    for label, batch, schedule, warmup in RUNS:
        run, first, final = train(folder, case, rows, batch, schedule, warmup)
        witness = Second(folder, case)
        second = witness.train(rows, batch, run["lr"], [])
        distance = {key: golden.apart(run[key], second[key]) for key in second}
        distance["final_norm"] = golden.norms_apart(final, {n: witness.weights[n] for n in final})
        assert max(distance.values()) < golden.AGREEMENT_OF_RUNS, (case, label, distance)
        if batch == 4:
            true = Second(folder, case).gradients(golden.samples(rows, batch, 0))[1]
            assert golden.gradients_apart(first, true) < golden.AGREEMENT_OF_GRADIENTS, case
            gradients = {n: golden.sampled(grad, f"{seed} {n}") for n, grad in first.items()}
        runs.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup, **run,
            "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
    print(f"{case}: loss {runs[0]['loss'][0]:.4f} to {runs[0]['loss'][-1]:.4f}, {distance}")
    golden.write_json(folder / "steps.json", {
        "base": CASES[case][0],
        "made_with": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "peft": peft.__version__},
        "recipe": {"steps": golden.STEPS, **golden.RECIPE},
        "gradients_of_step_1": {"run": "batch-4-cosine", "parameters": gradients},
        "runs": runs,
    })


def check(case):
    folder, rows = HERE / case, rows_of(case)
    steps = json.loads((folder / "steps.json").read_text())
    distance = 0.0
    for run in steps["runs"]:
        again, _, _ = train(folder, case, rows, run["batch"], run["schedule"], run["warmup_steps"], steps=1)
        second = Second(folder, case).train(rows, run["batch"], run["lr"], [], steps=1)
        for found in (again, second):
            distance = max(distance, *(golden.apart(found[key], run[key][:1]) for key in ("loss", "grad_norm")))
    print(f"{case}: step 1 of {len(steps['runs'])} runs as written, apart by {distance:.1e}")
    assert distance < golden.AGREEMENT, case


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    for seed, case in enumerate(CASES):
        (check if sys.argv[1:] else lambda case, seed=seed: make(case, seed))(case)
