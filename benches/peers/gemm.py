"""Our matrix products beside PyTorch's and the processor's limit, in turn on the same machine: best and median rates, and
their ratios; then how two threads scale, beside a loop that stays in registers.

Needs Python with torch, and `cargo build --release -p zeroth-device --example cpu_bench` before.

    python benches/peers/gemm.py [path of the cpu_bench binary] [rounds]
"""

import statistics
import subprocess
import sys
import time

import torch

TURN = 0.25  # seconds of one side before the other has its turn; in a few milliseconds even the limit's loop varies by a fifth
SHAPES = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 3072), (4096, 3072, 1024)]  # rows, outputs, inputs


class Ours:
    """Something that our binary runs again and again while it has its turn."""

    def __init__(self, binary, what, amount, threads):
        self.process = subprocess.Popen([binary, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.amount, self.rates = amount, []
        self.process.stdin.write(f"{what} {threads}\n")
        self.process.stdin.flush()

    def run(self):
        # One after the other without a word between, as PyTorch's are.
        self.process.stdin.write(f"{TURN}\n")
        self.process.stdin.flush()
        self.rates += [self.amount / float(seconds) / 1e9 for seconds in self.process.stdout.readline().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        return max(self.rates), statistics.median(self.rates)


def product(binary, name, shape, threads):
    m, n, k = shape
    return Ours(binary, f"{name} forward {m} {n} {k}", 2 * m * n * k, threads)


def limit(binary, name, threads):
    return Ours(binary, f"limit {name}", 1e9, threads)


def beside_torch(binary, threads, dtype, name, shape, rounds):
    m, n, k = shape
    x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    torch.nn.functional.linear(x, w)
    ours = product(binary, name, shape, threads)
    loop = limit(binary, "l2" if dtype is torch.bfloat16 else "f32", threads)
    theirs = []
    for _ in range(rounds):
        loop.run()
        ours.run()
        end = time.perf_counter() + TURN
        while (start := time.perf_counter()) < end:
            torch.nn.functional.linear(x, w)
            theirs.append(2 * m * n * k / (time.perf_counter() - start) / 1e9)
    (best, median), (most, usual) = ours.close(), loop.close()
    their_best, their_median = max(theirs), statistics.median(theirs)
    print(
        f"{f'{name} {m}x{n}x{k}, {threads} thread(s)':36} {best:8.1f} {median:8.1f} {their_best:8.1f} {their_median:8.1f}"
        f" {most:8.1f} {usual:8.1f}   {best / their_best:5.2f} {median / their_median:5.2f}"
        f"   {100 * best / most:5.1f} {100 * median / usual:5.1f}",
        flush=True,
    )


def scaling(binary, name, shape, rounds):
    """Two threads beside one, and the same of a loop that needs no memory."""
    loop = "registers" if name == "bf16" else "f32"
    lines = [product(binary, name, shape, threads) for threads in (1, 2)]
    lines += [limit(binary, loop, threads) for threads in (1, 2)]
    for _ in range(rounds):
        for line in lines:
            line.run()
    one, two, loop_one, loop_two = [line.close() for line in lines]
    own = [two[i] / one[i] for i in (0, 1)]
    registers = [loop_two[i] / loop_one[i] for i in (0, 1)]
    what = f"{name} {'x'.join(map(str, shape))}"
    print(
        f"{what:36} {own[0]:8.2f} {own[1]:8.2f} {registers[0]:8.2f} {registers[1]:8.2f}"
        f"   {own[0] / registers[0]:5.2f} {own[1] / registers[1]:5.2f}",
        flush=True,
    )


def main() -> None:
    binary = sys.argv[1] if len(sys.argv) > 1 else "target/release/examples/cpu_bench"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    work = [(torch.bfloat16, "bf16", shape) for shape in SHAPES]
    work += [(torch.float32, "f32", shape) for shape in SHAPES if shape[0] * shape[1] * shape[2] <= 2**33]
    print("GFLOP/s, best and median: ours, PyTorch's, the loop at the limit (bf16: tiles from L2, f32: registers);")
    print("then ours / PyTorch's, and percent of the limit")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype, name, shape in work:
            beside_torch(binary, threads, dtype, name, shape, rounds)
    print("Two threads / one, best and median: ours, the loop in registers, and the first over the second")
    for _, name, shape in work:
        scaling(binary, name, shape, rounds)


if __name__ == "__main__":
    main()
