"""Our matrix products beside PyTorch's, in turn on the same machine: best and median rates, and their ratios.

Needs Python with torch, and `cargo build --release -p zeroth-device --example cpu_bench` before.

    python benches/peers/gemm.py [path of the cpu_bench binary] [rounds]
"""

import statistics
import subprocess
import sys
import time

import torch

SHAPES = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 3072), (4096, 3072, 1024)]  # rows, outputs, inputs


def main() -> None:
    binary = sys.argv[1] if len(sys.argv) > 1 else "target/release/examples/cpu_bench"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    ours = subprocess.Popen([binary, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(f"{'product':40} {'ours best':>10} {'median':>8} {'torch best':>11} {'median':>8}   ratio of bests, of medians")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
            for m, n, k in SHAPES:
                if dtype is torch.float32 and m * n * k > 2**33:
                    continue
                measure(ours, threads, dtype, name, (m, n, k), rounds)
    ours.stdin.close()
    ours.wait()


def measure(ours, threads, dtype, name, shape, rounds) -> None:
    m, n, k = shape
    x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    torch.nn.functional.linear(x, w)
    ours.stdin.write(f"{name} forward {m} {n} {k} {threads} {rounds}\n")
    ours.stdin.flush()
    our_seconds, their_seconds = [], []
    for _ in range(rounds):
        ours.stdin.write("\n")
        ours.stdin.flush()
        our_seconds.append(float(ours.stdout.readline()))
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        their_seconds.append(time.perf_counter() - start)
    rate = lambda seconds: 2 * m * n * k / seconds / 1e9
    best, median = rate(min(our_seconds)), rate(statistics.median(our_seconds))
    their_best, their_median = rate(min(their_seconds)), rate(statistics.median(their_seconds))
    print(
        f"{f'{name} {m}x{n}x{k}, {threads} thread(s)':40} {best:10.1f} {median:8.1f} {their_best:11.1f} {their_median:8.1f}"
        f"   {best / their_best:.2f} {median / their_median:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
