"""A verifier as verl has it, for verl's rows or Gym's; no server. A recipe names it, with its settings:

    env: {verifier: {function: templates/reward.py:compute_score, form: 0.1}, train_files: [data/gsm8k/train.parquet]}

Copy it into a file of your own, change it, name that. It says what an answer is worth, in a process of its own
(kit/extras/python_verifiers/verifier_pool.py); templates/rewards.py has what changes that afterwards.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = r"-?\d+(?:\.\d+)?"  # its thousands commas are gone


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    form: float = 0.0,
) -> dict[str, Any]:
    """1 where the last number of an answer is the last of the ground truth, else `form` where it is in \\boxed{}.

    `score` is the reward; other numbers become metrics, and text is kept in the rollouts. An answer that cannot be read
    is worth 0; an exception would be a failed episode, which earns nothing and is not trained on.
    """
    said, true = (
        re.findall(NUMBER, str(text).replace(",", ""))[-1:] for text in (solution_str, ground_truth)
    )
    if not true:
        raise ValueError(
            f"no number in the ground truth {ground_truth!r}: the row is at fault, not the answer"
        )
    right, boxed = bool(said) and float(said[0]) == float(true[0]), "\\boxed{" in solution_str
    return {
        "score": 1.0 if right else form * boxed,
        "right": right,
        "boxed": boxed,
        "said": "".join(said),
    }
