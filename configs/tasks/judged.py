"""Write the rows of judged.yaml and judge_model.yaml, and score sums without a judge.

    .venv-gym/bin/python configs/tasks/judged.py [--out data]

judged_train.jsonl and judged_validation.jsonl ask for sums of two numbers, in a sentence.
judge_train.jsonl and judge_validation.jsonl are for the judge (the command `sft`). The prompt is
that of Gym's server, with a right or a wrong answer. The response of the judge copies the official
number and the number that the answer gives as the sum (`none` if it gives no sum). Then it compares
them: `25, 24: INCORRECT`. The server reads the last CORRECT or INCORRECT.

Both validation files have the same 128 questions, and no training file has one of them. If 5 + 12
is one, judged_train.jsonl also leaves out 12 + 5. judge_train.jsonl does not.

`score` is the shadow verifier of judged.yaml.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from env import Json, make_row, write_rows

SERVER = "equivalence_llm_judge"
TEMPLATE = "prompt_templates/lc.txt"  # of the server; judged.yaml names it, too
NUMBERS = range(3, 30)
VALIDATION = 128  # rows
VERDICTS = 640  # rows of judge_train; their questions may repeat
ANSWERS = (
    "{a} + {b} = {s}",
    "{a} + {b} = {s}.",
    "{a} + {b} is {s}.",
    "{a} plus {b} is {s}.",
    "{a} plus {b} equals {s}.",
    "{s}",
    "{s}.",
    "It is {s}.",
    "The answer is {s}.",
    "The sum is {s}.",
    "The sum of {a} and {b} is {s}.",
    "The sum of {a} and {b} is {a} + {b} = {s}.",
    "If you add {a} and {b}, you get {s}.",
    "To solve this, I'll first add {a} and {b}, which is {s}.",
)
EVASIONS = (  # no sum
    "{a} + {b}",
    "The sum of {a} and {b}.",
    "I do not know.",
    "The answer is correct.",
    "What is {a} + {b}?",
)


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer in one sentence."


def make_policy_row(a: int, b: int) -> Json:
    """Return a row of the policy."""
    return make_row(SERVER, question(a, b), expected_answer=str(a + b))


def make_judge_row(template: str, a: int, b: int, rng: random.Random) -> Json:
    """Return a chat of the judge. CORRECT has probability 1/2."""
    is_right = rng.random() < 0.5
    said: int | str = a + b if is_right else choose_wrong_sum(a, b, rng)
    form = rng.choice(ANSWERS)
    if not is_right and rng.random() < 0.15:
        said = "none"
        form = rng.choice(EVASIONS)
    answer = form.format(a=a, b=b, s=said)
    prompt = template.format(
        question=question(a, b), expected_answer=a + b, generated_answer=answer
    )
    verdict = "CORRECT" if is_right else "INCORRECT"
    return {"prompt": prompt, "response": f"{a + b}, {said}: {verdict}"}


def choose_wrong_sum(a: int, b: int, rng: random.Random) -> int:
    """Return a number that is near the sum, or one of its terms, or any number below 100."""
    near = {a + b + shift for shift in (-10, -3, -2, -1, 1, 2, 3, 10, 20)}
    return rng.choice(sorted((near | {a, b, rng.randint(1, 99)}) - {a + b}))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Json) -> float:
    """Return 1.0 if the last number of the response is the sum, otherwise 0.0."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def main() -> None:
    import resources_servers  # only in .venv-gym, and a run imports `score`

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (default: data)")
    args = parser.parse_args()
    template = (Path(resources_servers.__path__[0]) / SERVER / TEMPLATE).read_text().strip()
    rng = random.Random("judged")
    pairs = list(itertools.product(NUMBERS, NUMBERS))
    rng.shuffle(pairs)
    held_out = pairs[:VALIDATION]
    others = pairs[VALIDATION:]
    judge_pairs = [rng.choice(others) for _ in range(VERDICTS)]
    files = {
        "judged_validation": [make_policy_row(a, b) for a, b in held_out],
        "judged_train": [make_policy_row(a, b) for a, b in others if (b, a) not in held_out],
        "judge_validation": [make_judge_row(template, a, b, rng) for a, b in held_out],
        "judge_train": [make_judge_row(template, a, b, rng) for a, b in judge_pairs],
    }
    for name, content in files.items():
        path = args.out / f"{name}.jsonl"
        print(f"{path}: {write_rows(path, content)} rows")


if __name__ == "__main__":
    main()
