"""The session of one episode with a Python verifier: with a function, or with an environment.

Protects: rewards of verl's scorers, which the program that they run could change.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import gym_client
from gym_client import GymError, Json
from kit.chat.parsed_response import ParsedResponse
from kit.data.ground_truths import find_ground_truth
from kit.verify.masks import find_mask
from kit.verify.python_verifiers.settings import VerifierSpec


class CallResult(NamedTuple):
    """The result of one request. seconds: that the driver waited for it."""

    answer: Json
    seconds: float


class EpisodeSession:
    """The part of `gym_client.Session` that inference.py uses."""

    kind: str
    observation: str | None
    executable: frozenset[str]

    async def verify(self, _: Json, response: ParsedResponse) -> gym_client.VerifyResult:
        raise NotImplementedError

    async def step(self, _: Json, response: ParsedResponse) -> gym_client.StepResult:
        raise NotImplementedError

    async def call_tool(self, name: str, arguments: str) -> str:
        raise NotImplementedError


@dataclass
class FunctionSession(EpisodeSession):
    """A session with the interface of `gym_client.Session`, as far as inference.py uses it."""

    spec: VerifierSpec
    row: Json
    call: Callable[..., Awaitable[CallResult]]  # sends a request to a process, as Pool.call
    may_run_code: bool  # whether the recipe allows verl's scorer to run code of the policy
    kind: str = "verify"  # or "step"
    observation: str | None = None  # the first one of an environment
    # The tools of an environment. A call of any other tool is part of the response.
    executable: frozenset[str] = frozenset()
    score_method: ClassVar[str] = "score"

    async def verify(self, _: Json, response: ParsedResponse) -> gym_client.VerifyResult:
        """Return the function's reward of the policy's last turn. Raises GymError."""
        spec = self.spec
        default = spec.name if spec.path else None  # verl's scorer needs that of the row
        arguments = make_arguments(self.row, self.read_text(response), default)
        data_source = arguments["data_source"]
        runs_response = spec.runs_response(data_source)
        # The check of the recipe is not enough: a function that makes rows may make the first
        # program later.
        if runs_response and not self.may_run_code:
            raise GymError(
                "raised",
                f"{spec.reference}: data_source={data_source} runs code of the policy on this "
                "machine, which the recipe does not allow. Set env.verifier_pool.sandbox=bwrap, or "
                "env.allow_unsandboxed_code=true.",
            )
        scored = await self.call(self.score_method, arguments)
        # The user's own function may pay any reward.
        result = gym_client.parse_verify_result(
            scored.answer, scored.seconds, self.row, math.inf, find_mask
        )
        if runs_response and not 0 <= result.reward <= 1:
            raise GymError(
                "bad_answer",
                f"{spec.reference}: a reward of {result.reward:g}, but this scorer of verl "
                "returns 0 to 1. The program may have changed it.",
            )
        return result

    async def step(self, _: Json, response: ParsedResponse) -> gym_client.StepResult:
        """Give the policy's last turn to the environment. Raises GymError."""
        answer = (await self.call("step", self.read_text(response))).answer
        return gym_client.StepResult(
            answer["observation"], answer["reward"], terminated=answer["done"], truncated=False
        )

    async def call_tool(self, name: str, arguments: str) -> str:
        """Return the output of a tool of the environment. arguments: JSON. Raises GymError."""
        output: str = (await self.call("call_tool", name, arguments)).answer["output"]
        return output

    def read_text(self, response: ParsedResponse) -> str:
        """Return the answer, or with `raw_text` all that the policy wrote, as verl decodes it."""
        return response.raw if self.spec.raw_text else response.written


class EnvironmentSession(FunctionSession):
    """A session with an environment, which stays in one process. `call` sends requests to it."""

    score_method = "score_environment"

    async def open(self) -> None:
        """Make and reset the environment. Raises GymError."""
        answer = (await self.call("reset", self.row)).answer
        self.observation = answer["observation"]
        self.executable = frozenset(answer["tools"])


def make_arguments(row: Json, text: str, default_source: str | None) -> Json:
    """Make the keyword arguments of a function from a row and the response.

    They are those of verl 0.9.1 (experimental/reward_loop/reward_manager/naive.py).
    A key of the row's own extra_info wins. default_source: the data source of a row without one.
    """
    extra_info = row.get("extra_info")
    defaults = {"row": row, "num_turns": 2, "rollout_reward_scores": {}}
    return {
        "data_source": row.get("data_source") or default_source,
        "solution_str": text,
        "ground_truth": find_ground_truth(row),
        "extra_info": defaults | (extra_info if isinstance(extra_info, dict) else {}),
    }
