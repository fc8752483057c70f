"""An agent that plays environments of Prime's library `verifiers`: v0 (0.3.1) and v1 (0.4.0).

    PYTHON extras/agents/verifiers_script.py ENVIRONMENT ROWS.jsonl ['{"argument": 1}' [eval]]

PYTHON has verifiers and the environment. The command writes a row for each task. In a run, `solve`
plays the task of a row and returns its reward, or raises the environment's error.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import verifiers

KEY = "VERIFIERS_KEY"  # a variable that verifiers reads; the key of an episode is in its URL
scorer_errors: contextvars.ContextVar[list[Exception]] = contextvars.ContextVar("scorer_errors")


async def solve(row: dict[str, Any], base_url: str, key: str) -> dict[str, float]:
    """Play the task of a row. Raises RuntimeError."""
    environment = load(*row["environment"])
    return await environment.play(environment.tasks[row["index"]], f"{base_url}/s/{key}/v1", KEY)


@functools.cache
def load(name: str, arguments: str = "{}", split: str = "train") -> Any:  # a V0 or V1
    """Load an environment once. arguments: JSON. split: of v0, train or eval."""
    os.environ[KEY] = "none"
    module = importlib.import_module(name.rpartition("/")[2].replace("-", "_"))
    if hasattr(module, "load_environment"):
        return V0(verifiers.load_environment(name, **json.loads(arguments)), split)
    sys.path.append(str(Path(__file__).parent))  # verifiers looks there, too
    return importlib.import_module("verifiers_v1").V1(name, json.loads(arguments))


class V0:
    """An environment with load_environment."""

    def __init__(self, env: Any, split: str):
        self.env = env
        self.tasks = env.get_eval_dataset() if split == "eval" else env.get_dataset()
        watch(env.rubric)

    async def play(self, task: Any, url: str, key_variable: str) -> dict[str, float]:
        """Play a task, and return its metrics and its reward. Raises RuntimeError."""
        errors: list[Exception] = []
        scorer_errors.set(errors)
        client = verifiers.ClientConfig(api_base_url=url, api_key_var=key_variable, max_retries=0)
        output = await self.env.run_rollout(dict(task), client, "policy", {})
        if output.get("error") or errors:
            raise RuntimeError(output.get("error") or f"a reward function failed: {errors[0]!r}")
        return {**output["metrics"], "reward": output["reward"]}


def watch(rubric: Any) -> None:  # a Rubric
    """Remember the exceptions of reward functions with a weight, for which verifiers returns 0."""
    rubric.funcs = [
        remember(function) if weight else function
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]
    environments = getattr(rubric, "env_map", {}).values()  # of EnvGroup
    for part in (*getattr(rubric, "rubrics", ()), *(each.rubric for each in environments)):
        watch(part)


def remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that remembers its exception, also if it returns no number."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            scorer_errors.get().append(error)
            raise

    return call


def write_rows(name: str, path: str, *options: str) -> None:
    """Write a row for each task of an environment."""
    with Path(path).open("w", encoding="utf-8") as file:
        for index, task in enumerate(load(name, *options).tasks):
            data = task if isinstance(task, dict) else task.data.model_dump(mode="json")
            row = {"environment": [name, *options], "index": index}
            row["responses_create_params"] = {"input": data["prompt"] or []}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_rows(*sys.argv[1:])
