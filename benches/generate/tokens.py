"""CPU time of one more generated token after a short and a long prefix, with a model of 12 blocks made by `zeroth init`.

    python benches/generate/tokens.py target/release/zeroth [OTHER_BINARY ...] [--rounds 2] [--prefixes 5 190]

A token's time is the difference between runs of 11 and 1 new tokens, over 10: loading and the prompt cancel. Binaries are
interleaved and must generate the same tokens. User time on one thread, so that other work on the machine counts little.
Needs Python 3.9 on Unix, nothing else.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

SIZES = "--hidden 768 --layers 12 --heads 12 --kv-heads 4 --intermediate-size 2048 --vocab-size 4096"


def run(binary, model, prompt, tokens):
    """User seconds and new tokens of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [binary, "generate", "--model", model, "--prompt-ids", ",".join(map(str, prompt)), "--fp32"]
    command += ["--max-new-tokens", str(tokens), "--device", "cpu", "--threads", "1", "--format", "json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, json.loads(found)["ids"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binaries", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[5, 190])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        command = [options.binaries[0], "init", "--family", "llama", "--output", model, *SIZES.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for prefix in options.prefixes:
            prompt = [3 + 7 * i % 900 for i in range(prefix)]
            for _ in range(options.rounds):
                texts = set()
                for binary in options.binaries:
                    one, _ = run(binary, model, prompt, 1)
                    many, ids = run(binary, model, prompt, 11)
                    texts.add(tuple(ids))
                    print(f"{binary}: {1e3 * (many - one) / 10:.1f} ms per token after {prefix}", flush=True)
                if len(texts) != 1:
                    sys.exit("the binaries generated different tokens")


if __name__ == "__main__":
    main()
