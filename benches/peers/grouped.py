"""Matmuls of experts on CPUs beside PyTorch's, 128 rows an expert in bf16: one matmul per expert, and torch.bmm.

    cargo build --release -p zeroth-machine --example cpu_bench
    python benches/peers/grouped.py --threads 16 target/release/examples/cpu_bench
    python benches/peers/grouped.py --threads 1 8 16 --csv FILE target/release/examples/cpu_bench

Both sides take turns, round after round, each with the whole machine to itself. GFLOP/s by the median of all rounds, and percent
of our dense matmul with as many rows in the same round. Needs a Python with torch.
"""

import argparse
import csv
import re
import statistics
import subprocess
import time

import torch

# Experts, rows of all experts, outputs, inputs: as in cpu_bench.
SHAPES = [(16, 2048, 1536, 2048), (32, 4096, 1024, 1024)]
LINE = re.compile(r"bf16 (dense|grouped) (forward|dx|dw rounded|dw) .*?(\d+)\s+([\d.]+)\s+([\d.]+) GFLOP/s")


def ours(binary, threads):
    """Medians by (shape, side, form) of one run of cpu_bench: each shape is four pairs of lines, dense first."""
    printed = subprocess.run([binary, "uniform", "6", str(threads)], check=True, capture_output=True, text=True).stdout
    found = [LINE.match(line) for line in printed.splitlines()]
    found = [match for match in found if match]
    assert len(found) == 8 * len(SHAPES), printed
    return {(at // 8, f"zeroth {line[1]}", line[2]): float(line[5]) for at, line in enumerate(found)}


def seconds(work, repetitions=9):
    work()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def theirs(threads):
    """Medians of PyTorch by (shape, side, form)."""
    torch.set_num_threads(threads)
    found = {}
    for at, (experts, rows, outputs, inputs) in enumerate(SHAPES):
        x, dy = (torch.randn(experts, rows // experts, width, dtype=torch.bfloat16) for width in (inputs, outputs))
        w = torch.randn(experts, outputs, inputs, dtype=torch.bfloat16)
        flop = 2 * rows * outputs * inputs
        operands = {"forward": (x, w.transpose(1, 2)), "dx": (dy, w), "dw rounded": (dy.transpose(1, 2), x)}
        for form, (a, b) in operands.items():
            each = seconds(lambda: [torch.matmul(a[expert], b[expert]) for expert in range(experts)])
            found[at, "torch per expert", form] = flop / each / 1e9
            found[at, "torch.bmm", form] = flop / seconds(lambda: torch.bmm(a, b)) / 1e9
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the cpu_bench binary")
    parser.add_argument("--threads", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", help="file for every round")
    arguments = parser.parse_args()
    series = []
    for threads in arguments.threads:
        rounds = [{**ours(arguments.binary, threads), **theirs(threads)} for _ in range(arguments.rounds)]
        for key in rounds[0]:
            at, side, form = key
            rates = [found[key] for found in rounds]
            shares = [100 * found[key] / found[at, "zeroth dense", form] for found in rounds]
            series += [[threads, *SHAPES[at], side, form, number, round(rate, 1)] for number, rate in enumerate(rates)]
            print(f"{threads:3} threads  {SHAPES[at][0]} × {SHAPES[at][2]} × {SHAPES[at][3]}  {form:<10}  {side:<16} "
                  f"{statistics.median(rates):8,.0f} GFLOP/s  {statistics.median(shares):5.1f} % of dense "
                  f"({min(shares):.1f} to {max(shares):.1f})", flush=True)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["threads", "experts", "rows", "outputs", "inputs", "side", "form", "round", "gflops"])
            writer.writerows(series)


if __name__ == "__main__":
    main()
