"""Compares whole training steps of ours with DeepSpeed's and PyTorch's on the same model and the same kind of tokens.

    cargo build --release
    python benches/peers/step.py --size m50 --dtype bf16                      # everything
    python benches/peers/step.py --size 0.6b --sides zeroth-3,deepspeed-3 --rounds 3

Needs Linux and a Python with torch, transformers and deepspeed. Sides: zeroth-1 to zeroth-3 and deepspeed-1 to deepspeed-3
(ZeRO stages, 2 ranks of 1 thread each over shared memory and gloo), zeroth-zero1 to zeroth-zero3 (the presets of
`--deepspeed zero3` and so on), zeroth-lora-2, zeroth-lora-3, zeroth-qlora-2 and zeroth-qlora-3 (rank 16 on all linear
layers, the base in bf16 or nf4), and torch (1 process of 2 threads, which takes the batch of both ranks as two micro-batches).

Sides are interleaved: a, b, c, a, b, c. Peers stay alive between their turns (--fresh restarts them; 0.6b always does,
because not all sides fit into memory at once). Ours is a new `zeroth train` for each turn, whose first step is not counted.

--grad-accum-dtype sets the accumulation dtype of all sides; by default ours accumulates in fp32 and DeepSpeed in the model's
dtype. --small-buckets gives DeepSpeed a tenth of its default buckets. --csv writes the time of every step and the memory of
every turn. --fastest-cores, with the binary of `cargo build --release -p zeroth-machine --example cpu_bench`, pins every turn to
the cores on which AMX is fastest at that moment, prints the rates before and after the turn, and repeats the comparison for
the quiet turns: those in which both cores kept 80 % of the best rate before and after. Short turns (--steps 2) find more of
them. Memory is that of one rank: the largest sampled PSS, and its peak.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import cores

LENGTH = 512
RANKS = 2
# hidden, feed-forward, layers, heads, kv heads, head_dim, vocabulary, sequences of a rank
SIZES = {
    "m50": (512, 1536, 8, 8, 4, 64, 32_000, 2),
    "m125": (768, 2304, 12, 12, 4, 64, 32_000, 2),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, 1),
    "moe": (512, 1536, 8, 8, 4, 64, 32_000, 2),
}
# Mixtures of experts: experts, experts of a token, their feed-forward width.
EXPERTS = {"moe": (16, 2, 768)}
SIDES = ["zeroth-1", "deepspeed-1", "zeroth-2", "deepspeed-2", "zeroth-3", "deepspeed-3", "torch"]
PRESETS = ["zeroth-zero1", "zeroth-zero2", "zeroth-zero3"]
# Stages with LoRA instead of full training, and over nf4.
ADAPTERS = [f"zeroth-{kind}-{stage}" for kind in ("lora", "qlora") for stage in (2, 3)]
LORA = ["--train-type", "lora", "--lora-rank", 16, "--lora-dropout", 0, "--random-weights"]


def model_config(size):
    hidden, ffn, layers, heads, kv_heads, head_dim, vocab, _ = SIZES[size]
    experts = {}
    if size in EXPERTS:
        count, per_token, width = EXPERTS[size]
        experts = {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": count,
            "num_experts_per_tok": per_token, "moe_intermediate_size": width, "norm_topk_prob": True,
        }
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu",
        "attention_bias": False, "use_cache": False, **experts,
    }


# A tenth of DeepSpeed's defaults, which makes its ranks smaller.
SMALL_BUCKETS = {"sub_group_size": 100_000_000, "reduce_bucket_size": 50_000_000, "stage3_prefetch_bucket_size": 5_000_000}


def data_types(dtype):
    """The config section that sets the dtype in which gradients accumulate."""
    return {"data_types": {"grad_accum_dtype": dtype}} if dtype else {}


# ---- memory of a side's ranks ----


class Memory(threading.Thread):
    """Samples processes while they run; keeps the largest PSS of one and its peak, in MiB.

    The kernel keeps the peak RSS of a process. The peak PSS is estimated as that RSS minus the shared part of the sample
    with the largest PSS. Samples alone miss a peak that is shorter than the sampling interval.
    """

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.pss, self.shared, self.rss, self.done = pids, 0.0, 0.0, 0.0, threading.Event()
        self.start()

    def run(self):
        while not self.done.wait(0.3):
            for pid in self.pids():
                try:
                    rollup = f"/proc/{pid}/smaps_rollup"
                    pss, rss = field(rollup, "Pss:"), field(rollup, "Rss:")
                    if pss > self.pss:
                        self.pss, self.shared = pss, rss - pss
                    self.rss = max(self.rss, field(f"/proc/{pid}/status", "VmHWM:"))
                except OSError:
                    pass  # The process has ended.

    def stop(self):
        self.done.set()
        self.join()
        return self.pss, max(self.pss, self.rss - self.shared)


def field(path, name):
    for line in pathlib.Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


# ---- sides ----


class Ours:
    """Starts a new `zeroth train` for every turn; step times come from metrics.jsonl."""

    def __init__(self, name, options, folder):
        self.options, self.folder = options, folder
        self.flags = LORA + ["--quantize", "nf4"] * ("qlora" in name) if name in ADAPTERS else []
        if name in PRESETS:
            command = [options.zeroth, "config", "presets", name.removeprefix("zeroth-")]
            self.config = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        else:
            self.config = {"zero_optimization": {"stage": int(name[-1]), "overlap_comm": True}}

    def run(self, steps):
        options, output = self.options, self.folder / "run"
        config = {
            **self.config,
            "zero_optimization": {
                **self.config["zero_optimization"], "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": 1.0,
            **data_types(options.grad_accum_dtype),
            **({"zeroth": {"recompute": options.recompute}} if options.recompute else {}),
        }
        command = [
            options.zeroth, "train", "--model", self.folder / "model", "--data", self.folder / "tokens.jsonl",
            "--deepspeed", json.dumps(config), "--device", "cpu", "--ranks", RANKS, "--threads-per-rank", 1,
            "--per-device-train-batch-size", SIZES[options.size][7], "--max-length", LENGTH,
            "--max-steps", steps + 1, "--learning-rate", 1e-4, "--lr-scheduler-type", "constant",
            "--save-steps", 0, "--output", output, "--overwrite-output-dir", f"--{options.dtype}", *self.flags,
        ]
        process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "ZEROTH_CACHE": str(self.folder / "cache")},
        )
        memory = Memory(lambda: children(process.pid))
        output_text, _ = process.communicate()
        found = memory.stop()
        if process.returncode != 0:
            sys.exit(f"zeroth train ended with {process.returncode}:\n{output_text}")
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [line["step_ms"] / 1e3 for line in lines[1:]], found

    def processes(self):
        return []

    def stop(self):
        pass


class Peer:
    """Worker processes of this script, one per rank, that run steps on request."""

    def __init__(self, name, options, _):
        self.name, self.options, self.workers = name, options, []

    def start(self):
        ranks = 1 if self.name == "torch" else RANKS
        port = str(random.randrange(20_000, 60_000))
        for rank in range(ranks):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": RANKS // ranks,
                "DS_ACCELERATOR": "cpu",
                # DeepSpeed compiles its shared-memory collectives with the ninja of its Python environment.
                "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            command = [sys.executable, __file__, "--worker", self.name, "--size", self.options.size,
                       "--dtype", self.options.dtype]
            command += ["--grad-accum-dtype", self.options.grad_accum_dtype] if self.options.grad_accum_dtype else []
            command += ["--small-buckets"] if self.options.small_buckets else []
            self.workers.append(subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **{key: str(value) for key, value in environment.items()}},
            ))
        for worker in self.workers:
            threading.Thread(target=self.drain, args=(worker,), daemon=True).start()
        self.answers()

    def drain(self, worker):
        worker.log = []
        for line in worker.stderr:
            worker.log = worker.log[-20:] + [line]

    def answers(self):
        answers = []
        for worker in self.workers:
            line = worker.stdout.readline()
            if not line:
                time.sleep(0.5)
                sys.exit(f"{self.name} ended:\n{''.join(worker.log)}")
            answers.append(json.loads(line))
        return answers

    def run(self, steps):
        memory = Memory(self.processes)
        if not self.workers:
            self.start()
        for worker in self.workers:
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
        answers = self.answers()
        # Ranks synchronise in every step, so the slowest rank's time is the step's.
        return [max(times) for times in zip(*(answer["seconds"] for answer in answers))], memory.stop()

    def processes(self):
        return [worker.pid for worker in self.workers]

    def stop(self):
        for worker in self.workers:
            worker.stdin.close()
        for worker in self.workers:
            worker.wait()
        self.workers = []


# ---- worker: one rank of a peer ----


def worker(options):
    name, size, dtype = options.worker, options.size, options.dtype
    # Keeps the output of libraries out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def answer(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    stored = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    config = AutoConfig.for_model(**model_config(size))
    torch.manual_seed(0)
    torch.set_default_dtype(stored)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    torch.manual_seed(1 + int(os.environ["RANK"]))
    sequences, vocab = SIZES[size][7], SIZES[size][6]

    def tokens():
        return torch.randint(0, vocab, (sequences, LENGTH))

    step = torch_step(torch, model, tokens) if name == "torch" else deepspeed_step(model, tokens, options)
    for _ in range(2):
        step()
    answer(parameters=sum(parameter.numel() for parameter in model.parameters()))
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        answer(seconds=seconds)


def torch_step(torch, model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step():
        for _ in range(RANKS):
            x = tokens()
            (model(input_ids=x, labels=x).loss / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def deepspeed_step(model, tokens, options):
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": SIZES[options.size][7],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_optimization": {
            "stage": int(options.worker[-1]), "overlap_comm": True, "contiguous_gradients": True,
            **(SMALL_BUCKETS if options.small_buckets else {}),
        },
        # DeepSpeed compiles its own Adam at first use, which fails on some machines.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **data_types(options.grad_accum_dtype),
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step():
        x = tokens()
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    return step


# ---- rounds and report ----


def prepare(folder, size):
    """Writes a model folder and rows of random tokens, for ours."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(model_config(size)))
    generator = random.Random(7)
    vocab = SIZES[size][6]
    with open(folder / "tokens.jsonl", "w") as file:
        for _ in range(64):
            print(json.dumps({"input_ids": [generator.randrange(vocab) for _ in range(LENGTH)]}), file=file)


class CoreChoice:
    """The cores that a turn runs on, and their AMX rates in GFLOP/s."""

    def __init__(self, binary):
        self.binary, self.allowed, self.chosen = binary, sorted(os.sched_getaffinity(0)), None

    def pin(self, side):
        """Chooses cores and pins this process and the side to them; returns their rates, with --fastest-cores."""
        if not self.binary:
            return []
        self.chosen, rates = cores.fastest(self.binary, RANKS, self.allowed)
        cores.pin([os.getpid(), *side.processes()], self.chosen)
        return [rates[core] for core in sorted(self.chosen)]

    def rates(self):
        """The current rates of the chosen cores."""
        return list(cores.fastest(self.binary, RANKS, sorted(self.chosen))[1].values()) if self.binary else []


class Results:
    """Results of a side by turn: step seconds, AMX rates before and after, memory of a rank."""

    def __init__(self):
        self.turns, self.tiles, self.memory, self.pss, self.peak = [], [], [], 0.0, 0.0

    def add(self, seconds, tiles, pss, peak):
        self.turns.append(seconds)
        self.tiles.append(tiles)
        self.memory.append((pss, peak))
        self.pss, self.peak = max(self.pss, pss), max(self.peak, peak)

    def steps(self, fast):
        """Seconds of all steps of the turns around which AMX had at least this rate."""
        return [one for turn, tiles in zip(self.turns, self.tiles) if min(tiles, default=fast) >= fast for one in turn]


def report(found, tokens, fast):
    print(f"\n{'side':<14} {'best tok/s':>11} {'median':>9} {'best ms':>9} {'PSS MiB':>9} {'its peak':>9}")
    for name, side in found.items():
        seconds = side.steps(fast)
        best, median = min(seconds), statistics.median(seconds)
        print(f"{name:<14} {tokens / best:>11.0f} {tokens / median:>9.0f} {best * 1e3:>9.0f} {side.pss:>9.0f} {side.peak:>9.0f}")
    print("\nratios of tokens/s: best, median; of a rank's PSS as sampled, at its peak")
    for ours in (side for side in found if side.startswith("zeroth")):
        for peer in (f"deepspeed-{ours[-1]}", "torch"):
            if peer not in found:
                continue
            a, b = found[ours].steps(fast), found[peer].steps(fast)
            print(f"{ours} / {peer:<14} {min(b) / min(a):6.2f} {statistics.median(b) / statistics.median(a):6.2f}"
                  f"   {found[ours].pss / found[peer].pss:6.2f} {found[ours].peak / found[peer].peak:6.2f}")


def report_rounds(found):
    """Compares each side with the first, round by round: a disturbance of a whole round affects both."""
    first, *others = found
    if not others or len(found[first].turns) < 2:
        return
    print(f"\nspeed beside {first} by rounds: median, least, greatest; of a rank's PSS in the median")
    for name in others:
        pairs = list(zip(found[name].turns, found[first].turns))
        ratios = [statistics.median(b) / statistics.median(a) for a, b in pairs]
        pss = [statistics.median(pss for pss, _ in found[side].memory) for side in (name, first)]
        print(f"{name:<14} {statistics.median(ratios):6.3f} {min(ratios):6.3f} {max(ratios):6.3f}   {pss[0] / pss[1]:6.3f}"
              f"   {' '.join(f'{ratio:.3f}' for ratio in ratios)}")


def write_csv(path, found):
    """Writes one line per step of every turn."""
    with open(path, "w") as file:
        print("side,round,step,seconds,pss_mib,peak_mib", file=file)
        for name, side in found.items():
            for number, (seconds, (pss, peak)) in enumerate(zip(side.turns, side.memory), 1):
                for step, one in enumerate(seconds, 1):
                    print(f"{name},{number},{step},{one:.6f},{pss:.1f},{peak:.1f}", file=file)


def report_quiet(found, tokens):
    """Prints the report of the quiet turns, if every side has some and not all turns are quiet."""
    fast = cores.QUIET * max((rate for side in found.values() for tiles in side.tiles for rate in tiles), default=0.0)
    turns = [min(tiles, default=fast) >= fast for side in found.values() for tiles in side.tiles]
    if all(turns):
        return
    print(f"\nquiet turns, {sum(turns)} of {len(turns)}")
    if all(side.steps(fast) for side in found.values()):
        report(found, tokens, fast)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="m50")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--grad-accum-dtype", choices=["bf16", "fp32"], help="of all sides; by default fp32 for ours and bf16 for DeepSpeed")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides to interleave, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per turn")
    parser.add_argument(
        "--recompute", choices=["norm_swiglu", "attention", "block"], help="recompute these activations in ours; the bits stay the same"
    )
    parser.add_argument("--small-buckets", action="store_true", help="give DeepSpeed a tenth of its default buckets, where the defaults do not fit")
    parser.add_argument("--fastest-cores", metavar="CPU_BENCH", help="pin every turn to the cores that this binary finds fastest")
    parser.add_argument("--csv", metavar="FILE", help="write the time of every step and the memory of every turn to this file")
    parser.add_argument("--fresh", action="store_true", help="restart peers for every turn")
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    parser.add_argument("--zeroth", default=f"{target}/release/zeroth", help="our binary")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if options.fastest_cores:
        cores.require_binary(options.fastest_cores, parser)
    names = options.sides.split(",")
    if unknown := [name for name in names if name not in SIDES + PRESETS + ADAPTERS]:
        parser.error(f"no such side: {', '.join(unknown)}; there are {', '.join(SIDES + PRESETS + ADAPTERS)}")
    fresh = options.fresh or options.size == "0.6b"
    tokens = RANKS * SIZES[options.size][7] * LENGTH
    found = {name: Results() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        prepare(folder, options.size)
        sides = {name: (Ours if name.startswith("zeroth") else Peer)(name, options, folder) for name in names}
        choice = CoreChoice(options.fastest_cores)
        for number in range(1, options.rounds + 1):
            for name, side in sides.items():
                before = choice.pin(side)
                seconds, memory = side.run(options.steps)
                after = choice.rates()
                if fresh:
                    side.stop()
                found[name].add(seconds, before + after, *memory)
                texts = [" and ".join(f"{rate:.0f}" for rate in rates) for rates in (before, after)]
                where = f"; AMX {texts[0]} before, {texts[1]} after" if before else ""
                print(f"round {number}, {name}: {tokens / min(seconds):.0f} tokens/s{where}", file=sys.stderr, flush=True)
            if options.csv:
                write_csv(options.csv, found)
        for side in sides.values():
            side.stop()
    print(f"{options.size} {options.dtype}, {RANKS} ranks x 1 thread (torch: 1 x {RANKS}), {tokens} tokens per step")
    report(found, tokens, 0.0)
    report_rounds(found)
    report_quiet(found, tokens)


if __name__ == "__main__":
    main()
