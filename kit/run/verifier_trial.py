"""Call each verifier before a run starts: to find mistakes, and the scale of its rewards.

Protects: acc and pass@k, which count rewards on this scale, and runs whose verifier pays nothing.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
from kit.engine.inputs import Trial
from kit.errors import ConfigError, UserFunctionError
from kit.recipe.recipe import Recipe
from kit.run.event_loops import make_runner
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.python_verifiers.settings import VerifierSpec
from kit.verify.verifiers import VerifierRouter, make_verifiers

RESPONSE = "So the answer is 7."
WORK = "I work out the answer."
FULL_FORM = f"<think>\n{WORK}\n</think>\n<answer>{{}}</answer>"
# Responses with the expected answer. They are tried in this order, until only the answer earns 1.
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", FULL_FORM)
MAX_ANSWER = 60  # characters of an expected answer that is tried as a response
SHOWN_FORMS = 3  # in a warning
MAX_SOURCES = 20  # data sources that are tried


def check_verifiers(
    specs: Mapping[str, VerifierSpec],
    tasks: Sequence[Task],
    recipe: Recipe,
    scales: Scales | None = None,
    response: str = RESPONSE,
) -> list[Trial]:
    """Call each verifier for some of its rows. Return a trial with the rewards of each row.

    Python verifiers are called for a row of each data_source, Gym servers that run already for one
    row: a server to start does not run yet, and an agent needs the policy. The responses are
    `response` and, if the row's ground truth has a short expected answer, forms of this answer.
    scales: gets the scales that this shows. Raises UserFunctionError, ConfigError.
    """
    rows: dict[str, list[Task]] = {}
    for task in tasks:
        server = recipe.gym.servers.get(task.server)
        is_running = server and server.url and server.kind not in RUNS_EPISODES
        if task.server in specs or is_running:
            rows.setdefault(task.server, []).append(task)
    if not rows:
        return []
    urls = {name: str(recipe.gym.servers[name].url) for name in rows if name not in specs}
    with tempfile.TemporaryDirectory() as logs, make_runner() as runner:
        used = {name: specs[name] for name in rows if name in specs}
        pools = make_pools(recipe, used, Path(logs))
        router, _ = make_verifiers(recipe, urls, pools)

        async def check_all() -> list[Trial]:
            trials: list[Trial] = []
            async with router:
                for some in rows.values():
                    trials += await check_verifier(router, some, scales, response)
            return trials

        return runner.run(check_all())


async def check_verifier(
    router: VerifierRouter, tasks: Sequence[Task], scales: Scales | None, first: str
) -> list[Trial]:
    """Call one verifier for some of its tasks, as `check_verifiers` does."""
    trials: list[Trial] = []
    is_python = tasks[0].server in router.pools
    for task in select_tasks(tasks)[: MAX_SOURCES if is_python else 1]:
        try:
            trials.append(await check_row(router, task, scales, first))
        except GymError as error:
            trials.append(Trial(f"on row {task.row_id}: {error}"))
    if not is_python or await router.kind(tasks[0].server) != "verify":
        return trials
    missing = [task.row_id for task in tasks if is_missing(task.row)]
    if 0 < len(missing) < len(tasks):
        count = f"{len(missing):,} of {len(tasks):,} rows have no ground truth ({missing[0]})"
        warning = f"{count}. If the verifier needs one, remove these rows."
        trials.append(Trial("", warning))
    return trials


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source, if possible one with an answer."""
    selected: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: is_marked(find_ground_truth(task.row))):
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


class Attempt(NamedTuple):
    """A verified response. reward: None if it is masked or unknown."""

    reward: float | None
    observation: str | None = None  # the first one of an environment


async def call_once(router: VerifierRouter, task: Task, response: str) -> float | None:
    """Return the reward of a response, as `try_once` does."""
    return (await try_once(router, task, response)).reward


async def try_once(router: VerifierRouter, task: Task, response: str) -> Attempt:
    """Verify a response to the row of a task.

    A Gym server that plays turns only opens a session. Raises UserFunctionError for a Python
    verifier. For a Gym server, raises ConfigError, or GymError if the response may be the reason.
    """
    pool = router.pools.get(task.server)
    answer = split_text(response, THINK).answer.strip()
    parsed = ParsedResponse("", answer, [], answer, response)
    try:
        async with router.session(task.server, task.row) as session:
            reward = None
            if session.kind == "verify":
                body = gym_client.message_response(response)
                reward = (await session.verify(body, parsed)).reward
            elif pool:
                reward = (await session.step({}, parsed)).reward
            observation = session.observation
        return Attempt(reward, observation)
    except GymError as error:
        if error.reason in ("masked", "no_reward"):
            return Attempt(None)
        if pool:
            trial = ""
            if error.reason != "connect":
                trial = f" (tried on row {task.row_id} with the response {response!r})"
            raise UserFunctionError(f"{pool.spec.key}={error}{trial}") from None
        if error.reason.startswith("http_5"):
            raise
        raise ConfigError(
            f"gym.servers.{task.server} cannot verify row {task.row_id}: {error}. Correct the "
            "server, the row, or gym.servers."
        ) from None


async def check_row(
    router: VerifierRouter, task: Task, scales: Scales | None, first: str = RESPONSE
) -> Trial:
    """Verify responses to a row. Return the rewards of `first` and of the ground truth.

    first: no answer unless the user gave it. Raises what `call_once` does.
    """
    other, observation = await try_once(router, task, first)
    line = f"on row {task.row_id}: reward {show(other)} for {first!r}"
    if observation:
        line += f", after the first observation {observation!r:.200}"
    if await router.kind(task.server) != "verify":
        is_python = task.server in router.pools
        return Trial(line if is_python else f"on row {task.row_id}: a session opens")
    responses = list_responses(task)
    if not responses:
        return Trial(f"{line}. The row has no ground truth that can be tried as a response.")
    scale = RewardScale(other or UNKNOWN.nothing, UNKNOWN.full)  # that of most verifiers
    rewards: dict[str, float | None] = {}
    for response in responses:
        reward = await call_once(router, task, response)
        rewards[response] = reward
        if reward is None or (scale.tells_apart and are_equal([reward, scale.full])):
            break
    best = max(rewards, key=lambda response: rank(rewards[response]))
    right = rewards[best]
    line += f", {show(right)} for the ground truth {best!r}"
    if right is None:
        return Trial(line)
    # the same form, so that a reward for the form alone is not one for the answer
    wrong = await call_once(router, task, responses[best])
    scale = RewardScale(wrong or UNKNOWN.nothing, right)
    if not scale.tells_apart:
        forms = ", ".join(map(repr, list(responses)[:SHOWN_FORMS]))
        return Trial(
            line,
            f"Row {task.row_id}: the right answer earns at most {show(right)}, no more than a "
            "wrong one in the same form, so the reward would stay flat. Tried: "
            f"{forms}, ... Let the verifier accept one of these forms.",
        )
    if scales is not None:
        scales[task.server, str(task.row.get("data_source"))] = scale
    if not are_equal([scale.full, UNKNOWN.full]):
        line += f". A reward of {scale.full:g} counts as right (acc, pass@k)"
    return Trial(line)


def rank(reward: float | None) -> float:
    """Return the sort key of a reward. A masked one is not known, and comes last."""
    return -math.inf if reward is None else reward


def show(reward: float | None) -> str:
    """Return a reward for the summary."""
    return "none (masked, or null)" if reward is None else f"{reward:g}"


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
