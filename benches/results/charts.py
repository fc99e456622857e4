"""Draws the charts of the docs as SVG from the CSV files beside this script. Needs only the standard library.

    python benches/results/charts.py            # writes docs/*.svg
    python benches/results/charts.py --check    # exits 1 if a chart is stale
"""

import csv
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"

# The background is part of the chart, so that it stays readable where a viewer ignores the colour scheme.
STYLE = """
  .background { fill: #ffffff; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 15px; }
  .muted { fill: #59636e; font-size: 12px; }
  .ours { fill: #c2410c; }
  .peer { fill: #8c96a1; }
  .value { font-variant-numeric: tabular-nums; }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117; }
    text { fill: #f0f6fc; }
    .muted { fill: #9198a1; }
    .ours { fill: #f97316; }
    .peer { fill: #6e7681; }
  }
"""
LABEL, BAR, VALUE = 112, 190, 78  # widths of a bar's label, its longest bar, and its value
ROW, BAR_HEIGHT = 24, 15


def read(name):
    with open(HERE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def select(rows, **wanted):
    """The one row with these values."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1, f"{len(found)} rows with {wanted}"
    return found[0]


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def bars(x, y, heading, entries):
    """One panel: a heading and horizontal bars. An entry is (label, value, text)."""
    parts = [f'<text class="muted" x="{x + LABEL}" y="{y}">{escape(heading)}</text>']
    longest = max(value for _, value, _ in entries)
    for number, (label, value, text) in enumerate(entries):
        top = y + 10 + number * ROW
        middle = top + BAR_HEIGHT - 3
        width = max(2, round(BAR * value / longest))
        kind = "ours" if label == "zeroth" else "peer"
        parts.append(f'<text x="{x + LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="{kind}" x="{x + LABEL}" y="{top}" width="{width}" height="{BAR_HEIGHT}" rx="2"/>')
        parts.append(f'<text class="value" x="{x + LABEL + width + 6}" y="{middle}">{escape(text)}</text>')
    return parts


def chart(title, groups):
    """Groups below each other, each with a panel for speed and one for memory. A group is (heading, speed, memory)."""
    panel = LABEL + BAR + VALUE
    parts, y = [f'<text class="title" x="12" y="24">{escape(title)}</text>'], 52
    for heading, (speed_unit, speed), (memory_unit, memory) in groups:
        parts.append(f'<text x="12" y="{y}">{escape(heading)}</text>')
        y += 22
        parts += bars(0, y, speed_unit, speed)
        parts += bars(panel, y, memory_unit, memory)
        y += 10 + ROW * len(speed) + 26
    size = f'width="{2 * panel + 12}" height="{y - 16}" viewBox="0 0 {2 * panel + 12} {y - 16}"'
    body = "\n  ".join(['<rect class="background" width="100%" height="100%" rx="6"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n  <title>{escape(title)}</title>\n'
        f"  <style>{STYLE}  </style>\n  {body}\n</svg>\n"
    )


def gpu_group(rows, heading, model, systems):
    """Speed and memory of systems on the H200. A system is (label, the values that select its row)."""
    found = [(label, select(rows, model=model, optimizer="device", **wanted)) for label, wanted in systems]
    speed = [(label, int(row["tokens_per_s"]), f"{int(row['tokens_per_s']):,}") for label, row in found]
    memory = [(label, float(row["memory_gib"]), row["memory_gib"]) for label, row in found]
    return heading, ("tokens/s, more is better", speed), ("GPU memory in GiB, less is better", memory)


def case_group(name, case, heading, peer, system):
    """Medians of the runs of a case of `benches/gpu/steps.py`, ours and those of the peer's system."""
    speed, memory = [], []
    for label, wanted in [("zeroth", "zeroth"), (peer, system)]:
        runs = [row for row in read(name) if (row["case"], row["system"]) == (case, wanted)]
        rate = round(statistics.median(int(row["tokens_per_s"]) for row in runs))
        gib = statistics.median(float(row["gib"]) for row in runs)
        speed.append((label, rate, f"{rate:,}"))
        memory.append((label, gib, f"{gib:.1f}"))
    return heading, ("tokens/s, more is better", speed), ("GPU memory in GiB, less is better", memory)


def cpu_group(rows, heading, model):
    row = next(row for row in rows if (row["series"], row["model"], row["dtype"]) == ("padded-rows", model, "bf16"))
    speed = [("zeroth", int(row["ours_median"])), ("DeepSpeed", int(row["deepspeed_median"]))]
    memory = [("zeroth", int(row["ours_mib"])), ("DeepSpeed", int(row["deepspeed_mib"]))]
    return (
        heading,
        ("tokens/s, more is better", [(label, value, f"{value:,}") for label, value in speed]),
        ("MiB per rank, less is better", [(label, value, f"{value:,}") for label, value in memory]),
    )


def charts():
    gpu, cpu = read("gpu-steps.csv"), read("cpu-steps.csv")
    deepspeed = ("DeepSpeed", {"system": "DeepSpeed 0.19.8", "stage": "2"})
    compiled = ("torch.compile", {"system": "torch.compile 2.11"})
    plain = {"system": "zeroth", "conditions": ""}
    groups = [
        gpu_group(gpu, "Qwen3-0.6B shape, ZeRO-2, 8 × 2048 tokens, one H200", "0.6B",
                  [("zeroth", plain), compiled, deepspeed]),
        gpu_group(gpu, "Qwen3-1.7B shape, ZeRO-2, 4 × 4096 tokens, one H200 (llmq: Qwen2 shape, no q/k norm)", "1.7B",
                  [("zeroth", plain), ("llmq", {"system": "llmq"}), compiled, deepspeed]),
        case_group("lora-h200-2026-11-18.csv", "8b-lora-2x2048",
                   "LoRA of Qwen3-8B, rank 16, 2 × 2048 tokens, one H200", "PEFT", "peft"),
        case_group("moe-h200-2026-11-18.csv", "30b-lora",
                   "LoRA of Qwen3-30B-A3B, 128 experts, 4 × 4096 tokens, one H200 (PEFT: with checkpointing)", "PEFT",
                   "transformers and peft (checkpointing)"),
        case_group("kd-h200-2026-11-18.csv", "kd",
                   "Distillation of Qwen3-8B to 0.6B, 4 × 2048 tokens, one H200", "PyTorch", "PyTorch"),
        case_group("t5-h200-2026-11-18.csv", "t5",
                   "T5-3B shape, 8 pairs of 512 and 512 tokens, one H200", "transformers", "transformers"),
        cpu_group(cpu, "41.6M parameters, ZeRO-3, two ranks of one CPU core each (AMX)", "m50"),
    ]
    return {"speed-and-memory.svg": chart("Training speed and memory, bf16", groups)}


def main():
    is_check = sys.argv[1:] == ["--check"]
    stale = []
    for name, text in charts().items():
        path = DOCS / name
        if is_check:
            stale += [name] if not path.exists() or path.read_text(encoding="utf-8") != text else []
        else:
            path.write_text(text, encoding="utf-8")
    sys.exit(f"stale: {', '.join(stale)}; run python benches/results/charts.py" if stale else 0)


if __name__ == "__main__":
    main()
