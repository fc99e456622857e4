#!/usr/bin/env python3
"""Makes train.jsonl and held-out.jsonl from GSM8K: python3 make_rows.py GSM8K-TRAIN.jsonl GSM8K-TEST.jsonl

Needs Python 3 alone. The two inputs are train.jsonl and test.jsonl of github.com/openai/grade-school-math
(grade_school_math/data). Tokens are bytes: ids 0 to 255, and 256 ends a row. A prompt is not trained (label -100), its
answer is. Calculator marks such as <<48/2=24>> are taken out. The first problems that are short make the files.
"""

import json
import re
import sys
from pathlib import Path

END = 256
NOT_TRAINED = -100
LONGEST = 220  # tokens of a row
FILES = [("train.jsonl", 240), ("held-out.jsonl", 24)]


def row(problem):
    answer = re.sub(r"<<.*?>>", "", problem["answer"])
    prompt = list(f"{problem['question'].strip()}\n".encode())
    trained = [*answer.encode(), END]
    return {"input_ids": prompt + trained, "labels": [NOT_TRAINED] * len(prompt) + trained}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for source, (name, count) in zip(sys.argv[1:], FILES):
        with open(source, encoding="utf-8") as lines:
            rows = [row(json.loads(line)) for line in lines]
        short = [row for row in rows if len(row["input_ids"]) <= LONGEST][:count]
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short)
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(short)} rows, {sum(len(row['input_ids']) for row in short)} tokens")


main()
