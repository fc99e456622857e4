"""Compares `zeroth config check` on a file of 200 keys with DeepSpeed's own parsing of the same file.

    python benches/config-check/run.py

Needs a Python with deepspeed (and the torch it imports) in an environment of its own. DeepSpeed 0.19.8 accepts the file.
Rounds are interleaved because machines are noisy. Both sides are measured as whole processes and inside one process, without
start-up. DeepSpeed's side is the parse of the text (json or hjson) plus the DeepSpeedConfig object: it validates values but
has no verdict on keys without effect.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FILE = HERE / "config-200.json"
ROUNDS = 7

PEER = """
import json, time, sys, logging, statistics
logging.disable(logging.CRITICAL)
import hjson
from deepspeed.runtime.config import DeepSpeedConfig
text = open(sys.argv[1]).read()
def timed(parse):
    rounds = []
    for _ in range(30):
        start = time.perf_counter()
        DeepSpeedConfig(parse(text))
        rounds.append((time.perf_counter() - start) * 1e6)
    return {"best_us": min(rounds), "median_us": statistics.median(rounds)}
print("FIGURES", json.dumps({"json": timed(json.loads), "hjson": timed(lambda t: json.loads(hjson.dumpsJSON(hjson.loads(t))))}))
"""


def wall(command, **options):
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return (time.perf_counter() - start) * 1e3, done


def summary(values):
    return f"best {min(values):9.2f}   median {statistics.median(values):9.2f}"


def main():
    build = ["cargo", "build", "--release", "-q", "-p", "zeroth-cli"]
    subprocess.run(build, cwd=ROOT, check=True)
    ours = [str(ROOT / "target/release/zeroth"), "config", "check", str(FILE)]
    environment = dict(os.environ, DS_ACCELERATOR="cpu")
    our_process, peer_process, our_inside, peer_json, peer_hjson = [], [], [], [], []
    for _ in range(ROUNDS):
        for _ in range(20):
            milliseconds, done = wall(ours)
            assert done.returncode == 0, done.stdout + done.stderr
            our_process.append(milliseconds)
        _, done = wall(["cargo", "bench", "-q", "-p", "zeroth-config", "--bench", "config_check"], cwd=ROOT)
        our_inside.append(json.loads(done.stdout.strip().splitlines()[-1]))
        milliseconds, done = wall([sys.executable, "-c", PEER, str(FILE)], env=environment)
        figures = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
        assert figures, done.stdout + done.stderr
        figures = json.loads(figures[-1].split(" ", 1)[1])
        # The thirty rounds inside are not part of the process time.
        rounds_ms = 30 * (figures["json"]["median_us"] + figures["hjson"]["median_us"]) / 1e3
        peer_process.append(milliseconds - rounds_ms)
        peer_json.append(figures["json"])
        peer_hjson.append(figures["hjson"])
    print(f"{FILE.name}: 200 keys, {FILE.stat().st_size} bytes, {ROUNDS} interleaved rounds")
    print(f"whole process, ms    zeroth config check          {summary(our_process)}")
    print(f"                     python + DeepSpeedConfig     {summary(peer_process)}")
    best = lambda rows: min(row["best_us"] for row in rows)
    median = lambda rows: statistics.median(row["median_us"] for row in rows)
    for name, rows in [("zeroth read + check", our_inside), ("json + DeepSpeedConfig", peer_json), ("hjson + DeepSpeedConfig", peer_hjson)]:
        print(f"inside, µs           {name:28} best {best(rows):9.1f}   median {median(rows):9.1f}")
    print(f"ratio inside, json: best {best(peer_json) / best(our_inside):.0f}x, median {median(peer_json) / median(our_inside):.0f}x")


if __name__ == "__main__":
    main()
