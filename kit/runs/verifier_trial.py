"""Call each verifier before a run starts, to find mistakes before the workers start."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gym_client
from env import Task
from gym_client import RUNS_EPISODES, GymError, StepResult, VerifyResult
from kit.config.recipe import Recipe
from kit.data.ground_truths import find_ground_truth, is_empty, read_expected_answers
from kit.errors import ConfigError, UserFunctionError
from kit.gym.python_verifiers.pool import Pool
from kit.gym.python_verifiers.settings import VerifierSpec
from kit.gym.verifiers import VerifierRouter, make_verifiers
from kit.runs.event_loops import make_runner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSE = "So the answer is 7."
# Responses with the expected answer. They are tried in this order, until one earns a reward.
FORMS = ("{}", "\\boxed{{{}}}", "#### {}")
MAX_ANSWER = 60  # characters of an expected answer that is tried as a response
MAX_NAMED_ROWS = 3  # in a message
MAX_SOURCES = 20  # data sources that are tried


def try_verifiers(
    specs: Mapping[str, VerifierSpec],
    tasks: Sequence[Task],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Call each verifier for its first row of each data_source -> a line with each row's rewards.

    The responses are RESPONSE and, if the verifier is a function and the row's ground truth has a
    short expected answer, FORMS with this answer. A further line counts the rows without a ground
    truth, if other rows of the function have one, and one counts the data sources after the first
    MAX_SOURCES, which are not tried. Raises UserFunctionError.
    """
    lines: list[str] = []
    if not specs:
        return lines
    required = list_required_components(recipe)
    with tempfile.TemporaryDirectory() as logs, make_runner() as runner:
        for name, spec in specs.items():
            own_tasks = [task for task in tasks if task.server == name]
            pool = Pool(spec, recipe, Path(logs))
            lines += runner.run(try_verifier(pool, own_tasks, tokenizer, required))
    return lines


def try_servers(
    tasks: Sequence[Task], recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Try each running Gym server with its first row -> a line for each. Raises ConfigError.

    A server to start does not run yet, and an agent needs the policy.
    """
    first_tasks: dict[str, Task] = {}
    for task in tasks:
        server = recipe.gym.servers.get(task.server)
        if server and server.url and server.kind not in RUNS_EPISODES:
            first_tasks.setdefault(task.server, task)
    if not first_tasks:
        return []
    urls = {name: str(recipe.gym.servers[name].url) for name in first_tasks}
    router, _ = make_verifiers(recipe, urls, tokenizer, {})

    async def run() -> list[str]:
        async with router:
            return [await try_server(router, task) for task in first_tasks.values()]

    with make_runner() as runner:
        return runner.run(run())


async def try_server(router: VerifierRouter, task: Task) -> str:
    """Open sessions for a row, and verify responses. Returns a line. Raises ConfigError."""
    kind = await router.kind(task.server)
    rewards: dict[str, float | None] = {}  # by response
    try:
        for response in list_responses(task, kind):
            rewards[response] = await call_server(router, task, response)
            if response != RESPONSE and is_positive(rewards[response]):
                break
    except GymError as error:
        if error.reason == "masked" or error.reason.startswith("http_5"):  # maybe by this text
            return f"tried on row {task.row_id}: {error}"
        raise ConfigError(
            f"gym.servers.{task.server} cannot verify row {task.row_id}: {error}. Correct the "
            "server, the row, or gym.servers."
        ) from None
    result = "a session opens" if kind == "step" else f"reward {describe_rewards(rewards)}"
    return f"tried on row {task.row_id}: {result}"


async def call_server(router: VerifierRouter, task: Task, response: str) -> float | None:
    """Open a session and verify a response -> the reward, if it has one. Raises GymError."""
    async with router.session(task.server, task.row) as session:
        if session.kind == "step":
            return None
        return (await session.verify(gym_client.message_response(response), ())).reward


def list_required_components(recipe: Recipe) -> list[str]:
    """List the reward components that the verifier must return, since nothing else adds them."""
    estimator = recipe.get("algorithm.adv_estimator")
    if estimator != "gdpo" or recipe.env.reward:
        return []
    return list(recipe.algorithm.gdpo_reward_keys)


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source."""
    selected: dict[str, Task] = {}
    for task in tasks:
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


async def try_verifier(
    pool: Pool, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, required: Sequence[str]
) -> list[str]:
    """Start a verifier and call it for some of its tasks. Returns lines for the summary.

    required: the reward components that it must return. Raises UserFunctionError.
    """
    lines: list[str] = []
    missing: list[str] = []  # row ids
    try:
        kind = await pool.kind()
        if kind == "verify":
            missing = [task.row_id for task in tasks if is_empty(find_ground_truth(task.row))]
        selected = select_tasks(tasks)
        for task in selected[:MAX_SOURCES]:
            hint = describe_missing(missing, len(tasks)) if task.row_id in missing else ""
            lines.append(await try_row(pool, task, kind, tokenizer, hint, required))
    except GymError as error:
        raise UserFunctionError(f"{pool.spec.key}={error}") from None
    finally:
        await pool.close()
    if len(selected) > MAX_SOURCES:
        lines.append(f"{len(selected) - MAX_SOURCES:,} more data sources are not tried.")
    if 0 < len(missing) < len(tasks):
        lines.append(describe_missing(missing, len(tasks)))
    return lines


async def try_row(
    pool: Pool,
    task: Task,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    hint: str,
    required: Sequence[str],
) -> str:
    """Call a verifier for one row. Returns a line with the rewards. Raises UserFunctionError.

    hint: the end of the error's message. required: the reward components that it must return.
    """
    rewards: dict[str, float | None] = {}  # by response
    for response in list_responses(task, kind):
        try:
            result = await call_verifier(pool, task, response, tokenizer)
        except GymError as error:
            trial = f"(tried on row {task.row_id} with the response {response!r})"
            message = f"{pool.spec.key}={error} {trial} {hint}".rstrip()
            raise UserFunctionError(message) from None
        if isinstance(result, VerifyResult):
            check_components(pool, task, result, required)
        reward = result.reward if result else None
        rewards[response] = reward
        if response != RESPONSE and is_positive(reward):
            break
    line = f"tried on row {task.row_id}: reward {describe_rewards(rewards)}"
    if kind == "verify" and len(rewards) == 1:
        line += ". The row has no ground truth that can be tried as a response."
    return line


def describe_missing(ids: Sequence[str], count: int) -> str:
    """Describe the rows without a ground truth. ids: of these rows. count: of all rows.

    >>> describe_missing(["a:2", "a:3"], 4)
    '2 of 4 rows have no ground truth (a:2, a:3). If the verifier needs one, remove these rows.'
    """
    names = ", ".join(ids[:MAX_NAMED_ROWS]) + (", ..." if len(ids) > MAX_NAMED_ROWS else "")
    return (
        f"{len(ids):,} of {count:,} rows have no ground truth ({names}). If the verifier needs "
        "one, remove these rows."
    )


def describe_rewards(rewards: Mapping[str, float | None]) -> str:
    """Describe the rewards of RESPONSE and of the ground truth, if it was tried.

    >>> describe_rewards({RESPONSE: 0.0, "42": 0.0, "#### 42": 1.0})
    "0 for 'So the answer is 7.', 1 for the ground truth '#### 42'"
    """
    tried = [response for response in rewards if response != RESPONSE]
    earning = [response for response in tried if is_positive(rewards[response])]
    parts = []
    for response in [RESPONSE, *(earning or tried)[:1]]:
        reward = rewards[response]
        label = "" if response == RESPONSE else "the ground truth "
        shown = "none (masked)" if reward is None else f"{reward:g}"
        parts.append(f"{shown} for {label}{response!r}")
    text = ", ".join(parts)
    if tried and not earning:
        text += ". The ground truth earns nothing. Does the verifier require another format?"
    return text


def is_positive(reward: float | None) -> bool:
    """Return whether a response earned something. A masked reward is not known."""
    return reward is None or reward > 0


def list_responses(task: Task, kind: str) -> list[str]:
    """Return the responses to try on a row. kind: `verify` for a function, `step` for a class."""
    responses = [RESPONSE]
    if kind == "verify":
        try:
            answer = read_expected_answers(find_ground_truth(task.row))[0]
        except ValueError:  # a function may have a ground truth of any other form
            return responses
        if len(answer) <= MAX_ANSWER:
            responses += [form.format(answer) for form in FORMS]
    return responses


def check_components(pool: Pool, task: Task, result: VerifyResult, required: Sequence[str]) -> None:
    """Raise UserFunctionError if a result lacks one of the required reward components."""
    for name in required:
        if name not in result.components:
            names = ", ".join(sorted(result.components)) or "none"
            raise UserFunctionError(
                f"algorithm.gdpo_reward_keys has {name}, but {pool.spec.key} returned the reward "
                f"components {names} (tried on row {task.row_id}). Let it return {name} each time, "
                "or change the key."
            )


async def call_verifier(
    pool: Pool, task: Task, response: str, tokenizer: PreTrainedTokenizerBase
) -> VerifyResult | StepResult | None:
    """Verify a response to the row of a task. Raises GymError.

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
    return result
