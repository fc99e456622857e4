"""Writes translation/: a T5 tokenizer, 1,000 rows, and what transformers' run_translation makes of them.

    pip install transformers==5.23.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf
    python make_translation.py

The tokenizer is a SentencePiece unigram model trained on the rows, converted by transformers as T5's is. Tokens come from
`preprocess_function` of examples/pytorch/translation/run_translation.py, decoder inputs from `_shift_right` of
modeling_t5.py; both are repeated below in their own words, without torch and datasets.
"""

import gzip
import hashlib
import io
import json
import pathlib
import random
import struct
import tempfile

import sentencepiece
from transformers import T5Tokenizer

HERE = pathlib.Path(__file__).parent / "translation"
START, PAD = 0, 0

WORDS = {
    "en": "the house is small and old but we like it very much because morning light falls through every window "
    "yesterday our neighbours painted their doors green while children were playing in the garden two cats slept "
    "train leaves at half past nine from platform four please bring your ticket weather report said rain again "
    "parliament adopted resolution on fisheries policy without further amendment thank you madam president",
    "ro": "casa este mică și veche dar ne place foarte mult pentru că lumina dimineții cade prin fiecare fereastră "
    "ieri vecinii noștri au vopsit ușile în verde în timp ce copiii se jucau în grădină două pisici dormeau trenul "
    "pleacă la nouă și jumătate de la linia patru vă rugăm să aduceți biletul buletinul meteo anunță iarăși ploaie "
    "parlamentul a adoptat rezoluția privind politica pescuitului fără alte amendamente vă mulțumesc",
}
# What normalisation, unknown characters and white space do to a text.
ODD = ["  two  spaces ", "tab\there", "line\nend", "ﬁne ﬂour", "ＡＢＣ１２３", "½ ° ™ …", "naïve café", "日本語のテキスト", "Ωμέγα",
       "😀👍🏽", "e\u0301 o\u0308", "\u00a0nbsp\u3000", "\u200bzero", "a/b_c-d", "<extra_id_0> mask <extra_id_1>", "</s> inside",
       "1,234.56 €", "“quotes” ‘single’", "ş ţ Ş Ţ ș ț", "x" * 60]

# A part of T5's normalisation: the table of all of NFKC takes 300 kB.
NORMALISATION = {"ﬁ": "fi", "ﬂ": "fl", "½": "1⁄2", "™": "TM", "…": "...", "e\u0301": "é", "o\u0308": "ö", "\u200b": "",
                 "\u00a0": " ", "\u3000": " ", "\t": " ", "\n": " ", **dict(zip("ＡＢＣ１２３", "ABC123"))}


def sentence(random_numbers, language, words):
    drawn = random_numbers.choices(WORDS[language].split(), k=words)
    text = " ".join(drawn).capitalize() + random_numbers.choice([".", "!", "?", "", " ."])
    if random_numbers.random() < 0.3:
        text = random_numbers.choice([f"{text} {{}}", f"{{}} {text}"]).format(random_numbers.choice(ODD))
    return text


def make_rows():
    random_numbers = random.Random(17)
    rows = []
    for number in range(1000):
        long = number % 250 == 5
        lengths = (random_numbers.randint(900, 1400), random_numbers.randint(90, 300)) if long else (
            random_numbers.randint(1, 24), random_numbers.randint(1, 24))
        rows.append({language: sentence(random_numbers, language, length)
                     for language, length in zip(["en", "ro"], lengths)})
    return rows


def train_tokenizer(rows):
    texts = [text for row in rows for text in row.values() if "</s>" not in text]
    codes = lambda text: " ".join(f"{ord(character):X}" for character in text)
    with tempfile.TemporaryDirectory() as folder:
        rules = pathlib.Path(folder, "rules.tsv")
        rules.write_text("".join(f"{codes(text)}\t{codes(to)}\n" for text, to in NORMALISATION.items()))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=f"{folder}/spiece", vocab_size=350, model_type="unigram",
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, character_coverage=0.999, num_threads=1, max_sentence_length=20000,
            normalization_rule_tsv=str(rules),
            minloglevel=2)
        tokenizer = T5Tokenizer.from_pretrained(folder, extra_ids=4)
        tokenizer.save_pretrained(HERE)


def preprocess(tokenizer, rows, source_lang, target_lang, prefix, max_source_length, max_target_length):
    """`preprocess_function` of run_translation, with padding=False."""
    inputs = [prefix + row[source_lang.split("_")[0]] for row in rows]
    targets = [row[target_lang.split("_")[0]] for row in rows]
    model_inputs = tokenizer(inputs, max_length=max_source_length, padding=False, truncation=True)
    labels = tokenizer(text_target=targets, max_length=max_target_length, padding=False, truncation=True)
    return list(zip(model_inputs["input_ids"], labels["input_ids"]))


def shift_right(labels):
    """`_shift_right` of modeling_t5."""
    return [PAD if label == -100 else label for label in [START] + labels[:-1]]


CASES = [
    {"source_lang": "en", "target_lang": "ro", "prefix": "translate English to Romanian: ", "max_source_length": 1024,
     "max_target_length": 128},
    {"source_lang": "ro_RO", "target_lang": "en_XX", "prefix": "", "max_source_length": 24, "max_target_length": 9},
    {"source_lang": "en", "target_lang": "ro", "prefix": "the ", "max_source_length": 20, "max_target_length": 11,
     "truncation_side": "left"},
]


def main():
    HERE.mkdir(exist_ok=True)
    rows = make_rows()
    text = "".join(json.dumps({"translation": row}, ensure_ascii=False) + "\n" for row in rows)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
        file.write(text.encode())
    (HERE / "rows.jsonl.gz").write_bytes(buffer.getvalue())
    train_tokenizer(rows)
    # Two end-of-text tokens where the text ends with one are the one difference: we keep one.
    assert not any(text.rstrip().endswith("</s>") for row in rows for text in row.values())
    golden = []
    for case in CASES:
        digest = hashlib.sha256()
        side = case.get("truncation_side", "right")
        tokenizer = T5Tokenizer.from_pretrained(HERE, truncation_side=side)
        pairs = preprocess(tokenizer, rows, **{key: value for key, value in case.items() if key != "truncation_side"})
        for source, labels in pairs:
            for ids in (source, labels, shift_right(labels)):
                digest.update(struct.pack(f"<{len(ids) + 1}i", len(ids), *ids))
        truncated = sum(len(source) == case["max_source_length"] for source, _ in pairs)
        first = [{"input_ids": source, "labels": labels, "decoder_input_ids": shift_right(labels)}
                 for source, labels in pairs[:3]]
        golden.append({**case, "full_sources": truncated, "longest_target": max(len(labels) for _, labels in pairs),
                       "sha256": digest.hexdigest(), "first": first})
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
