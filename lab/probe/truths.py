"""What is known of a row: texts that may be its truth, other answers, and forms of an answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from env import Json, Task
from kit.data.ground_truths import GROUND_TRUTH_KEYS, find_ground_truth, read_expected_answers
from kit.run import verifier_trial

# Where rows of Gym have a truth, besides the places of kit/data/ground_truths.py.
OTHER_KEYS = ("expected_output", "target", "ideal", "reference_response", "outputs")
NESTED_KEYS = ("verifier_metadata", "reward_model", "extra_info")
MAX_TEXTS = 6  # candidates of one row
MAX_CHARACTERS = 4000  # of a candidate
# Forms of an answer that are tried after those of the trial.
MORE_FORMS = (
    "Answer: {}",
    "The answer is {}.",
    "Final Answer: {}",
    "[[{}]]",
    "```\n{}\n```",
    '{{"answer": "{}"}}',
)


def list_truths(row: Json) -> list[str]:
    """Return texts that may be the right answer to a row: short ones first, empty if unknown."""
    truth = find_ground_truth(row)
    values = [truth]
    for fields in (row, truth, *(row.get(key) for key in NESTED_KEYS)):
        if isinstance(fields, dict):
            values += [fields.get(key) for key in (*OTHER_KEYS, *GROUND_TRUTH_KEYS)]
    texts: list[str] = []
    for value in values:
        texts += write_value(value)
    usable = [text for text in texts if text.strip() and len(text) <= MAX_CHARACTERS]
    return list(dict.fromkeys(usable))[:MAX_TEXTS]


def write_value(value: object) -> Iterator[str]:
    """Yield the texts of a truth: the answers that the kit reads in it, then the value itself."""
    with contextlib.suppress(ValueError):  # a verifier may have a truth of any other form
        answers = read_expected_answers(value)
        if len(answers) > 1:
            yield ", ".join(answers)
        yield from answers
    if isinstance(value, bool):
        yield from (str(value), str(value).lower())
    elif isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield json.dumps(value)


# --- the other answers that a policy may guess ----------------------------------------------------


def read_choices(row: Json) -> dict[str, str]:
    """Return the choices of a row: {letter: text}."""
    options = row.get("options") or row.get("choices") or {}
    choices: dict[str, str] = {}
    for option in options if isinstance(options, list) else [options]:
        if isinstance(option, Mapping):
            choices |= {str(letter): str(text) for letter, text in option.items()}
    return choices


def list_candidates(truth: str, choices: Mapping[str, str], others: Sequence[str]) -> list[str]:
    """Return the answers that a policy could list: the choices, or the rows' truths.

    others: the truths of other rows. The truth is among the candidates.
    """
    if truth in choices:
        return list(choices)
    return list(dict.fromkeys([truth, *others]))


def is_same_answer(one: str, other: str) -> bool:
    """Return whether two answers differ at most in case, spaces and punctuation."""
    return normalize(one) == normalize(other)


def normalize(text: str) -> str:
    """Return the letters and digits of a text, and the signs that change a number."""
    return re.sub(r"[^\w./+*=<>^-]|[.](?!\d)", "", text.lower())


# --- the prompt -----------------------------------------------------------------------------------


def read_prompt(task: Task) -> str:
    """Return the text of the last user message of a task, empty if the environment writes it."""
    for message in reversed(task.messages):
        if message.get("role") == "user":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    return ""


def write(form: str, answer: str) -> str:
    """Return an answer in a form, with JSON's escapes between quotation marks."""
    return form.format(json.dumps(answer)[1:-1] if '"{}"' in form else answer)


def list_forms(prompt: str) -> list[str]:
    """Return the forms of an answer, first those that the prompt shows, such as its tags."""
    shown: list[str] = []
    others: list[str] = []
    for form in (*verifier_trial.list_forms(prompt), *MORE_FORMS):
        before = form.partition("{")[0].strip().rpartition("\n")[2]  # such as \boxed
        (shown if before and before in prompt else others).append(form)
    return [*shown, *others]
