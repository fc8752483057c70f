"""Other ways to write a right answer, and wrong answers near it, such as one with a digit more.

A near miss is checked to be wrong: it has another value than the truth, or another text than all
answers of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from lab.probe import truths

WHOLE = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)")
NUMBER = re.compile(rf"{WHOLE.pattern}|-?\d*\.\d+|-?\d+/0*[1-9]\d*")
NAME = re.compile(r"[A-Z][a-z]+( [A-Za-z][a-z]+)*")  # no formula, no code
LIST = re.compile(r"(?P<start>\\?[\[({]|)(?P<items>[^\[\](){}]+)(?P<end>\\?[\])}]|)")
WORD = re.compile(r"[^\W\d_]{3,}( [^\W\d_]+)*")
COMPUTED = re.compile(r"\d *[-+*/^] *\d|comput|calculat|evaluate|solve|value of", re.IGNORECASE)
VARIABLE = re.compile(r"\b(?:for|find|of|is) \$?([b-hj-z])\$?(?![a-z'])")
UNORDERED = re.compile(r"\b(set|solutions|roots|all (the )?[a-z]+|any order)\b", re.IGNORECASE)
ORDERED = re.compile(
    r"\b(order(s|ed)?|sort(ed)?|(as|des)cending|sequence|rank(ed|ing)?|steps?|coordinates?|point|"
    r"pair|tuple|permutation|first|then|reversed?|vector)\b",
    re.IGNORECASE,
)
APPROXIMATE = re.compile(
    r"approx|about|roughly|estimat|within|round|nearest|decimal place|significant|toleran|±|%",
    re.IGNORECASE,
)
TOLERANCE = Fraction(5, 100)  # of a value, if the prompt asks for about the right value
MAX_CHARACTERS = 60  # of a near miss: a longer answer is a text or a program, not a value
# {kind: (pattern, replacement) of the near miss of an answer with digits}
OF_DIGITS = {
    "a digit in front": (r"\d", r"1\g<0>"),
    "a digit at the end": (r"\d(?!.*\d)", r"\g<0>5"),
    "without its first digit": (r"\d(?=\d)", ""),
    "without its last digit": (r"(?<=\d)\d(?!.*\d)", ""),
    "its digits rotated": (r"(\d)(\d+)", r"\2\1"),
    "its point moved": (r"^(-?\d)(\d+)$", r"\1.\2"),
}
OF_WORDS = {
    "a letter in front": (r"^", "x"),
    "a letter at the end": (r"$", "x"),
    "without its last letter": (r".$", ""),
}
# {kind: (factor, summand) of the near miss of a number}
OF_NUMBERS: dict[str, tuple[Fraction | int, Fraction | int]] = {
    "1 more": (1, 1),
    "1 less": (1, -1),
    "0.4 more": (1, Fraction(4, 10)),
    "0.9 more": (1, Fraction(9, 10)),
    "times ten": (10, 0),
    "the other sign": (-1, 0),
    "3% more": (Fraction(103, 100), 0),
}


def read_number(text: str) -> Fraction | None:
    """Return the number that a text is, or None.

    >>> read_number("1,000"), read_number("1/2"), read_number("x")
    (Fraction(1000, 1), Fraction(1, 2), None)
    """
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None


# --- the right answer ----------------------------------------------------------------------------


def split_list(text: str) -> list[str]:
    """Return the items of a list such as [1, 2], or of numbers such as 1, 2; otherwise nothing."""
    found = LIST.fullmatch(text)
    if not found or bool(found["start"]) != bool(found["end"]) or read_number(text) is not None:
        return []
    items = [item.strip() for item in found["items"].split(",")]
    is_list = bool(found["start"]) or all(read_number(item) is not None for item in items)
    return items if is_list and len(items) > 1 else []


def write_list(text: str, items: Sequence[str]) -> str:
    """Return other items between the brackets of a list."""
    found = LIST.fullmatch(text)
    assert found, text
    return f"{found['start']}{', '.join(items)}{found['end']}"


def rewrite_answer(truth: str, prompt: str, choices: Mapping[str, str]) -> dict[str, str]:
    """Return other ways to write an answer, each as right as the answer itself: {kind: text}."""
    texts = rewrite_number(truth, prompt)
    items = split_list(truth)
    is_set = truth.startswith(("{", "\\{")) or UNORDERED.search(prompt)
    if items and is_set and not ORDERED.search(prompt):
        texts["items in another order"] = write_list(truth, items[::-1])
    if choices.get(truth, truth) != truth:
        texts["in parentheses"] = f"({truth})"
        texts["with the text of the choice"] = f"{truth}. {choices[truth]}"
    if NAME.fullmatch(truth):
        texts["lower case"] = truth.lower()
    return {kind: text for kind, text in texts.items() if text != truth}


def rewrite_number(truth: str, prompt: str) -> dict[str, str]:
    """Return other ways to write a number, empty if the answer is none: {kind: text}."""
    value = read_number(truth)
    if value is None:
        return {}
    texts = {"in dollar signs": f"${truth}$"}
    variable = VARIABLE.search(prompt)
    if variable and "=" in prompt:
        texts["as an equation"] = f"{variable[1]} = {truth}"
    if WHOLE.fullmatch(truth):
        if COMPUTED.search(prompt):
            texts["with a zero after the point"] = f"{truth}.0"
        plain = truth.replace(",", "")
        texts["with a thousands separator"] = f"{int(plain):,}" if abs(value) >= 1000 else truth
        texts["without thousands separators"] = plain
    elif 1 < value.denominator <= 100:
        texts["as a fraction"] = str(value)
        sign = "-" if value < 0 else ""
        parts = f"{{{abs(value.numerator)}}}{{{value.denominator}}}"
        texts["as a LaTeX fraction"] = f"{sign}\\frac{parts}"
    if "/" in truth and 10_000 % value.denominator == 0:
        texts["as a decimal number"] = f"{Decimal(value.numerator) / value.denominator:f}"
    return texts


# --- wrong answers near it -----------------------------------------------------------------------


def make_near_misses(truth: str, prompt: str, answers: Sequence[str]) -> dict[str, str]:
    """Return wrong answers near a right one: {kind: text}. answers: all right ones."""
    if len(truth) > MAX_CHARACTERS or "\n" in truth:
        return {}
    misses = list_candidates(truth, prompt)
    right = [truth, *answers]
    return {kind: text for kind, text in misses.items() if is_wrong(text, prompt, right)}


def list_candidates(truth: str, prompt: str) -> dict[str, str]:
    """Return near misses, some of which may be right: {kind: text}."""
    texts = {}
    value = read_number(truth)
    if value is not None:
        for kind, (factor, summand) in OF_NUMBERS.items():
            texts[kind] = f"{float(value * factor + summand):.10g}"
        texts["cut to a whole number"] = str(int(value))
        if value.denominator == 1 and value >= 0:
            texts["a number for Python"] = hex(int(value))
    changes = OF_WORDS if WORD.fullmatch(truth) else OF_DIGITS
    for kind, (pattern, replacement) in changes.items():
        texts[kind] = re.sub(pattern, replacement, truth, count=1)
    part = re.search(r"\d[\d.]*|[^\W\d_]{3,}", truth)
    if part:
        texts["reversed"] = truth.replace(part[0], part[0][::-1], 1)
    texts["the answer as a pattern"] = truth.replace(".", "x")
    items = split_list(truth)
    if items:
        texts["an item less"] = write_list(truth, items[:-1])
        texts["an item more"] = write_list(truth, [*items, "999"])
        if ORDERED.search(prompt):
            texts["items in another order"] = write_list(truth, [*items[1:], items[0]])
    return texts


def is_wrong(text: str, prompt: str, answers: Sequence[str]) -> bool:
    """Return whether a near miss is wrong, also for a prompt that accepts about the value."""
    if not text.strip() or any(truths.is_same_answer(text, each) for each in answers):
        return False
    value = read_number(text)
    for answer in answers:
        right = read_number(answer)
        if value is None or right is None:
            continue
        difference = abs(value - right)
        is_close = difference <= max(TOLERANCE * abs(right), Fraction(1))
        # of a number that is not whole, the last digits are rounded
        is_rounded = right.denominator > 1 and difference * 50 < abs(right)
        if difference == 0 or is_rounded or (is_close and APPROXIMATE.search(prompt)):
            return False
    return True
