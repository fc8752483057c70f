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
from kit.extras.python_verifiers.verifier_pool import Pool
from kit.extras.python_verifiers.verifier_settings import VerifierSpec

RESPONSE = "So the answer is 7."


def try_verifiers(
    specs: Mapping[str, VerifierSpec], tasks: Sequence[Task], config: DictConfig, tokenizer: Any
) -> None:
    """Give each verifier a synthetic response to its first row of each data_source.

    Raises UserFunctionError.
    """
    with (
        tempfile.TemporaryDirectory() as logs,
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
    ):
        for name, spec in specs.items():
            selected = select_tasks([task for task in tasks if task.server == name])
            pool = Pool(spec, config, Path(logs))
            runner.run(try_verifier(pool, selected, tokenizer))


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source."""
    selected: dict[str, Task] = {}
    for task in tasks:
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


async def try_verifier(pool: Pool, tasks: Sequence[Task], tokenizer: Any) -> None:
    """Start a verifier and call it for each task. Raises UserFunctionError."""
    ids = tokenizer.encode(RESPONSE, add_special_tokens=False)
    trial = ""
    try:
        await pool.kind()
        for task in tasks:
            trial = f" (tried on row {task.row_id} with the response {RESPONSE!r})"
            await call_verifier(pool, task, ids, tokenizer)
    except GymError as error:
        raise UserFunctionError(f"{pool.spec.key}={error}{trial}") from None
    finally:
        await pool.close()


async def call_verifier(pool: Pool, task: Task, ids: list[int], tokenizer: Any) -> None:
    """Verify a response to the row of a task. Raises GymError."""
    try:
        session = await pool.open_session(task.row, tokenizer)
        if session.kind == "verify":
            await session.verify({}, ids)
        else:
            await session.step({}, ids)
    except GymError as error:
        if error.reason != "masked":  # a verifier may mark its reward as invalid
            raise
