"""Compares planned with resident memory: an 8-layer model, stages 0 to 3, offload, and 1, 2 and 4 ranks.

Run from the root of the repository after `cargo build --release`: `python benches/memory/run.py`. It prints
benches/results/memory-plan.csv. Resident memory is the peak proportional set size (PSS) of rank 0, from metrics.jsonl. It
exceeds the plan by the binary itself, the data, and the shared-memory channels between ranks.
"""
import json
import pathlib
import subprocess
import tempfile

ZEROTH = pathlib.Path("target/release/zeroth")
CONFIG = {
    "model_type": "llama", "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 1024, "vocab_size": 8000, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}
HOST = {"device": "cpu"}
OFFLOADS = {"none": {}, "optimizer": {"offload_optimizer": HOST}, "both": {"offload_optimizer": HOST, "offload_param": HOST}}
CASES = [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"),
         (3, "both")]


def rows(path):
    lines = []
    for row in range(16):
        ids = [(row * 131 + position * position * 7 + position * 13) % CONFIG["vocab_size"] for position in range(128)]
        lines.append(json.dumps({"input_ids": ids}))
    path.write_text("\n".join(lines) + "\n")


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        data = folder / "rows.jsonl"
        rows(data)
        names = ["parameters", "gradients", "optimizer", "activations", "buffers"]
        columns = [f"{tier}_{name}_mb" for tier in ("device", "host") for name in names]
        print(",".join(["stage", "offload", "ranks", *columns, "plan_mb", "pss_mb", "beyond_plan_mb"]))
        for stage, offload in CASES:
            for ranks in (1, 2, 4):
                config = {"zero_optimization": {"stage": stage, **OFFLOADS[offload]}}
                run = folder / f"{stage}-{offload}-{ranks}"
                subprocess.run(
                    [ZEROTH, "train", "--device", "cpu", "--model", model, "--data", data, "--deepspeed", json.dumps(config),
                     "--ranks", str(ranks), "--threads-per-rank", "1", "--max-steps", "2", "--logging-steps", "1",
                     "--output", run],
                    check=True, capture_output=True)
                plan = json.loads((run / "plan.json").read_text())
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                resident = max(line["host_bytes_peak"] for line in lines)
                device, host = plan["device_bytes"], plan["host_bytes"]
                total = device["total"] + host["total"]
                cells = [f"{device[name] / 1e6:.1f}" for name in names] + [f"{host[name] / 1e6:.1f}" for name in names]
                cells += [f"{total / 1e6:.1f}", f"{resident / 1e6:.1f}", f"{(resident - total) / 1e6:.1f}"]
                print(",".join([str(stage), offload, str(ranks), *cells]), flush=True)


if __name__ == "__main__":
    main()
