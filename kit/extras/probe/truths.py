"""The truth of a row, as texts that a verifier may accept, and the row's other candidates."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from env import Json, Task
from kit.data.ground_truths import (
    GROUND_TRUTH_KEYS,
    find_ground_truth,
    is_empty,
    read_expected_answers,
)

# Ways to write an answer. They are tried in this order, and the first one that earns most is used.
FORMATS = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "Answer: {}",
    "#### {}",
    "The answer is {}.",
    "Final Answer: {}",
    "[[{}]]",
    "```\n{}\n```",
    '{{"answer": "{}"}}',
)


def write(format_: str, answer: str) -> str:
    """Return an answer in a format, with JSON's escapes between quotation marks."""
    return format_.format(json.dumps(answer)[1:-1] if '"{}"' in format_ else answer)


MAX_TAGS = 3  # formats with tags that a prompt mentions
# Where rows of Gym have a truth, besides the places of kit/data/ground_truths.py.
OTHER_KEYS = ("expected_output", "target", "ideal", "reference_response", "outputs")
NESTED_KEYS = ("verifier_metadata", "reward_model", "extra_info")
MAX_TEXTS = 6  # candidates of one row
MAX_CHARACTERS = 4000  # of a candidate
OPPOSITES = (("yes", "no"), ("true", "false"))
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w])")


def list_truths(row: Json) -> list[str]:
    """Return texts that may be the right answer to a row: short ones first, empty if unknown."""
    texts: list[str] = []
    for value in list_truth_values(row):
        texts += [text for text in write_value(value) if text.strip()]
    short = dict.fromkeys(text for text in texts if len(text) <= MAX_CHARACTERS)
    return list(short)[:MAX_TEXTS]


def list_truth_values(row: Json) -> Iterator[object]:
    """Yield the values of a row that may be its truth."""
    value = find_ground_truth(row)
    if not is_empty(value):
        yield value
    for fields in (row, value, *(row.get(key) for key in NESTED_KEYS)):
        if not isinstance(fields, dict):
            continue
        for key in (*OTHER_KEYS, *GROUND_TRUTH_KEYS):
            if not is_empty(fields.get(key)):
                yield fields[key]


def write_value(value: object) -> Iterator[str]:
    """Yield the texts of a truth: the answers that the kit reads in it, then the value itself."""
    items = read_list(value)
    if items is not None and all(isinstance(item, str | int | float) for item in items):
        joined = ", ".join(str(item) for item in items)
        yield joined
        yield f"[{joined}]"
    with contextlib.suppress(ValueError):  # a verifier may have a truth of any other form
        yield from read_expected_answers(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield json.dumps(value)


def read_list(value: object) -> list[object] | None:
    """Return the list that a truth is, or that its text is in JSON, otherwise None."""
    if isinstance(value, str) and value.strip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, list) else None


# --- the other answers that a policy may guess ----------------------------------------------------


def read_choices(row: Json) -> dict[str, str]:
    """Return the choices of a row: {letter: text}, or {text: text} if they have no letters."""
    options = row.get("options") or row.get("choices")
    if not isinstance(options, list):
        return {}
    choices: dict[str, str] = {}
    for option in options:
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
        if truth.lower() in pair:
            return [match_case(word, truth) for word in pair]
    return list(dict.fromkeys([truth, *others]))


def match_case(word: str, pattern: str) -> str:
    """Return a word in the case of another one.

    >>> match_case("no", "Yes")
    'No'
    """
    if pattern.isupper():
        return word.upper()
    return word.capitalize() if pattern[:1].isupper() else word


def is_same_answer(one: str, other: str) -> bool:
    """Return whether two answers differ at most in case, spaces and punctuation."""
    return normalize(one) == normalize(other)


def normalize(text: str) -> str:
    """Return the letters and digits of a text, and the signs that change a number."""
    return re.sub(r"[^\w./+*=<>^-]|[.](?!\d)", "", text.lower())


def list_numbers(text: str) -> list[str]:
    """Return the different numbers in a text, in order."""
    return list(dict.fromkeys(NUMBER.findall(text)))


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


def list_formats(prompt: str) -> list[str]:
    """Return FORMATS, and those with the tags that a prompt mentions."""
    tags = dict.fromkeys(re.findall(r"</([a-z_]{2,20})>", prompt))
    tagged = [f"<{tag}>{{}}</{tag}>" for tag in tags if tag not in ("think", "answer")]
    return [*FORMATS, *tagged[-MAX_TAGS:]]


def list_empty_forms(prompt: str) -> list[str]:
    """Return the forms that a prompt asks for, such as its tags, filled with x."""
    tags = dict.fromkeys(re.findall(r"</(\w+)>", prompt))
    demanded = find_demanded_format(prompt)
    forms = ["\n".join(f"<{tag}>\nx\n</{tag}>" for tag in tags), write(demanded, "x")]
    return [form for form in forms if form]


DEMANDS = {  # {format: what a prompt that demands it contains}
    "\\boxed{{{}}}": re.compile(r"\\boxed"),
    "<answer>{}</answer>": re.compile(r"<answer>"),
    "#### {}": re.compile(r"####"),
    "Answer: {}": re.compile(r"Answer: "),
    '{{"answer": "{}"}}': re.compile(r'"answer"'),
}


def find_demanded_format(prompt: str) -> str:
    """Return the format that a prompt demands, empty if none of DEMANDS is known to be."""
    demanded = [format_ for format_, pattern in DEMANDS.items() if pattern.search(prompt)]
    return demanded[0] if len(demanded) == 1 else ""


# --- schemas --------------------------------------------------------------------------------------


def fill_schema(row: Json) -> str:
    """Return JSON of placeholders that follows the row's schema, empty if it has no JSON schema.

    It has no information from the prompt.
    """
    text = row.get("schema_str")
    if not isinstance(text, str) or row.get("schema_type", "json") != "json":
        return ""
    try:
        schema = json.loads(text)
    except ValueError:
        return ""
    is_object = isinstance(schema, dict) and schema.get("required")
    return json.dumps(make_placeholder(schema)) if is_object else ""


def make_placeholder(schema: Json | bool) -> object:
    """Return the emptiest value that follows a JSON schema without references."""
    if not isinstance(schema, dict):  # true: any value
        return "x"
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return make_placeholder(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or "properties" in schema:
        required = schema.get("required") or []
        properties = schema.get("properties") or {}
        return {name: make_placeholder(properties.get(name) or {}) for name in required}
    if kind == "array":
        item = make_placeholder(schema.get("items") or {})
        return [item] * int(schema.get("minItems") or 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    fixed: dict[object, object] = {"boolean": False, "null": None}
    return fixed.get(kind, "x".ljust(int(schema.get("minLength") or 0), "x"))
