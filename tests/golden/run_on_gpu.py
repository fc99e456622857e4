"""Tests of training on a GPU: `python tests/golden/run_on_gpu.py [BINARY [PART...]]` from the root of the repository.

Needs a GPU and a release build (`cargo build --release`). PART selects some of these; the default is all:

golden        every golden model in fp32 at ZeRO stages 0 and 3, with one rank and with two ranks on one GPU, and one model with
              offload and recomputation: losses within 1e-5 of PyTorch's
same_bits     programs with different stages, offload and recomputation are bitwise equal, in bf16 and fp16
attention     the same with attention forward by cuDNN
both_devices  losses on GPU and CPU in bf16 within 1 %
curve         the same over 200 steps of a model with 12 layers
transports    collectives by CUDA IPC and through the host are bitwise equal
lost_rank     a killed and a stopped rank end the job with an error that names the rank

Exits with 1 if one fails.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

GOLDEN = "tests/golden"
BINARY = sys.argv[1] if len(sys.argv) > 1 else "target/release/zeroth"
HOST = {"device": "cpu"}
# Largest error of a golden loss; 8e-7 has been observed.
LOSS_BOUND = 1e-5
OFFLOAD = {"none": {}, "optimizer": {"offload_optimizer": HOST}, "both": {"offload_optimizer": HOST, "offload_param": HOST}}


def train_command(model, zero, recompute, ranks, accumulation, micro_batch, flags, output, steps=20):
    config = {"zero_optimization": {"overlap_comm": True, **zero}, "zeroth": {"recompute": recompute, "stall_seconds": 5}}
    return [
        BINARY, "train", "--model", f"{GOLDEN}/{model}", "--data", f"{GOLDEN}/{model}/data.jsonl",
        "--deepspeed", json.dumps(config), "--ranks", str(ranks), "--per-device-train-batch-size", str(micro_batch),
        "--gradient-accumulation-steps", str(accumulation), "--max-steps", str(steps), "--learning-rate", "1e-3",
        "--warmup-steps", "3", "--shuffle", "false", "--max-length", "40", "--output", output,
        "--overwrite-output-dir", *flags]


def train(model, zero, recompute, ranks, accumulation, micro_batch, flags, output, variables=None):
    command = train_command(model, zero, recompute, ranks, accumulation, micro_batch, flags, output)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(variables or {})})
    if done.returncode != 0:
        print("FAILED", " ".join(command), done.stderr[-600:])
        return None
    with open(f"{output}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def golden(output):
    models = sorted(name for name in os.listdir(GOLDEN) if os.path.exists(f"{GOLDEN}/{name}/data.jsonl"))
    # `train` has no way to freeze parameters; the example half_frozen_on_gpu of zeroth-engine trains those.
    models = [name for name in models if not name.endswith("-half-frozen")]
    cases = [(model, stage, *split, "none", "none")
             for model in models for stage in (0, 3) for split in ((1, 1, 4), (1, 4, 1), (2, 1, 2))]
    cases += [("qwen3-tied", stage, *split, offload, recompute)
              for stage in (1, 2, 3) for split in ((1, 1, 4), (2, 1, 2)) for offload in ("optimizer", "both")
              for recompute in ("none", "block")]
    cases += [("qwen2-yarn-tied", 3, 2, 1, 2, "both", "attention"),
              ("llama-biases-tied", 2, 2, 1, 2, "optimizer", "norm_swiglu")]
    failures, worst, began = 0, 0.0, time.time()
    for model, stage, ranks, accumulation, micro_batch, offload, recompute in cases:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **OFFLOAD[offload]}
        found = train(model, zero, recompute, ranks, accumulation, micro_batch, ["--device", "cuda", "--fp32"], output)
        if found is None:
            failures += 1
            continue
        with open(f"{GOLDEN}/{model}/steps.json") as file:
            runs = json.load(file)["runs"]
        batch = ranks * accumulation * micro_batch
        expected = next(run for run in runs if run["name"] == f"batch-{batch}-cosine")["loss"]
        error = max(abs(line["loss"] - loss) for line, loss in zip(found, expected))
        worst = max(worst, error)
        if not error < LOSS_BOUND:
            failures += 1
            print("FAILED", model, stage, ranks, accumulation, offload, recompute, error)
    print(f"{len(cases)} golden runs, {failures} failed, largest loss error {worst:.1e}, {time.time() - began:.0f} s")
    return failures


def same_bits(output):
    programs = [(0, "none", "none"), (1, "none", "none"), (2, "optimizer", "none"), (3, "none", "block"),
                (3, "both", "none"), (3, "both", "block")]
    failures = 0
    for precision in ("--bf16", "--fp16"):
        for ranks in (1, 2):
            seen = set()
            for stage, offload, recompute in programs:
                flags = ["--device", "cuda", precision]
                found = train("qwen3-tied", {"stage": stage, **OFFLOAD[offload]}, recompute, ranks, 1, 4 // ranks, flags,
                              output)
                seen.add(found and tuple((line["loss"], line["grad_norm"]) for line in found))
            failures += len(seen) - 1 + (None in seen)
            print(f"{precision[2:]}, {ranks} rank(s): {len(programs)} programs, {len(seen)} distinct result(s)")
    return failures


def both_devices(output):
    found = [train("qwen3-tied", {"stage": 3}, "none", 1, 1, 4, ["--device", device, "--bf16"], output)
             for device in ("cpu", "cuda")]
    if None in found:
        return 1
    error = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(*found))
    print(f"bf16, CPU and GPU: largest relative difference of losses {error:.1e}")
    return int(error > 0.01)


def curve(output):
    """200 steps of a model with 12 layers in bf16 on CPU and GPU: loss curves within 1 %. Curves are means over ten steps,
    because losses of single batches of eight rows scatter by more."""
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
    error = max(abs(a / b - 1) for a, b in zip(*means))
    print(f"12 layers, bf16, {len(losses[0])} steps: loss {losses[1][0]:.4f} → {losses[1][-1]:.4f}, largest relative difference "
          f"of CPU and GPU {error:.1e} (means of ten steps), {single:.1e} (single steps)")
    return int(error > 0.01)


def attention(output):
    """Rows of equal length, attention forward by cuDNN: all programs bitwise equal, losses within 1 % of our own kernel."""
    model, data = output + "-attention", output + "-attention.jsonl"
    made = [BINARY, "init", "--family", "qwen3", "--hidden", "128", "--intermediate-size", "256", "--layers", "3",
            "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--vocab-size", "512", "--tied", "--output", model]
    subprocess.run(made, check=True, capture_output=True)
    with open(data, "w") as file:
        for row in range(80):
            file.write(json.dumps({"input_ids": [(row * row + 7 * at * (row % 5 + 1)) % 512 for at in range(192)]}) + "\n")
    failures = 0
    for ranks in (1, 2):
        seen, losses = {}, {}
        for backend in ("cudnn", "own"):
            for stage, offload, recompute in [(0, "none", "none"), (2, "none", "none"), (3, "both", "block")]:
                config = {"zero_optimization": {"stage": stage, **OFFLOAD[offload]}, "zeroth": {"recompute": recompute}}
                command = [
                    BINARY, "train", "--model", model, "--data", data, "--deepspeed", json.dumps(config), "--bf16",
                    "--device", "cuda", "--ranks", str(ranks), "--per-device-train-batch-size", str(8 // ranks),
                    "--max-length", "192", "--max-steps", "10", "--learning-rate", "1e-3", "--save-steps", "0",
                    "--output", output, "--overwrite-output-dir"]
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ZEROTH_GPU_ATTENTION": backend})
                if done.returncode != 0:
                    print("FAILED", " ".join(command), done.stderr[-600:])
                    return 1
                with open(f"{output}/metrics.jsonl") as lines:
                    found = [json.loads(line) for line in lines]
                seen.setdefault(backend, set()).add(tuple((line["loss"], line["grad_norm"]) for line in found))
                losses[backend] = [line["loss"] for line in found]
        error = max(abs(a / b - 1) for a, b in zip(losses["cudnn"], losses["own"]))
        # Bitwise equal to our own kernel means that cuDNN did not run.
        cudnn_ran = not seen["cudnn"] & seen["own"]
        print(f"attention by cuDNN, {ranks} rank(s): 3 programs, {len(seen['cudnn'])} distinct result(s), own kernel "
              f"{len(seen['own'])}; largest relative difference {error:.1e}{'' if cudnn_ran else '; cuDNN did NOT run'}")
        failures += len(seen["cudnn"]) - 1 + len(seen["own"]) - 1 + (error > 0.01) + (not cudnn_ran)
    return failures


def transports(output):
    """Two ranks on one GPU: CUDA IPC and the host transport are bitwise equal."""
    cases = [(stage, "none", precision) for stage in (0, 1, 2, 3) for precision in ("--fp32", "--bf16")]
    cases += [(2, "optimizer", "--bf16"), (3, "both", "--bf16")]
    failures, milliseconds = 0, {"ipc": 0.0, "host": 0.0}
    for stage, offload, precision in cases:
        seen = {}
        for transport in milliseconds:
            found = train("qwen3-tied", {"stage": stage, "stage3_param_persistence_threshold": 0, **OFFLOAD[offload]}, "none",
                          2, 2, 1, ["--device", "cuda", precision], output, {"ZEROTH_GPU_COLLECTIVES": transport})
            seen[transport] = found and [(line["loss"], line["grad_norm"]) for line in found]
            times = sorted(line["step_ms"] for line in found[5:]) if found else [0.0]
            milliseconds[transport] += times[len(times) // 2]
        if seen["ipc"] is None or seen["ipc"] != seen["host"]:
            failures += 1
            print("FAILED", stage, offload, precision, "ipc and host differ")
    each = ", ".join(f"{name} {total / len(cases):.2f} ms" for name, total in milliseconds.items())
    print(f"two ranks on one GPU: {len(cases)} programs, {failures} differ between ipc and host; mean step: {each}")
    return failures


def lost_rank(output):
    """If a rank is killed or stopped, the other one, whose GPU waits for it, exits and names the lost rank."""
    return sum(lose(output, *case) for case in ((signal.SIGKILL, "is dead: its process ended"),
                                              (signal.SIGSTOP, "is stopped: its heartbeat has not moved")))


def lose(output, signal_number, expected):
    command = train_command("qwen3-tied", {"stage": 3}, "none", 2, 1, 2, ["--device", "cuda", "--bf16"], output, steps=1000000)
    metrics = f"{output}/metrics.jsonl"
    if os.path.exists(metrics):
        os.remove(metrics)
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, "ZEROTH_GPU_COLLECTIVES": "ipc"})
    deadline, ranks = time.time() + 40, []
    while time.time() < deadline and launcher.poll() is None:
        time.sleep(0.1)
        with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as children:
            ranks = [int(pid) for pid in children.read().split()]
        if len(ranks) == 2 and os.path.exists(metrics) and os.path.getsize(metrics) > 4000:
            break
    lost = time.time()
    if len(ranks) == 2:
        os.kill(ranks[1], signal_number)
    try:
        log = launcher.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        launcher.kill()
        log = launcher.communicate()[0]
    lines = [line for line in log.splitlines() if "rank" in line and "step " in line][-4:]
    passed = launcher.returncode == 1 and "[rank 0] error:" in log and expected in log
    print(f"rank lost by {signal_number.name}: {'ok' if passed else 'FAILED'}, job ended after {time.time() - lost:.1f} s")
    print("  " + "\n  ".join(lines if passed else [log[-1500:]]))
    return int(not passed)


if __name__ == "__main__":
    PARTS = (golden, same_bits, attention, both_devices, curve, transports, lost_rank)
    selected = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(min(1, sum(part(folder + "/run") for part in PARTS if not selected or part.__name__ in selected)))
