"""Adapters of zeroth beside those of PEFT: logits, and merged weights.

    python tests/golden/compare_adapters.py ZEROTH BASE ADAPTER...   # compares; exit 1 where they differ. Run by hand
    python tests/golden/compare_adapters.py --write                  # makes lora/adapters.json and lora/*/merged-*.safetensors

ZEROTH is the binary, BASE a Hugging Face folder, ADAPTER folders that zeroth or PEFT wrote. Needs what make_golden_lora.py
needs.

- Logits: all of the token after a prompt, `zeroth generate --adapter` beside `PeftModel.from_pretrained`, both in fp32.
  Bound 1e-4.
- Merged weights: `zeroth checkpoint export --merge` beside `merge_and_unload`, every element. Bound 1e-6 in fp32, and one step of
  bf16 at the larger of weight, product and sum. Both add the fp32 product and round once; PEFT's `safe_merge=True` would round
  the product too. Elements that differ are counted.

--write keeps, for every folder of lora/ and some prompts, the logits and 8 greedy tokens of PEFT in fp32, and for every merged
matrix its norm and sum; for one folder the merged matrices too, in fp32 and bf16.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from compare_logits import load, logits_of, prompts_for
from peft import PeftModel
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
LOGITS, MERGED = 1e-4, 1e-6
WHOLE = "qwen3-tied-all-rslora"
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def adapted(base, adapter, dtype=torch.float32):
    return PeftModel.from_pretrained(load(base, dtype), adapter).eval()


def weight_of(module, modules):
    """The weight that an adapter adds to. Experts have one for each of their parameters, the inner one for gate and up."""
    if module.endswith(".experts.base_layer"):
        return module.replace(".base_layer", ".gate_up_proj")
    if module.endswith(".experts"):
        assert f"{module}.base_layer" in modules, "adapters of both parameters of experts are compared"
        return f"{module}.down_proj"
    return f"{module}.weight"


def merged_by_peft(base, adapter, dtype):
    """The merged matrices, by their names in the base, and the same before."""
    model = adapted(base, adapter, dtype)
    names = {name.split(".lora_A.")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters() if ".lora_A." in name}
    merged = model.merge_and_unload().state_dict()
    before = load(base, dtype).state_dict()
    keys = [weight_of(name, names) for name in sorted(names)]
    return {key: merged[key].contiguous() for key in keys}, {key: before[key] for key in keys}


def run(command):
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {ended.returncode}\n{ended.stderr}")
    return ended.stdout


def our_logits(zeroth, base, adapter, ids):
    flags = ["--prompt-ids", ",".join(map(str, ids)), "--fp32", "--device", "cpu", "--max-new-tokens", "0", "--logits"]
    text = run([zeroth, "generate", "--model", base, "--adapter", adapter, *flags, "--format", "json"])
    return torch.tensor(json.loads(text)["logits"])


def merged_by_zeroth(zeroth, base, adapter, dtype):
    """From a base in that dtype, as PEFT merges."""
    with tempfile.TemporaryDirectory() as scratch:
        stored, out = pathlib.Path(scratch) / "base", pathlib.Path(scratch) / "merged"
        load(base, TORCH[dtype]).save_pretrained(stored)
        run([zeroth, "checkpoint", "export", adapter, "--merge", "--model", stored, "--output", out])
        # transformers loads the folder as any other.
        return load(out, TORCH[dtype]).state_dict()


def steps_of_bf16(x):
    return torch.exp2(torch.floor(torch.log2(x.clamp_min(1e-30))) - 7)


def compare(zeroth, base, adapter):
    model = adapted(base, adapter)
    config, worst = model.config, 0.0
    for ids in prompts_for(config.vocab_size, config.max_position_embeddings):
        worst = max(worst, (our_logits(zeroth, base, adapter, ids) - logits_of(model.base_model.model, ids)).abs().max().item())
    plain = load(base, torch.float32)
    moved = max((logits_of(plain, ids) - logits_of(model.base_model.model, ids)).abs().max().item()
                for ids in prompts_for(config.vocab_size, config.max_position_embeddings))
    good = worst <= LOGITS
    print(f"{adapter}: logits {worst:.2e} of {LOGITS:.0e} (the adapter moves them by {moved:.2e}){'' if good else ': TOO FAR'}")
    for precision, dtype in TORCH.items():
        expected, before = merged_by_peft(base, adapter, dtype)
        found = merged_by_zeroth(zeroth, base, adapter, precision)
        distance, unequal, elements = 0.0, 0, 0
        for name, theirs in expected.items():
            assert found[name].dtype == theirs.dtype and theirs.isfinite().all() and found[name].isfinite().all(), name
            unequal, elements = unequal + (found[name] != theirs).sum().item(), elements + theirs.numel()
            apart = (found[name].double() - theirs.double()).abs()
            if precision == "bf16":
                size = torch.stack([theirs.double(), before[name].double(), theirs.double() - before[name].double()])
                apart = apart / steps_of_bf16(size.abs().max(0).values)
            distance = max(distance, apart.max().item())
        bound, unit = (MERGED, "") if precision == "fp32" else (1.0, " steps of bf16")
        fits = distance <= bound
        print(f"  merged, {precision}: {unequal} of {elements} elements differ, by {distance:.2e}{unit}{'' if fits else ': TOO FAR'}")
        good = good and fits
    return good


@torch.no_grad()
def write():
    cases = {}
    for folder in sorted(path.parent for path in (HERE / "lora").glob("*/steps.json")):
        base = HERE / json.loads((folder / "steps.json").read_text())["base"]
        model, prompts = adapted(base, folder), []
        config = model.config
        for prompt in prompts_for(config.vocab_size, min(24, config.max_position_embeddings - 8)):
            ids, logits = list(prompt), logits_of(model.base_model.model, prompt)
            for _ in range(8):
                ids.append(logits_of(model.base_model.model, ids).argmax().item())
            prompts.append({"prompt": prompt, "logits": [float(f"{x:.9g}") for x in logits.tolist()], "greedy": ids[len(prompt):]})
        merged, _ = merged_by_peft(base, folder, torch.float32)
        sums = {name: {"norm": w.double().norm().item(), "sum": w.double().sum().item()} for name, w in merged.items()}
        cases[folder.name] = {"base": base.name, "prompts": prompts, "merged": sums}
        if folder.name == WHOLE:
            for precision, dtype in TORCH.items():
                save_file(merged_by_peft(base, folder, dtype)[0], folder / f"merged-{precision}.safetensors", {"format": "pt"})
    (HERE / "lora" / "adapters.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"adapters.json: {len(cases)} adapters")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zeroth", nargs="?")
    parser.add_argument("base", nargs="?")
    parser.add_argument("adapters", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write:
        return write()
    if not arguments.adapters:
        parser.error("give the binary, the base and at least one adapter")
    good = [compare(arguments.zeroth, arguments.base, adapter) for adapter in arguments.adapters]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
