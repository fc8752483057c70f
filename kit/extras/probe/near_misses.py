"""Wrong answers near the right one, made from it: a digit more, another order, 3% more.

Each is checked to be wrong: it has another value than the truth, or another text than all answers
of the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from kit.extras.probe import truths
from kit.extras.probe.rewrites import ORDERED, Rewrite, read_number, split_list, write_list

MAX_CHARACTERS = 60  # of an answer: a longer one is a text or a program, not a value
TOLERANCE = Fraction(5, 100)  # of a value, if the prompt asks for about the right value
APPROXIMATE = re.compile(
    r"approx|about|roughly|estimat|within|round|nearest|decimal place|significant|toleran|±|%",
    re.IGNORECASE,
)
DIGIT = re.compile(r"\d")
LAST_DIGIT = re.compile(r"\d(?!.*\d)")
WORD = re.compile(r"[^\W\d_]{3,}( [^\W\d_]+)*")


# {kind: what makes the near miss of an answer with digits}
OF_DIGITS: dict[str, Callable[[str], str]] = {
    "a digit in front": lambda text: DIGIT.sub(lambda digit: f"1{digit[0]}", text, count=1),
    "a digit at the end": lambda text: LAST_DIGIT.sub(lambda digit: f"{digit[0]}5", text),
    "without its first digit": lambda text: re.sub(r"\d(?=\d)", "", text, count=1),
    "without its last digit": lambda text: re.sub(r"(?<=\d)\d(?!.*\d)", "", text),
    "its digits reversed": lambda text: re.sub(r"\d[\d.]*", lambda number: number[0][::-1], text),
    "its digits rotated": lambda text: re.sub(r"(\d)(\d+)", r"\2\1", text, count=1),
    "its point moved": lambda text: re.sub(r"^(-?\d)(\d+)$", r"\1.\2", text),
}
# {kind: what makes the near miss of a number}
OF_NUMBERS: dict[str, Callable[[Fraction], Fraction]] = {
    "1 more": lambda value: value + 1,
    "1 less": lambda value: value - 1,
    "0.4 more": lambda value: value + Fraction(4, 10),
    "0.9 more": lambda value: value + Fraction(9, 10),
    "times ten": lambda value: value * 10,
    "the other sign": lambda value: -value,
    "3% more": lambda value: value * Fraction(103, 100),
    "cut to a whole number": lambda value: Fraction(int(value)),
}
OF_WORDS: dict[str, Callable[[str], str]] = {
    "a letter at the end": lambda text: f"{text}x",
    "a letter in front": lambda text: f"x{text}",
    "without its last letter": lambda text: text[:-1],
    "its letters reversed": lambda text: text[::-1],
}


def make_near_misses(truth: str, prompt: str, answers: Sequence[str]) -> Iterator[Rewrite]:
    """Yield wrong answers near a right one. answers: all right ones that are known."""
    if len(truth) > MAX_CHARACTERS or "\n" in truth:
        return
    for near in list_candidates(truth, prompt):
        if is_wrong(near.text, prompt, [truth, *answers]):
            yield near


def list_candidates(truth: str, prompt: str) -> Iterator[Rewrite]:
    """Yield near misses, some of which may be right."""
    value = read_number(truth)
    if value is not None:
        for kind, change in OF_NUMBERS.items():
            yield Rewrite(kind, f"{float(change(value)):.10g}")
        if value.denominator == 1 and value >= 0:
            yield Rewrite("a number for Python", hex(int(value)))
    for kind, rewrite in (OF_WORDS if WORD.fullmatch(truth) else OF_DIGITS).items():
        yield Rewrite(kind, rewrite(truth))
    yield Rewrite("the answer as a pattern", write_match(truth))
    items = split_list(truth)
    if len(items) > 1:
        yield Rewrite("an item less", write_list(truth, items[:-1]))
        yield Rewrite("an item more", write_list(truth, [*items, "999"]))
        if ORDERED.search(prompt):
            yield Rewrite("items in another order", write_list(truth, [*items[1:], items[0]]))


def write_match(truth: str) -> str:
    """Return another text that matches an answer as a regular expression: 3x14 of 3.14."""
    text = re.sub(r"(.)[+]", r"\1\1", truth.replace(".", "x"))
    text = re.sub(r".[*?]", "", text)
    text = re.sub(r"[()^$]", "", text)
    try:
        return text if re.fullmatch(truth, text) else ""
    except re.error:
        return ""


def is_wrong(text: str, prompt: str, answers: Sequence[str]) -> bool:
    """Whether a near miss is no right answer, also for a prompt that accepts about the value."""
    if not text.strip() or any(truths.is_same_answer(text, each) for each in answers):
        return False
    value = read_number(text)
    for answer in answers:
        right = read_number(answer)
        if value is None or right is None:
            continue
        difference = abs(value - right)
        is_close = difference <= max(TOLERANCE * abs(right), 1)
        # of a number that is not whole, the last digits are rounded
        is_rounded = right.denominator > 1 and difference * 50 < abs(right)
        if difference == 0 or is_rounded or (is_close and APPROXIMATE.search(prompt)):
            return False
    return True
