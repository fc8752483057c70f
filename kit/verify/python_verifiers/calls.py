"""Load a Python verifier, call it, and check its return value. Runs in the verifier's process.

Protects: rewards are finite numbers that a function returned, and no failure becomes one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

from kit.errors import UserFunctionError
from kit.recipe.python_files import describe_place

if TYPE_CHECKING:  # its packages would take each process a second to import
    from gym_client import Json

SCORE_RESULT = "a finite number, or a dict with a finite number `score`"
STEP_RESULT = "(observation, reward, done): text or None, a finite number, True or False"


class VerifierError(Exception):
    """The verifier cannot be used, or returned an invalid value. The message has the reason."""


class Environment(Protocol):
    """An instance of a user's class. The methods may be async, and may return anything.

    It may have `close`, to end what it started.
    """

    def reset(self, row: Json) -> object: ...
    def step(self, text: str) -> object: ...


class ToolEnvironment(Protocol):
    """An environment whose tools the policy calls, and which computes the reward at the end."""

    tools: Collection[str]  # their names, after reset

    def reset(self, row: Json) -> object: ...
    def call_tool(self, name: str, arguments: str) -> object: ...
    def score(self, **arguments: object) -> object: ...  # of a function


# --- call ----------------------------------------------------------------------------------------


def score(verifier: Callable[..., object], runner: asyncio.Runner, arguments: Json) -> Json:
    """Call a function and return the JSON of a verification result. Raises VerifierError.

    The other numbers of a dict are components of the reward. If JSON can express another value, it
    is returned unchanged, otherwise as its repr.
    """
    value = await_result(verifier(**arguments), runner)
    parts = dict(value) if isinstance(value, Mapping) else {"score": value}
    reward = to_finite_number(parts.pop("score", None))
    components: dict[str, float | None] = {}
    details: Json = {}
    for name, part in parts.items():
        if to_number(part) is None:
            details[str(name)] = to_json_value(part)
        else:
            components[str(name)] = to_finite_number(part)
    if reward is None or None in components.values():
        raise VerifierError(f"returned {reprlib.repr(value)}; it must return {SCORE_RESULT}.")
    return {**details, "reward": reward, "reward_components": components}


def reset(environment: Environment | ToolEnvironment, runner: asyncio.Runner, row: Json) -> Json:
    """Reset an environment, and return its first observation. Raises VerifierError."""
    observation = await_result(environment.reset(row), runner)
    if not isinstance(observation, str | None):
        raise VerifierError(
            f"reset returned {reprlib.repr(observation)}; it must return text or None."
        )
    return {"observation": observation, "tools": list(getattr(environment, "tools", ()))}


def step(environment: Environment, runner: asyncio.Runner, text: str) -> Json:
    """Give the text of the policy to an environment. Raises VerifierError."""
    value = await_result(environment.step(text), runner)
    answer = parse_step(value)
    if answer is None:
        raise VerifierError(f"step returned {reprlib.repr(value)}; it must return {STEP_RESULT}.")
    return answer


def call_tool(
    environment: ToolEnvironment, runner: asyncio.Runner, name: str, arguments: str
) -> Json:
    """Call a tool of an environment, and return its output."""
    return {"output": str(await_result(environment.call_tool(name, arguments), runner))}


def score_environment(
    environment: ToolEnvironment, runner: asyncio.Runner, arguments: Json
) -> Json:
    """Return the JSON of an environment's reward, as `score` does. Raises VerifierError."""
    return score(environment.score, runner, arguments)


def close(environment: object, runner: asyncio.Runner) -> Json:
    """Let an environment end what it started, if it has such a method."""
    if hasattr(environment, "close"):
        await_result(environment.close(), runner)
    return {}


def parse_step(value: object) -> Json | None:
    """Return the JSON of a step's return value, None if it is invalid."""
    if not isinstance(value, tuple) or len(value) != 3:
        return None
    observation, reward, done = value
    reward = to_finite_number(reward)
    done = to_scalar(done)
    if not isinstance(observation, str | None) or reward is None or not isinstance(done, bool):
        return None
    return {"observation": observation, "reward": reward, "done": done}


def await_result(value: object, runner: asyncio.Runner) -> object:
    """Return the value, or the result of an async function."""
    return runner.run(value) if inspect.iscoroutine(value) else value


# --- values --------------------------------------------------------------------------------------


def to_finite_number(value: object) -> float | None:
    """Return the finite number that a value is, else None. The limit is that of sanitize_json."""
    number = to_number(value)
    return number if number is not None and abs(number) < 1e308 else None


def to_number(value: Any) -> float | None:  # any value of a user's function
    """Return the number that a value is, where True is 1, or None if it is not one number.

    Numbers are those of Python, Decimal, Fraction, and scalars and 0-d arrays of NumPy and torch.
    """
    if not isinstance(to_scalar(value), numbers.Real | Decimal):
        return None
    try:
        return float(value)  # of a masked value of NumPy, the scalar would be 0
    except (OverflowError, ValueError):  # ValueError: a signaling NaN
        return math.nan


def to_scalar(value: Any) -> object:  # any value of a user's function
    """Return a scalar or 0-d array of NumPy or torch as Python's number, and others unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def to_json_value(value: object) -> object:
    """Return the value if JSON can express it, otherwise its repr."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)
    return value


def describe_failure(error: BaseException, path: str) -> Json:
    """Return the reason of a failed call, with the last line in a file of the user.

    path: of the verifier's file.
    """
    if isinstance(error, VerifierError):
        return {"failed": "bad_answer", "why": str(error)}
    if isinstance(error, UserFunctionError):  # of its import, or of a template
        return {"failed": "bad_answer", "why": f"failed: {error}"}
    place = describe_place(error, path).strip() or "failed:"
    reason = "memory" if isinstance(error, MemoryError) else "raised"
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    hint = ". Use less, or raise env.verifier_pool.memory_gb." if reason == "memory" else ""
    return {"failed": reason, "why": f"{place} {message:.500}{hint}"}
