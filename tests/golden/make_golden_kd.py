"""Golden runs of knowledge distillation: a qwen3 student with llama teachers, 20 AdamW steps each, by TRL's generalized
JSD in fp32.

    python tests/golden/make_golden_kd.py           # writes every folder under kd/ beside this file
    python tests/golden/make_golden_kd.py --check   # reads the committed files and computes step 1 of every run again

Needs what make_golden.py needs, and trl; steps.json says which versions made the committed files.

The loss of a step is alpha * KD + (1 - alpha) * CE, both means over its trained tokens; `squared` multiplies KD by T^2.
Logits beyond the ids that both models have are dropped before KD. With `top_k` the teacher is its k largest probabilities
at the loss's temperature: `tail` adds one bucket for the remaining mass, of both models; otherwise both are renormalised
over the k ids.

As in make_golden.py every number has two witnesses: TRL, and the float64 one of that file with the divergence written from
its definition, sum of p * log(p / q).
"""

import json
import math
import os
import pathlib
import platform
import sys
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import make_golden as golden
import torch
import transformers
import trl
from make_golden import rope, sizes
from safetensors.torch import save
from transformers.trainer_pt_utils import get_parameter_names
from trl.experimental.gkd import GKDTrainer

HERE = pathlib.Path(__file__).resolve().parent / "kd"
# Tokens of the data: all models have them.
SHARED = 47
PLAIN = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}
STUDENT = ("qwen3", sizes(
    53, 16, 22, 2, heads=2, kv_heads=1, head_dim=8, tie_word_embeddings=True, rope_parameters=rope("default", 10000.0),
    **PLAIN))
# The student's sizes and rope differ in everything from its teachers'.
TEACHERS = {
    name: ("llama", sizes(
        vocabulary, 27, 30, blocks, heads=3, kv_heads=1, head_dim=10, tie_word_embeddings=False,
        rope_parameters=rope("default", 500.0), **PLAIN))
    for name, vocabulary, blocks in (("teacher", 53, 3), ("teacher-longer", 61, 1), ("teacher-shorter", SHARED, 1))
}


def case(beta, temperature, alpha, squared, teacher="teacher", top_k=None, tail=True):
    return {
        "teacher": teacher, "beta": beta, "temperature": temperature, "alpha": alpha, "squared": squared,
        "top_k": top_k, "tail": tail}


CASES = {
    "forward-kl": case(0.0, 1.0, 1.0, False),
    "forward-kl-mixed": case(0.0, 2.0, 0.3, True),
    "forward-kl-unsquared": case(0.0, 2.0, 1.0, False),
    "jsd": case(0.3, 2.0, 1.0, True),
    "jsd-mixed": case(0.3, 1.0, 0.3, False),
    "jsd-unsquared": case(0.3, 2.0, 1.0, False),
    "reverse-kl": case(1.0, 1.0, 1.0, True),
    "reverse-kl-mixed": case(1.0, 2.0, 0.3, True),
    "longer-teacher": case(0.3, 2.0, 0.3, True, teacher="teacher-longer"),
    "shorter-teacher": case(0.0, 2.0, 0.3, True, teacher="teacher-shorter"),
    "top-7-tail": case(0.3, 2.0, 0.3, True, top_k=7),
    "top-7-renormalized": case(0.0, 2.0, 1.0, False, top_k=7, tail=False),
}
# The case that has every batch, and its whole gradients and final weights.
WHOLE = "jsd"
# Divergences give every row of the head a gradient, most of them tiny, and AdamW divides each by its own size: rounding
# shows in the gradient norms of later steps, which tests compare at 5e-4.
AGREEMENT_OF_NORMS = 1e-4


def runs_of(name):
    return [run for run in golden.RUNS if run[2] == "cosine" and (run[1] == 4 or name == WHOLE and run[1] in (12, 20))]


# --- The first witness: transformers and TRL --------------------------------------------------------------------------

def write_model(folder, family, fields, seed):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        golden.make_model(family, fields, seed).save_pretrained(scratch)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())


def buckets(student, teacher, given):
    """Logits [T, k (+ 1)] of both models over the teacher's k largest ids, and the tail of each where it counts."""
    t = given["temperature"]
    ids = teacher.topk(given["top_k"], -1).indices
    logs = [torch.log_softmax(logits / t, -1) for logits in (student, teacher)]
    chosen = torch.zeros_like(teacher, dtype=torch.bool).scatter(-1, ids, True)
    tails = [log.masked_fill(chosen, -math.inf).logsumexp(-1, keepdim=True) for log in logs]
    return [torch.cat([log.gather(-1, ids), *([tail] if given["tail"] else [])], -1) for log, tail in zip(logs, tails)]


def parts(student, teacher, labels, given):
    """Cross-entropy and divergence of a row, summed over its trained tokens. Logits [T, V], labels [T] shifted."""
    shared = min(student.shape[-1], teacher.shape[-1])
    ce = torch.nn.functional.cross_entropy(student, labels, ignore_index=-100, reduction="sum")
    both, temperature = [student[:, :shared], teacher[:, :shared]], given["temperature"]
    if given["top_k"]:
        # Log-probabilities at the temperature: what is left is a softmax.
        both, temperature = buckets(*both, given), 1.0
    kd = GKDTrainer.generalized_jsd_loss(
        *(logits[None] for logits in both), labels=labels[None], beta=given["beta"], temperature=temperature,
        reduction="sum")
    return ce, kd * (given["temperature"] ** 2 if given["squared"] else 1.0)


def backward(model, teacher, rows, given):
    """Adds the gradients of a step; its cross-entropy and divergence."""
    total, sums, alpha = golden.trained(rows), [0.0, 0.0], given["alpha"]
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([*row["labels"][1:], -100])
        with torch.no_grad():
            taught = teacher(input_ids=ids, use_cache=False).logits[0]
        ce, kd = parts(model(input_ids=ids, use_cache=False).logits[0], taught, labels, given)
        ((alpha * kd + (1 - alpha) * ce) / total).backward()
        sums = [sums[0] + ce.item() / total, sums[1] + kd.item() / total]
    return sums


def train(rows, given, batch, schedule, warmup, steps=golden.STEPS):
    model, teacher = (golden.load_model(HERE / name) for name in ("student", given["teacher"]))
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], golden.UNDECAYED))
    named, recipe = list(model.named_parameters()), golden.RECIPE
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": recipe["weight_decay"]},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    betas = (recipe["adam_beta1"], recipe["adam_beta2"])
    optimizer = torch.optim.AdamW(
        groups, lr=recipe["learning_rate"], betas=betas, eps=recipe["adam_epsilon"], foreach=False, fused=False)
    scheduler = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=golden.STEPS)
    run = {"loss": [], "ce_loss": [], "kd_loss": [], "grad_norm": [], "lr": []}
    for step in range(steps):
        optimizer.zero_grad()
        ce, kd = backward(model, teacher, golden.samples(rows, batch, step), given)
        run["loss"].append(given["alpha"] * kd + (1 - given["alpha"]) * ce)
        run["ce_loss"].append(ce)
        run["kd_loss"].append(kd)
        if step == 0:
            first = {name: weight.grad.clone() for name, weight in named}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"], foreach=False)
        run["grad_norm"].append(norm.item())
        run["lr"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    final = {name: weight.detach().double() for name, weight in named}
    return run, first, final, sorted(name for name, _ in named if name not in decayed)


# --- The second witness -----------------------------------------------------------------------------------------------

class Second(golden.Second):
    """The student from its files, and the divergence from its definition."""

    def __init__(self, given):
        super().__init__(HERE / "student")
        self.given, self.teacher = given, golden.Second(HERE / given["teacher"])

    def chances(self, logits, ids):
        """Probabilities at the temperature; of a top-k teacher's ids and the tail alone."""
        powers = torch.exp(logits / self.given["temperature"])
        if ids is None:
            return powers / powers.sum()
        kept = powers[ids]
        if not self.given["tail"]:
            return kept / kept.sum()
        rest = [at for at in range(len(powers)) if at not in ids]
        return torch.cat([kept, powers[rest].sum()[None]]) / powers.sum()

    def divergence(self, student, teacher):
        shared, beta = min(len(student), len(teacher)), self.given["beta"]
        student, teacher = student[:shared], teacher[:shared]
        ids = None
        if self.given["top_k"]:
            ids = sorted(range(shared), key=lambda at: -teacher[at].item())[: self.given["top_k"]]
        s, t = self.chances(student, ids), self.chances(teacher, ids)
        divergence = lambda p, q: (p * torch.log(p / q)).sum()
        if beta in (0.0, 1.0):
            kd = divergence(t, s) if beta == 0.0 else divergence(s, t)
        else:
            m = beta * t + (1 - beta) * s
            kd = beta * divergence(t, m) + (1 - beta) * divergence(s, m)
        return kd * (self.given["temperature"] ** 2 if self.given["squared"] else 1.0)

    def loss(self, rows):
        alpha, total = self.given["alpha"], 0.0
        for row in rows:
            student, teacher = self.logits(row), self.teacher.logits(row).detach()
            for at, label in enumerate(row["labels"][1:]):
                if label != -100:
                    ce = torch.logsumexp(student[at], 0) - student[at, label]
                    total = total + alpha * self.divergence(student[at], teacher[at]) + (1 - alpha) * ce
        return total / golden.trained(rows)


# --- What a mistake would change --------------------------------------------------------------------------------------

def check_sensitivity(name, rows):
    """Every setting of a case must show in its first loss."""
    given, taken = CASES[name], golden.samples(rows, 4, 0)
    true = Second(given).loss(taken).item()
    wrong = {"beta": 1.0 - given["beta"], "temperature": 3.0 - given["temperature"], "alpha": 0.7}
    if given["temperature"] != 1.0:
        wrong["squared"] = not given["squared"]
    if given["top_k"]:
        wrong |= {"top_k": None, "tail": not given["tail"]}
    for key, value in wrong.items():
        moved = abs(Second({**given, key: value}).loss(taken).item() - true)
        # Tests compare losses at 1e-5.
        assert moved > 2e-5, (name, key, moved)


# --- Writing and checking ---------------------------------------------------------------------------------------------

def read_rows():
    return [json.loads(line) for line in (HERE / "student" / "data.jsonl").read_text().splitlines()]


def make(name, seed):
    given, rows, runs = CASES[name], read_rows(), []
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    check_sensitivity(name, rows)
    for label, batch, schedule, warmup in runs_of(name):
        run, first, final, undecayed = train(rows, given, batch, schedule, warmup)
        witness = Second(given)
        second = witness.train(rows, batch, run["lr"], undecayed)
        distance = {key: golden.apart(run[key], second[key]) for key in second}
        distance["final_norm"] = golden.norms_apart(final, witness.weights)
        print(f"{name} {label}: loss {run['loss'][0]:.4f} to {run['loss'][-1]:.4f}, kd {run['kd_loss'][0]:.4f} to "
              f"{run['kd_loss'][-1]:.4f}; apart {distance}")
        assert all(distance[key] < (AGREEMENT_OF_NORMS if key == "grad_norm" else golden.AGREEMENT_OF_RUNS)
                   for key in distance), (name, label, distance)
        if batch == 4:
            true = Second(given).gradients(golden.samples(rows, batch, 0))[1]
            distance["gradients"] = golden.gradients_apart(first, true)
            assert distance["gradients"] < golden.AGREEMENT_OF_GRADIENTS, (name, distance)
            gradients = {n: golden.sampled(grad, f"{seed} {n}") for n, grad in first.items()}
            if name == WHOLE:
                (folder / "grads.safetensors").write_bytes(save(first))
                golden.write_final(folder, final, witness.weights)
        runs.append({
            "name": label, "batch": batch, "schedule": schedule, "warmup_steps": warmup, **run,
            "apart_from_float64": distance,
            "final": {n: {"norm": w.norm().item(), "sum": w.sum().item()} for n, w in final.items()},
        })
    golden.write_json(folder / "steps.json", {
        "distillation": given,
        "made_with": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "trl": trl.__version__},
        "recipe": {"steps": golden.STEPS, **golden.RECIPE, "undecayed": undecayed},
        "gradients_of_step_1": {"run": "batch-4-cosine", "whole": name == WHOLE, "parameters": gradients},
        "runs": runs,
    })


def check(name):
    rows, steps = read_rows(), json.loads((HERE / name / "steps.json").read_text())
    assert steps["distillation"] == CASES[name], name
    distance = 0.0
    for run in steps["runs"]:
        again, _, _, undecayed = train(
            rows, CASES[name], run["batch"], run["schedule"], run["warmup_steps"], steps=1)
        second = Second(CASES[name]).train(rows, run["batch"], run["lr"], undecayed, steps=1)
        for found in (again, second):
            distance = max(distance, *(golden.apart(found[key], run[key][:1]) for key in ("loss", "grad_norm")))
    print(f"{name}: step 1 of {len(steps['runs'])} runs as written, apart by {distance:.1e}")
    assert distance < 2 * golden.AGREEMENT, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if not sys.argv[1:]:
        # An odd seed: loud models, whose distributions are far apart.
        for seed, (name, (family, fields)) in enumerate([("student", STUDENT), *TEACHERS.items()]):
            write_model(HERE / name, family, fields, 2 * seed + 1)
        rows = golden.make_rows(SHARED, 1)
        (HERE / "student" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, name in enumerate(CASES):
        (check if sys.argv[1:] else lambda name, seed=seed: make(name, seed))(name)
