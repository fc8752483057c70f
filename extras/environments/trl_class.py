"""An environment class for TRL's GRPOTrainer, in a process of a Python verifier, without TRL.

The rules are those of TRL 1.16 (grpo_trainer.py): `reset(**row)` returns None or text, and each
other public function is a tool, except `get_reward`. Two rules differ. Each episode has a new
instance. If a tool raises an OSError, such as a timeout or a lost connection, the episode fails. In
TRL the policy reads it, and the reward is then often 0.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING

from kit.errors import ConfigError, UserFunctionError
from kit.recipe.python_files import import_callable

if TYPE_CHECKING:  # its packages would take each process a second to import
    from gym_client import Json

NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """An instance of the class for one episode (kit.verify.python_verifiers.calls)."""

    def __init__(self, trl_class: str, reward: str | None = None):
        self.environment = import_callable(trl_class)()
        self.reward = import_callable(reward) if reward else None
        self.tools = find_tools(type(self.environment))

    async def reset(self, row: Json) -> object:
        """Pass the columns of the row. Return the first observation."""
        return await finish(self.environment.reset(**read_columns(row)))

    async def call_tool(self, name: str, arguments: str) -> str:
        """Return the output of a tool, or its exception as text. Raises OSError."""
        if name not in self.tools:
            return json.dumps({"error": f"Tool {name} not found."})
        try:
            parsed = json.loads(arguments)
            if not isinstance(parsed, dict):
                kind = type(parsed).__name__
                raise TypeError(f"the arguments must be a JSON object, not {kind}")
            return str(await finish(getattr(self.environment, name)(**parsed)))
        except OSError:  # also TimeoutError: the environment failed, not the policy
            raise
        except Exception as error:  # as in TRL
            return str({"error": str(error)})

    async def score(self, solution_str: str, extra_info: Json, **_: object) -> object:
        """Return the reward. Raises what the class or the reward function raises."""
        if self.reward is None:
            return await finish(self.environment.get_reward())
        columns = read_columns(extra_info["row"])
        message = {"role": "assistant", "content": solution_str}
        batch = {name: [value] for name, value in columns.items() if name != "prompt"}
        metrics: dict[str, object] = {}
        rewards = await finish(
            self.reward(
                prompts=[columns["prompt"]],
                completions=[[message]],
                environments=[self.environment],
                log_metric=metrics.__setitem__,
                log_extra=lambda column, values: None,
                **batch,
            )
        )
        return {**metrics, "score": rewards[0]}  # type: ignore[index]  # a list, as in TRL

    async def close(self) -> None:
        """End what the environment started, if it has such a method."""
        if hasattr(self.environment, "close"):
            await finish(self.environment.close())


def read_columns(row: Json) -> Json:
    """Return the columns of the row, as in a data set for TRL."""
    columns = {key: value for key, value in row.items() if key != "responses_create_params"}
    return {"prompt": row["responses_create_params"].get("input"), **columns}


async def finish(value: object) -> object:
    """Return the value, or the result of an async function."""
    return await value if inspect.isawaitable(value) else value


def find_tools(trl_class: object) -> list[str]:
    """Return the names of the tools of a class."""
    names = [name for name, _ in inspect.getmembers(trl_class, inspect.isfunction)]
    return [n for n in names if not n.startswith("_") and n not in (*NO_TOOLS, "close")]


def describe_tools(reference: str, reward: str | None, key: str) -> list[Json]:
    """Return the tools of a class in the form of a chat, before a run. Raises ConfigError.

    reward: the reward function, without which the class needs get_reward.
    """
    from transformers.utils import get_json_schema

    try:
        trl_class = import_callable(reference, key)
    except UserFunctionError as error:
        raise ConfigError(str(error)) from None
    for name in ("reset",) if reward else NO_TOOLS:
        if not hasattr(trl_class, name):
            hint = " or name a reward function as `reward`" if name == "get_reward" else ""
            raise ConfigError(f"{key}={reference} has no {name}. Write it{hint}.")
    described = []
    for name in find_tools(trl_class):
        method = inspect.getattr_static(trl_class, name).__get__(object())  # without `self`
        try:
            described.append(get_json_schema(method))
        except Exception as error:  # its classes have no common one
            message = " ".join(str(error).split())
            raise ConfigError(
                f"{key}={reference}: the tool {name} has no schema: {message}. Give it type hints "
                "and a docstring with the section `Args:`."
            ) from None
    return described
