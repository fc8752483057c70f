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
import contextlib
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kit.errors import ConfigError
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck, RunOutput, RunPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from extras.agents.processes import FunctionAgent
    from extras.agents.runner import AgentRunner
    from kit.data.episode import Episode
    from kit.engine.endpoint.sessions import Sessions
    from kit.engine.inputs import RunInputs
    from kit.engine.sampling import Agent, RolloutContext
    from kit.recipe.recipe import Recipe
    from kit.recipe.schema import AgentSpec, AgentsSection
    from kit.run.launch import Launch

MAX_PROBLEM = 500  # characters


class Agents(RecipeCheck, RunPart, RunOutput):
    """The agent of a recipe."""

    def __init__(self, settings: Settings):
        self.spec = settings.env.agent
        self.settings = settings.agents

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Check the agent's program, and that the driver and a verifier can run its episodes."""
        assert self.spec
        if settings.rollout.agent.num_workers:
            key = "actor_rollout_ref.rollout.agent.num_workers"
            yield f"env.agent runs in the driver only. Set {key}=0."
        for name, server in settings.gym.servers.items():
            if server.kind != "verify":
                yield f"gym.servers.{name} runs the turns, as env.agent does. Remove one of them."
        program = self.spec.python or next(iter(shlex.split(self.spec.command or "")), None)
        if program and not shutil.which(program):
            yield f"env.agent: there is no program {program}. Install it, or correct its path."

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Check that the algorithm can train on several rows of an episode."""
        from kit.data.training_rows import find_reason_against

        reason = find_reason_against(recipe)
        if reason and self.settings.branches == "all":
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

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Call the agent once, and show its first prompt. A server may not run yet."""
        from extras.agents.trial import try_agent

        assert self.spec
        return () if self.spec.url else try_agent(self, recipe, inputs)

    def before_gym(self, launch: Launch) -> None:
        """Have the policy endpoint started."""
        launch.serves_policy = True

    def make_agent(self, launch: Launch, context: RolloutContext) -> Agent:
        """Make the agent, and limit the episodes that run at the same time."""
        from extras.agents import processes
        from kit.run.launch import enter

        loop = launch.run.stages.loop
        assert self.spec and launch.policy and loop
        if self.settings.concurrency:
            context.episode_slots = asyncio.Semaphore(self.settings.concurrency)
        function = processes.FunctionAgent(self.spec, launch.logs / "agent.log")
        enter(contextlib.aclosing(function), loop, launch.stack)
        base_url = launch.policy["base_url"].removesuffix("/v1")
        return make_agent_runner(self.spec, self.settings, function, launch.sessions, base_url)

    def describe_episodes(self, episodes: Sequence[Episode]) -> Iterable[str]:
        """Return the calls and the training rows of the episode with most calls."""
        from extras.agents.tree import describe_longest

        return describe_longest(episodes)


def make_agent_runner(
    spec: AgentSpec,
    settings: AgentsSection,
    function: FunctionAgent,
    sessions: Sessions,
    base_url: str,
) -> AgentRunner:
    """Make the runner of an agent. function: its process, unused by other kinds of agents."""
    from extras.agents import processes, runner

    run = function.run
    if spec.command:
        run = partial(processes.run_command, spec, settings.exit_code == "fail")
    elif spec.url:
        run = partial(runner.call_url, spec.url)
    first_prompts: dict[str, int] | None = {} if spec.function else None
    return runner.AgentRunner(run, sessions, base_url, settings, first_prompts)
