"""Golden runs and same bits on a GPU: `python tests/golden/run_on_gpu.py [BINARY [PART...]]` from the root of the repository.

Needs a GPU and a release build (`cargo build --release`). Trains every golden model in fp32 at stages 0 and 3 with one rank and
two ranks on one card, and one model with offload and recomputation, and compares the losses with PyTorch's (1e-3); then
compares programs with each other bit by bit in bf16 and fp16, and with attention by cuDNN, the processor with the card, at last over 200 steps of a model
of 12 layers in bf16 (1 %), and two ranks that exchange bytes from card to card with two that do so through the host; last it
kills a rank, and stops one. PART names some of these: golden, same_bits, attention, both_devices, curve, ways, lost_rank. Exit 1 where
one is wrong.
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
OFFLOAD = {"none": {}, "optimizer": {"offload_optimizer": HOST}, "both": {"offload_optimizer": HOST, "offload_param": HOST}}


def command_of(model, zero, recompute, ranks, accumulation, micro_batch, flags, output, steps=20):
    config = {"zero_optimization": {"overlap_comm": True, **zero}, "zeroth": {"recompute": recompute}}
    return [
        BINARY, "train", "--model", f"{GOLDEN}/{model}", "--data", f"{GOLDEN}/{model}/data.jsonl",
        "--deepspeed", json.dumps(config), "--ranks", str(ranks), "--per-device-train-batch-size", str(micro_batch),
        "--gradient-accumulation-steps", str(accumulation), "--max-steps", str(steps), "--learning-rate", "1e-3",
        "--warmup-steps", "3", "--shuffle", "false", "--max-length", "40", "--output", output,
        "--overwrite-output-dir", *flags]


def train(model, zero, recompute, ranks, accumulation, micro_batch, flags, output, variables=None):
    command = command_of(model, zero, recompute, ranks, accumulation, micro_batch, flags, output)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(variables or {})})
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


def attention(output):
    """Rows of one length, attention forward by cuDNN: the same bits in every program, and the losses of our own kernel."""
    model, data = output + "-attention", output + "-attention.jsonl"
    made = [BINARY, "init", "--family", "qwen3", "--hidden", "128", "--intermediate-size", "256", "--layers", "3",
            "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--vocab-size", "512", "--tied", "--output", model]
    subprocess.run(made, check=True, capture_output=True)
    with open(data, "w") as file:
        for row in range(80):
            file.write(json.dumps({"input_ids": [(row * row + 7 * at * (row % 5 + 1)) % 512 for at in range(192)]}) + "\n")
    wrong = 0
    for ranks in (1, 2):
        seen, losses = {}, {}
        for who in ("cudnn", "own"):
            for stage, offload, recompute in [(0, "none", "none"), (2, "none", "none"), (3, "both", "block")]:
                config = {"zero_optimization": {"stage": stage, **OFFLOAD[offload]}, "zeroth": {"recompute": recompute}}
                command = [
                    BINARY, "train", "--model", model, "--data", data, "--deepspeed", json.dumps(config), "--bf16",
                    "--device", "cuda", "--ranks", str(ranks), "--per-device-train-batch-size", str(8 // ranks),
                    "--max-length", "192", "--max-steps", "10", "--learning-rate", "1e-3", "--save-steps", "0",
                    "--output", output, "--overwrite-output-dir"]
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ZEROTH_GPU_ATTENTION": who})
                if done.returncode != 0:
                    print("FAILED", " ".join(command), done.stderr[-600:])
                    return 1
                with open(f"{output}/metrics.jsonl") as lines:
                    found = [json.loads(line) for line in lines]
                seen.setdefault(who, set()).add(tuple((line["loss"], line["grad_norm"]) for line in found))
                losses[who] = [line["loss"] for line in found]
        apart = max(abs(a / b - 1) for a, b in zip(losses["cudnn"], losses["own"]))
        # The same bits as our own kernel's would mean that the library was never asked.
        asked = not seen["cudnn"] & seen["own"]
        print(f"attention by cuDNN, {ranks} rank(s): 3 programs, {len(seen['cudnn'])} training(s) among them, own kernel "
              f"{len(seen['own'])}; losses at most {apart:.1e} apart{'' if asked else '; the library was NOT asked'}")
        wrong += len(seen["cudnn"]) - 1 + len(seen["own"]) - 1 + (apart > 0.01) + (not asked)
    return wrong


def ways(output):
    """Two ranks on one card, from card to card and through the host's memory: the same bits."""
    cases = [(stage, "none", precision) for stage in (0, 1, 2, 3) for precision in ("--fp32", "--bf16")]
    cases += [(2, "optimizer", "--bf16"), (3, "both", "--bf16")]
    wrong, took = 0, {"ipc": 0.0, "host": 0.0}
    for stage, offload, precision in cases:
        seen = {}
        for way in took:
            found = train("qwen3-tied", {"stage": stage, "stage3_param_persistence_threshold": 0, **OFFLOAD[offload]}, "none",
                          2, 2, 1, ["--device", "cuda", precision], output, {"ZEROTH_GPU_COLLECTIVES": way})
            seen[way] = found and [(line["loss"], line["grad_norm"]) for line in found]
            times = sorted(line["step_ms"] for line in found[5:]) if found else [0.0]
            took[way] += times[len(times) // 2]
        if seen["ipc"] is None or seen["ipc"] != seen["host"]:
            wrong += 1
            print("WRONG", stage, offload, precision, "ipc and host differ")
    each = ", ".join(f"{way} {time / len(cases):.2f} ms" for way, time in took.items())
    print(f"two ranks on one card: {len(cases)} programs, {wrong} not the same by ipc and by host; a step by {each}")
    return wrong


def lost_rank(output):
    """A rank that is killed, and one that is stopped: the other one, whose card waits for it, ends and says who is lost."""
    return sum(lose(output, *how) for how in ((signal.SIGKILL, "is dead: its process ended"),
                                              (signal.SIGSTOP, "is stopped: its heartbeat has not moved")))


def lose(output, by, expected):
    command = command_of("qwen3-tied", {"stage": 3}, "none", 2, 1, 2, ["--device", "cuda", "--bf16"], output, steps=1000000)
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
        os.kill(ranks[1], by)
    try:
        said = launcher.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        launcher.kill()
        said = launcher.communicate()[0]
    lines = [line for line in said.splitlines() if "rank" in line and "step " in line][-4:]
    right = launcher.returncode == 1 and "[rank 0] error:" in said and expected in said
    print(f"a rank lost by {by.name}: {'ok' if right else 'WRONG'}, all had ended after {time.time() - lost:.1f} s")
    print("  " + "\n  ".join(lines if right else [said[-1500:]]))
    return int(not right)


if __name__ == "__main__":
    PARTS = (golden, same_bits, attention, both_devices, curve, ways, lost_rank)
    asked = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(min(1, sum(part(folder + "/run") for part in PARTS if not asked or part.__name__ in asked)))
