#!/usr/bin/env python3
"""Measures `zeroth monitor`: opening a million steps, and CPU beside a run of about a hundred steps a second and one of thousands.

    python3 benches/monitor.py target/release/zeroth

Needs Python 3.9 and Linux, no packages. Prints one line per figure: name, value, limit.
"""

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

BINARY = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "target/release/zeroth")
STEPS = 1_000_000
SECONDS = 20


def figure(name, value, limit):
    print(f"{name:<55} {value:>12}   limit {limit}", flush=True)


def waited(process):
    """Seconds of CPU and the peak resident megabytes of a child that has ended."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def million_steps(folder):
    run = Path(folder) / "million"
    run.mkdir()
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            loss = 2.0 + 8.0 / step**0.5
            file.write(json.dumps({
                "step": step, "loss": loss, "grad_norm": loss / 7, "lr": 1e-3 / loss, "tokens": 4096,
                "tokens_per_second": 40960 / loss, "step_ms": 100 * loss, "loss_scale": 1.0, "skipped": False,
                "device_bytes_peak": 123456789, "host_bytes_peak": 234567890, "samples_seen": 32 * step,
            }, separators=(",", ":")) + "\n")
    size = (run / "metrics.jsonl").stat().st_size / 1e6
    for _ in range(3):
        begun = time.monotonic()
        process = subprocess.Popen([BINARY, "monitor", str(run), "--format", "json"], stdout=subprocess.DEVNULL)
        _, peak = waited(process)
        assert process.returncode == 0
        figure(f"1,000,000 steps ({size:.0f} MB) opened and printed", f"{time.monotonic() - begun:.2f} s", "2 s")
        figure("  peak resident memory", f"{peak:.0f} MB", "300 MB")


def threads(pid, name):
    """Seconds on a CPU of a process's threads of that name."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if name is None or (task / "comm").read_text().strip() == name:
                total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            pass
    return total / 1e9


def beside_a_run(folder, hidden, layers):
    """Beside a run whose steps take as long as a model of this size needs."""
    folder = Path(folder) / f"beside-{hidden}"
    folder.mkdir()
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 2 * hidden, "vocab_size": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    }))
    rows = [{"input_ids": [(row * 7 + at * 3) % 32 for at in range(16)]} for row in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = folder / "run"
    train = subprocess.Popen(
        [BINARY, "train", "--device", "cpu", "--model", str(model), "--data", str(folder / "rows.jsonl"), "--output",
         str(run), "--max-steps", "100000000", "--save-strategy", "no", "--threads-per-rank", "1", "--logging-steps", "1000"],
        stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 10_000:
        assert train.poll() is None, "the run has ended"
        time.sleep(0.1)
    web = subprocess.Popen([BINARY, "monitor", str(run), "--web", "--format", "json"], stdout=subprocess.PIPE, text=True)
    text = ""
    while not text.rstrip().endswith("}"):
        text += web.stdout.readline()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    url = json.loads(text)["url"]
    opener.open(url).read()
    stream = opener.open(url.split("?")[0] + "api/stream")
    threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()
    pid, screen = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(BINARY, [BINARY, "monitor", str(run)])
    threading.Thread(target=lambda: drain(screen), daemon=True).start()
    time.sleep(3)
    count = sum(1 for _ in open(metrics))
    before = [threads(train.pid, "status"), threads(web.pid, None), threads(pid, None)]
    begun = time.monotonic()
    time.sleep(SECONDS)
    after = [threads(train.pid, "status"), threads(web.pid, None), threads(pid, None)]
    took = time.monotonic() - begun
    speed = (sum(1 for _ in open(metrics)) - count) / took
    status, page, terminal = [1000 * (b - a) / took for a, b in zip(before, after)]
    figure("steps of the run", f"{speed:.0f} /s", "")
    figure("status writer", f"{status:.2f} ms/s", "")
    figure("web view with a page open", f"{page:.2f} ms/s", "")
    figure("terminal view", f"{terminal:.2f} ms/s", "")
    figure("status writer and web view", f"{status + page:.2f} ms/s", "10 ms/s")
    figure("status writer and terminal view", f"{status + terminal:.2f} ms/s", "10 ms/s")
    os.write(screen, b"q")
    os.waitpid(pid, 0)
    web.terminate()
    web.wait()
    train.kill()
    train.wait()


def drain(screen):
    try:
        while os.read(screen, 65536):
            pass
    except OSError:
        pass


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        million_steps(folder)
        beside_a_run(folder, 128, 3)
        beside_a_run(folder, 16, 1)
