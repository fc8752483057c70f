"""Wrong answers near the right one, made from it: a digit more, another order, 3% more.

Each is checked to be wrong: it has another value than the truth, or another text than all answers
of the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from kit.extras.probe import truths
from kit.extras.probe.rewrites import ORDERED, Rewrite, read_number, split_list, write_list

MAX_CHARACTERS = 60  # of an answer: a longer one is a text or a program, not a value
TOLERANCE = Fraction(5, 100)  # of a value, if the prompt asks for about the right value
APPROXIMATE = re.compile(
    r"approx|about|roughly|estimat|within|round|nearest|decimal place|significant|toleran|±|%",
    re.IGNORECASE,
)
WORD = re.compile(r"[^\W\d_]{3,}( [^\W\d_]+)*")
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
        for kind, (factor, summand) in OF_NUMBERS.items():
            yield Rewrite(kind, f"{float(value * factor + summand):.10g}")
        yield Rewrite("cut to a whole number", str(int(value)))
        if value.denominator == 1 and value >= 0:
            yield Rewrite("a number for Python", hex(int(value)))
    changes = OF_WORDS if WORD.fullmatch(truth) else OF_DIGITS
    for kind, (pattern, replacement) in changes.items():
        yield Rewrite(kind, re.sub(pattern, replacement, truth, count=1))
    part = re.search(r"\d[\d.]*|[^\W\d_]{3,}", truth)
    if part:
        yield Rewrite("reversed", truth.replace(part[0], part[0][::-1], 1))
    yield Rewrite("the answer as a pattern", truth.replace(".", "x"))
    items = split_list(truth)
    if len(items) > 1:
        yield Rewrite("an item less", write_list(truth, items[:-1]))
        yield Rewrite("an item more", write_list(truth, [*items, "999"]))
        if ORDERED.search(prompt):
            yield Rewrite("items in another order", write_list(truth, [*items[1:], items[0]]))


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
        is_close = difference <= max(TOLERANCE * abs(right), Fraction(1))
        # of a number that is not whole, the last digits are rounded
        is_rounded = right.denominator > 1 and difference * 50 < abs(right)
        if difference == 0 or is_rounded or (is_close and APPROXIMATE.search(prompt)):
            return False
    return True
