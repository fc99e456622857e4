#!/usr/bin/env python3
"""Makes train.jsonl and held-out.jsonl from GSM8K: python3 make_rows.py GSM8K-TRAIN.jsonl GSM8K-TEST.jsonl

Needs Python 3 alone. The two inputs are train.jsonl and test.jsonl of github.com/openai/grade-school-math
(grade_school_math/data). Rows are {"question", "answer"}. Calculator marks such as <<48/2=24>> are taken out. The first
problems that are short make the files.
"""

import json
import re
import sys
from pathlib import Path

LONGEST = 360  # characters of a question and its answer
FILES = [("train.jsonl", 2400), ("held-out.jsonl", 32)]


def row(problem):
    answer = re.sub(r"<<.*?>>", "", problem["answer"])
    return {"question": problem["question"].strip(), "answer": answer.strip()}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for source, (name, count) in zip(sys.argv[1:], FILES):
        with open(source, encoding="utf-8") as lines:
            rows = [row(json.loads(line)) for line in lines]
        short = [row for row in rows if len(row["question"]) + len(row["answer"]) <= LONGEST][:count]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in short)
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(short)} rows, {len(text.encode())} bytes")


main()
