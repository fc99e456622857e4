"""Measures whole training steps on a GPU: Qwen3 shapes with random rows, one run of `zeroth train` per case.

    cargo build --release
    python benches/gpu/steps.py                       # all cases
    python benches/gpu/steps.py 4b-optimizer-24       # some
    python benches/gpu/steps.py --ranks 2 0.6b-zero2  # two ranks, which share the GPU if there is only one
    python benches/gpu/steps.py --same-rows --steps 20 30b-lora  # every step has the rows of the first: the loss must fall
    python benches/gpu/steps.py --device cpu tiny     # tests the script itself without a GPU

Prints tokens per second of the median step after the third (without the last), MFU (6 FLOPs per parameter, 4 with
LoRA, 2 for those of a teacher, plus causal attention, of an H200's 989 TFLOP/s), the device arena, the memory that the driver reports in use beyond it (with
nvidia-smi), the first and last loss, and with fp16 the last skipped step. Packed cases have rows of 64 to 1,024 tokens.
Tokens of T5 are those of source and target, as many each. Needs no package.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading

# hidden, feed-forward, layers, heads, KV heads, head_dim, tied
SHAPES = {
    "0.6b": (1024, 3072, 28, 16, 8, 128, True),
    "1.7b": (2048, 6144, 28, 16, 8, 128, True),
    "4b": (2560, 9728, 36, 32, 8, 128, True),
    "8b": (4096, 12288, 36, 32, 8, 128, False),
    "tiny": (64, 128, 2, 4, 2, 16, True),
    "tiny-teacher": (96, 192, 3, 4, 2, 24, False),
    "3b-moe": (2048, 6144, 12, 16, 4, 128, True),
    "30b-a3b": (2048, 6144, 48, 32, 4, 128, False),
    "tiny-moe": (64, 128, 2, 4, 2, 16, True),
}
# Encoder-decoders: hidden, feed-forward, layers of each stack, heads, head_dim, dropout
T5 = {"t5-3b": (1024, 16384, 24, 32, 128, 0.1), "tiny-t5": (64, 128, 2, 4, 16, 0.1)}
# Mixtures of experts: experts, experts of a token, their feed-forward width.
EXPERTS = {"3b-moe": (48, 8, 768), "30b-a3b": (128, 8, 768), "tiny-moe": (8, 2, 32)}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**OPTIMIZER, "offload_param": {"device": "cpu"}}
BLOCK = {"recompute": "block"}
SMALL = ["--device-memory", "24GiB"]
# On all seven projections, as the peer's.
LORA = ["--train-type", "lora", "--lora-rank", "16", "--lora-alpha", "32", "--lora-dropout", "0", "--random-weights"]
NF4 = [*LORA, "--quantize", "nf4"]
ATTENTION = [*LORA, "--target-modules", "q_proj,k_proj,v_proj,o_proj"]
RANK_8 = ["--train-type", "lora", "--lora-rank", "8", "--random-weights", "--quantize", "nf4"]
SHARDED = {"frozen": "sharded"}
# A case with a teacher: TEACHER and its shape, which write_model makes. CACHE is a cache of that teacher, which
# `zeroth distill cache` makes before the steps.
TEACHER, CACHE = "--teacher", "--kd-cache"
KD = ["--random-weights", "--kd-alpha", "0.5", "--kd-temperature", "2"]
# shape, rows, length, zero_optimization, the zeroth section, accumulation, flags
CASES = {
    "0.6b-zero2": ("0.6b", 8, 2048, {"stage": 2}, {}, 1, []),
    "0.6b-zero3": ("0.6b", 8, 2048, {"stage": 3}, {}, 1, []),
    "0.6b-optimizer": ("0.6b", 8, 2048, {"stage": 3, **OPTIMIZER}, {}, 1, []),
    "0.6b-both": ("0.6b", 8, 2048, {"stage": 3, **BOTH}, {}, 1, []),
    "1.7b-zero2": ("1.7b", 4, 4096, {"stage": 2}, {}, 1, []),
    "1.7b-packed": ("1.7b", 4, 4096, {"stage": 2}, {}, 1, ["--packing"]),
    "4b-optimizer": ("4b", 4, 4096, {"stage": 3, **OPTIMIZER}, BLOCK, 1, []),
    "4b-both": ("4b", 4, 4096, {"stage": 3, **BOTH}, BLOCK, 1, []),
    "4b-optimizer-host": ("4b", 4, 4096, {"stage": 3, **OPTIMIZER}, {**BLOCK, "update": "host"}, 1, []),
    "4b-both-host": ("4b", 4, 4096, {"stage": 3, **BOTH}, {**BLOCK, "update": "host"}, 1, []),
    "4b-optimizer-24": ("4b", 4, 4096, {"stage": 3, **OPTIMIZER}, BLOCK, 1, SMALL),
    "4b-both-24": ("4b", 4, 4096, {"stage": 3, **BOTH}, BLOCK, 1, SMALL),
    "4b-optimizer-24-device": (
        "4b", 4, 4096, {"stage": 3, **OPTIMIZER}, {**BLOCK, "update": "device"}, 1, SMALL),
    "4b-both-24-device": ("4b", 4, 4096, {"stage": 3, **BOTH}, {**BLOCK, "update": "device"}, 1, SMALL),
    "4b-optimizer-24-host": ("4b", 4, 4096, {"stage": 3, **OPTIMIZER}, {**BLOCK, "update": "host"}, 1, SMALL),
    "4b-both-24-host": ("4b", 4, 4096, {"stage": 3, **BOTH}, {**BLOCK, "update": "host"}, 1, SMALL),
    "8b-bf16-moments": ("8b", 4, 4096, {"stage": 3}, {"moments": "bf16"}, 1, []),
    "8b-optimizer-4": ("8b", 4, 4096, {"stage": 3, **OPTIMIZER}, {}, 4, []),
    "8b-optimizer-4-bf16-moments": ("8b", 4, 4096, {"stage": 3, **OPTIMIZER}, {"moments": "bf16"}, 4, []),
    "8b-lora": ("8b", 4, 4096, {"stage": 2}, {}, 1, LORA),
    "8b-lora-2x2048": ("8b", 2, 2048, {"stage": 2}, {}, 1, LORA),
    "8b-lora-nf4": ("8b", 4, 4096, {"stage": 2}, {}, 1, NF4),
    "8b-lora-nf4-16": ("8b", 2, 2048, {"stage": 2}, {}, 1, [*NF4, "--device-memory", "16GiB"]),
    "8b-lora-nf4-15": ("8b", 2, 2048, {"stage": 2}, {}, 1, [*NF4, "--device-memory", "15GiB"]),
    "8b-lora-nf4-12": ("8b", 2, 2048, {"stage": 2}, {}, 1, [*NF4, "--device-memory", "12GiB"]),
    "8b-lora-nf4-11": ("8b", 2, 2048, {"stage": 2}, {}, 1, [*NF4, "--device-memory", "11GiB"]),
    "3b-moe-zero3": ("3b-moe", 2, 2048, {"stage": 3}, {}, 1, []),
    "30b-lora": ("30b-a3b", 4, 4096, {"stage": 2}, {}, 1, ATTENTION),
    "30b-lora-2x2048": ("30b-a3b", 2, 2048, {"stage": 2}, {}, 1, ATTENTION),
    "30b-lora-sharded": ("30b-a3b", 2, 1024, {"stage": 2}, SHARDED, 1, ATTENTION),
    "30b-lora-nf4-24": (
        "30b-a3b", 1, 2048, {"stage": 2}, {}, 1, [*ATTENTION, "--quantize", "nf4", "--device-memory", "23.4GiB"]),
    "30b-lora-nf4-all": (
        "30b-a3b", 1, 2048, {"stage": 2, **OPTIMIZER}, BLOCK, 1, [*RANK_8, "--device-memory", "19.6GiB"]),
    "30b-lora-nf4-all-host": (
        "30b-a3b", 1, 2048, {"stage": 3, **BOTH}, BLOCK, 1, [*RANK_8, "--device-memory", "2.4GiB"]),
    "kd": ("0.6b", 4, 2048, {"stage": 2}, {}, 1, [TEACHER, "8b", *KD]),
    "kd-host": (
        "0.6b", 4, 2048, {"stage": 2}, {}, 1, [TEACHER, "8b", *KD, "--teacher-deepspeed", "zero3_offload"]),
    "kd-nf4": ("0.6b", 4, 2048, {"stage": 2}, {}, 1, [TEACHER, "8b", *KD, "--teacher-quantize", "nf4"]),
    "kd-cache": ("0.6b", 4, 2048, {"stage": 2}, {}, 1, [CACHE, "8b", *KD]),
    "kd-student": ("0.6b", 4, 2048, {"stage": 2}, {}, 1, []),
    "t5": ("t5-3b", 8, 512, {"stage": 2}, {}, 1, ["--device-memory", "64GiB"]),
    "t5-24": ("t5-3b", 8, 512, {"stage": 3, **BOTH}, {}, 1, ["--device-memory", "23.4GiB"]),
    "t5-fp16": ("t5-3b", 8, 512, {"stage": 2}, {}, 1, ["--fp16", "--device-memory", "64GiB"]),
    "tiny-t5": ("tiny-t5", 2, 64, {"stage": 3, **BOTH}, BLOCK, 1, []),
    "tiny-t5-fp16": ("tiny-t5", 2, 64, {"stage": 2}, {}, 1, ["--fp16"]),
    "tiny": ("tiny", 2, 64, {"stage": 3, **BOTH}, BLOCK, 1, []),
    "tiny-moe": ("tiny-moe", 2, 64, {"stage": 3, **BOTH}, BLOCK, 1, []),
    "tiny-moe-lora": ("tiny-moe", 2, 64, {"stage": 2}, SHARDED, 1, ATTENTION),
    "tiny-lora": ("tiny", 2, 64, {"stage": 2}, {}, 1, LORA),
    "tiny-kd": ("tiny", 2, 64, {"stage": 2}, {}, 1, [TEACHER, "tiny-teacher", *KD]),
    "tiny-kd-cache": ("tiny", 2, 64, {"stage": 2}, {}, 1, [CACHE, "tiny-teacher", *KD]),
    "tiny-lora-nf4": ("tiny", 2, 64, {"stage": 2}, BLOCK, 1, NF4),
}


def write_t5(folder, shape, vocabulary):
    hidden, feed_forward, layers, heads, head_dim, dropout = T5[shape]
    config = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": hidden, "d_ff": feed_forward,
        "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "d_kv": head_dim, "vocab_size": vocabulary,
        "dropout_rate": dropout, "feed_forward_proj": "relu", "tie_word_embeddings": True, "pad_token_id": 0,
        "eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    }
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def write_model(folder, shape, vocabulary):
    if shape in T5:
        return write_t5(folder, shape, vocabulary)
    hidden, feed_forward, layers, heads, kv_heads, head_dim, tied = SHAPES[shape]
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": feed_forward, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "attention_bias": False,
    }
    if shape in EXPERTS:
        count, per_token, width = EXPERTS[shape]
        config |= {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": count,
            "num_experts_per_tok": per_token, "moe_intermediate_size": width, "norm_topk_prob": True,
        }
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def write_rows(path, tokens, lengths, vocabulary, times, pairs):
    random.seed(1)
    lines = []
    while tokens > 0:
        row = [random.randrange(vocabulary) for _ in range(random.randint(*lengths))]
        labels = random.sample(row, len(row)) if pairs else row
        lines.append(json.dumps({"input_ids": row, "labels": labels}) + "\n")
        tokens -= len(row)
    with open(path, "w") as file:
        for _ in range(times):
            file.writelines(lines)


def model_flops(shape, vocabulary, length, per_parameter=6):
    """FLOPs per token: those of the parameters it passes, plus causal attention (half of the scores)."""
    if shape in T5:
        hidden, feed_forward, layers, heads, head_dim, _ = T5[shape]
        attention, feed_forward_parameters = 4 * hidden * heads * head_dim, 2 * hidden * feed_forward
        # Source tokens pass the encoder and the keys and values of cross attention, target tokens the decoder and the head.
        source = layers * (attention + feed_forward_parameters + attention // 2)
        target = layers * (attention + feed_forward_parameters + attention // 2) + vocabulary * hidden
        scores = layers * heads * head_dim * length * (2 + 1 + 2)
        return (per_parameter * (source + target) + 6 * scores) / 2
    hidden, feed_forward, layers, heads, kv_heads, head_dim, tied = SHAPES[shape]
    feed_forward_parameters = 3 * hidden * feed_forward
    if shape in EXPERTS:
        count, per_token, width = EXPERTS[shape]
        feed_forward_parameters = hidden * (count + 3 * per_token * width)
    block = hidden * head_dim * (2 * heads + 2 * kv_heads) + feed_forward_parameters
    parameters = layers * block + (1 if tied else 2) * vocabulary * hidden
    return per_parameter * parameters + 6 * layers * heads * head_dim * length


def with_teacher(name, flags, arguments, model_folder, data, length, vocabulary, work):
    """The flags of a case with its teacher's shape as a folder, or as a cache of that folder; and the shape of a teacher that
    runs beside the student."""
    flag = next((flag for flag in (TEACHER, CACHE) if flag in flags), None)
    if flag is None:
        return flags, None
    place = flags.index(flag) + 1
    shape = flags[place]
    folder = os.path.join(work, f"teacher-{shape}")
    write_model(folder, shape, vocabulary)
    if flag == TEACHER:
        return [*flags[:place], folder, *flags[place + 1:]], shape
    cache = os.path.join(work, f"cache-{name}")
    command = [
        arguments.zeroth, "distill", "cache", "--teacher", folder, "--model", model_folder, "--data", data, "--top-k", "20",
        "--max-length", str(length), "--per-device-train-batch-size", "4", "--random-weights", "--device",
        arguments.device, "--output", cache,
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    print(made.stdout.strip() or made.stderr[-2000:], flush=True)
    flags = [flag for flag in flags if flag != "--random-weights"]
    place = flags.index(CACHE) + 1
    return [*flags[:place], cache, *flags[place + 1:]], None


class DriverMemory(threading.Thread):
    """Peak memory of the first GPU as nvidia-smi reports it, in MiB."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = None, threading.Event()
        self.start()

    def run(self):
        command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.done.wait(2):
            try:
                answer = subprocess.run(command, capture_output=True, text=True)
                self.most = max(self.most or 0, int(answer.stdout.split()[0]))
            except (OSError, ValueError, IndexError):
                return

    def stop(self):
        self.done.set()
        self.join()
        return self.most


def tail(path):
    with open(path) as file:
        return file.read()[-2000:]


def run(name, arguments, work):
    shape, rows, length, zero, ours, accumulation, flags = CASES[name]
    vocabulary = 512 if shape.startswith("tiny") else 32_128 if shape in T5 else 151_936
    model, data, output = (os.path.join(work, part) for part in (shape, f"{length}.jsonl", f"run-{name}"))
    write_model(model, shape, vocabulary)
    is_packed = "--packing" in flags
    data += ".packed" if is_packed else ".t5" if shape in T5 else ""
    lengths = (64, 1024) if is_packed else (length, length)
    batch = rows * accumulation * arguments.ranks
    fresh, times = arguments.steps + is_packed, 1
    if arguments.same_rows:
        fresh, times = times, fresh
    write_rows(data, batch * fresh * length, lengths, vocabulary, times, shape in T5)
    flags, teacher = with_teacher(name, flags, arguments, model, data, length, vocabulary, work)
    # Skips the export of the model: only steps are measured.
    zero = {**zero, "stage3_gather_16bit_weights_on_model_save": False}
    config = {
        "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation,
        "fp16" if "--fp16" in flags else "bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3 if arguments.same_rows else 1e-5}}, "zeroth": ours,
    }
    trace = ["--trace", os.path.join(arguments.trace, f"{name}.json")] if arguments.trace else []
    limits = ["--max-length", str(length)]
    if shape in T5:
        limits = ["--max-source-length", str(length), "--max-target-length", str(length)]
    command = [
        arguments.zeroth, "train", "--model", model, "--data", data, "--deepspeed", json.dumps(config),
        "--device", arguments.device, "--ranks", str(arguments.ranks), *limits,
        "--max-steps", str(arguments.steps), "--save-steps", "0", "--output", output, *flags, *trace,
    ]
    command += ["--shuffle", "false"] if arguments.same_rows else []
    used, log = DriverMemory(), os.path.join(work, f"{name}.txt")
    try:
        with open(log, "w") as file:
            ended = subprocess.run(command, stdout=file, stderr=file)
    except SystemExit:
        print(f"{name}: stopped\n{tail(log)}", flush=True)
        raise
    used = used.stop()
    if ended.returncode != 0:
        print(f"{name}: exit {ended.returncode}\n{tail(log)}", flush=True)
        return False
    with open(os.path.join(output, "metrics.jsonl")) as file:
        steps = [json.loads(line) for line in file]
    # step_ms runs from one step's record to the next. The last step is not enqueued ahead, so it reads short.
    timed = steps[3:-1]
    ms = statistics.median(step["step_ms"] for step in timed)
    speed = statistics.median(step["tokens"] / step["step_ms"] * 1e3 for step in timed)
    memory = steps[-1]["device_bytes_peak"] / 2**30
    beside = f"  driver {used / 1024 - memory:+5.2f}" if used else ""
    flops = model_flops(shape, vocabulary, 0 if is_packed else length, 4 if "lora" in flags else 6)
    if teacher:
        # Its forward alone, a third of a step; the embedding of an untied model is only read.
        untied = 0 if SHAPES[teacher][-1] else 2 * vocabulary * SHAPES[teacher][0]
        flops += model_flops(teacher, vocabulary, length) / 3 - untied
    mfu = speed * flops / 989e12
    losses = f"loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"
    if "--fp16" in flags:
        losses += f"  last skipped step {max((step['step'] for step in steps if step['skipped']), default=0)}"
    with open(log) as file:
        chosen = [line.strip() for line in file if line.startswith("note: zeroth.")]
    print(f"{name:22} {speed:10,.0f} tokens/s  {ms:9.1f} ms  {mfu:5.1%} MFU  {memory:7.2f} GiB{beside}  {losses}",
          *chosen, sep="\n    ", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; default: all but tiny ones")
    parser.add_argument("--zeroth", default="target/release/zeroth", help="path of the binary")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=1, help="each rank has its own rows")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--same-rows", action="store_true", help="the rows of the first step in every step, lr 1e-3")
    parser.add_argument("--trace", help="folder for a trace of each case")
    arguments = parser.parse_args()
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown or arguments.steps < 5:
        parser.error(f"no case {', '.join(unknown)}" if unknown else "--steps: at least 5; three are warm-up")
    # Stopping this script stops the current run too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as work:
        names = arguments.cases or [case for case in CASES if not case.startswith("tiny")]
        # A list: runs all cases even if one fails.
        sys.exit(not all([run(name, arguments, work) for name in names]))


if __name__ == "__main__":
    main()
