"""Compares training steps of two binaries of zeroth, such as those before and after a change.

    python benches/peers/paired.py BEFORE AFTER --size m50 --rounds 20 --csv pairs.csv

Both train the same model on the same random tokens: 2 ranks of 1 thread, ZeRO-3, bf16. A round is one turn of each, in an
order that alternates; its ratio is that of the medians of their steps, above 1 where AFTER is faster. Prints the median
ratio and its quartiles, and tokens per second of both. Needs Linux and no package.
"""

import argparse
import pathlib
import statistics
import tempfile
import types

import step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--size", choices=step.SIZES, default="m50")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--side", default="zeroth-3", help="a zeroth side of step.py")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per turn")
    parser.add_argument("--csv", help="write the time of every step to this file")
    options = parser.parse_args()
    tokens = step.RANKS * step.SIZES[options.size][7] * step.LENGTH
    rows, ratios, speeds = ["round,binary,step,seconds"], [], {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        step.prepare(folder, options.size)
        sides = {
            name: step.Ours(options.side, types.SimpleNamespace(
                zeroth=binary, size=options.size, dtype=options.dtype, grad_accum_dtype=None, recompute=None), folder)
            for name, binary in [("before", options.before), ("after", options.after)]
        }
        for round_ in range(options.rounds):
            medians = {}
            for name in sorted(sides, reverse=round_ % 2 == 0):
                times, _ = sides[name].run(options.steps)
                medians[name] = statistics.median(times)
                speeds[name] += [tokens / seconds for seconds in times]
                rows += [f"{round_},{name},{i},{seconds:.6f}" for i, seconds in enumerate(times)]
            ratios.append(medians["before"] / medians["after"])
            print(f"round {round_}: {ratios[-1]:.3f}", flush=True)
    if options.csv:
        pathlib.Path(options.csv).write_text("\n".join(rows) + "\n")
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(f"{options.size} {options.dtype} {options.side}: median of {len(ratios)} ratios {middle:.3f}, quartiles {low:.3f} to {high:.3f}")
    for name, all_ in speeds.items():
        print(f"  {name}: {statistics.median(all_):,.0f} tokens/s in the median, {max(all_):,.0f} at best")


if __name__ == "__main__":
    main()
