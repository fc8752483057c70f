"""Call each Python verifier before a run starts, to find mistakes before the workers start."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from env import Task
from gym_client import GymError
from kit.errors import UserFunctionError
from kit.extras.python_verifiers.function_session import make_arguments
from kit.extras.python_verifiers.verifier_pool import Pool
from kit.extras.python_verifiers.verifier_settings import VerifierSpec

RESPONSE = "So the answer is 7."
MAX_GROUND_TRUTH = 60  # characters of a ground truth that is tried as a response


def try_verifiers(
    specs: Mapping[str, VerifierSpec], tasks: Sequence[Task], config: DictConfig, tokenizer: Any
) -> list[str]:
    """Call each verifier for its first row of each data_source -> a line with each row's rewards.

    The responses are RESPONSE and, if the verifier is a function and the row has a short ground
    truth, this ground truth. Raises UserFunctionError.
    """
    lines: list[str] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
    ):
        for name, spec in specs.items():
            selected = select_tasks([task for task in tasks if task.server == name])
            pool = Pool(spec, config, Path(logs))
            lines += runner.run(try_verifier(pool, selected, tokenizer))
    return lines


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source."""
    selected: dict[str, Task] = {}
    for task in tasks:
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


async def try_verifier(pool: Pool, tasks: Sequence[Task], tokenizer: Any) -> list[str]:
    """Start a verifier and call it for each task -> a line for each. Raises UserFunctionError."""
    lines: list[str] = []
    trial = ""
    try:
        kind = await pool.kind()
        for task in tasks:
            rewards: dict[str, float | None] = {}  # by response
            for response in list_responses(task, kind):
                trial = f" (tried on row {task.row_id} with the response {response!r})"
                rewards[response] = await call_verifier(pool, task, response, tokenizer)
            line = f"row {task.row_id}: reward {describe_rewards(rewards)}"
            if kind == "verify" and len(rewards) == 1:
                line += ". The row has no ground truth that can be tried as a response."
            lines.append(line)
    except GymError as error:
        raise UserFunctionError(f"{pool.spec.key}={error}{trial}") from None
    finally:
        await pool.close()
    return lines


def describe_rewards(rewards: Mapping[str, float | None]) -> str:
    """Describe the rewards of RESPONSE and of the ground truth, if it was tried.

    >>> describe_rewards({RESPONSE: 0.0, "42": 1.0})
    "0 for 'So the answer is 7.', 1 for the ground truth '42'"
    """
    parts = []
    for response, reward in rewards.items():
        label = "" if response == RESPONSE else "the ground truth "
        shown = "none (masked)" if reward is None else f"{reward:g}"
        parts.append(f"{shown} for {label}{response!r}")
    text = ", ".join(parts)
    ground_truth_rewards = [rewards[response] for response in rewards if response != RESPONSE]
    if any(reward is not None and reward <= 0 for reward in ground_truth_rewards):
        text += ". The ground truth earns nothing. Does the verifier require another format?"
    return text


def list_responses(task: Task, kind: str) -> list[str]:
    """Return the responses to try on a row. kind: `verify` for a function, `step` for a class."""
    ground_truth = make_arguments(task.row, "", task.server)["ground_truth"]
    is_text = isinstance(ground_truth, (str, int, float))
    if kind != "verify" or not is_text or len(str(ground_truth)) > MAX_GROUND_TRUTH:
        return [RESPONSE]
    return [RESPONSE, str(ground_truth)]


async def call_verifier(pool: Pool, task: Task, response: str, tokenizer: Any) -> float | None:
    """Verify a response to the row of a task -> its reward. Raises GymError.

    None if the verifier marks its reward as invalid.
    """
    ids = tokenizer.encode(response, add_special_tokens=False)
    try:
        session = await pool.open_session(task.row, tokenizer)
        verify = session.verify if session.kind == "verify" else session.step
        result = await verify({}, ids)
    except GymError as error:
        if error.reason != "masked":
            raise
        return None
    return result.reward
