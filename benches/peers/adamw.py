"""Compares AdamW with PyTorch's fused AdamW and DeepSpeed's CPU Adam over the same number of parameters, interleaved.

    cargo build --release
    python benches/peers/adamw.py [rounds]

Needs a Python with torch. DeepSpeed's line appears if deepspeed is installed and its Adam compiles (a C++ compiler and
ninja); otherwise the reason is printed. Ours updates fp32 master weights and moments from a bf16 or an fp32 gradient and
writes the bf16 weights in the same pass: 28 or 30 bytes per parameter, or 26 or 28 if only the low-order bits of master
weights are stored, as in training. The peers update fp32 weights from fp32 gradients (28 bytes); "and cast" adds the bf16
copy that bf16 training needs. Parameters per second are compared because the bytes differ. Data is random.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

OURS = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release/zeroth"
PARAMETERS = 24 << 20
TENSORS = 24
BURSTS = 5
BYTES = {
    "adamw, bf16 gradient, bf16 weight": 28, "adamw, f32 gradient, bf16 weight": 30,
    "adamw, bf16 gradient, bf16 weight and rest": 26, "adamw, f32 gradient, bf16 weight and rest": 28,
}
BESIDE = "pytorch fused and cast"


def ours():
    """Maps (name, threads) to parameters per second: best and median of the bursts of one run."""
    command = [OURS, "bench", "optimizer", "--threads", "2", "--rounds", str(BURSTS), "--no-save", "--format", "json"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in json.loads(text)["parts"]["optimizer"]:
        if bytes_moved := BYTES.get(line["name"]):
            rates = tuple(line[kind] * 1e9 / bytes_moved for kind in ("best", "median"))
            found[line["name"], line["threads"]] = rates
    return found


class Peer:
    """A PyTorch optimizer over tensors of a million elements each."""

    def __init__(self, name, make):
        torch.manual_seed(1)
        self.name = name
        self.weights = [torch.nn.Parameter(torch.randn(PARAMETERS // TENSORS)) for _ in range(TENSORS)]
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in self.weights]
        for weight in self.weights:
            weight.grad = torch.randn_like(weight)
        self.optimizer = make(self.weights)
        self.optimizer.step()

    def step(self, cast):
        begin = time.perf_counter()
        self.optimizer.step()
        if cast:
            with torch.no_grad():
                for copy, weight in zip(self.copies, self.weights):
                    copy.copy_(weight)
        return time.perf_counter() - begin

    def run(self):
        found = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for cast in (False, True):
                seconds = sorted(self.step(cast) for _ in range(BURSTS))
                name = self.name + (" and cast" if cast else "")
                found[name, threads] = (PARAMETERS / seconds[0], PARAMETERS / statistics.median(seconds))
        return found


def peers():
    options = {"lr": 1e-4, "weight_decay": 0.1}
    found = [Peer("pytorch fused", lambda weights: torch.optim.AdamW(weights, fused=True, **options))]
    try:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # finds ninja
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        found.append(Peer("deepspeed cpu adam", lambda weights: DeepSpeedCPUAdam(weights, adamw_mode=True, **options)))
    except Exception as error:  # The exception of a failed build depends on the compiler and on the version.
        print(f"DeepSpeed's CPU Adam is not available: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=4)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"rounds: at least 1, not {rounds}")
    sides, all_found = [ours, *(peer.run for peer in peers())], {}
    for _ in range(rounds):
        for side in sides:
            for key, rates in side().items():
                all_found.setdefault(key, []).append(rates)
    total = {key: (max(best for best, _ in rates), statistics.median(median for _, median in rates))
             for key, rates in all_found.items()}
    print(f"{'':<36} threads   best M/s  median M/s   over {BESIDE}: best, median")
    for (name, threads), (best, median) in total.items():
        peer_best, peer_median = total[BESIDE, threads]
        print(f"{name:<36} {threads:>7} {best / 1e6:>10.0f} {median / 1e6:>11.0f} "
              f"{best / peer_best:>31.2f} {median / peer_median:>7.2f}")


if __name__ == "__main__":
    main()
