"""Measures the matmuls of experts on a GPU beside PyTorch's torch._grouped_mm, in alternating rounds.

    cargo build --release -p zeroth-cuda --example cuda_self_test
    python benches/gpu/grouped.py [--rounds 3] [--binary FILE] [--csv FILE]

32,768 rows, 128 experts, 1,536 outputs and 2,048 inputs in bf16, with equal shares of rows and with shares of 1, 1/2,
1/3 and so on. Prints the median TFLOP/s of all rounds. Needs PyTorch 2.10 with CUDA.
"""

import argparse
import ast
import csv
import re
import statistics
import subprocess
import sys

ROWS, EXPERTS, OUTPUTS, INPUTS = 32_768, 128, 1536, 2048
FLOPS = 2 * ROWS * OUTPUTS * INPUTS
# The names that the self-test prints.
KINDS = {"grouped_linear": "forward", "grouped_linear_dx": "dx", "grouped_linear_dw": "dw"}
LINE = re.compile(r"(grouped_linear\w*) bf16 (uniform|zipf)(.*): ([\d.]+) ms")


def ours(binary):
    """(split, kind) -> seconds, by the self-test's timings."""
    command = [binary, "timings", "only=grouped"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for name, split, form, milliseconds in LINE.findall(text):
        found[split, (KINDS[name] + form).replace("dw bf16", "dw")] = float(milliseconds) / 1e3
    return found


def theirs():
    """The same by torch._grouped_mm, in a process of its own."""
    command = [sys.executable, __file__, "--torch"]
    return ast.literal_eval(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_torch():
    import torch

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def seconds(call, runs=10):
        rounds = []
        for _ in range(6):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(runs):
                call()
            end.record()
            torch.cuda.synchronize()
            rounds.append(begin.elapsed_time(end) / runs / 1e3)
        # The first round warms up.
        return statistics.median(rounds[1:])

    x, w, dy = draw(ROWS, INPUTS), draw(EXPERTS, OUTPUTS, INPUTS), draw(ROWS, OUTPUTS)
    found = {}
    for split in ("uniform", "zipf"):
        shares = [1.0 if split == "uniform" else 1.0 / (expert + 1) for expert in range(EXPERTS)]
        rows = [int(share / sum(shares) * ROWS) for share in shares]
        rows[0] += ROWS - sum(rows)
        ends = torch.tensor(rows).cumsum(0).to(torch.int32).cuda()
        found[split, "forward"] = seconds(lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends))
        found[split, "dx"] = seconds(lambda: torch._grouped_mm(dy, w, offs=ends))
        found[split, "dw"] = seconds(lambda: torch._grouped_mm(dy.t(), x, offs=ends))
    return found


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--binary", default="target/release/examples/cuda_self_test")
    arguments.add_argument("--csv", help="writes every round to this file")
    arguments.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.torch:
        print(measure_torch())
        return
    rows = []
    for number in range(1, chosen.rounds + 1):
        for system, found in (("zeroth", ours(chosen.binary)), ("torch", theirs())):
            rows += [(number, system, split, kind, FLOPS / at / 1e12) for (split, kind), at in found.items()]
    for split, kind in dict.fromkeys(row[2:4] for row in rows):
        of = {system: [row[4] for row in rows if row[1:4] == (system, split, kind)] for system in ("zeroth", "torch")}
        medians = " ".join(f"{system} {statistics.median(rates):.0f}" for system, rates in of.items() if rates)
        print(f"{split} {kind}: {medians} TFLOP/s")
    if chosen.csv:
        with open(chosen.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["round", "system", "split", "kind", "tflops"])
            writer.writerows([*row[:4], f"{row[4]:.1f}"] for row in rows)


if __name__ == "__main__":
    main()
