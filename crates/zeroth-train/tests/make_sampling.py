"""Writes golden/sampling.json: next-token probabilities of transformers' logits processors.

Needs torch and transformers (made with 5.23). Run: python crates/zeroth-train/tests/make_sampling.py
"""

import json
from pathlib import Path

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 24
CASES = [
    dict(),
    dict(temperature=0.6),
    dict(temperature=2.5),
    dict(top_k=5),
    dict(top_p=0.9),
    dict(top_p=0.3, temperature=0.5),
    dict(min_p=0.1),
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=0.7),
    dict(top_k=8, top_p=0.8, temperature=0.7),
    dict(top_k=6, top_p=0.95, min_p=0.2, temperature=1.4, repetition_penalty=1.15),
    dict(top_p=1e-6),
    dict(top_k=1, repetition_penalty=50.0),
]


def main():
    generator = torch.Generator().manual_seed(7)
    cases = []
    for given in CASES:
        case = dict(temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0) | given
        logits = torch.randn(1, VOCABULARY, generator=generator) * 3
        text = torch.randint(VOCABULARY, (1, 9), generator=generator)
        # The order of GenerationMixin._get_logits_processor.
        scores = RepetitionPenaltyLogitsProcessor(case["repetition_penalty"])(text, logits.clone())
        greedy = int(scores.argmax())
        scores = TemperatureLogitsWarper(case["temperature"])(text, scores)
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
            if case[name] is not None:
                scores = warper(case[name])(text, scores)
        probabilities = torch.softmax(scores.double(), -1)[0].tolist()
        cases.append(
            case | dict(text=text[0].tolist(), logits=logits[0].tolist(), greedy=greedy, probabilities=probabilities)
        )
    lines = ",\n".join(json.dumps(case) for case in cases)
    path = Path(__file__).parent / "golden" / "sampling.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
