"""Compares our matrix multiplications with PyTorch's and with the limit of the CPU, interleaved on the same machine.

Prints best and median rates and their ratios, then the scaling from one thread to two beside a loop that stays in registers.
Needs a Python with torch, and `cargo build --release -p zeroth-machine --example cpu_bench` before.

    python benches/peers/gemm.py [path of the cpu_bench binary] [rounds]
    python benches/peers/gemm.py --fastest-cores --max-rounds 60 target/release/examples/cpu_bench 12

A line that begins with "quiet" repeats the line above for the rounds in which the limit loop kept 80 % of its best rate
before and after the round. This filters out rounds disturbed by neighbours or by a slow tile unit, by a measurement that is
independent of both sides. Where the speed changes every second, shorter bursts (--burst 0.05) find more quiet rounds.
--fastest-cores pins each line to the cores on which that loop is fastest. With --max-rounds, a line continues until the
requested number of rounds were quiet, or until that many were run.

Rows of x have the layout that each side uses in training: PyTorch's are contiguous, ours are padded by a cache line.
--pad-rows gives PyTorch the padded layout, which it does not choose itself.

Operands are reallocated every few rounds (--rounds-per-allocation): the same matmul by the same program differs by up to a
fifth with the physical pages of its operands.
"""

import argparse
import os
import statistics
import subprocess
import time

import cores
import torch

ROUNDS_PER_ALLOCATION = 3  # rounds
CACHE_LINE = 64  # bytes
BURST = 0.25  # seconds; bursts of a few milliseconds vary by a fifth even in the limit loop
SHAPES = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 3072), (4096, 3072, 1024)]  # rows, outputs, inputs
ALLOWED = sorted(os.sched_getaffinity(0))


class Ours:
    """A workload that the cpu_bench binary repeats during its bursts."""

    def __init__(self, binary, what, amount, threads):
        self.process = subprocess.Popen([binary, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.amount = amount
        self.process.stdin.write(f"{what} {threads}\n")
        self.process.stdin.flush()

    def run(self, seconds):
        """Returns the rates of a burst, in GFLOP/s."""
        # The binary runs back to back without talking to us, as PyTorch does below.
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return [self.amount / float(seconds) / 1e9 for seconds in self.process.stdout.readline().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Torch:
    """The same matmul by PyTorch."""

    def __init__(self, dtype, shape, padded):
        m, n, k = shape
        padding = CACHE_LINE // dtype.itemsize if padded else 0
        self.x, self.w, self.amount = torch.randn(m, k + padding).to(dtype)[:, :k], torch.randn(n, k).to(dtype), 2 * m * n * k
        torch.nn.functional.linear(self.x, self.w)

    def run(self, seconds):
        rates, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            torch.nn.functional.linear(self.x, self.w)
            rates.append(self.amount / (time.perf_counter() - start) / 1e9)
        return rates

    def close(self):
        pass


def matmul(binary, name, shape, threads):
    m, n, k = shape
    return Ours(binary, f"{name} forward {m} {n} {k}", 2 * m * n * k, threads)


def limit(binary, name, threads):
    return Ours(binary, f"limit {name}", 1e9, threads)


def interleave(loops, make_matmuls, options):
    """Returns rates by round and side, limit loops first, and which rounds were quiet.

    Each round lies between two bursts of the limit loops: the one before it, recorded with it, and the one before the next.
    """

    def run(some):
        return [side.run(options.burst) for side in some]

    matmuls = make_matmuls()
    rounds, quiet, before = [], [], run(loops)
    while len(rounds) < options.rounds or sum(quiet) < options.rounds and len(rounds) < options.max_rounds:
        if rounds and len(rounds) % options.rounds_per_allocation == 0:
            # Allocate before freeing: memory that was just freed would be handed out again.
            earlier, matmuls = matmuls, make_matmuls()
            close(earlier)
        rounds.append([*before, *run(matmuls)])
        before = run(loops)
        # By medians: one repetition of two milliseconds says nothing about a whole burst.
        turns = [[statistics.median(turn) for turn in turns[: len(loops)]] for turns in [*rounds, before]]
        best = [max(of_loop) for of_loop in zip(*turns)]
        steady = [all(rate >= cores.QUIET * most for rate, most in zip(turn, best)) for turn in turns]
        quiet = [start and end for start, end in zip(steady, steady[1:])]
    close([*loops, *matmuls])
    return rounds, quiet


def close(sides):
    for side in sides:
        side.close()


def best_and_median(rounds, side):
    rates = [rate for turns in rounds for rate in turns[side]]
    return max(rates), statistics.median(rates)


def print_line(what, rounds, quiet, line):
    """Prints the line of all rounds, and that of the quiet rounds if they differ and there are at least three."""
    print(f"{what:36} {line(rounds)}", flush=True)
    kept = [turns for turns, steady in zip(rounds, quiet) if steady]
    if len(kept) < len(rounds):
        print(f"{f'quiet, {len(kept)} of {len(rounds)} rounds':>36} {line(kept) if len(kept) > 2 else ''}", flush=True)


def pin_to_fastest(threads, options):
    """Pins this process to the cores that are fastest now, with --fastest-cores."""
    if options.fastest_cores:
        chosen, _ = cores.fastest(options.binary, threads, ALLOWED)
        cores.pin([os.getpid()], chosen)


def beside_torch(options, threads, dtype, name, shape):
    pin_to_fastest(threads, options)
    loop = limit(options.binary, "l2" if dtype is torch.bfloat16 else "f32", threads)

    def matmuls():
        return [matmul(options.binary, name, shape, threads), Torch(dtype, shape, options.pad_rows)]

    def line(rounds):
        (most, usual), (best, median), (their_best, their_median) = [best_and_median(rounds, side) for side in range(3)]
        return (
            f"{best:8.1f} {median:8.1f} {their_best:8.1f} {their_median:8.1f} {most:8.1f} {usual:8.1f}"
            f"   {best / their_best:5.2f} {median / their_median:5.2f}   {100 * best / most:5.1f} {100 * median / usual:5.1f}"
        )

    rounds, quiet = interleave([loop], matmuls, options)
    print_line(f"{name} {'x'.join(map(str, shape))}, {threads} thread(s)", rounds, quiet, line)


def scaling(options, name, shape):
    """Two threads over one, and the same for a loop that touches no memory."""
    pin_to_fastest(2, options)
    loop = "registers" if name == "bf16" else "f32"
    loops = [limit(options.binary, loop, threads) for threads in (1, 2)]

    def matmuls():
        return [matmul(options.binary, name, shape, threads) for threads in (1, 2)]

    def line(rounds):
        loop_one, loop_two, one, two = [best_and_median(rounds, side) for side in range(4)]
        own = [two[i] / one[i] for i in (0, 1)]
        registers = [loop_two[i] / loop_one[i] for i in (0, 1)]
        return (
            f"{own[0]:8.2f} {own[1]:8.2f} {registers[0]:8.2f} {registers[1]:8.2f}"
            f"   {own[0] / registers[0]:5.2f} {own[1] / registers[1]:5.2f}"
        )

    rounds, quiet = interleave(loops, matmuls, options)
    print_line(f"{name} {'x'.join(map(str, shape))}", rounds, quiet, line)


def shape_of(text):
    """Parses a shape as the lines print it."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"rows, outputs and inputs, as 1024x1024x3072, not {text!r}")
    return tuple(int(size) for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", nargs="?", default="target/release/examples/cpu_bench", help="the cpu_bench binary")
    parser.add_argument("rounds", nargs="?", type=int, default=12)
    parser.add_argument("--max-rounds", type=int, default=0, help="continue until `rounds` were quiet, at most this many")
    parser.add_argument("--burst", type=float, default=BURST, help=f"seconds of a burst of one side ({BURST})")
    parser.add_argument(
        "--rounds-per-allocation", type=int, default=ROUNDS_PER_ALLOCATION, help=f"rounds before operands are reallocated ({ROUNDS_PER_ALLOCATION})"
    )
    parser.add_argument("--pad-rows", action="store_true", help="pad the rows of PyTorch's x by a cache line, as ours are")
    parser.add_argument("--fastest-cores", action="store_true", help="pin every line to the cores that are fastest before it")
    parser.add_argument("--shape", type=shape_of, action="append", metavar="MxNxK", help="rows, outputs, inputs; repeatable")
    parser.add_argument("--only", choices=["1", "2", "scaling"], action="append", help="only these lines; repeatable")
    options = parser.parse_args()
    cores.require_binary(options.binary, parser)
    if options.rounds < 1:
        parser.error(f"rounds: at least 1, not {options.rounds}")
    if options.rounds_per_allocation < 1:
        parser.error(f"--rounds-per-allocation: rounds, at least 1, not {options.rounds_per_allocation}")
    if not 0 < options.burst < float("inf"):
        parser.error(f"--burst: seconds, more than 0, not {options.burst}")
    wanted = options.only or ["1", "2", "scaling"]
    shapes = options.shape or SHAPES
    work = [(torch.bfloat16, "bf16", shape) for shape in shapes]
    work += [(torch.float32, "f32", shape) for shape in shapes if shape[0] * shape[1] * shape[2] <= 2**33]
    print(f"PyTorch {torch.__version__}. GFLOP/s, best and median: ours, PyTorch's, the limit loop (bf16: AMX from L2,")
    print("f32: registers); then ours / PyTorch's, and percent of the limit")
    for threads in (threads for threads in (1, 2) if str(threads) in wanted):
        torch.set_num_threads(threads)
        for dtype, name, shape in work:
            beside_torch(options, threads, dtype, name, shape)
    if "scaling" in wanted:
        print("Two threads / one, best and median: ours, the loop in registers, and their ratio")
        for _, name, shape in work:
            scaling(options, name, shape)


if __name__ == "__main__":
    main()
