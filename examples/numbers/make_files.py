#!/usr/bin/env python3
"""Makes the rows and the tokenizer of this folder: python3 make_files.py

Needs Python 3 alone; the seed is fixed, so every run writes the same files. Rows are {"question", "answer"}: a number in
digits and the same number in words. All numbers below 100 are trained on, and a sample of those below 1,000,000; held-out
numbers are drawn in the same way, and none of them is trained on. A token is one byte, so any text has tokens.
"""

import json
import random
from pathlib import Path

SEED = 1
TRAINED, HELD_OUT = 3400, 200
DIGITS = "00123456789"  # zeros twice: they leave words out, which takes more examples
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] + ('\n' if message['role'] == 'user' else '" + END + "') }}"
    "{% endfor %}"
)

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number):
    if number < 20:
        return ONES[number]
    if number < 100:
        ones = f"-{ONES[number % 10]}" if number % 10 else ""
        return TENS[number // 10 - 2] + ones
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = f" {in_words(number % unit)}" if number % unit else ""
    return f"{in_words(number // unit)} {name}{rest}"


def numbers():
    """Trained and held-out numbers: half of the drawn ones have six digits, the others three to five."""
    draw = random.Random(SEED)
    trained, held_out = list(range(100)), []
    seen = set(trained)
    while len(held_out) < HELD_OUT:
        digits = [draw.choice(DIGITS) for _ in range(draw.choice([3, 4, 5, 6, 6, 6]))]
        number = int("".join(digits))
        if number not in seen:
            seen.add(number)
            (trained if len(trained) < TRAINED else held_out).append(number)
    return trained, held_out


def byte_names():
    """The character that stands for each byte in byte-level vocabularies: its own where it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return [names[byte] for byte in range(256)]


def tokenizer():
    end = {"id": 0, "content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {name: place for place, name in enumerate([END, *byte_names()])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def write(name, text):
    (Path(__file__).parent / name).write_text(text, encoding="utf-8")
    print(f"{name}: {len(text.encode()):,} bytes")


def main():
    trained, held_out = numbers()
    assert (len(trained), len(held_out)) == (TRAINED, HELD_OUT)
    assert not set(trained) & set(held_out), "held-out numbers are trained on"
    for name, part in [("train.jsonl", trained), ("held-out.jsonl", held_out)]:
        rows = [{"question": f"{number:,}", "answer": in_words(number)} for number in part]
        write(name, "".join(json.dumps(row) + "\n" for row in rows))
    for name, content in [("tokenizer.json", tokenizer()), ("tokenizer_config.json", tokenizer_config())]:
        write(f"tiny-qwen3/{name}", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


main()
