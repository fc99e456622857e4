"""Greedy and beam-search answers of transformers for a file of prompts, and those of `zeroth generate` beside them.

    python tests/golden/make_golden_generation.py FOLDER PROMPTS OUTPUT              # writes OUTPUT
    python tests/golden/make_golden_generation.py FOLDER PROMPTS OUTPUT --zeroth BIN # compares BIN with OUTPUT; exit 1 where they differ

FOLDER is a Hugging Face folder, PROMPTS a JSONL file whose rows have `prompt_ids`, `prompt`, or `translation` with --source-lang;
--source-prefix stands before texts. Texts become tokens by the folder's tokenizer.json, as in zeroth. Needs torch,
transformers and tokenizers in an environment outside the repository.

OUTPUT has a row for each prompt: `prompt_ids`, and for `greedy` and `beam` the `ids` up to and without the end, `text`, and for
`beam` its `score`. One prompt at a time, so no padding is involved. Both compute in fp32 on the CPU: where the two best tokens are
closer than fp32 rounds, answers may differ; `margin` of `greedy` is the smallest difference of the two largest logits.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
from compare_logits import load, start_of
from tokenizers import Tokenizer
from transformers import GenerationConfig


def first(tokens):
    return tokens[0] if isinstance(tokens, list) else tokens


def source_ids(row, tokenizer, arguments):
    if "prompt_ids" in row:
        return row["prompt_ids"]
    text = row["translation"][arguments.source_lang] if "translation" in row else row["prompt"]
    return tokenizer.encode(arguments.source_prefix + text).ids


def can_cache(config):
    """transformers 5.23 makes a cache for as many decoder layers as the encoder has."""
    return not config.is_encoder_decoder or config.num_decoder_layers == config.num_layers


@torch.no_grad()
def answer(model, ids, beams, arguments):
    is_pair, end = model.config.is_encoder_decoder, first(model.config.eos_token_id)
    searched = {"length_penalty": arguments.length_penalty, "early_stopping": arguments.early_stopping} if beams > 1 else {}
    config = GenerationConfig(
        max_new_tokens=arguments.max_new_tokens, num_beams=beams, do_sample=False, eos_token_id=end,
        pad_token_id=end if model.config.pad_token_id is None else model.config.pad_token_id,
        decoder_start_token_id=start_of(model.config) if is_pair else None,
        return_dict_in_generate=True, output_scores=True, use_cache=can_cache(model.config), **searched)
    prompt = torch.tensor([ids])
    # Without one, the padding token in a prompt would be masked.
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    new = found.sequences[0, 1 if is_pair else len(ids):].tolist()
    result = {"ids": new[:new.index(end)] if end in new else new}
    if beams > 1:
        result["score"] = found.sequences_scores[0].item()
    else:
        two = [scores[0].topk(2).values for scores in found.scores]
        result["margin"] = min((best - next_).item() for best, next_ in two)
    return result


def write(rows, arguments, tokenizer):
    model = load(arguments.folder, torch.float32)
    with open(arguments.output, "w", encoding="utf-8") as file:
        for row in rows:
            ids = source_ids(row, tokenizer, arguments)
            found = {"prompt_ids": ids}
            for name, beams in (("greedy", 1), ("beam", arguments.num_beams)):
                found[name] = answer(model, ids, beams, arguments)
                if tokenizer:
                    found[name]["text"] = tokenizer.decode(found[name]["ids"])
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
            file.flush()
    print(f"{arguments.output}: {len(rows)} prompts")


def compare(rows, arguments, end):
    """Whether zeroth gives the same tokens."""
    wrong = 0
    for place, row in enumerate(rows):
        for name, beams in (("greedy", 1), ("beam", arguments.num_beams)):
            command = [arguments.zeroth, "generate", "--model", arguments.folder, "--fp32", "--device", "cpu"]
            command += ["--prompt-ids", ",".join(map(str, row["prompt_ids"])), "--format", "json"]
            command += ["--max-new-tokens", str(arguments.max_new_tokens)]
            if beams > 1:
                command += ["--num-beams", str(beams), "--length-penalty", str(arguments.length_penalty)]
                command += ["--early-stopping", str(arguments.early_stopping).lower()]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
            ids = json.loads(run.stdout)["ids"]
            ids = ids[:ids.index(end)] if end in ids else ids
            if ids != row[name]["ids"]:
                wrong += 1
                print(f"row {place}, {name}: {ids}\n  transformers: {row[name]}")
    print(f"{len(rows)} prompts, greedy and {arguments.num_beams} beams: {2 * len(rows) - wrong} of {2 * len(rows)} answers are equal")
    return wrong == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "prompts", "output"):
        parser.add_argument(name)
    parser.add_argument("--zeroth")
    parser.add_argument("--source-lang", default="en")
    parser.add_argument("--source-prefix", default="")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--early-stopping", action="store_true")
    parser.add_argument("--limit", type=int, help="the first prompts alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = arguments.output if arguments.zeroth else arguments.prompts
    rows = [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()][:arguments.limit]
    if arguments.zeroth:
        config = json.loads((pathlib.Path(arguments.folder) / "config.json").read_text())
        sys.exit(0 if compare(rows, arguments, first(config["eos_token_id"])) else 1)
    file = pathlib.Path(arguments.folder) / "tokenizer.json"
    write(rows, arguments, Tokenizer.from_file(str(file)) if file.exists() else None)


if __name__ == "__main__":
    main()
