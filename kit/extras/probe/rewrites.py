"""Rewrites of an answer that a person would accept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

INTEGER = re.compile(r"-?\d+")
WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)(\d+)/(\d+)")
PLAIN_WORDS = re.compile(r"[A-Z][a-z]+( [A-Za-z][a-z]+)*")  # no formula, no code
COUNTED = re.compile(  # the noun after `how many`
    r"\bhow many (?!(?:are|can|did|does|do|different|had|has|have|is|more|of|other|the|times|total|"
    r"was|were|will|would)\b)([a-z]{3,})",
    re.IGNORECASE,
)
SHARES = re.compile(r"probab|chance|percent|fraction|%", re.IGNORECASE)
# Prompts that forbid other text than the answer, or other forms of it.
ONLY = re.compile(
    r"\b(only|just|nothing (else|but)|exact(ly)?|verbatim|without|prepend|begin|start|"
    r"no (other|extra|additional|explanations?|words|text|units?|punctuation)|"
    r"(do not|don't|never) (add|include|explain|output|write|use)|"
    r"as (an?|the) (integer|decimal|fraction|percentage|word|digits?)|"
    r"single (number|integer|digit|word|letter|token)|simplest|lowest terms)\b",
    re.IGNORECASE,
)
COMPUTED = re.compile(r"\d *[-+*/^] *\d|comput|calculat|evaluate|solve|value of", re.IGNORECASE)
VARIABLE = re.compile(r"\b(?:for|find|of|is) \$?([b-hj-z])\$?(?![a-z'])")
UNORDERED = re.compile(r"\b(set|solutions|roots|all (the )?[a-z]+|any order)\b", re.IGNORECASE)
ORDERED = re.compile(
    r"\b(order(s|ed)?|sort(ed)?|(as|des)cending|sequence|rank(ed|ing)?|steps?|coordinates?|point|"
    r"pair|tuple|permutation|first|then|reversed?|vector)\b",
    re.IGNORECASE,
)
LIST = re.compile(r"(?P<start>\\?[\[({]|)(?P<items>[^\[\](){}]+)(?P<end>\\?[\])}]|)")
REASONING = "First I read the question again. Then I work out the answer step by step.\n\n"
MAX_SENTENCE = 80  # characters of an answer that gets a period or a dollar sign


class Rewrite(NamedTuple):
    """Another way to write an answer. kind: its name. text: goes into the format."""

    kind: str
    text: str


def rewrite_answer(truth: str, prompt: str, choices: Mapping[str, str]) -> Iterator[Rewrite]:
    """Yield the rewrites of an answer. Each is as right as the answer itself."""
    if truth in choices and choices[truth] != truth:
        yield Rewrite("in parentheses", f"({truth})")
        yield Rewrite("with the text of the choice", f"{truth}. {choices[truth]}")
    yield from rewrite_number(truth, prompt)
    yield from rewrite_words(truth)
    items = split_list(truth)
    if len(items) > 1 and truth[0] in "[({\\":
        spaced = write_list(truth, items)
        packed = spaced.replace(", ", ",")
        yield Rewrite("other spaces in a list", packed if packed != truth else spaced)
    is_set = truth.startswith(("{", "\\{")) or UNORDERED.search(prompt)
    if len(items) > 1 and is_set and not ORDERED.search(prompt):
        yield Rewrite("items in another order", write_list(truth, items[::-1]))


def rewrite_number(truth: str, prompt: str) -> Iterator[Rewrite]:
    """Yield the rewrites of a number."""
    value = read_number(truth)
    if value is None:
        return
    yield Rewrite("in dollar signs", f"${truth}$")
    if INTEGER.fullmatch(truth) and COMPUTED.search(prompt):
        yield Rewrite("with a zero after the point", f"{truth}.0")
    variable = VARIABLE.search(prompt)
    if variable and "=" in prompt:
        yield Rewrite("as an equation", f"{variable[1]} = {truth}")
    if INTEGER.fullmatch(truth) and abs(value) >= 1000:
        yield Rewrite("with a thousands separator", f"{int(value):,}")
    if WITH_COMMAS.fullmatch(truth):
        yield Rewrite("without thousands separators", truth.replace(",", ""))
    counted = COUNTED.search(prompt)
    if counted and value.denominator == 1:
        yield Rewrite("with its unit", f"{truth} {counted[1].lower()}")
    if value.denominator == 1:
        return
    yield from rewrite_fraction(truth, value, prompt)


def rewrite_fraction(truth: str, value: Fraction, prompt: str) -> Iterator[Rewrite]:
    """Yield the rewrites of a number that is not whole."""
    sign = "-" if value < 0 else ""
    numerator = abs(value.numerator)
    denominator = value.denominator
    is_short = denominator <= 100
    if is_short and not FRACTION.fullmatch(truth):
        yield Rewrite("as a fraction", f"{sign}{numerator}/{denominator}")
    if is_short:
        yield Rewrite("as a LaTeX fraction", f"{sign}\\frac{{{numerator}}}{{{denominator}}}")
    decimal = write_decimal(value)
    if decimal and not DECIMAL.fullmatch(truth):
        yield Rewrite("as a decimal number", decimal)
    if decimal and abs(value) < 1:
        yield Rewrite("without the leading zero", decimal.replace("0.", ".", 1))
    if decimal and 0 < value < 1 and SHARES.search(prompt):
        percent = write_decimal(value * 100) or str(value * 100)
        yield Rewrite("as a percentage", f"{percent}%")


def rewrite_words(truth: str) -> Iterator[Rewrite]:
    """Yield the rewrites of plain words, whose case has no meaning."""
    is_word = PLAIN_WORDS.fullmatch(truth) and len(truth) > 1
    if is_word or truth.lower() in ("yes", "no", "true", "false"):
        for kind, text in (("lower case", truth.lower()), ("upper case", truth.upper())):
            if text != truth:
                yield Rewrite(kind, text)


def split_list(text: str) -> list[str]:
    """Return the items of a list such as [1, 2], or of numbers such as 1, 2; otherwise nothing."""
    found = LIST.fullmatch(text)
    if not found or bool(found["start"]) != bool(found["end"]) or read_number(text) is not None:
        return []
    items = [item.strip() for item in found["items"].split(",")]
    is_list = bool(found["start"]) or all(read_number(item) is not None for item in items)
    return items if is_list else []


def write_list(text: str, items: Sequence[str]) -> str:
    """Return other items between the brackets of a list."""
    found = LIST.fullmatch(text)
    assert found, text
    return f"{found['start']}{', '.join(items)}{found['end']}"


def read_number(text: str) -> Fraction | None:
    """Return the number that a text is, or None.

    >>> read_number("1,000"), read_number("1/2"), read_number("x")
    (Fraction(1000, 1), Fraction(1, 2), None)
    """
    plain = text.replace(",", "") if WITH_COMMAS.fullmatch(text) else text
    if INTEGER.fullmatch(plain) or DECIMAL.fullmatch(plain):
        return Fraction(plain)
    parts = FRACTION.fullmatch(plain)
    if parts and int(parts[3]):
        return Fraction(int(f"{parts[1]}{parts[2]}"), int(parts[3]))
    return None


def write_decimal(value: Fraction) -> str:
    """Return a number as a decimal of at most four digits after the point, empty if it has more.

    >>> write_decimal(Fraction(1, 2)), write_decimal(Fraction(1, 3))
    ('0.5', '')
    """
    scaled = value * 10_000
    if scaled.denominator != 1:
        return ""
    return f"{(Decimal(scaled.numerator) / 10_000).normalize():f}"
