"""Chooses CPU cores to measure on: those whose AMX tile unit is fast at the moment.

On a virtual machine the tile unit of a core may drop to a quarter of its speed for seconds to minutes with nothing else
running, while vector code keeps its speed or at least half of it. A comparison of programs that use the tile unit to
different degrees has to record which mode it ran in.
"""

import os
import pathlib
import shutil
import statistics
import subprocess


QUIET = 0.8  # share of the best tile rate from which a core counts as fast


def require_binary(binary, parser):
    """Exits with the build command if the binary is missing."""
    if not shutil.which(binary):
        parser.error(f"{binary}: no such program; `cargo build --release -p zeroth-machine --example cpu_bench` builds it")


def fastest(binary, count, allowed):
    """Returns the `count` cores of `allowed` with the fastest AMX loop out of L2, and the GFLOP/s of all of them."""
    rates = {}
    for core in allowed:
        answer = subprocess.run(
            ["taskset", "-c", str(core), binary, "serve"], input="limit l2 1\n0.1\n", capture_output=True, text=True, check=True
        )
        rates[core] = 1 / statistics.median(float(seconds) for seconds in answer.stdout.split())
    order = sorted(rates, key=rates.get, reverse=True)
    return set(order[:count]), rates


def pin(processes, cores):
    """Pins all threads of our own processes to cores; threads and processes they start later inherit it."""
    for process in processes:
        for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
