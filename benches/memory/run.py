"""Plan and resident memory side by side: an 8-layer model, stages 0 to 3, offload, 1, 2 and 4 ranks.

Run from the root of the repository after `cargo build --release`: `python benches/memory/run.py`. It prints the table of
docs/performance.md. Resident memory is the proportional set size (PSS) of rank 0 at its peak, from metrics.jsonl; the
overhead is what it has beyond both arenas: the program itself, the data, and the regions that ranks talk through.
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
PLACES = {"none": {}, "optimizer": {"offload_optimizer": HOST}, "both": {"offload_optimizer": HOST, "offload_param": HOST}}
CASES = [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"),
         (3, "both")]


def rows(path):
    lines = []
    for row in range(16):
        ids = [(row * 131 + place * place * 7 + place * 13) % CONFIG["vocab_size"] for place in range(128)]
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
        print("| stage | offload | ranks | device: " + " | ".join(names) + " | host: " + " | ".join(names)
              + " | plan | PSS | beyond the plan |")
        print("|--:|---|--:|" + "--:|" * (2 * len(names) + 3))
        for stage, offload in CASES:
            for ranks in (1, 2, 4):
                asked = {"zero_optimization": {"stage": stage, **PLACES[offload]}}
                run = folder / f"{stage}-{offload}-{ranks}"
                subprocess.run(
                    [ZEROTH, "train", "--device", "cpu", "--model", model, "--data", data, "--deepspeed", json.dumps(asked),
                     "--ranks", str(ranks), "--threads-per-rank", "1", "--max-steps", "2", "--logging-steps", "1",
                     "--output", run],
                    check=True, capture_output=True)
                plan = json.loads((run / "plan.json").read_text())
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                resident = max(line["host_bytes_peak"] for line in lines)
                device, host = plan["device_bytes"], plan["host_bytes"]
                total = device["total"] + host["total"]
                cells = [f"{device[name] / 1e6:.1f}" for name in names] + [f"{host[name] / 1e6:.1f}" for name in names]
                cells += [f"{total / 1e6:.1f}", f"{resident / 1e6:.1f}", f"{(resident - total) / 1e6:+.1f}"]
                print(f"| {stage} | {offload} | {ranks} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
