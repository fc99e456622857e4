"""Processors to measure on: those on which tile instructions are fast at the moment.

On a virtual machine the tile unit of a processor may fall to a quarter of its speed for seconds to minutes, with nothing
else running, while vectors keep theirs or at least half of it. Whoever compares programs that use it differently has to know
which it was.
"""

import os
import pathlib
import shutil
import statistics
import subprocess


CALM = 0.8  # of the best rate of tiles: what counts as fast


def built(binary, parser):
    """Ends with what to do where the binary is not there."""
    if not shutil.which(binary):
        parser.error(f"{binary}: no such program; `cargo build --release -p zeroth-machine --example cpu_bench` builds it")


def fastest(binary, count, allowed):
    """The `count` of the `allowed` processors on which the loop out of the second-level cache is fastest; GFLOP/s of all."""
    rates = {}
    for processor in allowed:
        answer = subprocess.run(
            ["taskset", "-c", str(processor), binary, "serve"], input="limit l2 1\n0.1\n", capture_output=True, text=True, check=True
        )
        rates[processor] = 1 / statistics.median(float(seconds) for seconds in answer.stdout.split())
    order = sorted(rates, key=rates.get, reverse=True)
    return set(order[:count]), rates


def move(processes, processors):
    """Moves all threads of processes, which must be ours, to processors; what they start later is there, too."""
    for process in processes:
        for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), processors)
