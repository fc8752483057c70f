"""The session of one episode with a Python verifier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import gym_client
from gym_client import GymError, Json
from kit.data.ground_truths import find_ground_truth
from kit.extras.python_verifiers.verifier_calls import CallResult
from kit.extras.python_verifiers.verifier_settings import VerifierSpec, runs_policy_code


class FunctionSession:
    """A session with the interface of `gym_client.Session`, as far as inference.py uses it.

    call: sends a request to a process, such as Pool.call.
    may_run_policy_code: whether the recipe allows verl's scorer to run code of the policy.
    """

    executable: frozenset[str] = frozenset()  # no tools: a tool call is part of the response

    def __init__(
        self,
        spec: VerifierSpec,
        kind: str,
        row: Json,
        tokenizer: Any,
        call: Callable[..., Awaitable[CallResult]],
        may_run_policy_code: bool,
    ):
        self.spec = spec
        self.kind = kind  # "verify" or "step"
        self.row = row
        self.tokenizer = tokenizer
        self.call = call
        self.may_run_policy_code = may_run_policy_code
        self.observation: str | None = None  # the first one of an environment
        self.env_state = b""  # the pickled environment

    async def open(self) -> None:
        """Make and reset an environment. For a function there is nothing to do. Raises GymError."""
        if self.kind == "step":
            reset = await self.call("reset", self.row)
            self.env_state = reset.env_state
            self.observation = reset.answer["observation"]

    async def verify(self, _: Json, token_ids: Sequence[int]) -> gym_client.VerifyResult:
        """Return the function's reward of the policy's last turn. Raises GymError.

        token_ids: of that turn. A function does not get the Response object.
        """
        arguments = make_arguments(self.row, self.decode(token_ids), self.spec.name)
        data_source = arguments["data_source"]
        if not self.spec.path:
            self.check_data_source()
        is_code = runs_policy_code(self.spec, [data_source])
        # The check of the recipe is not enough: a function that makes rows may make the first
        # program later.
        if is_code and not self.may_run_policy_code:
            raise GymError(
                "raised",
                f"{self.spec.reference}: data_source={data_source} runs code of the policy on this "
                "machine, which the recipe does not allow. Set env.verifier_pool.sandbox=bwrap, or "
                "env.allow_unsandboxed_code=true.",
            )
        answer = (await self.call("score", arguments)).answer
        result = gym_client.parse_verify_result(answer, answer["_seconds"], self.row)
        if is_code and not 0 <= result.reward <= 1:
            raise GymError(
                "bad_answer",
                f"{self.spec.reference}: a reward of {result.reward:g}, but this scorer of verl "
                "returns 0 to 1. The program may have changed it.",
            )
        return result

    def check_data_source(self) -> None:
        """Check that the row has a data source, by which verl chooses a scorer. Raises GymError."""
        data_source = self.row.get("data_source")
        if not isinstance(data_source, str) or not data_source.strip():
            raise GymError(
                "raised",
                f"{self.spec.reference}: the row has data_source={data_source!r:.80}, by which "
                "verl chooses the scorer. Set it in the row, such as openai/gsm8k, or name another "
                "verifier, such as templates/reward.py:compute_score.",
            )

    async def step(self, _: Json, token_ids: Sequence[int]) -> gym_client.StepResult:
        """Give the policy's last turn to the environment. Raises GymError.

        token_ids: of that turn. An environment does not get the Response object.
        """
        result = await self.call("step", self.env_state, self.decode(token_ids))
        self.env_state = result.env_state
        answer = result.answer
        return gym_client.StepResult(
            answer["observation"], answer["reward"], terminated=answer["done"], truncated=False
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn without special tokens, as verl decodes it."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def make_arguments(row: Json, text: str, name: str) -> Json:
    """Make the keyword arguments of a function from a row and the response.

    They are those of verl 0.9.1 (experimental/reward_loop/reward_manager/naive.py).
    name: of the verifier, used as the data source of a row without one.
    """
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict):
        extra_info = {}
    return {
        "data_source": row.get("data_source") or name,
        "solution_str": text,
        "ground_truth": find_ground_truth(row),
        "extra_info": {"row": row, **extra_info, "num_turns": 2, "rollout_reward_scores": {}},
    }
