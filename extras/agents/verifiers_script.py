"""An agent that plays environments of Prime's library `verifiers`: v0 (0.3.1) and v1 (0.4.0).

    PYTHON extras/agents/verifiers_script.py ENVIRONMENT ROWS.jsonl ['{"argument": 1}' [eval]]

PYTHON has verifiers and the environment. The command writes a row for each task. In a run, `solve`
plays the task of a row and returns its reward, or raises the environment's error.
"""

from __future__ import annotations

import asyncio
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
    return await environment.play(environment.tasks[row["index"]], f"{base_url}/s/{key}/v1")


@functools.cache
def load(name: str, arguments: str = "{}", split: str = "train") -> V0 | V1:
    """Load an environment once. arguments: JSON. split: of v0, train or eval."""
    os.environ[KEY] = "none"
    module = importlib.import_module(name.rpartition("/")[2].replace("-", "_"))
    kind = V0 if hasattr(module, "load_environment") else V1
    return kind(name, json.loads(arguments), split == "eval")


class V0:
    """An environment with load_environment."""

    def __init__(self, name: str, arguments: dict[str, Any], is_eval: bool):
        self.env = verifiers.load_environment(name, **arguments)
        watch(self.env.rubric)
        self.tasks = self.env.get_eval_dataset() if is_eval else self.env.get_dataset()

    async def play(self, task: dict[str, Any], url: str) -> dict[str, float]:
        """Play a task, and return its metrics and its reward. Raises RuntimeError."""
        errors: list[Exception] = []
        scorer_errors.set(errors)
        client = verifiers.ClientConfig(api_base_url=url, api_key_var=KEY, max_retries=0)
        output = await self.env.run_rollout(dict(task), client, "policy", {})
        if output.get("error") or errors:
            raise RuntimeError(output.get("error") or f"a reward function failed: {errors[0]!r}")
        return {**output["metrics"], "reward": output["reward"]}


def watch(rubric: Any) -> None:  # a Rubric
    """Remember the exceptions of reward functions, for which verifiers returns 0."""
    rubric.funcs = [remember(function) for function in rubric.funcs]
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


class V1:
    """A Taskset, whose agent is that of its package, or the one of verifiers_harness.py."""

    def __init__(self, name: str, arguments: dict[str, Any], _: bool):
        from verifiers.v1.utils import loaders

        sys.path.append(str(Path(__file__).parent))
        own = loaders.default_harness_id(name)
        harness = {"id": "verifiers_harness" if own == "bash" else own}
        agent = {"harness": harness, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": name, **arguments}, "agent": agent}
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.tasks = list(self.env.taskset)
        self.serving: asyncio.Future[None] | None = None  # tools of all tasks

    async def play(self, task: Any, url: str) -> dict[str, float]:
        """Play a task, and return its metrics and its reward. Raises RuntimeError."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        self.serving = self.serving or asyncio.ensure_future(self.env.serving().__aenter__())
        await asyncio.shield(self.serving)
        client = EvalClientConfig(base_url=url, api_key_var=KEY)
        episode = await self.env.run_episode(task, ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
            raise RuntimeError([f"{error.type}: {error.message}" for error in errors])
        (trace,) = episode.traces
        return {**trace.metrics, "reward": trace.reward if trace.rewards else None}


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
