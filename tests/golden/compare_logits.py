"""Next-token logits of `zeroth generate` beside those of transformers, for Hugging Face folders.

    python tests/golden/compare_logits.py ZEROTH FOLDER... [--prompt-ids 1,2,3]   # compares; exit 1 where they differ
    python tests/golden/compare_logits.py --write                     # makes next_tokens.json beside this file and in t5/

ZEROTH is the binary. Needs torch and transformers in an environment outside the repository; README.md names versions.

The numbers compared are plain absolute differences of all logits of the token after the prompt, the largest over the
vocabulary; logits are not scaled.

transformers must load the folder strictly: no tensor missing, none left over, none of another shape. The prompt of an
encoder-decoder is its source, and the logits are those of the first token of its target.

- fp32: both compute in fp32 from the folder's weights. Bound 1e-4.
- bf16: both round the weights to bf16 and compute in bf16. transformers rounds the logits themselves to bf16 too, whose
  steps are 0.03 between 4 and 8: more than the bound, whatever is computed. zeroth keeps logits in fp32, so the last
  hidden state of transformers in bf16 is projected here in fp32, by the same bf16 weights. Two programs in bf16 round in
  different places, so both are compared with fp32 arithmetic on the same bf16 weights: zeroth may be 2e-2 from it, or
  twice as far as transformers. Besides, no logit may be farther than 2e-2 of the largest one from that of transformers.
  With experts a token may be routed otherwise where the last chosen and the first other expert are as near as bf16
  rounds: such prompts are named, not judged.

next_tokens.json holds, for every golden model and some prompts, the logits and the greedy continuation of transformers
in fp32; that in t5/ has those of the encoder-decoders. Tests of zeroth-train read them.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

HERE = pathlib.Path(__file__).resolve().parent
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(folder, dtype):
    if AutoConfig.from_pretrained(folder).is_encoder_decoder:
        auto, more = AutoModelForSeq2SeqLM, {}
    else:
        # Grouped matmuls of experts would need sides that are multiples of 16 bytes.
        auto, more = AutoModelForCausalLM, {"experts_implementation": "eager"}
    model, found = auto.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, **more)
    wrong = {what: keys for what, keys in found.items() if keys}
    if wrong:
        sys.exit(f"{folder}: transformers does not load it strictly: {wrong}")
    return model.eval()


@torch.no_grad()
def logits_of(model, ids):
    """The head in fp32, whatever the model computes in."""
    if model.config.is_encoder_decoder:
        return target_logits(model, ids, [])
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden.float() @ model.lm_head.weight.float().T


@torch.no_grad()
def target_logits(model, source, target):
    """Of the token after the first ones of a target."""
    encoded = model.encoder(input_ids=torch.tensor([source])).last_hidden_state
    target = torch.tensor([[start_of(model.config), *target]])
    hidden = model.decoder(input_ids=target, encoder_hidden_states=encoded, use_cache=False).last_hidden_state[0, -1]
    if getattr(model.config, "scale_decoder_outputs", False):
        hidden = hidden * model.config.d_model ** -0.5
    return hidden.float() @ model.lm_head.weight.float().T


def start_of(config):
    return config.pad_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id


@torch.no_grad()
def routes_alike(model, ids):
    """Whether bf16 may choose other experts than fp32 for a token of the prompt."""
    config = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts or experts == config.num_experts_per_tok:
        return False
    answer = model(input_ids=torch.tensor([ids]), output_router_logits=True)
    for logits in answer.router_logits:
        last, other = logits.float().sort(descending=True).values[:, config.num_experts_per_tok - 1:][:, :2].T
        # Hidden states of bf16 are 2^-8 of themselves apart, and a router sums their errors.
        if (last - other <= 2**-6 * logits.float().abs().amax(-1)).any():
            return True
    return False


def prompts_for(vocab, positions):
    """Short ones, and one that is longer than windows and than where rotations stretch."""
    lengths = sorted({1, 2, 7, min(40, positions)})
    return [[(place * 7 + 3 * length) % vocab for place in range(length)] for length in lengths]


def ours(zeroth, folder, ids, precision):
    command = [zeroth, "generate", "--model", folder, "--prompt-ids", ",".join(map(str, ids)), f"--{precision}"]
    command += ["--device", "cpu", "--max-new-tokens", "0", "--logits", "--format", "json"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
    return torch.tensor(json.loads(run.stdout)["logits"])


def apart(a, b):
    return (a - b).abs().max().item()


def compare(zeroth, folder, given):
    worst = 0.0
    models = {precision: load(folder, dtype) for precision, dtype in TORCH.items()}
    rounded = load(folder, torch.bfloat16).float()
    config = models["fp32"].config
    # Longer than the largest distance of T5 has a bucket for.
    positions = getattr(config, "max_position_embeddings", 200)
    prompts = prompts_for(config.vocab_size, positions)
    if config.is_encoder_decoder:
        prompts.append([place * 11 % config.vocab_size for place in range(positions)])
    for ids in [given] if given else prompts:
        for precision, model in models.items():
            found, expected = ours(zeroth, folder, ids, precision), logits_of(model, ids)
            distance, bound, more = apart(found, expected), BOUNDS[precision], ""
            judged = distance
            if precision == "bf16":
                exact = logits_of(rounded, ids)
                judged, theirs = apart(found, exact), apart(expected, exact)
                bound = max(bound, 2 * theirs)
                more = f"; from fp32 arithmetic: zeroth {judged:.2e}, transformers {theirs:.2e}"
            line = f"{folder}, {len(ids)} tokens, {precision}: {distance:.2e} apart, bound {bound:.1e}"
            largest = expected.abs().max().item()
            line += f", {distance / largest:.1e} of the largest logit, {largest:.2f}{more}"
            if found.argmax() != expected.argmax():
                line += "; ANOTHER LARGEST TOKEN"
            # Both must hold: the absolute bound, and 2e-2 of the largest logit.
            apart_by = max(judged / bound, distance / largest / BOUNDS["bf16"])
            if apart_by > 1.0 and precision == "bf16" and routes_alike(rounded, ids):
                print(f"{line}: not judged, experts are as near as bf16 rounds")
                continue
            print(line if apart_by <= 1.0 else f"{line}: TOO FAR")
            worst = max(worst, apart_by)
    return worst <= 1.0


@torch.no_grad()
def write():
    models = {}
    for folder in sorted(path.parent for path in HERE.glob("*/steps.json")):
        model = load(folder, torch.float32)
        config, cases = model.config, []
        for prompt in prompts_for(config.vocab_size, min(24, config.max_position_embeddings - 8)):
            ids, logits = list(prompt), logits_of(model, prompt)
            for _ in range(8):
                # A new model for each prefix: dynamic rotations remember the longest one they met.
                ids.append(logits_of(load(folder, torch.float32), ids).argmax().item())
            cases.append({"prompt": prompt, "logits": [float(f"{x:.9g}") for x in logits.tolist()], "greedy": ids[len(prompt):]})
        models[folder.name] = cases
    write_models("next_tokens.json", models)
    models = {}
    for folder in sorted(path.parent for path in HERE.glob("t5/*/steps.json")):
        model, cases = load(folder, torch.float32), []
        for prompt in prompts_for(model.config.vocab_size, 40):
            greedy = []
            for _ in range(8):
                greedy.append(target_logits(model, prompt, greedy).argmax().item())
            logits = target_logits(model, prompt, []).tolist()
            cases.append({"prompt": prompt, "logits": [float(f"{x:.9g}") for x in logits], "greedy": greedy})
        models[folder.name] = cases
    write_models("t5/next_tokens.json", models)


def write_models(file, models):
    (HERE / file).write_text(json.dumps(models, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{file}: {len(models)} models")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zeroth", nargs="?")
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--prompt-ids", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write:
        return write()
    if not arguments.folders:
        parser.error("give the binary and at least one folder")
    good = [compare(arguments.zeroth, folder, arguments.prompt_ids) for folder in arguments.folders]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
