"""Rewrites of an answer that a person would accept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
# Prompts that forbid other text than the answer.
ONLY = re.compile(
    r"\b(only|just|nothing else|exactly|no other|without|do not (add|include|explain|output)|"
    r"prepend|begin|start)\b",
    re.IGNORECASE,
)
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
    if re.fullmatch(r"\[[^\[\]{}\"']+(, ?[^\[\]{}\"']+)+\]", truth):
        spaced = ", ".join(part.strip() for part in truth[1:-1].split(","))
        packed = spaced.replace(", ", ",")
        other = packed if f"[{packed}]" != truth else spaced
        yield Rewrite("other spaces in a list", f"[{other}]")


def rewrite_number(truth: str, prompt: str) -> Iterator[Rewrite]:
    """Yield the rewrites of a number."""
    value = read_number(truth)
    if value is None:
        return
    yield Rewrite("in dollar signs", f"${truth}$")
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
