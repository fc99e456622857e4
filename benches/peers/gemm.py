"""Our matrix products beside PyTorch's and the processor's limit, in turn on the same machine: best and median rates, and
their ratios; then how two threads scale, beside a loop that stays in registers.

Needs Python with torch, and `cargo build --release -p zeroth-machine --example cpu_bench` before.

    python benches/peers/gemm.py [path of the cpu_bench binary] [rounds]
    python benches/peers/gemm.py --fastest --rounds-in-all 60 target/release/examples/cpu_bench 12

A line that begins with "calm" repeats the one above it for the rounds in which the loop at the limit had 80 % of its best
before the round and after it: a machine that others use, or whose tile unit changes its speed, is then left out by what
neither side computes. Where its speed changes every second, shorter turns (--turn 0.05) find more of them. --fastest takes
the processors that are fastest by that loop before every line, and with --rounds-in-all a line goes on until as many rounds
were calm as are asked for, or so many were run.

Rows of x lie as each side has them in training: PyTorch's one after the other, ours a cache line apart. --apart gives PyTorch the
same layout, which it does not choose itself.

Products get new memory every few rounds (--same-memory): the same product by the same program differs by up to a fifth with the
pages that it happens to stand on.
"""

import argparse
import os
import statistics
import subprocess
import time

import processors
import torch

SAME_MEMORY = 3  # rounds
LINE = 64  # bytes
TURN = 0.25  # seconds, where none are given: in a few milliseconds even the limit's loop varies by a fifth
SHAPES = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 3072), (4096, 3072, 1024)]  # rows, outputs, inputs
ALLOWED = sorted(os.sched_getaffinity(0))


class Ours:
    """Something that our binary runs again and again while it has its turn."""

    def __init__(self, binary, what, amount, threads):
        self.process = subprocess.Popen([binary, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.amount = amount
        self.process.stdin.write(f"{what} {threads}\n")
        self.process.stdin.flush()

    def run(self, turn):
        """The rates of a turn of so many seconds."""
        # One after the other without a word between, as PyTorch's are.
        self.process.stdin.write(f"{turn}\n")
        self.process.stdin.flush()
        return [self.amount / float(seconds) / 1e9 for seconds in self.process.stdout.readline().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Torch:
    """The same product by PyTorch."""

    def __init__(self, dtype, shape, apart):
        m, n, k = shape
        between = LINE // dtype.itemsize if apart else 0
        self.x, self.w, self.amount = torch.randn(m, k + between).to(dtype)[:, :k], torch.randn(n, k).to(dtype), 2 * m * n * k
        torch.nn.functional.linear(self.x, self.w)

    def run(self, turn):
        rates, end = [], time.perf_counter() + turn
        while (start := time.perf_counter()) < end:
            torch.nn.functional.linear(self.x, self.w)
            rates.append(self.amount / (time.perf_counter() - start) / 1e9)
        return rates

    def close(self):
        pass


def product(binary, name, shape, threads):
    m, n, k = shape
    return Ours(binary, f"{name} forward {m} {n} {k}", 2 * m * n * k, threads)


def limit(binary, name, threads):
    return Ours(binary, f"limit {name}", 1e9, threads)


def take_turns(loops, make_products, options):
    """Rates by round and side, the loops at the limit first; and which rounds were calm by those.

    Each round lies between two turns of the loops: that before it, which counts as its own, and that before the next one.
    """

    def run(some):
        return [side.run(options.turn) for side in some]

    products = make_products()
    rounds, calm, before = [], [], run(loops)
    while len(rounds) < options.rounds or sum(calm) < options.rounds and len(rounds) < options.rounds_in_all:
        if rounds and len(rounds) % options.same_memory == 0:
            # New ones before the others go: memory that was just given back would be the same again.
            earlier, products = products, make_products()
            close(earlier)
        rounds.append([*before, *run(products)])
        before = run(loops)
        # By their medians: a burst of two milliseconds says nothing of a whole turn.
        turns = [[statistics.median(turn) for turn in turns[: len(loops)]] for turns in [*rounds, before]]
        best = [max(of_loop) for of_loop in zip(*turns)]
        steady = [all(rate >= processors.CALM * most for rate, most in zip(turn, best)) for turn in turns]
        calm = [start and end for start, end in zip(steady, steady[1:])]
    close([*loops, *products])
    return rounds, calm


def close(sides):
    for side in sides:
        side.close()


def best_and_median(rounds, side):
    rates = [rate for turns in rounds for rate in turns[side]]
    return max(rates), statistics.median(rates)


def tell(what, rounds, calm, line):
    """Prints the line of all rounds, and the one of the calm rounds where they are others and there are three."""
    print(f"{what:36} {line(rounds)}", flush=True)
    kept = [turns for turns, steady in zip(rounds, calm) if steady]
    if len(kept) < len(rounds):
        print(f"{f'calm, {len(kept)} of {len(rounds)} rounds':>36} {line(kept) if len(kept) > 2 else ''}", flush=True)


def settle(threads, options):
    """On the fastest processors of the moment, where that is asked for."""
    if options.fastest:
        chosen, _ = processors.fastest(options.binary, threads, ALLOWED)
        processors.move([os.getpid()], chosen)


def beside_torch(options, threads, dtype, name, shape):
    settle(threads, options)
    loop = limit(options.binary, "l2" if dtype is torch.bfloat16 else "f32", threads)

    def products():
        return [product(options.binary, name, shape, threads), Torch(dtype, shape, options.apart)]

    def line(rounds):
        (most, usual), (best, median), (their_best, their_median) = [best_and_median(rounds, side) for side in range(3)]
        return (
            f"{best:8.1f} {median:8.1f} {their_best:8.1f} {their_median:8.1f} {most:8.1f} {usual:8.1f}"
            f"   {best / their_best:5.2f} {median / their_median:5.2f}   {100 * best / most:5.1f} {100 * median / usual:5.1f}"
        )

    rounds, calm = take_turns([loop], products, options)
    tell(f"{name} {'x'.join(map(str, shape))}, {threads} thread(s)", rounds, calm, line)


def scaling(options, name, shape):
    """Two threads beside one, and the same of a loop that needs no memory."""
    settle(2, options)
    loop = "registers" if name == "bf16" else "f32"
    loops = [limit(options.binary, loop, threads) for threads in (1, 2)]

    def products():
        return [product(options.binary, name, shape, threads) for threads in (1, 2)]

    def line(rounds):
        loop_one, loop_two, one, two = [best_and_median(rounds, side) for side in range(4)]
        own = [two[i] / one[i] for i in (0, 1)]
        registers = [loop_two[i] / loop_one[i] for i in (0, 1)]
        return (
            f"{own[0]:8.2f} {own[1]:8.2f} {registers[0]:8.2f} {registers[1]:8.2f}"
            f"   {own[0] / registers[0]:5.2f} {own[1] / registers[1]:5.2f}"
        )

    rounds, calm = take_turns(loops, products, options)
    tell(f"{name} {'x'.join(map(str, shape))}", rounds, calm, line)


def shape_of(text):
    """Three numbers, as lines name them."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"rows, outputs and inputs, as 1024x1024x3072, not {text!r}")
    return tuple(int(size) for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", nargs="?", default="target/release/examples/cpu_bench", help="the cpu_bench binary")
    parser.add_argument("rounds", nargs="?", type=int, default=12)
    parser.add_argument("--rounds-in-all", type=int, default=0, help="go on until `rounds` were calm, at most for so many")
    parser.add_argument("--turn", type=float, default=TURN, help=f"seconds of one side before the other has its turn ({TURN})")
    parser.add_argument(
        "--same-memory", type=int, default=SAME_MEMORY, help=f"rounds before products get new memory ({SAME_MEMORY})"
    )
    parser.add_argument("--apart", action="store_true", help="PyTorch's x with its rows a cache line apart, as steps of ours have them")
    parser.add_argument("--fastest", action="store_true", help="take the processors that are fastest before every line")
    parser.add_argument("--shape", type=shape_of, action="append", metavar="MxNxK", help="rows, outputs, inputs; may be given again")
    parser.add_argument("--only", choices=["1", "2", "scaling"], action="append", help="these lines; may be given again")
    options = parser.parse_args()
    processors.built(options.binary, parser)
    if options.rounds < 1:
        parser.error(f"rounds: at least 1, not {options.rounds}")
    if options.same_memory < 1:
        parser.error(f"--same-memory: rounds, at least 1, not {options.same_memory}")
    if not 0 < options.turn < float("inf"):
        parser.error(f"--turn: seconds, more than 0, not {options.turn}")
    wanted = options.only or ["1", "2", "scaling"]
    shapes = options.shape or SHAPES
    work = [(torch.bfloat16, "bf16", shape) for shape in shapes]
    work += [(torch.float32, "f32", shape) for shape in shapes if shape[0] * shape[1] * shape[2] <= 2**33]
    print(f"PyTorch {torch.__version__}. GFLOP/s, best and median: ours, PyTorch's, the loop at the limit (bf16: tiles from L2,")
    print("f32: registers); then ours / PyTorch's, and percent of the limit")
    for threads in (threads for threads in (1, 2) if str(threads) in wanted):
        torch.set_num_threads(threads)
        for dtype, name, shape in work:
            beside_torch(options, threads, dtype, name, shape)
    if "scaling" in wanted:
        print("Two threads / one, best and median: ours, the loop in registers, and the first over the second")
        for _, name, shape in work:
            scaling(options, name, shape)


if __name__ == "__main__":
    main()
