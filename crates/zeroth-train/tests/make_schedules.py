"""Makes schedules.json: learning rates that transformers and DeepSpeed give, step by step.

Needs torch, transformers and deepspeed. Run as `python make_schedules.py`; it writes schedules.json beside itself.
`rates[i]` is the rate that the optimizer uses after `kept[i]` steps were applied, over 2,000 steps. Numbers are Python floats as repr writes them.
"""
import json
import pathlib
import platform
import re

import deepspeed
import torch
import transformers
from deepspeed.runtime import lr_schedules

LR = 3e-4
STEPS = 2000
# The first ones, where schedules turn, and then every 61st: a prime, so that no cycle hides between.
KEPT = list(range(30)) + list(range(30, STEPS, 61)) + [STEPS - 1]

HUGGING_FACE = [
    # name, warm-up steps, steps of the run, keywords
    ("constant", 5, 24, {}),
    ("constant_with_warmup", 5, 24, {}),
    ("constant_with_warmup", 0, 24, {}),
    ("linear", 0, 24, {}),
    ("linear", 5, 24, {}),
    ("linear", 30, 24, {}),
    ("cosine", 0, 24, {}),
    ("cosine", 5, 24, {}),
    ("cosine", 24, 24, {}),
    ("cosine_with_restarts", 4, 24, {}),
    ("cosine_with_restarts", 4, 25, {"num_cycles": 3}),
    ("polynomial", 5, 24, {}),
    ("polynomial", 5, 24, {"power": 2.5, "lr_end": 1e-5}),
    ("inverse_sqrt", 0, 24, {}),
    ("inverse_sqrt", 5, 24, {}),
    ("inverse_sqrt", 5, 24, {"timescale": 40}),
    ("constant_with_warmup", 150, 1800, {}),
    ("linear", 150, 1800, {}),
    ("cosine", 150, 1800, {}),
    ("cosine_with_restarts", 150, 1800, {"num_cycles": 4}),
    ("polynomial", 150, 1800, {"power": 1.5}),
    ("inverse_sqrt", 150, 1800, {}),
    ("cosine", 5, 24, {"num_cycles": 1.25}),
    ("cosine_with_min_lr", 0, 24, {"min_lr": 3e-5}),
    ("cosine_with_min_lr", 5, 24, {"min_lr": 3e-5}),
    ("cosine_with_min_lr", 5, 24, {"min_lr_rate": 0.25, "num_cycles": 1.5}),
    ("cosine_with_min_lr", 30, 24, {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", 150, 1800, {"min_lr_rate": 0.05}),
    ("cosine_warmup_with_min_lr", 0, 24, {"min_lr": 3e-5}),
    ("cosine_warmup_with_min_lr", 1, 24, {"min_lr": 3e-5, "warmup_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", 5, 24, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", 5, 24, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2, "num_cycles": 1.5}),
    ("cosine_warmup_with_min_lr", 150, 1800, {"min_lr": 1e-5}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 8}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 0}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 8, "num_stable_steps": 3, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 22, "decay_type": "linear"}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 8, "warmup_type": "cosine", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", 5, 24, {"num_decay_steps": 8, "warmup_type": "1-sqrt", "num_cycles": 1.5}),
    ("warmup_stable_decay", 150, 1800, {"num_decay_steps": 180, "min_lr_ratio": 0.05}),
]

DEEPSPEED = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": 2e-3, "warmup_num_steps": 9}),
    ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": 2e-3, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 24, "warmup_num_steps": 6}),
    ("WarmupDecayLR", {"total_num_steps": 24, "warmup_min_lr": 1e-6, "warmup_max_lr": 2e-3, "warmup_num_steps": 6,
                       "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 24, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05,
                        "warmup_type": "linear"}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 7}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 7, "cycle_second_step_size": 11,
                  "decay_step_size": 3, "decay_lr_rate": 0.4, "decay_mom_rate": 0.01, "cycle_min_mom": 0.7,
                  "cycle_max_mom": 0.95}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 9, "cycle_second_step_size": 13,
                  "cycle_first_stair_count": 3, "cycle_second_stair_count": 4, "cycle_momentum": False}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10,
                  "cycle_first_stair_count": 5, "decay_step_size": 2, "decay_lr_rate": 0.1}),
    ("LRRangeTest", {"lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.5,
                     "lr_range_test_staircase": True}),
    ("WarmupLR", {"warmup_max_lr": 2e-3, "warmup_num_steps": 700}),
    ("WarmupDecayLR", {"total_num_steps": 1800, "warmup_max_lr": 2e-3, "warmup_num_steps": 150}),
    ("WarmupCosineLR", {"total_num_steps": 1800, "warmup_num_steps": 150}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 500, "cycle_second_step_size": 700,
                  "decay_step_size": 50, "decay_lr_rate": 0.2, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 90, "lr_range_test_step_rate": 1.5}),
]


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR, betas=(0.9, 0.95))


def walk(optimizer, scheduler):
    """The rate and the betas that each step uses."""
    rates, betas = [], []
    for _ in range(STEPS):
        group = optimizer.param_groups[0]
        rates.append(float(group["lr"]))
        betas.append([float(beta) for beta in group["betas"]])
        optimizer.step()
        scheduler.step()
    return [rates[step] for step in KEPT], [betas[step] for step in KEPT]


def main():
    hugging_face = []
    for name, warmup, total, keywords in HUGGING_FACE:
        adam = optimizer()
        scheduler = transformers.get_scheduler(
            name, adam, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=keywords)
        rates, _ = walk(adam, scheduler)
        hugging_face.append(
            {"name": name, "warmup_steps": warmup, "total_steps": total, "keywords": keywords, "rates": rates})
    deeper = []
    for name, params in DEEPSPEED:
        adam = optimizer()
        rates, betas = walk(adam, getattr(lr_schedules, name)(adam, **params))
        entry = {"name": name, "params": params, "rates": rates}
        if any(pair != [0.9, 0.95] for pair in betas):
            entry["betas"] = betas
        deeper.append(entry)
    made = {
        "made_with": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "deepspeed": deepspeed.__version__,
        },
        "learning_rate": LR,
        "kept": KEPT,
        "hugging_face": hugging_face,
        "deepspeed": deeper,
    }
    lines = json.dumps(made, indent=1)
    # One list of numbers a line: the file is read by people when a test fails.
    lines = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + " ".join(m.group(1).split()) + "]", lines)
    pathlib.Path(__file__).with_name("schedules.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
