# make_plus.py
import random
from pathlib import Path

from env import make_row, write_rows


def row(number, added):
    question = f"Complete the equation: {number} + {added} ="
    return make_row(
        "reasoning_gym",
        question,
        system="You are a calculator.",
        question=question,
        answer=f"{number} + {added} = {number + added}",
        metadata={"source_dataset": "chain_sum"},
    )


numbers = list(range(2, 90))
random.Random(0).shuffle(numbers)
for split, some in {"train": numbers[32:], "validation": numbers[:32]}.items():
    rows = [row(number, added) for number in some for added in (1, 10)]
    path = Path(f"data/plus_{split}.jsonl")
    print(f"{path}: {write_rows(path, rows)} rows")
