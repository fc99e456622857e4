#!/usr/bin/env python3
"""Trains tiny-qwen3's tokenizer: python3 make_tokenizer.py GSM8K-TRAIN.jsonl

Needs Python 3 with `tokenizers` (0.23 made the files). The input is train.jsonl of github.com/openai/grade-school-math
(grade_school_math/data). Writes tokenizer.json and tokenizer_config.json to tiny-qwen3/: byte-level BPE, so
that any text has tokens, numbers in groups of up to three digits; three special tokens; and a chat template.
"""

import json
import re
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A word with the space before it, up to three digits, a run of other signs, or white space.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(path):
    for line in open(path, encoding="utf-8"):
        problem = json.loads(line)
        yield problem["question"]
        yield re.sub(r"<<.*?>>", "", problem["answer"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(__file__).parent / "tiny-qwen3"
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        # All bytes, whatever the text has.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(sys.argv[1]), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


main()
