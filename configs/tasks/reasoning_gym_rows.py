"""Write rows of reasoning-gym's generators, which Gym's reasoning_gym server scores.

    .venv-gym/bin/python configs/tasks/reasoning_gym_rows.py NAME NAME ... [--out data]

reasoning-gym is installed in the environment of the Gym servers. The files are NAME_train.jsonl,
NAME_validation.jsonl, and NAME_warm.jsonl with right answers for a supervised warm-up. No question
is in two files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import reasoning_gym

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from env import Json, make_row, write_rows

SIZES = {"warm": 64, "validation": 128, "train": 512}
# Settings of the generators. None is harder than the default.
SETTINGS: dict[str, dict[str, int]] = {
    "needle_haystack": {"min_num_statements": 5, "max_num_statements": 5},  # by default, 10 to 100
    "word_sequence_reversal": {"min_words": 3, "max_words": 3},  # by default, 3 to 8
}


def make_rows(name: str) -> dict[str, list[Json]]:
    """Return the rows of each split. Questions do not repeat."""
    count = 20 * sum(SIZES.values())  # questions may repeat
    dataset = reasoning_gym.create_dataset(name, size=count, seed=1, **SETTINGS[name])
    entries = iter({entry["question"]: entry for entry in dataset}.values())
    return {
        split: [convert(split, next(entries)) for _ in range(size)] for split, size in SIZES.items()
    }


def convert(split: str, entry: Json) -> Json:
    """Return a row of Gym, or of the command `sft`."""
    question = entry["question"]
    answer = entry["answer"]
    if split == "warm":
        return {"prompt": question, "response": answer}
    fields = {"question": question, "answer": answer, "metadata": entry["metadata"]}
    return make_row("reasoning_gym", question, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=SETTINGS, metavar="name")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (default: data)")
    args = parser.parse_args()
    for name in args.names:
        for split, rows in make_rows(name).items():
            path = args.out / f"{name}_{split}.jsonl"
            print(f"{path}: {write_rows(path, rows)} rows")


if __name__ == "__main__":
    main()
