"""Call each Python verifier before a run starts: to find mistakes, and the scale of its rewards."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from env import Task
from gym_client import GymError, StepResult, VerifyResult
from kit.config.recipe import Recipe
from kit.data.episode import ParsedResponse
from kit.data.ground_truths import (
    find_ground_truth,
    is_marked,
    is_missing,
    read_expected_answers,
)
from kit.data.reward_scale import UNKNOWN, RewardScale, Scales, are_equal, measure_scale
from kit.errors import UserFunctionError
from kit.gym.python_verifiers.pool import Pool
from kit.gym.python_verifiers.settings import VerifierSpec
from kit.runs.event_loops import make_runner

RESPONSE = "So the answer is 7."
FULL_FORM = "<think>\nI work out the answer.\n</think>\n<answer>{}</answer>"
# Responses with the expected answer. They are tried in this order, until one earns 1.
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", FULL_FORM)
MAX_ANSWER = 60  # characters of an expected answer that is tried as a response
MAX_NAMED_ROWS = 3  # in a message
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
    short expected answer, FORMS with this answer. scales: gets the scales of rewards that this
    shows. A further line counts the rows without a ground truth, if other rows of the function have
    one, and one counts the data sources after the first MAX_SOURCES, which are not tried. Raises
    UserFunctionError.
    """
    lines: list[str] = []
    if not specs:
        return lines
    required = list_required_components(recipe)
    with tempfile.TemporaryDirectory() as logs, make_runner() as runner:
        for name, spec in specs.items():
            own_tasks = [task for task in tasks if task.server == name]
            pool = Pool(spec, recipe, Path(logs))
            lines += runner.run(try_verifier(pool, own_tasks, required, scales, response))
    return lines


def list_required_components(recipe: Recipe) -> list[str]:
    """List the reward components that the verifier must return, since nothing else adds them."""
    estimator = recipe.get("algorithm.adv_estimator")
    if estimator != "gdpo" or recipe.env.reward:
        return []
    return list(recipe.algorithm.gdpo_reward_keys)


def select_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Return the first task of each data_source, if possible one with an answer."""
    selected: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: is_marked(find_ground_truth(task.row))):
        selected.setdefault(str(task.row.get("data_source")), task)
    return list(selected.values())


async def try_verifier(
    pool: Pool,
    tasks: Sequence[Task],
    required: Sequence[str],
    scales: Scales | None = None,
    response: str = RESPONSE,
) -> list[str]:
    """Start a verifier and call it for some of its tasks. Returns lines for the summary.

    required: the reward components that it must return. scales: as of `try_verifiers`. Raises
    UserFunctionError.
    """
    lines: list[str] = []
    missing: list[str] = []  # row ids
    try:
        kind = await pool.kind()
        if kind == "verify":
            missing = [task.row_id for task in tasks if is_missing(task.row)]
        selected = select_tasks(tasks)
        for task in selected[:MAX_SOURCES]:
            trial = RowTrial(pool, task, required, response)
            lines.append(await trial.run(kind))
            if scales is not None:
                scales[task.server, str(task.row.get("data_source"))] = trial.scale
    except GymError as error:
        raise UserFunctionError(f"{pool.spec.key}={error}") from None
    finally:
        await pool.close()
    if len(selected) > MAX_SOURCES:
        lines.append(f"{len(selected) - MAX_SOURCES:,} more data sources are not tried.")
    if 0 < len(missing) < len(tasks):
        lines.append(describe_missing(missing, len(tasks)))
    return lines


@dataclass
class RowTrial:
    """The trial of a verifier on one row.

    required: the reward components that it must return. first: the first response, which is no
    answer unless the user gave it. rewards: by response; None if the verifier marks its reward as
    invalid. scale: what the row shows of the verifier's rewards.
    """

    pool: Pool
    task: Task
    required: Sequence[str]
    first: str = RESPONSE
    rewards: dict[str, float | None] = field(default_factory=dict)
    scale: RewardScale = UNKNOWN

    async def run(self, kind: str) -> str:
        """Try the responses of `list_responses` -> a line with the rewards."""
        await self.call(self.first)
        forms = list_responses(self.task, kind)
        for response in forms:
            if is_usual(await self.call(response)):
                break
        line = f"tried on row {self.task.row_id}: reward {await self.describe(forms)}"
        if kind == "verify" and not forms:
            line += ". The row has no ground truth that can be tried as a response."
        return line

    async def call(self, response: str) -> float | None:
        """Return the reward of a response. Raises UserFunctionError."""
        try:
            result = await call_verifier(self.pool, self.task, response)
        except GymError as error:
            trial = f"(tried on row {self.task.row_id} with the response {response!r})"
            raise UserFunctionError(f"{self.pool.spec.key}={error} {trial}") from None
        if isinstance(result, VerifyResult):
            check_components(self.pool, self.task, result, self.required)
        self.rewards[response] = result.reward if result else None
        return self.rewards[response]

    async def describe(self, forms: Mapping[str, str]) -> str:
        """Measure the scale, and describe the rewards: 0 for 'So...', 1 for the ground truth '5'.

        forms: {response with the ground truth: the same response with a wrong answer}.
        """
        text = f"{show(self.rewards[self.first])} for {self.first!r}"
        tried = [response for response in forms if response in self.rewards]
        if not tried:
            return text
        best = max(tried, key=lambda response: rank(self.rewards[response]))
        right = self.rewards[best]
        text += f", {show(right)} for the ground truth {best!r}"
        if right is None:
            return text
        # the same form, so that a reward for the form alone is not one for the answer
        wrong = self.rewards[self.first] if is_usual(right) else await self.call(forms[best])
        full = UNKNOWN.full if is_usual(right) else right
        self.scale = measure_scale(full, UNKNOWN.nothing if wrong is None else wrong)
        if self.scale == UNKNOWN and not is_usual(right):
            earned = "no more than a wrong answer" if right else "nothing"
            text += f". The ground truth earns {earned}. Does the verifier require another format?"
        elif self.scale.full != UNKNOWN.full:
            text += f". A reward of {self.scale.full:g} counts as right (acc, pass@k)"
        return text


def is_usual(reward: float | None) -> bool:
    """Return whether a reward is 1, the full one of most verifiers. A masked one is not known."""
    return reward is None or are_equal([reward, UNKNOWN.full])


def rank(reward: float | None) -> float:
    """Return the sort key of a reward. A masked one is not known, and comes last."""
    return -math.inf if reward is None else reward


def show(reward: float | None) -> str:
    """Return a reward for the summary."""
    return "none (masked)" if reward is None else f"{reward:g}"


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


def list_responses(task: Task, kind: str) -> dict[str, str]:
    """Return {response with the row's ground truth: the same one with a wrong answer}.

    kind: `verify` for a function, `step` for a class, which gets none.
    """
    if kind != "verify":
        return {}
    try:
        answer = read_expected_answers(find_ground_truth(task.row))[0]
    except ValueError:  # a function may have a ground truth of any other form
        return {}
    if len(answer) > MAX_ANSWER:
        return {}
    wrong = "8" if answer == "7" else "7"
    return {form.format(answer): form.format(wrong) for form in FORMS}


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


async def call_verifier(pool: Pool, task: Task, response: str) -> VerifyResult | StepResult | None:
    """Verify a response to the row of a task. Raises GymError.

    None if the verifier marks its reward as invalid.
    """
    try:
        session = await pool.open_session(task.row)
        verify = session.verify if session.kind == "verify" else session.step
        result = await verify({}, ParsedResponse.of_text(response))
    except GymError as error:
        if error.reason != "masked":
            raise
        return None
    return result
