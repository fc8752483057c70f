"""Agents of a recipe that run the turns of each episode (env.agent), through the policy endpoint.

    {function: my_agent.py:solve}    an async function: processes.py
    {command: "program {prompt}"}    a process per episode: processes.py
    {url: http://host:port}          a server that runs elsewhere: runner.py

An agent gets the row, the address of the endpoint and a key of its episode. The endpoint keeps what
the policy samples for this key, and makes the training rows of it. The row's verifier reads the
answer that the agent returns. docs/guides/agents.md has examples.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from kit.errors import ConfigError
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck, RunOutput, RunPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kit.data.episode import Episode
    from kit.engine.inputs import RunInputs
    from kit.engine.interfaces import Agent
    from kit.engine.sampling import RolloutContext
    from kit.recipe.recipe import Recipe
    from kit.run.launch import Launch

MAX_PROBLEM = 500  # characters


class Agents(RecipeCheck, RunPart, RunOutput):
    """The agent of a recipe."""

    def __init__(self, settings: Settings):
        self.spec = settings.env.agent
        self.settings = settings.agents

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Check the files and programs of the agent, and what it cannot be used with."""
        assert self.spec
        if settings.rollout.agent.num_workers:
            yield (
                "env.agent runs in the driver only. Set actor_rollout_ref.rollout.agent."
                "num_workers=0."
            )
        for name, server in settings.gym.servers.items():
            if server.kind != "verify":
                yield f"gym.servers.{name} runs the turns, as env.agent does. Remove one of them."
        programs = {"python": self.spec.python, "command": None}
        if self.spec.command:
            programs["command"] = shlex.split(self.spec.command)[0]
        for key, program in programs.items():
            if program and not shutil.which(program):
                yield f"env.agent.{key}: there is no program {program}. Install it, or correct it."
        for path in map(PurePath, self.spec.files):
            if path.is_absolute() or ".." in path.parts:
                yield f"env.agent.files: {path} is not in the episode's folder. Make it relative."

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Check that the algorithm can train on several rows of an episode."""
        from kit.data.training_rows import find_reason_against

        if reason := find_reason_against(recipe):
            yield f"env.agent: {reason}"

    def check_inputs(self, recipe: Recipe, inputs: RunInputs) -> None:
        """Load the function in its interpreter. Raises ConfigError."""
        from extras.agents import processes

        assert self.spec
        if not self.spec.function:
            return
        command = processes.list_command(self.spec)
        variables = processes.list_variables(self.spec)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            problem = done.stderr[-MAX_PROBLEM:].strip()
            raise ConfigError(f"env.agent.function={self.spec.function}: {problem}")

    def summary_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
        """Describe the agent and its limits."""
        assert self.spec
        what = self.spec.function or self.spec.command or self.spec.url
        limits = f"{self.settings.max_calls} calls and {self.settings.timeout_s:g} s"
        yield f"agent       {what}: at most {limits} an episode"

    def before_gym(self, launch: Launch) -> None:
        """Have the policy endpoint started."""
        launch.serves_policy = True

    def make_agent(self, launch: Launch, context: RolloutContext) -> Agent:
        """Make the agent, and limit the episodes that run at the same time."""
        from extras.agents.processes import CommandAgent, FunctionAgent
        from extras.agents.runner import AgentRunner, UrlAgent
        from kit.engine.endpoint.sessions import Limits

        assert self.spec and launch.policy
        settings = self.settings
        if settings.concurrency:
            context.episode_slots = asyncio.Semaphore(settings.concurrency)
        kind: FunctionAgent | CommandAgent | UrlAgent = UrlAgent(str(self.spec.url))
        if self.spec.function:
            kind = FunctionAgent(self.spec, launch.logs / "agent.log")
        elif self.spec.command:
            kind = CommandAgent(self.spec, settings.exit_code == "fail")
        launch.stack.callback(kind.close)
        limits = settings.model_dump(exclude={"exit_code", "concurrency"})
        if not settings.max_tokens:
            limits["max_tokens"] = settings.max_rows * context.max_response_length
        limits["timeout_s"] = math.inf  # a late agent is a failure, not a limit: AgentRunner
        base_url = launch.policy["base_url"].removesuffix("/v1")
        return AgentRunner(kind, launch.sessions, base_url, Limits(**limits), settings.timeout_s)

    def describe_episodes(self, episodes: Sequence[Episode]) -> Iterable[str]:
        """Return the calls and the training rows of the episode that has most of them."""
        from extras.agents.tree import describe_rows

        if not episodes:
            return ()
        return describe_rows(max(episodes, key=lambda episode: len(episode.branches)))
