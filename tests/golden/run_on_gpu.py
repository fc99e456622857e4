"""Golden runs and same bits on a GPU: `python tests/golden/run_on_gpu.py [BINARY]` from the root of the repository.

Needs a GPU and a release build (`cargo build --release`). Trains every golden model in fp32 at stages 0 and 3 with one rank and
two ranks on one card, and one model with offload and recomputation, and compares the losses with PyTorch's (1e-3); then
compares programs with each other bit by bit in bf16 and fp16, and the processor with the card, at last over 200 steps of a
model of 12 layers in bf16 (1 %). Exit 1 where one is wrong.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

GOLDEN = "tests/golden"
BINARY = sys.argv[1] if len(sys.argv) > 1 else "target/release/zeroth"
HOST = {"device": "cpu"}
OFFLOAD = {"none": {}, "optimizer": {"offload_optimizer": HOST}, "both": {"offload_optimizer": HOST, "offload_param": HOST}}


def train(model, zero, recompute, ranks, accumulation, micro_batch, flags, output):
    config = {"zero_optimization": {"overlap_comm": True, **zero}, "zeroth": {"recompute": recompute}}
    command = [
        BINARY, "train", "--model", f"{GOLDEN}/{model}", "--data", f"{GOLDEN}/{model}/data.jsonl",
        "--deepspeed", json.dumps(config), "--ranks", str(ranks), "--per-device-train-batch-size", str(micro_batch),
        "--gradient-accumulation-steps", str(accumulation), "--max-steps", "20", "--learning-rate", "1e-3",
        "--warmup-steps", "3", "--shuffle", "false", "--max-length", "40", "--output", output,
        "--overwrite-output-dir", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print("FAILED", " ".join(command), done.stderr[-600:])
        return None
    with open(f"{output}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def golden(output):
    models = sorted(name for name in os.listdir(GOLDEN) if os.path.isdir(f"{GOLDEN}/{name}"))
    cases = [(model, stage, *split, "none", "none")
             for model in models for stage in (0, 3) for split in ((1, 1, 4), (1, 4, 1), (2, 1, 2))]
    cases += [("qwen3-tied", stage, *split, offload, recompute)
              for stage in (1, 2, 3) for split in ((1, 1, 4), (2, 1, 2)) for offload in ("optimizer", "both")
              for recompute in ("none", "block")]
    cases += [("qwen2-yarn-tied", 3, 2, 1, 2, "both", "attention"),
              ("llama-biases-tied", 2, 2, 1, 2, "optimizer", "norm_swiglu")]
    wrong, worst, began = 0, 0.0, time.time()
    for model, stage, ranks, accumulation, micro_batch, offload, recompute in cases:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **OFFLOAD[offload]}
        found = train(model, zero, recompute, ranks, accumulation, micro_batch, ["--device", "cuda", "--fp32"], output)
        if found is None:
            wrong += 1
            continue
        with open(f"{GOLDEN}/{model}/steps.json") as file:
            runs = json.load(file)["runs"]
        batch = ranks * accumulation * micro_batch
        expected = next(run for run in runs if run["name"] == f"batch-{batch}-cosine")["loss"]
        apart = max(abs(line["loss"] - loss) for line, loss in zip(found, expected))
        worst = max(worst, apart)
        if not apart < 1e-3:
            wrong += 1
            print("WRONG", model, stage, ranks, accumulation, offload, recompute, apart)
    print(f"{len(cases)} golden runs, {wrong} wrong, losses at most {worst:.1e} apart, {time.time() - began:.0f} s")
    return wrong


def same_bits(output):
    programs = [(0, "none", "none"), (1, "none", "none"), (2, "optimizer", "none"), (3, "none", "block"),
                (3, "both", "none"), (3, "both", "block")]
    wrong = 0
    for precision in ("--bf16", "--fp16"):
        for ranks in (1, 2):
            seen = set()
            for stage, offload, recompute in programs:
                flags = ["--device", "cuda", precision]
                found = train("qwen3-tied", {"stage": stage, **OFFLOAD[offload]}, recompute, ranks, 1, 4 // ranks, flags,
                              output)
                seen.add(found and tuple((line["loss"], line["grad_norm"]) for line in found))
            wrong += len(seen) - 1 + (None in seen)
            print(f"{precision[2:]}, {ranks} rank(s): {len(programs)} programs, {len(seen)} training(s) among them")
    return wrong


def both_devices(output):
    found = [train("qwen3-tied", {"stage": 3}, "none", 1, 1, 4, ["--device", device, "--bf16"], output)
             for device in ("cpu", "cuda")]
    if None in found:
        return 1
    apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(*found))
    print(f"bf16, processor beside card: losses at most {apart:.1e} apart, relative")
    return int(apart > 0.01)


def curve(output):
    """200 steps of a model of 12 layers in bf16, on the processor and on the card: the curves stay within 1 %. A curve is
    the mean of ten steps: two roundings make two trainings, whose batches of eight rows scatter by more."""
    example, model = "examples/gsm8k", output + "-model"
    made = [BINARY, "init", "--family", "qwen3", "--hidden", "256", "--intermediate-size", "768", "--layers", "12",
            "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--vocab-size", "2048", "--tied", "--output", model]
    subprocess.run(made, check=True, capture_output=True)
    for name in os.listdir(f"{example}/tiny-qwen3"):
        if name.startswith("tokenizer"):
            shutil.copy(f"{example}/tiny-qwen3/{name}", model)
    losses = []
    for device in ("cpu", "cuda"):
        command = [
            BINARY, "train", "--model", model, "--data", f"{example}/train.jsonl", "--deepspeed", "zero3", "--bf16",
            "--device", device, "--ranks", "1", "--per-device-train-batch-size", "8", "--max-length", "256",
            "--max-steps", "200", "--learning-rate", "3e-4", "--warmup-steps", "20", "--save-steps", "0",
            "--output", output, "--overwrite-output-dir"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            print("FAILED", " ".join(command), done.stderr[-600:])
            return 1
        with open(f"{output}/metrics.jsonl") as lines:
            losses.append([json.loads(line)["loss"] for line in lines])
    single = max(abs(a / b - 1) for a, b in zip(*losses))
    means = [[sum(run[at:at + 10]) / 10 for at in range(len(run) - 9)] for run in losses]
    apart = max(abs(a / b - 1) for a, b in zip(*means))
    print(f"12 layers, bf16, {len(losses[0])} steps: loss {losses[1][0]:.4f} → {losses[1][-1]:.4f}, curves of processor and "
          f"card at most {apart:.1e} apart, relative; single steps {single:.1e}")
    return int(apart > 0.01)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        parts = (golden, same_bits, both_devices, curve)
        sys.exit(min(1, sum(part(folder + "/run") for part in parts)))
