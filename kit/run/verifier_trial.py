"""Call each verifier before a run starts: to find mistakes, and the scale of its rewards."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import gym_client
from env import Task
from gym_client import RUNS_EPISODES, GymError
from kit.chat.parsed_response import ParsedResponse
from kit.chat.thoughts import THINK, split_text
from kit.data.ground_truths import (
    find_ground_truth,
    is_marked,
    is_missing,
    read_expected_answers,
)
from kit.data.reward_scale import UNKNOWN, RewardScale, Scales, are_equal
from kit.errors import ConfigError, UserFunctionError
from kit.recipe.recipe import Recipe
from kit.run.event_loops import make_runner
from kit.verify.python_verifiers.pool import Pool
from kit.verify.python_verifiers.settings import VerifierSpec
from kit.verify.verifiers import VerifierRouter, make_verifiers

RESPONSE = "So the answer is 7."
WORK = "I work out the answer."
FULL_FORM = f"<think>\n{WORK}\n</think>\n<answer>{{}}</answer>"
# Responses with the expected answer. They are tried in this order, until only the answer earns 1.
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", FULL_FORM)
MAX_ANSWER = 60  # characters of an expected answer that is tried as a response
MAX_SOURCES = 20  # data sources that are tried


def try_verifiers(
    specs: Mapping[str, VerifierSpec],
    tasks: Sequence[Task],
    recipe: Recipe,
    scales: Scales | None = None,
    response: str = RESPONSE,
) -> list[str]:
    """Call each verifier for its first row of each data_source -> a line with each row's rewards.

    The responses are `response` and, if the verifier is a function and the row's ground truth has a
    short expected answer, forms of this answer. scales: gets the scales that this shows. A further
    line counts the rows without a ground truth, if other rows of the function have one. Raises
    UserFunctionError.
    """
    lines: list[str] = []
    if not specs:
        return lines
    with tempfile.TemporaryDirectory() as logs, make_runner() as runner:
        for name, spec in specs.items():
            own_tasks = [task for task in tasks if task.server == name]
            pool = Pool(spec, recipe, Path(logs))
            lines += runner.run(try_verifier(pool, own_tasks, scales, response))
    return lines


def try_servers(tasks: Sequence[Task], recipe: Recipe, scales: Scales | None = None) -> list[str]:
    """Try each running Gym server with its first row -> a line for each. Raises ConfigError.

    A server to start does not run yet, and an agent needs the policy. scales: as of
    `try_verifiers`.
    """
    first_tasks: dict[str, Task] = {}
    for task in tasks:
        server = recipe.gym.servers.get(task.server)
        if server and server.url and server.kind not in RUNS_EPISODES:
            first_tasks.setdefault(task.server, task)
    if not first_tasks:
        return []
    urls = {name: str(recipe.gym.servers[name].url) for name in first_tasks}
    router, _ = make_verifiers(recipe, urls, {})

    async def run() -> list[str]:
        async with router:
            return [await try_server(router, task, scales) for task in first_tasks.values()]

    with make_runner() as runner:
        return runner.run(run())


async def try_server(router: VerifierRouter, task: Task, scales: Scales | None) -> str:
    """Open sessions for a row, and verify responses. Returns a line. Raises ConfigError."""

    async def verify(response: str) -> float | None:
        async with router.session(task.server, task.row) as session:
            if session.kind == "step":
                return None
            parsed = ParsedResponse.of_text(response)
            return (await session.verify(gym_client.message_response(response), parsed)).reward

    try:
        kind = await router.kind(task.server)
        line = await try_row(task, verify, kind, scales)
    except GymError as error:
        if error.reason == "masked" or error.reason.startswith("http_5"):  # maybe by this text
            return f"tried on row {task.row_id}: {error}"
        raise ConfigError(
            f"gym.servers.{task.server} cannot verify row {task.row_id}: {error}. Correct the "
            "server, the row, or gym.servers."
        ) from None
    return f"tried on row {task.row_id}: a session opens" if kind == "step" else line


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source, if possible one with an answer."""
    selected: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: is_marked(find_ground_truth(task.row))):
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


async def try_verifier(
    pool: Pool,
    tasks: Sequence[Task],
    scales: Scales | None = None,
    response: str = RESPONSE,
) -> list[str]:
    """Start a verifier and call it for some of its tasks. Returns lines for the summary.

    scales: as of `try_verifiers`. Raises UserFunctionError.
    """
    lines: list[str] = []
    missing: list[str] = []  # row ids
    try:
        kind = await pool.kind()
        if kind == "verify":
            missing = [task.row_id for task in tasks if is_missing(task.row)]
        for task in select_tasks(tasks)[:MAX_SOURCES]:
            call = functools.partial(call_function, pool, task)
            lines.append(await try_row(task, call, kind, scales, response))
    except GymError as error:
        raise UserFunctionError(f"{pool.spec.key}={error}") from None
    finally:
        await pool.close()
    if 0 < len(missing) < len(tasks):
        lines.append(
            f"{len(missing):,} of {len(tasks):,} rows have no ground truth ({missing[0]}). If the "
            "verifier needs one, remove these rows."
        )
    return lines


async def try_row(
    task: Task,
    verify: Callable[[str], Awaitable[float | None]],
    kind: str,
    scales: Scales | None = None,
    first: str = RESPONSE,
) -> str:
    """Verify responses to a row -> a line with the rewards of `first` and of the ground truth.

    verify: makes the reward of a response, None if the verifier marks it as invalid. first: no
    answer unless the user gave it. scales: gets what this shows. Raises what `verify` does.
    """
    other = await verify(first)
    line = f"tried on row {task.row_id}: reward {show(other)} for {first!r}"
    if kind != "verify":
        return line
    responses = list_responses(task)
    if not responses:
        return f"{line}. The row has no ground truth that can be tried as a response."
    scale = RewardScale(other or UNKNOWN.nothing, UNKNOWN.full)  # that of most verifiers
    rewards: dict[str, float | None] = {}
    for response in responses:
        rewards[response] = await verify(response)
        reward = rewards[response]
        if reward is None or (scale.tells_apart and are_equal([reward, scale.full])):
            break
    best = max(rewards, key=lambda response: rank(rewards[response]))
    right = rewards[best]
    line += f", {show(right)} for the ground truth {best!r}"
    if right is None:
        return line
    # the same form, so that a reward for the form alone is not one for the answer
    scale = RewardScale(await verify(responses[best]) or UNKNOWN.nothing, right)
    if not scale.tells_apart:
        earned = "no more than a wrong answer" if right else "nothing"
        return f"{line}. The ground truth earns {earned}. Does the verifier require another format?"
    if scales is not None:
        scales[task.server, str(task.row.get("data_source"))] = scale
    if not are_equal([scale.full, UNKNOWN.full]):
        line += f". A reward of {scale.full:g} counts as right (acc, pass@k)"
    return line


def rank(reward: float | None) -> float:
    """Return the sort key of a reward. A masked one is not known, and comes last."""
    return -math.inf if reward is None else reward


def show(reward: float | None) -> str:
    """Return a reward for the summary."""
    return "none (masked)" if reward is None else f"{reward:g}"


def list_responses(task: Task) -> dict[str, str]:
    """Return {response with the row's ground truth: the same one with a wrong answer}."""
    try:
        answer = read_expected_answers(find_ground_truth(task.row))[0]
    except ValueError:  # a function may have a ground truth of any other form
        return {}
    if len(answer) > MAX_ANSWER:
        return {}
    wrong = "8" if "7" in answer else "7"
    return {form.format(answer): form.format(wrong) for form in list_forms(str(task.messages))}


def list_forms(prompt: str) -> list[str]:
    """Return the tags of a prompt with the answer in the last one, if it has tags, then FORMS.

    Rewards for accuracy and for a format are often added, and only the tags earn both.
    """
    tags = list(dict.fromkeys(re.findall(r"</(\w+)>", prompt)))
    if not tags:
        return list(FORMS)
    parts = [f"<{tag}>\n{WORK}\n</{tag}>\n" for tag in tags[:-1]]
    return [f"{''.join(parts)}<{tags[-1]}>\n{{}}\n</{tags[-1]}>", *FORMS]


async def call_function(pool: Pool, task: Task, response: str) -> float | None:
    """Verify a response to the row of a task -> its reward. Raises UserFunctionError."""
    try:
        session = await pool.open_session(task.row)
        verify = session.verify if session.kind == "verify" else session.step
        answer = split_text(response, THINK).answer.strip()
        parsed = ParsedResponse("", answer, [], answer, response)
        result = await verify({}, parsed)
    except GymError as error:
        if error.reason == "masked":
            return None
        trial = f"(tried on row {task.row_id} with the response {response!r})"
        raise UserFunctionError(f"{pool.spec.key}={error} {trial}") from None
    return result.reward
