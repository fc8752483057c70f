"""What is known of a row: texts that may be its truth, other answers, and forms of an answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from env import Json, Task
from kit.data.ground_truths import GROUND_TRUTH_KEYS, find_ground_truth, read_expected_answers
from kit.runs import verifier_trial

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
DEMANDS = {  # {form: what a prompt that demands it contains}
    "\\boxed{{{}}}": "\\boxed",
    "<answer>{}</answer>": "<answer>",
    "#### {}": "####",
    "Answer: {}": "Answer: ",
    '{{"answer": "{}"}}': '"answer"',
}
OPPOSITES = (("yes", "no"), ("Yes", "No"), ("true", "false"), ("True", "False"))


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
    """Yield the texts of a truth: its items, the answers that the kit reads, the value itself."""
    items = value
    if isinstance(value, str) and value.strip().startswith("["):
        with contextlib.suppress(ValueError):
            items = json.loads(value)
    if isinstance(items, list) and all(isinstance(item, str | int | float) for item in items):
        joined = ", ".join(str(item) for item in items)
        yield joined
        yield f"[{joined}]"
    with contextlib.suppress(ValueError):  # a verifier may have a truth of any other form
        yield from read_expected_answers(value)
    if isinstance(value, bool):
        yield from (str(value), str(value).lower())
    elif isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield json.dumps(value)


# --- the other answers that a policy may guess ----------------------------------------------------


def read_choices(row: Json) -> dict[str, str]:
    """Return the choices of a row: {letter: text}, or {text: text} if they have no letters."""
    options = row.get("options") or row.get("choices")
    choices: dict[str, str] = {}
    if isinstance(options, Mapping) and isinstance(options.get("text"), list):  # as of ARC
        labels = options.get("label") or options["text"]
        return dict(zip(map(str, labels), map(str, options["text"]), strict=False))
    if isinstance(options, Mapping):
        options = [options]
    for option in options if isinstance(options, list) else []:
        if isinstance(option, Mapping):
            choices |= {str(letter): str(text) for letter, text in option.items()}
        elif isinstance(option, str):
            choices[option] = option
    return choices


def list_candidates(truth: str, choices: Mapping[str, str], others: Sequence[str]) -> list[str]:
    """Return the answers that a policy could list: the choices, yes and no, or the rows' truths.

    others: the truths of other rows. The truth is among the candidates.
    """
    if truth in choices:
        return list(choices)
    for pair in OPPOSITES:
        if truth in pair:
            return list(pair)
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
    """Return the forms of an answer: the one with the tags of the prompt, then the usual ones."""
    return [*verifier_trial.list_forms(prompt), *MORE_FORMS]


def list_empty_forms(prompt: str) -> list[str]:
    """Return the forms that a prompt asks for, such as its tags, filled with x."""
    demanded = dict.fromkeys([list_forms(prompt)[0], find_demanded_form(prompt)])
    return [write(form, "x") for form in demanded if form not in ("", "{}")]


def find_demanded_form(prompt: str) -> str:
    """Return the form that a prompt demands, empty if none of DEMANDS is known to be."""
    demanded = [form for form, text in DEMANDS.items() if text in prompt]
    return demanded[0] if len(demanded) == 1 else ""
