"""Other ways to write a right answer, and wrong answers near it: a digit more, another order.

A near miss is checked to be wrong: it has another value than the truth, or another text than all
answers of the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from lab.probe import truths

INTEGER = re.compile(r"-?\d+")
WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
NAME = re.compile(r"[A-Z][a-z]+( [A-Za-z][a-z]+)*")  # no formula, no code
WORD = re.compile(r"[^\W\d_]{3,}( [^\W\d_]+)*")
LIST = re.compile(r"(?P<start>\\?[\[({]|)(?P<items>[^\[\](){}]+)(?P<end>\\?[\])}]|)")
# Prompts that forbid other text than the answer, or other forms of it.
ONLY = re.compile(
    r"\b(only|just|nothing (else|but|more)|exact(ly)?|verbatim|without|prepend|begin|start|omit|"
    r"leave out|(whole|entire) (answer|output|reply|response)|JSON|(lower|upper) ?case|"
    r"no (other|extra|additional|explanations?|reasoning|words|work|text|units?|punctuation)|"
    r"(do not|don't|never) (add|include|explain|give|output|provide|show|write|use)|"
    r"as (an?|the) ([a-z]+ )?(integer|decimal|fraction|percentage|word|digits?)|in digits|"
    r"answer in (the|this) form(at)?|in scientific notation|yes or no|true or false|"
    r"(single|(give|in|with) one|two|three)[ -](number|integer|digit|word|letter|token)|"
    r"(answer|reply|respond) with (an?|the|[A-Z](,| or)) ?(final |correct )?"
    r"(digits?|integer|letter|name|number|word|[A-Z]\b)|(number|letter|word) alone|"
    r"simplest|lowest terms|nur|uniquement|seulement|solo con|solamente|soltanto|apenas|somente)\b|"
    r"[只仅](需|输出|回答|给出|返回|写)|только|だけ|のみ",
    re.IGNORECASE,
)
COMPUTED = re.compile(r"\d *[-+*/^] *\d|comput|calculat|evaluate|solve|value of", re.IGNORECASE)
VARIABLE = re.compile(r"\b(?:for|find|of|is) \$?([b-hj-z])\$?(?![a-z'])")
COUNTED = re.compile(  # the noun after `how many`
    r"\bhow many (?!(?:are|can|did|does|do|different|had|has|have|is|more|of|other|the|times|total|"
    r"was|were|will|would)\b)([a-z]{3,})",
    re.IGNORECASE,
)
SHARES = re.compile(r"probab|chance|percent|fraction|%", re.IGNORECASE)
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


# --- the right answer ----------------------------------------------------------------------------


def rewrite_answer(truth: str, prompt: str, choices: Mapping[str, str]) -> dict[str, str]:
    """Return other ways to write an answer, each as right as the answer itself: {kind: text}."""
    texts = rewrite_number(truth, prompt)
    if truth in choices and choices[truth] != truth:
        texts["in parentheses"] = f"({truth})"
        texts["with the text of the choice"] = f"{truth}. {choices[truth]}"
    if NAME.fullmatch(truth) and len(truth) > 1:
        texts["lower case"] = truth.lower()
    items = split_list(truth)
    if len(items) > 1 and truth[0] in "[({\\":
        spaced = write_list(truth, items)
        packed = spaced.replace(", ", ",")
        texts["other spaces in a list"] = packed if packed != truth else spaced
    is_set = truth.startswith(("{", "\\{")) or UNORDERED.search(prompt)
    if len(items) > 1 and is_set and not ORDERED.search(prompt):
        texts["items in another order"] = write_list(truth, items[::-1])
    return texts


def rewrite_number(truth: str, prompt: str) -> dict[str, str]:
    """Return other ways to write a number, empty if the answer is none: {kind: text}."""
    value = read_number(truth)
    if value is None:
        return {}
    texts = {"in dollar signs": f"${truth}$"}
    texts |= write_as_asked(truth, value, prompt)
    if INTEGER.fullmatch(truth):
        if abs(value) >= 1000:
            texts["with a thousands separator"] = f"{int(truth):,}"
        if COMPUTED.search(prompt):
            texts["with a zero after the point"] = f"{truth}.0"
    elif WITH_COMMAS.fullmatch(truth):
        texts["without thousands separators"] = truth.replace(",", "")
    elif value.denominator <= 100 and not FRACTION.fullmatch(truth):
        texts["as a fraction"] = str(value)
    if 1 < value.denominator <= 100:
        sign = "-" if value < 0 else ""
        texts["as a LaTeX fraction"] = (
            f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
        )
    if FRACTION.fullmatch(truth) and 10_000 % value.denominator == 0:
        texts["as a decimal number"] = f"{Decimal(value.numerator) / value.denominator:f}"
    return {kind: text for kind, text in texts.items() if text != truth}


def write_as_asked(truth: str, value: Fraction, prompt: str) -> dict[str, str]:
    """Return forms of a number that a prompt suggests: {kind: text}."""
    texts = {}
    variable = VARIABLE.search(prompt)
    if variable and "=" in prompt:
        texts["as an equation"] = f"{variable[1]} = {truth}"
    counted = COUNTED.search(prompt)
    if counted and value.denominator == 1:
        texts["with its unit"] = f"{truth} {counted[1].lower()}"
    if 0 < value < 1 and 10_000 % value.denominator == 0 and SHARES.search(prompt):
        texts["as a percentage"] = f"{float(value * 100):g}%"
    return texts


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
    is_number = any(form.fullmatch(plain) for form in (INTEGER, DECIMAL, FRACTION))
    return Fraction(plain) if is_number else None


# --- wrong answers near it -----------------------------------------------------------------------

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


def make_near_misses(truth: str, prompt: str, answers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of wrong answers near a right one. answers: all right ones."""
    if len(truth) > MAX_CHARACTERS or "\n" in truth:
        return
    for kind, text in list_candidates(truth, prompt):
        if is_wrong(text, prompt, [truth, *answers]):
            yield kind, text


def list_candidates(truth: str, prompt: str) -> Iterator[tuple[str, str]]:
    """Yield near misses, some of which may be right."""
    value = read_number(truth)
    if value is not None:
        for kind, (factor, summand) in OF_NUMBERS.items():
            yield kind, f"{float(value * factor + summand):.10g}"
        yield "cut to a whole number", str(int(value))
        if value.denominator == 1 and value >= 0:
            yield "a number for Python", hex(int(value))
    changes = OF_WORDS if WORD.fullmatch(truth) else OF_DIGITS
    for kind, (pattern, replacement) in changes.items():
        yield kind, re.sub(pattern, replacement, truth, count=1)
    part = re.search(r"\d[\d.]*|[^\W\d_]{3,}", truth)
    if part:
        yield "reversed", truth.replace(part[0], part[0][::-1], 1)
    yield "the answer as a pattern", truth.replace(".", "x")
    items = split_list(truth)
    if len(items) > 1:
        yield "an item less", write_list(truth, items[:-1])
        yield "an item more", write_list(truth, [*items, "999"])
        if ORDERED.search(prompt):
            yield "items in another order", write_list(truth, [*items[1:], items[0]])


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
