"""Environments of verifiers v1 (0.4.0), with a harness that needs no network.

The harness `null` of verifiers installs packages with uv in each episode.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import verifiers.v1 as v1
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.utils import loaders


class V1:
    """A taskset, with the harness of its package or the one below."""

    def __init__(self, name: str, arguments: dict[str, Any]):
        own = loaders.default_harness_id(name)
        harness = {"id": __name__ if own == "bash" else own}
        agent = {"harness": harness, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": name, **arguments}, "agent": agent}
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.tasks = list(self.env.taskset)
        self.shared_tools = self.env.serving()  # without a reference, Python would close them
        self.serving: asyncio.Future[None] | None = None

    async def play(self, task: Any, url: str, key_variable: str) -> dict[str, float]:
        """Play a task, and return its metrics and its reward. Raises RuntimeError."""
        self.serving = self.serving or asyncio.ensure_future(self.shared_tools.__aenter__())
        await asyncio.shield(self.serving)
        client = v1.EvalClientConfig(base_url=url, api_key_var=key_variable)
        episode = await self.env.run_episode(task, v1.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = list(episode.errors)
            for trace in episode.traces:
                errors += trace.errors
            raise RuntimeError([f"{error.type}: {error.message}" for error in errors])
        (trace,) = episode.traces
        return {**trace.metrics, "reward": trace.reward if trace.rewards else None}


class OfflineHarness(NullHarness):
    """The harness `null`: a chat with tools, in this interpreter."""

    async def setup(self, runtime: Any) -> None:  # a Runtime
        """Have the program of the chat run without an installation."""
        runtime.prepare_uv_script = run_here


async def run_here(program: str, *_: object, **__: object) -> list[str]:
    """Return the command of a program."""
    return [sys.executable, "-c", program]


__all__ = ["OfflineHarness"]
