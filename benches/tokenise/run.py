"""Compares tokenising 100,000 rows, from JSONL to tokens with labels, with Hugging Face's tokenizers in Python.

    cargo build --release
    python benches/tokenise/run.py [--rows 100000] [--rounds 3] [--model examples/gsm8k/tiny-qwen3]

Needs a Python with `transformers` and `tokenizers`. Rounds are interleaved; the table has best and median of each side:

- zeroth: `train --dry-run` with an empty cache. The file is read, hashed, parsed, rendered by the chat template, tokenised,
  masked, written to the token cache and synced. The time is the one it prints ("rows read and tokenised in X s").
- tokenizers alone: `encode_batch` over texts that are already rendered, in memory, on all cores, without masks: a lower
  bound for a Python pipeline.
- transformers: the usual Python script: json.loads, apply_chat_template to text, one encode_batch, and the labels of the
  answer from character offsets.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows_of(count):
    """Repeats the GSM8K rows of the examples with other numbers, so that no two rows are equal."""
    source = [json.loads(line) for line in open(ROOT / "examples/gsm8k/train.jsonl", encoding="utf-8")]
    for index in range(count):
        row, turn = source[index % len(source)], index // len(source)
        shift = lambda match: str(int(match.group()) + turn)
        yield {key: re.sub(r"\d+", shift, row[key]) for key in ("question", "answer")}


def zeroth(model, data):
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "target/release/zeroth", "train", "--model", model, "--data", data, "--device", "cpu",
                   "--dry-run", "--save-steps", "0", "--output", f"{folder}/run"]
        environment = dict(os.environ, ZEROTH_CACHE=f"{folder}/cache", NO_COLOR="1")
        stderr = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    seconds = float(re.search(r"rows read and tokenised in ([\d.]+) s", stderr).group(1))
    tokens = int(re.search(r"samples, ([\d,]+) tokens", stderr).group(1).replace(",", ""))
    return seconds, tokens


def rendered(tokenizer, path):
    texts = []
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        texts.append((tokenizer.apply_chat_template(messages, tokenize=False), row["answer"]))
    return texts


def transformers(tokenizer, fast, path):
    begun = time.perf_counter()
    texts = rendered(tokenizer, path)
    tokens = 0
    for (text, answer), encoding in zip(texts, fast.encode_batch([text for text, _ in texts], add_special_tokens=False)):
        start = text.rindex(answer)
        ids, offsets = encoding.ids, encoding.offsets
        labels = [token if end > start else -100 for token, (_, end) in zip(ids, offsets)]
        tokens += len(labels)
    return time.perf_counter() - begun, tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=str(ROOT / "examples/gsm8k/tiny-qwen3"))
    arguments = parser.parse_args()
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    fast = Tokenizer.from_file(f"{arguments.model}/tokenizer.json")
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/rows.jsonl"
        with open(data, "w", encoding="utf-8") as file:
            for row in rows_of(arguments.rows):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        texts = [text for text, _ in rendered(tokenizer, data)]
        taken = {"zeroth, JSONL to labels": [], "tokenizers, encode_batch alone": [], "transformers, JSONL to labels": []}
        counts = {}
        for _ in range(arguments.rounds):
            seconds, counts["zeroth, JSONL to labels"] = zeroth(arguments.model, data)
            taken["zeroth, JSONL to labels"].append(seconds)
            begun = time.perf_counter()
            encodings = fast.encode_batch(texts, add_special_tokens=False)
            taken["tokenizers, encode_batch alone"].append(time.perf_counter() - begun)
            counts["tokenizers, encode_batch alone"] = sum(len(encoding.ids) for encoding in encodings)
            del encodings
            seconds, counts["transformers, JSONL to labels"] = transformers(tokenizer, fast, data)
            taken["transformers, JSONL to labels"].append(seconds)
        print(f"{arguments.rows:,} rows, {os.path.getsize(data) / 1e6:.0f} MB, {os.cpu_count()} cores\n")
    print("| | tokens | best s | median s | rows/s (best) | Mtok/s (best) |\n|---|---:|---:|---:|---:|---:|")
    for name, seconds in taken.items():
        best = min(seconds)
        print(f"| {name} | {counts[name]:,} | {best:.2f} | {statistics.median(seconds):.2f} "
              f"| {arguments.rows / best:,.0f} | {counts[name] / best / 1e6:.2f} |")


if __name__ == "__main__":
    main()
