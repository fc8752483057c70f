"""A result that is one finite number is a reward, of whichever type. Everything else fails."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.gym.python_verifiers import calls
from kit.gym.python_verifiers.calls import VerifierError

MAKE_NUMBER = {  # {type: a function of 0 or 1}
    "int": int,
    "float": float,
    "bool": bool,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "np.bool_": np.bool_,
    "np.int64": np.int64,
    "np.float16": np.float16,
    "np.longdouble": np.longdouble,
    "0-d array": np.array,
    "0-d array of bool": lambda value: np.array(bool(value)),
    "0-d tensor": torch.tensor,
    "0-d tensor of bool": lambda value: torch.tensor(bool(value)),
    "bfloat16": lambda value: torch.tensor(float(value), dtype=torch.bfloat16),
    "with gradient": lambda value: torch.tensor(float(value), requires_grad=True),
}
NO_NUMBERS = [
    *(None, "1", b"1", "", [1.0], (1.0,), {1.0}, [], (1.0, {}), 1j, Ellipsis, Decimal),
    *(np.array([1.0]), np.array([]), np.array("1"), np.array(None), np.datetime64("2026-01-01")),
    *(torch.tensor([1.0]), torch.tensor(1j), np.ma.masked),
    *(math.nan, math.inf, -math.inf, np.float32("nan"), np.array(math.nan), torch.tensor(math.inf)),
    *(
        Decimal("nan"),
        Decimal("snan"),
        Decimal("inf"),
        Decimal("1e999"),
        10**400,
        Fraction(10**400),
    ),
]


def score(value):
    """Return the answer of a function that returns `value`."""
    with asyncio.Runner() as runner:
        return calls.score(lambda: value, runner, {}).answer


@pytest.mark.parametrize("kind", MAKE_NUMBER)
def test_a_number_of_any_type_is_a_reward_and_a_metric(kind):
    for number in (0, 1):
        value = MAKE_NUMBER[kind](number)
        assert score(value) == {"reward": float(number), "reward_components": {}}
        answer = score({"score": value, "part": value, "name": kind})
        assert answer == {"reward": number, "reward_components": {"part": number}, "name": kind}
        assert {type(answer["reward"]), type(answer["reward_components"]["part"])} == {float}
        step = calls.parse_step((None, value, False))
        assert step == {"observation": None, "reward": number, "done": False}


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_any_other_result_is_a_failure_with_the_same_message(value):
    expected = (
        r"returned .*; it must return a finite number, or a dict with a finite number `score`"
    )
    for result in (value, {"score": value}, {"acc": 1.0}):
        with pytest.raises(VerifierError, match=expected):
            score(result)
    assert calls.parse_step((None, value, False)) is None


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_is_not_changed(value):
    if abs(value) < 1e308:
        for make in (
            float,
            np.float64,
            np.array,
            Decimal,
            torch.DoubleTensor([value])[0].new_tensor,
        ):
            assert score(make(value))["reward"] == value


@pytest.mark.parametrize(
    "done", [True, np.bool_(True), np.array(True), torch.tensor(True)], ids=repr
)
def test_the_end_of_an_environment_is_a_bool_of_any_library(done):
    assert calls.parse_step(("x", 1, done))["done"] is True


@pytest.mark.parametrize("done", [1, None, "True", np.array([True]), torch.tensor(1)], ids=repr)
def test_any_other_end_of_an_environment_is_a_failure(done):
    assert calls.parse_step(("x", 1, done)) is None
