"""Find the ground truth of a row.

It is in the first of these places whose value is not empty:

    reward_model.ground_truth       verl, DAPO-Math
    ground_truth, expected_answer   NeMo Gym, OpenMathReasoning
    answer                          GSM8K, MATH-500, NuminaMath-1.5, Big-Math
    final_answer                    DeepMath, OlympiadBench
    solution                        MATH, NuminaMath-CoT, TRL's examples
    extra_info, with these keys     verl

Empty are null, blank text, and an object without another value. Tables are filled with such values
if their rows have different columns, or if a cell has no value.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
GROUND_TRUTH_KEYS = ("ground_truth", "expected_answer", "answer", "final_answer", "solution")
PLACES = ("reward_model.ground_truth", *GROUND_TRUTH_KEYS, "extra_info")  # for messages


def find_ground_truth(row: Json) -> Any:
    """Return the first ground truth of a row that is not empty, otherwise the first one or None."""
    values = list_values(row)
    for value in values:
        if not is_empty(value):
            return value
    return values[0] if values else None


def list_values(row: Json) -> list[Any]:
    """Return the values of a row that may be its ground truth, the most specific one first."""
    values = []
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        values.append(reward_model["ground_truth"])
    for fields in (row, row.get("extra_info")):
        if isinstance(fields, dict):
            values += [fields[key] for key in GROUND_TRUTH_KEYS if key in fields]
    return values


def is_empty(value: Any) -> bool:
    """Return whether a value is null, blank text, or an object of such values.

    A list is a value, even an empty one: it says that there is no expected answer.
    """
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, dict):
        return all(is_empty(member) for member in value.values())
    return value is None
