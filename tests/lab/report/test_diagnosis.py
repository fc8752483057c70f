"""Each rule of the report finds its problem in a run, and no rule finds one in a good run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kit.data.episode import Episode
from kit.data.rollout_files import to_record, write_record
from lab.report import diagnosis
from lab.run_folder import RunFolder
from tests.helpers.recipes import row

STEPS = 24


def write_run(path, recipe, columns, episodes=()) -> RunFolder:
    """Write a run directory with metrics: columns is {name: values from step 1 on}.

    The last step and the evaluation after it have the same `episodes`.
    """
    count = len(next(iter(columns.values())))
    lines = []
    for i in range(count):
        metrics = {name: values[i] for name, values in columns.items()}
        lines.append(json.dumps({"step": i + 1} | metrics))
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "config.yaml").write_text(json.dumps(recipe))
    (path / "rollouts").mkdir()
    for name in (f"step_{count}", f"val_{count}"):
        with (path / "rollouts" / f"{name}.jsonl").open("wb") as out:
            for i, episode in enumerate(episodes):
                write_record(out, to_record(episode, 0, i))
    return RunFolder(path)


def make_episodes(ended, rewards, group="1/0"):
    return [
        Episode("x:1", group, "s", [5], row=row(), reward=reward, ended=ended) for reward in rewards
    ]


@pytest.mark.parametrize(
    ("truncated", "complete", "frac", "is_problem"),
    [
        ([0.0, 0.1], [0.9, 1.0], 0.5, True),
        ([0.9, 1.0], [0.0, 0.1], 0.5, False),  # truncated ones earn more
        ([0.9, 1.0], [0.0, 0.1], 0.9, True),  # nearly all are: always a problem
    ],
)
def test_truncated_responses_are_a_problem_if_they_earn_less_than_complete_ones(
    tmp_path, truncated, complete, frac, is_problem
):
    episodes = [*make_episodes("length", truncated), *make_episodes("stop", complete)]
    columns = {"rollout/ended/length_frac": [frac] * 6, "rollout/episodes": [5.0] * 6}
    run = write_run(tmp_path, {"data": {"max_response_length": 100}}, columns, episodes)
    findings = list(diagnosis.find_truncated_responses(run))
    assert len(findings) == is_problem
    if is_problem:
        assert findings[0].problem.startswith(f"{frac:.0%} of the responses are truncated at")


# --- the summary ---------------------------------------------------------------------------------


def test_the_summary_has_no_pause_and_the_interval_of_the_last_score(tmp_path):
    """The run has six steps of 60 s, and a pause of two days after the third."""
    columns = {
        "time": [0.0, 60.0, 120.0, 172920.0, 172980.0, 173040.0],
        "rollout/episodes": [8.0] * 6,
        "rollout/reward/mean": [0.5] * 6,
        "val-core/s/acc/mean@1": [0.25, None, None, None, 0.75, None],
        "val-aux/s/acc/mean@1_low95": [0.1, None, None, None, 0.6, None],
        "val-aux/s/acc/mean@1_high95": [0.4, None, None, None, 0.85, None],
        "val-aux/s/acc/mean@1_failed_as_0": [0.2, None, None, None, 0.5, None],
    }
    run = write_run(tmp_path, {"trainer": {"total_training_steps": 20}}, columns)
    assert diagnosis.summarize(run) == (
        "6/20 steps, 4.0 min training; reward 0.5 -> 0.5 (mean of the last 2); "
        "held-out s/acc/mean@1 0.25 -> 0.75 [0.600, 0.850]"
    )


# --- the rules on metrics -------------------------------------------------------------------------


def geometric(first: float, last: float) -> list[float]:
    """Return values for all steps, from `first` to `last` with a constant ratio."""
    return np.geomspace(first, last, STEPS).tolist()


NOISE = [0.02 * (-1) ** i for i in range(STEPS)]
FLAT_REWARD = {"rollout/reward/mean": [0.3 + noise for noise in NOISE]}
FALLING_REWARD = {"rollout/reward/mean": geometric(0.8, 0.3)}
GOOD_RUN = {
    "rollout/reward/mean": [0.3 + 0.02 * i + NOISE[i] for i in range(STEPS)],
    "actor/entropy": geometric(1.0, 0.1),
    "rollout/zero_variance_groups": [1.0] * STEPS,
    "actor/loss": [0.1] * STEPS,
    "rollout/failed_frac": [0.0] * STEPS,
    "rollout/episodes": [64.0] * STEPS,
}


def make_shadow(first: float, last: float) -> dict[str, list[float]]:
    """Make metrics of a reward that rises by 0.46, and a shadow reward to `last`."""
    reward = np.array(GOOD_RUN["rollout/reward/mean"])
    of_shadow = np.linspace(first, last, STEPS)
    return {
        "rollout/shadow_reward/mean": of_shadow.tolist(),
        "rollout/shadow_gap/mean": (reward - of_shadow).tolist(),
    }


# Each entry of the next two tables changes some metrics of GOOD_RUN.
NO_PROBLEM = {
    "good": ({}, {}),
    "solved, and more certain with each step": (
        {"rollout/reward/mean": [0.95 + noise for noise in NOISE]},
        {},
    ),
    "a noisy reward that rises, while the entropy falls": (
        {
            "rollout/reward/mean": [0.1 + 0.025 * i + 20 * NOISE[i] for i in range(STEPS)],
            "actor/entropy": geometric(1.0, 0.01),
        },
        {},
    ),
    "rows that get harder": (FALLING_REWARD, {"env": {"sampler": "x.py:f"}}),
    "an advantage that does not compare a group": (
        {"rollout/zero_variance_groups": [8.0] * STEPS},
        {"algorithm": {"adv_estimator": "gae"}},
    ),
    "a shadow reward that rises, too": (make_shadow(0.3, 0.74), {}),
}
PROBLEMS = {
    "falling reward": (
        {**FALLING_REWARD, "actor/entropy": [0.5] * STEPS},
        "The reward is flat or falls: 0.69",
    ),
    "zero variance": (
        {"rollout/zero_variance_groups": [8.0] * STEPS},
        "In 100% of the groups all responses earn the same reward",
    ),
    "rollout engine": (
        {"training/rollout_probs_diff_mean": [0.2] * STEPS},
        "Rollout engine and trainer disagree by 0.2",
    ),
    "flat reward": (
        {**FLAT_REWARD, "actor/entropy": [1.0] * STEPS},
        "The reward is flat or falls: 0.3 at first",
    ),
    "rising entropy": (
        {**FLAT_REWARD, "actor/entropy": geometric(0.2, 4.0)},
        "Policy collapse: it writes nearly random text, and its reward does not rise: entropy 0.2",
    ),
    "entropy near 0": (
        {**FLAT_REWARD, "actor/entropy": geometric(1.0, 0.01)},
        "Policy collapse: it repeats the same response",
    ),
    "a growing gap to the shadow reward": (
        make_shadow(0.3, 0.25),
        "Reward hacking: the reward rose from 0.3",
    ),
    "failures": (
        {
            "rollout/failed_frac": [0.5] * 3 + [0.0] * 21,
            "rollout/failed/http_500": [32.0] * 3 + [0.0] * 21,
        },
        "6% of the episodes failed (96 http_500), in 3 steps from 1 to 3",
    ),
}


def find_problems(path, changes, recipe=None) -> list[str]:
    """Return the problems of GOOD_RUN with changed metrics or another recipe."""
    defaults = {"actor_rollout_ref": {"rollout": {"n": 8}}}
    columns = {"time": list(range(STEPS))} | GOOD_RUN | changes
    episodes = make_episodes("stop", [0, 1] * 32)
    run = write_run(path, defaults | (recipe or {}), columns, episodes)
    return [finding.problem for finding in diagnosis.find_problems(run)]


@pytest.mark.parametrize(("changes", "recipe"), NO_PROBLEM.values(), ids=NO_PROBLEM)
def test_a_good_run_has_no_problem(tmp_path, changes, recipe):
    """If a rule found problems in good runs, users would ignore it."""
    assert find_problems(tmp_path, changes, recipe) == []


@pytest.mark.parametrize(("changes", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_the_first_finding_is_the_problem(tmp_path, changes, expected):
    problems = find_problems(tmp_path, changes)
    assert problems and problems[0].startswith(expected), problems


@pytest.mark.parametrize(
    ("solved", "cause"),
    [
        (8, "The task is solved or too easy"),
        (0, "The task is too hard for this policy"),
    ],
)
def test_groups_without_variance_are_solved_or_not(tmp_path, solved, cause):
    """8 groups without variance, of which some earn the full reward."""
    columns = {
        "rollout/episodes": [16.0] * 6,
        "rollout/failed_frac": [0.0] * 6,
        "rollout/zero_variance_groups": [8.0] * 6,
    }
    episodes = []
    for group in range(8):
        episodes += make_episodes("stop", [float(group < solved)] * 2, f"1/{group}")
    run = write_run(tmp_path, {"actor_rollout_ref": {"rollout": {"n": 2}}}, columns, episodes)
    [finding] = diagnosis.find_zero_variance_groups(run)
    assert cause in finding.problem
    (tmp_path / "rollouts/step_6.jsonl").rename(tmp_path / "rollouts.jsonl")  # as `rollout` does
    step = {"step": 0, **dict.fromkeys(columns, 8.0), "rollout/failed_frac": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    [finding] = diagnosis.find_zero_variance_groups(RunFolder(tmp_path))
    assert cause in finding.problem and f"mostly {solved / 8:g}" in finding.problem
