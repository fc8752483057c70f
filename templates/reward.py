"""A verifier as a function, as in verl. It needs no server, and takes rows of verl or Gym.

    env: {verifier: {function: templates/reward.py:compute_score, form: 0.1}}

To use your own: copy this file, change it, and name your copy in the recipe. Other keys next to
`function` become arguments. env.train_files name the rows, for example [data/gsm8k/train.parquet].
The function runs in a separate process (kit/verify/python_verifiers/__init__.py has the details).
To change rewards after the verification, see templates/rewards.py.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

NUMBER = r"-?\d+(?:\.\d+)?"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    form: float = 0.0,
) -> dict[str, Any]:
    """Return 1 if the last number of the response is the last number of the ground truth.

    Otherwise return `form` if the response has \\boxed{}, else 0. In the dict, `score` is the
    reward. Other numbers become metrics. Text is saved in the rollouts files. If the ground truth
    is a list, the last number of any of its members is right.

    A response that cannot be parsed has the reward 0. Raise an error only if the row is invalid.
    Then the episode fails, and it is not trained on.
    """
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    true_numbers = [read_number(truth) for truth in truths]
    if not true_numbers:
        raise ValueError("the ground truth is an empty list: the row is at fault")
    number = find_last_number(solution_str)
    is_right = number is not None and float(number) in true_numbers
    is_boxed = "\\boxed{" in solution_str
    score = 0.0
    if is_right:
        score = 1.0
    elif is_boxed:
        score = form
    return {"score": score, "right": is_right, "boxed": is_boxed, "number": number or ""}


def read_number(truth: Any) -> float:
    """Return the number of a ground truth, or the last one in its text. Raises ValueError."""
    number = truth
    if isinstance(truth, str):
        number = float(find_last_number(truth) or "nan")
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        raise ValueError(f"the ground truth {truth!r} has no number: the row is at fault")
    return float(number)


def find_last_number(text: str) -> str | None:
    """Find the last number in a text, without thousands separators."""
    matches = re.findall(NUMBER, text.replace(",", ""))
    return matches[-1] if matches else None
