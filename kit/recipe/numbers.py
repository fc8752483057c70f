"""The numbers of a recipe as types: their ranges, and the meaning of -1 and null.

Meanings are those of verl's configuration files. A value without a meaning there is refused.

Protects: a size that cannot be, or a misspelled number, ends the run before a worker starts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BeforeValidator

NONE: Mapping[object, Any] = MappingProxyType({})


class Number(NamedTuple):
    """The values that a number of the recipe may have.

    words: {value outside the range: its meaning}.
    """

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False
    excludes_low: bool = False
    words: Mapping[object, str] = NONE

    def is_valid(self, value: object) -> bool:
        """Return whether the key may have this value."""
        if isinstance(value, (bool, list, dict)):
            return False
        if value in self.words:
            return True
        return isinstance(value, (int, float)) and self.is_in_range(value)

    def is_in_range(self, value: float) -> bool:
        """Return whether a finite number is within the limits."""
        if not math.isfinite(value) or (self.is_whole and not isinstance(value, int)):
            return False
        is_above = value > self.low if self.excludes_low else value >= self.low
        return is_above and value <= self.high

    def describe(self) -> str:
        """Describe the allowed values: "a whole number of at least 1, or null (all)"."""
        noun = "a whole number" if self.is_whole else "a number"
        limits = ""
        if not math.isinf(self.low):
            limits = f" {'above' if self.excludes_low else 'of at least'} {self.low:.12g}"
        if not math.isinf(self.high):
            limits += f" and at most {self.high:.12g}"
        words = "".join(
            f", or {show(value)}{f' ({meaning})' if meaning else ''}"
            for value, meaning in self.words.items()
        )
        return f"{noun}{limits}{words}"


def show(value: object) -> str:
    """Write a value as in YAML, cut if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if isinstance(value, (dict, list)):
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def follow(rule: Number, value: object) -> object:
    """Return a valid number. Raises ValueError."""
    if rule.is_valid(value):
        return value
    is_quoted = isinstance(value, str) and value.isdecimal()
    fix = "Remove the quotes" if is_quoted else "Change it"
    raise ValueError(f"must be {rule.describe()}. {fix}.")


def by(rule: Number) -> BeforeValidator:
    """Make the validator of a field with a number."""
    return BeforeValidator(functools.partial(follow, rule))


def count(**words: str) -> BeforeValidator:
    """Make the validator of a count. words: the meanings of `null` and `minus_one`."""
    values: dict[object, str] = {}
    if "minus_one" in words:
        values[-1] = words["minus_one"]
    if "null" in words:
        values[None] = words["null"]
    return by(Number(1, is_whole=True, words=values))


AT_LEAST_ZERO = Number(0)
COUNT = Number(1, is_whole=True)
COUNT_OR_ZERO = Number(0, is_whole=True)

Count = Annotated[int, by(COUNT)]
CountOrZero = Annotated[int, by(COUNT_OR_ZERO)]
CountOrNull = Annotated[int | None, count(null="")]
CountOrAll = Annotated[int | None, count(null="all")]
Seed = Annotated[int, by(Number(0, 2**31 - 1, is_whole=True))]
Port = Annotated[int | None, by(Number(1, 65535, is_whole=True, words={None: "a free port"}))]
Positive = Annotated[float, by(Number(0, excludes_low=True))]
NotNegative = Annotated[float, by(AT_LEAST_ZERO)]
Finite = Annotated[float, by(Number())]
Fraction = Annotated[float, by(Number(0, 1))]
Share = Annotated[float, by(Number(0, 1, excludes_low=True))]
Seconds = Annotated[float, by(Number(0, 10**9, excludes_low=True))]
Temperature = Annotated[float, by(Number(0, 2))]  # vLLM's limit
LIMIT = COUNT._replace(words={"auto": "raised until the server slows down"})
Concurrency = Annotated[int | Literal["auto"], by(LIMIT)]
