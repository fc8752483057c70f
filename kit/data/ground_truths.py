r"""Find the ground truth of a row, and read the expected answers in it.

The ground truth is in the first of these places whose value is not empty:

    reward_model.ground_truth       verl, DAPO-Math
    ground_truth, expected_answer   NeMo Gym, OpenMathReasoning
    answer                          GSM8K, MATH-500, NuminaMath-1.5, Big-Math
    final_answer                    DeepMath, OlympiadBench
    solution                        MATH, NuminaMath-CoT, TRL's examples
    extra_info, with these keys     verl

Empty are null, blank text, and an object without another value. Tables are filled with such values
if their rows have different columns, or if a cell has no value.

A verifier function gets the value unchanged. The kit's own verifiers read one or more expected
answers in it, and each of them is right:

    a number      is compared as a number
    a text        is the answer, or a worked solution: its answer is in its last \boxed{}, otherwise
                  after its last ####
    a list        of numbers and texts. Any one of them is right. It may be a text with JSON: ["4"]

Without a ground truth that can be read, they raise a ValueError before they look at the response,
so that the episode fails, and no response earns a reward.

Protects: rewards, from an expected answer that is missing, or that is read as another one.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

Json = dict[str, Any]  # a JSON object. The processes of verifiers do not import env.py
GROUND_TRUTH_KEYS = ("ground_truth", "expected_answer", "answer", "final_answer", "solution")
PLACES = ("reward_model.ground_truth", *GROUND_TRUTH_KEYS, "extra_info")  # for messages
# Texts that pandas and Python write for a missing value, and marks of data sets.
MISSING = re.compile(r"None|nan|NaN|<NA>|NaT|null|(?i:n/a|not[ _]?found|proof)")
WORDS = re.compile(r"[^\W\d_]{3,}( [^\W\d_]+)*")  # no value that a parser of mathematics reads
VERDICTS = ("yes", "true", "false")  # answers that many rows may share
MARK_FACTOR = 2.0  # times as many rows as the mean of the other answers
LIST_STARTS = ('["', "['")  # of a list of texts that was written as text
BOX = "\\boxed{"
SPACED_BOX = re.compile(r"\\boxed\s+\{")
BARE_BOX = re.compile(r"\\boxed\s*(.+?)\s*(?:\$|\\\)|\\\]|\n|\Z)")  # as in \boxed\frac12
MARK = "####"  # GSM8K's, before the answer
THOUSANDS = r"-?\d{1,3}(,\d{3})+(\.\d+)?"  # a number with commas


# --- find -----------------------------------------------------------------------------------------


def find_ground_truth(row: Json) -> object:
    """Return the first ground truth of a row that is not empty, otherwise the first one or None."""
    values = []
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        values.append(reward_model["ground_truth"])
    for fields in (row, row.get("extra_info")):
        if isinstance(fields, dict):
            values += [fields[key] for key in GROUND_TRUTH_KEYS if key in fields]
    usable = [value for value in values if not is_empty(value)]
    return next(iter([*usable, *values]), None)


def is_missing(row: Json) -> bool:
    """Return whether a row has no ground truth, or only a text that stands for none."""
    value = find_ground_truth(row)
    return is_empty(value) or is_marked(value)


def is_marked(value: object) -> bool:
    """Return whether a value is a text that stands for no answer: a mark, or an empty box."""
    if not isinstance(value, str):
        return False
    return not cut_answer(value) or bool(MISSING.fullmatch(value.strip()))


def is_empty(value: object) -> bool:
    """Return whether a value is null, NaN, blank text, or an object of such values.

    A list is a value, even an empty one: it says that there is no expected answer.
    """
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, dict):
        return all(is_empty(member) for member in value.values())
    return value is None or (isinstance(value, float) and math.isnan(value))


def find_marks(rows: Sequence[Json]) -> dict[str, int]:
    """Find words that are the ground truth of many rows, while most have a value: {word: rows}.

    Such a word may be a mark of the data set for a row without an answer. It has MARK_FACTOR
    times as many rows as other answers have on average.
    """
    values = [find_ground_truth(row) for row in rows]
    texts = [value.strip() for value in values if isinstance(value, str)]
    words = Counter(text for text in texts if WORDS.fullmatch(text))
    if words.total() >= len(values) / 2:
        return {}
    others = {str(value).strip() for value in values} - words.keys()  # a value may be a list
    mean = (len(values) - words.total()) / max(len(others), 1)
    least = max(3, 0.01 * len(values), MARK_FACTOR * mean)
    return {word: n for word, n in words.items() if n >= least and word.lower() not in VERDICTS}


# --- read -----------------------------------------------------------------------------------------


def read_expected_answers(value: object) -> list[str]:
    """Return the expected answers in a ground truth, as texts. Raises ValueError."""
    if value is None:
        raise make_error(value, f"the row has none in {', '.join(PLACES)}")
    if isinstance(value, str) and value.lstrip().startswith(LIST_STARTS):
        try:
            value = json.loads(value)
        except ValueError:
            raise make_error(value, "it is a list as text, and not JSON") from None
    members = value if isinstance(value, list) else [value]
    if not members:
        raise make_error(value, "it is an empty list")
    return [read_expected_answer(member) for member in members]


def read_expected_answer(value: object) -> str:
    """Return one expected answer as text. Raises ValueError."""
    if isinstance(value, str):
        return read_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise make_error(value, f"it is {kind}, not a text, a number or a list of these")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):  # from a list as text
        raise make_error(value, "it is not a finite number")
    # without an exponent, which LaTeX does not have
    return f"{Decimal(str(value)).normalize():f}"


def read_text(text: str) -> str:
    """Return the expected answer in a text, which may be a worked solution. Raises ValueError."""
    answer = cut_answer(text)
    if is_marked(text):
        reason = "it stands for a missing value" if answer else "it has no answer"
        raise make_error(text, reason)
    if BOX not in text and MARK in text and "\n" in answer:  # the mark is a heading in Markdown
        raise make_error(text, f"several lines follow its last {MARK}")
    return answer


def cut_answer(text: str) -> str:
    """Return the answer in a text, stripped: in its last box, after its last MARK, or all of it."""
    text = SPACED_BOX.sub(lambda _: BOX, text)
    if BOX in text:
        return find_last_box(text).strip()
    if MARK in text:
        answer = text.rpartition(MARK)[2].strip()
        return answer.replace(",", "") if re.fullmatch(THOUSANDS, answer) else answer
    boxes = BARE_BOX.findall(text)
    return str(boxes[-1] if boxes else text).strip()


def find_last_box(text: str) -> str:
    r"""Return the content of the last `\boxed{}` of a text, empty if it is not closed."""
    _, separator, rest = text.rpartition(BOX)
    depth = 1
    for index, character in enumerate(rest if separator else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:index]
    return ""


def make_error(ground_truth: object, reason: str) -> ValueError:
    """Return the error of a ground truth that cannot be read."""
    return ValueError(
        f"the expected answer {ground_truth!r:.80} cannot be read: {reason}. Change the row"
    )
