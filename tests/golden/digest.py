"""Digest of training results: `python tests/golden/digest.py BINARY [--device cpu|cuda] [--jobs N] [--models NAME...]`.

Trains every golden model at stages 0 to 3 on 1, 2 and 3 ranks, with and without offload and recompute, in fp32 and bf16, and
prints one line a run: its name and the SHA-256 of its losses, gradient norms and final weights. The last line is the digest of
all of them. A change that must keep bits gives the same lines before and after. Run it from the root of the repository.
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile

GOLDEN = os.path.dirname(os.path.abspath(__file__))
HOST = {"device": "cpu"}
OFFLOAD = {"none": {}, "optimizer": {"offload_optimizer": HOST},
           "both": {"offload_optimizer": HOST, "offload_param": HOST}}
STAGES = {0: ["none"], 1: ["none", "optimizer"], 2: ["none", "optimizer"], 3: ["none", "optimizer", "both"]}


def cases(only=()):
    models = sorted(name for name in os.listdir(GOLDEN) if os.path.exists(f"{GOLDEN}/{name}/data.jsonl"))
    # `train` has no way to freeze parameters: it would train a half-frozen model wholly.
    models = [name for name in models if not name.endswith("-half-frozen")]
    models = [name for name in models if not only or name in only]
    for model, precision, ranks, recompute in itertools.product(models, ("fp32", "bf16"), (1, 2, 3), ("none", "block")):
        for stage, offloads in STAGES.items():
            for offload in offloads:
                yield model, precision, ranks, stage, offload, recompute


def digest(options, case):
    model, precision, ranks, stage, offload, recompute = case
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": True, **OFFLOAD[offload]}
    config = {"zero_optimization": zero, "zeroth": {"recompute": recompute}}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            options.binary, "train", "--model", f"{GOLDEN}/{model}", "--data", f"{GOLDEN}/{model}/data.jsonl",
            "--deepspeed", json.dumps(config), "--ranks", str(ranks), "--per-device-train-batch-size", "1",
            "--gradient-accumulation-steps", "2", "--max-steps", str(options.steps), "--learning-rate", "1e-3",
            "--warmup-steps", "1", "--shuffle", "false", "--max-length", "40", "--save-steps", "0",
            "--device", options.device, f"--{precision}", "--output", f"{folder}/run"]
        environment = {**os.environ, "ZEROTH_CACHE": f"{folder}/cache"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            return case, f"FAILED with {done.returncode}: {done.stderr[-300:]}"
        found = hashlib.sha256()
        with open(f"{folder}/run/metrics.jsonl") as lines:
            for line in map(json.loads, lines):
                found.update(f"{line['loss']!r} {line['grad_norm']!r}\n".encode())
        with open(f"{folder}/run/model/model.safetensors", "rb") as weights:
            found.update(weights.read())
        return case, found.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=(), help="these golden models only")
    options = parser.parse_args()
    total, failed, count = hashlib.sha256(), 0, 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for case, found in pool.map(lambda case: digest(options, case), cases(options.models)):
            line = "{} {} ranks={} stage={} offload={} recompute={}".format(*case) + f" {found}"
            print(line, flush=True)
            total.update(line.encode())
            failed += found.startswith("FAILED")
            count += 1
    print(f"{count} runs on {options.device}, {failed} failed, digest {total.hexdigest()}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
