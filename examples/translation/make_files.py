#!/usr/bin/env python3
"""Makes the rows and the tokenizer of this folder: python3 make_files.py

Needs Python 3 alone; the seed is fixed, so every run writes the same files. Rows are {"translation": {"de", "en"}}: a number
below 10,000 in German, which is one word and says the ones before the tens, and in English. Held-out numbers are not
trained on.

The tokenizer is built as T5's: a unigram vocabulary of pieces that begin with ▁ at the start of a word, and </s> behind every
text. Pieces are English words and the parts of German ones (siebentausend, fünfund); other words are spelled, and characters
without a piece are <unk>.
"""

import json
import random
import string
from pathlib import Path

SEED = 1
TRAINED, HELD_OUT, NUMBERS = 1800, 200, 10_000
PREFIX = "translate German to English: "
SPECIAL = ["<pad>", "</s>", "<unk>"]

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
EINER = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
).split()
ZEHNER = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def in_english(number):
    if number < 20:
        return ONES[number]
    if number < 100:
        ones = f"-{ONES[number % 10]}" if number % 10 else ""
        return TENS[number // 10 - 2] + ones
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = f" {in_english(number % unit)}" if number % unit else ""
    return f"{in_english(number // unit)} {name}{rest}"


def in_german(number):
    """One word, in which a last one is `eins`."""
    def part(number):
        if number < 20:
            return EINER[number]
        if number < 100:
            ones = f"{EINER[number % 10]}und" if number % 10 else ""
            return ones + ZEHNER[number // 10 - 2]
        unit, name = (100, "hundert") if number < 1000 else (1000, "tausend")
        return f"{part(number // unit)}{name}{part(number % unit) if number % unit else ''}"

    return part(number) + ("s" if number % 100 == 1 else "")


def numbers():
    """Trained and held-out numbers. The small ones are rare among all, and trained on."""
    draw = random.Random(SEED)
    others = draw.sample(range(120, NUMBERS), TRAINED - 120 + HELD_OUT)
    return [*range(120), *others[HELD_OUT:]], others[:HELD_OUT]


def pieces():
    words = [*ONES, *TENS, "hundred", "thousand", "-", *PREFIX.replace(":", " :").split()]
    compounds = [one + part for part in ("tausend", "hundert", "und") for one in EINER[1:10]]
    parts = [*EINER, *ZEHNER, "eins", *compounds]
    listed = ["▁", *(f"▁{word}" for word in [*words, *parts]), *words, *parts]
    known = list(dict.fromkeys(listed))
    letters = [letter for letter in string.ascii_letters + string.digits + "äöüß.,:!?'" if letter not in known]
    return [(piece, -1.0) for piece in known] + [(letter, -10.0) for letter in letters]


def tokenizer():
    def special(place):
        return {"id": place, "content": SPECIAL[place], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True}

    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(place) for place in range(len(SPECIAL))],
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, end, second, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [*([token, 0.0] for token in SPECIAL), *(list(piece) for piece in pieces())],
            "byte_fallback": False,
        },
    }


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }


def config(vocabulary):
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": vocabulary,
        "d_model": 96,
        "d_kv": 24,
        "d_ff": 256,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def write(name, text):
    (Path(__file__).parent / name).write_text(text, encoding="utf-8")
    print(f"{name}: {len(text.encode()):,} bytes")


def main():
    trained, held_out = numbers()
    assert (len(trained), len(held_out)) == (TRAINED, HELD_OUT)
    assert not set(trained) & set(held_out), "held-out numbers are trained on"
    for name, part in [("train.jsonl", trained), ("held-out.jsonl", held_out)]:
        rows = [{"translation": {"de": in_german(number), "en": in_english(number)}} for number in part]
        write(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    made = tokenizer()
    for name, content in [
        ("config.json", config(len(made["model"]["vocab"]))),
        ("tokenizer.json", made),
        ("tokenizer_config.json", tokenizer_config()),
    ]:
        write(f"tiny-t5/{name}", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


main()
