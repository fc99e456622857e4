"""AdamW beside PyTorch's fused AdamW on the CPU: the same number of parameters, in turns, best and median.

Run from the root of the repository after `cargo build --release -p zeroth-device --example cpu_memory`:
`python benches/peers/adamw.py [rounds]`, with a Python that has torch. Ours updates f32 master weights and moments from a
bf16 or an f32 gradient and writes the bf16 weights in the same pass (28 or 30 bytes a parameter). PyTorch's updates f32
weights from f32 gradients (28 bytes); its line "and cast" adds the bf16 copy that training in bf16 needs. Parameters a
second are compared, because bytes differ. Data is random.
"""
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import torch

OURS = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release/examples/cpu_memory"
PARAMETERS = 24 << 20
TENSORS = 24
BURSTS = 5
LINE = re.compile(r"^(adamw, .*?|limit: triad, past.*?) +(\d) +([\d.]+) +([\d.]+)")
BYTES = {"adamw, bf16 gradient, bf16 weight": 28, "adamw, f32 gradient, bf16 weight": 30}


def ours():
    """Name and threads, with parameters a second: best and median of a run's bursts."""
    text = subprocess.run([OURS, str(BURSTS), "adamw"], check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        if (match := LINE.match(line)) and match[1] in BYTES:
            best, median = (float(match[at]) * 1e9 / BYTES[match[1]] for at in (3, 4))
            found[match[1], int(match[2])] = (best, median)
    return found


class Peer:
    """PyTorch's fused AdamW over tensors of a million numbers each."""

    def __init__(self):
        torch.manual_seed(1)
        self.weights = [torch.nn.Parameter(torch.randn(PARAMETERS // TENSORS)) for _ in range(TENSORS)]
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in self.weights]
        for weight in self.weights:
            weight.grad = torch.randn_like(weight)
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, weight_decay=0.1, fused=True)
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
                name = "pytorch fused" + (" and cast" if cast else "")
                found[name, threads] = (PARAMETERS / seconds[0], PARAMETERS / statistics.median(seconds))
        return found


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    peer, all_found = Peer(), {}
    for _ in range(rounds):
        for found in (ours(), peer.run()):
            for key, rates in found.items():
                all_found.setdefault(key, []).append(rates)
    total = {key: (max(best for best, _ in rates), statistics.median(median for _, median in rates))
             for key, rates in all_found.items()}
    print(f"{'':<36} threads   best M/s  median M/s   over pytorch fused and cast: best, median")
    for (name, threads), (best, median) in total.items():
        peer_best, peer_median = total["pytorch fused and cast", threads]
        print(f"{name:<36} {threads:>7} {best / 1e6:>10.0f} {median / 1e6:>11.0f} "
              f"{best / peer_best:>31.2f} {median / peer_median:>7.2f}")


if __name__ == "__main__":
    main()
