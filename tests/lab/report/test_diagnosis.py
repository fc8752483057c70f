"""Each rule of the report finds its problem in a run, and no rule finds one in a good run."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from kit.data.episode import Episode
from kit.data.rollout_files import to_record, write_record
from lab.report import diagnosis
from lab.report.run_data import RunData
from tests.helpers.recipes import row

STEPS = 24


def write_run(path, recipe, columns, episodes=()) -> RunData:
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
    return RunData(path)


def make_episodes(ended, rewards, status="ok"):
    return [
        Episode(
            row_id="x:1",
            group_id="1/0",
            server="s",
            prompt_ids=[5],
            row=row(),
            reward=reward,
            ended=ended,
            status=status,
        )
        for reward in rewards
    ]


@pytest.mark.parametrize(
    ("truncated", "complete", "frac", "is_problem"),
    [
        ([0.0, 0.1], [0.9, 1.0], 0.5, True),
        ([0.9, 1.0], [0.0, 0.1], 0.5, False),  # truncated ones earn more
        ([0.4, 0.6], [0.5, 0.5], 0.5, False),  # both earn the same
        ([0.0, 0.1], [0.9, 1.0], 0.25, False),  # few are truncated
        ([0.9, 1.0], [0.0, 0.1], 0.9, True),  # nearly all are: always a problem
    ],
)
def test_truncated_responses_are_a_problem_if_they_earn_less_than_complete_ones(
    tmp_path, truncated, complete, frac, is_problem
):
    episodes = [
        *make_episodes("length", truncated),
        *make_episodes("stop", complete),
        *make_episodes("stop", [None], "timeout"),
    ]
    columns = {"rollout/ended/length_frac": [frac] * 6, "rollout/episodes": [5.0] * 6}
    run = write_run(tmp_path, {"data": {"max_response_length": 100}}, columns, episodes)
    findings = list(diagnosis.find_truncated_responses(run))
    assert len(findings) == is_problem
    if is_problem:
        assert findings[0].problem == (
            f"{frac:.0%} of the responses are truncated at data.max_response_length=100. They earn "
            f"{np.mean(truncated):.3g} on average, complete ones {np.mean(complete):.3g}."
        )


# --- the summary ---------------------------------------------------------------------------------


def test_the_summary_does_not_count_the_pause_before_a_resume(tmp_path):
    """The run has six steps of 60 s, and a pause of two days after the third."""
    columns = {
        "time": [0.0, 60.0, 120.0, 172920.0, 172980.0, 173040.0],
        "rollout/episodes": [8.0] * 6,
        "rollout/reward/mean": [0.5] * 6,
    }
    run = write_run(tmp_path, {"trainer": {"total_training_steps": 20}}, columns)
    expected = "6/20 steps, 4.0 min training; reward 0.5 -> 0.5 (mean of the last 2)"
    assert diagnosis.summarize(run) == expected


def test_the_summary_omits_a_score_that_counts_failures_as_0(tmp_path):
    columns = {
        "time": [0.0, 60.0],
        "rollout/episodes": [8.0] * 2,
        "val-core/s/acc/mean@1": [0.5, 1.0],
        "val-aux/s/acc/mean@1_failed_as_0": [0.25, 0.5],
    }
    run = write_run(tmp_path, {}, columns)
    expected = "2 steps, 1.0 min training; held-out s/acc/mean@1 0.5 -> 1"
    assert diagnosis.summarize(run) == expected


def test_the_summary_has_the_interval_of_the_last_score(tmp_path):
    columns = {
        "time": [0.0, 60.0, 120.0],
        "rollout/episodes": [8.0] * 3,
        "val-core/s/acc/mean@1": [0.25, 0.75, None],
        "val-aux/s/acc/mean@1_low95": [0.1, 0.6, None],
        "val-aux/s/acc/mean@1_high95": [0.4, 0.85, None],
    }
    run = write_run(tmp_path, {}, columns)
    expected = "held-out s/acc/mean@1 0.25 -> 0.75 [0.600, 0.850]"
    assert diagnosis.summarize(run).endswith(expected)


def test_the_summary_counts_the_recorded_steps_if_some_are_missing(tmp_path):
    columns = {"time": [0.0, 60.0, 120.0], "rollout/episodes": [None, 8.0, 8.0]}
    run = write_run(tmp_path, {"trainer": {"total_training_steps": 3}}, columns)
    assert diagnosis.summarize(run).startswith("3/3 steps (2 recorded), ")


# --- the rules on metrics -------------------------------------------------------------------------


def geometric(first: float, last: float) -> list[float]:
    """Values for all steps, from `first` to `last` with a constant ratio."""
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
# Each entry of the next three tables changes some metrics of GOOD_RUN.
NO_PROBLEM = {
    "good": {},
    "solved, and more certain with each step": {
        "rollout/reward/mean": [0.95 + noise for noise in NOISE]
    },
    "metrics without a value": {
        "val/loss": [None] * STEPS,
        "val-core/s/acc/mean@1": [None] * STEPS,
    },
    "small difference of probabilities": {"training/rollout_probs_diff_mean": [0.01] * STEPS},
    "an engine that logs no loss": {"actor/loss": [None] * STEPS},
}
NO_PROBLEM_WITH_RECIPE = {
    "rows that get harder": (FALLING_REWARD, {"env": {"sampler": "x.py:f"}}),
    "an advantage that does not compare a group": (
        {"rollout/zero_variance_groups": [8.0] * STEPS},
        {"algorithm": {"adv_estimator": "gae"}},
    ),
}
PROBLEMS = {
    "falling reward": (
        {**FALLING_REWARD, "actor/entropy": [0.5] * STEPS},
        "The reward falls: 0.69",
    ),
    "sudden collapse, although the reward rises": (
        {"actor/entropy": [3.0, 3.0, 0.5, 0.1] + [0.05] * 20},
        "Policy collapse: entropy 3",
    ),
    "zero variance": (
        {"rollout/zero_variance_groups": [8.0] * STEPS},
        "100% of the groups all responses earn the same reward",
    ),
    "rollout engine": (
        {"training/rollout_probs_diff_mean": [0.2] * STEPS},
        "Rollout engine and trainer disagree by 0.2",
    ),
    "flat reward": (
        {**FLAT_REWARD, "actor/entropy": [1.0] * STEPS},
        "The reward is flat: 0.3 at first",
    ),
    "rising entropy": (
        {**FLAT_REWARD, "actor/entropy": geometric(0.2, 4.0)},
        "Policy collapse: entropy 0.2",
    ),
    "non-finite numbers": (
        {"training/skipped_nonfinite_steps": [0.0] * 23 + [1.0]},
        r"1 steps? had non-finite numbers.*step 24",
    ),
    "skipped steps": (
        {"actor/loss": [0.1] * 20 + [None] * 4},
        "4 of 24 steps were skipped, steps 21 to 24",
    ),
    "groups without variance, which change no weights": (
        {
            "actor/loss": [0.1] * 14 + [None] * 10,
            "critic/advantages/max": [1.0] * 14 + [0.0] * 10,
            "rollout/zero_variance_groups": [0.0] * 14 + [8.0] * 10,
        },
        "of the groups all responses earn the same reward",
    ),
}


def diagnose(path, changes, recipe=None) -> list[diagnosis.Finding]:
    """Return the findings of GOOD_RUN with changed metrics or another recipe."""
    defaults = {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1e-3}}}}
    columns = {"time": list(range(STEPS))} | GOOD_RUN | changes
    episodes = []
    for i in range(64):
        row_id = f"rows.jsonl:{i}"
        episode = Episode(row_id, f"1/{i}", "s", [5], row=row("say 7"), reward=i % 2, ended="stop")
        episodes.append(episode)
    run = write_run(path, defaults | (recipe or {}), columns, episodes)
    return diagnosis.find_problems(run)


def find_problems(path, changes, recipe=None) -> list[str]:
    """Return the problems of GOOD_RUN with changed metrics or another recipe."""
    return [finding.problem for finding in diagnose(path, changes, recipe)]


@pytest.mark.parametrize("changes", NO_PROBLEM.values(), ids=NO_PROBLEM)
def test_a_good_run_has_no_problem(tmp_path, changes):
    """If a rule found problems in good runs, users would ignore it."""
    assert find_problems(tmp_path, changes) == []


@pytest.mark.parametrize(
    ("changes", "recipe"), NO_PROBLEM_WITH_RECIPE.values(), ids=NO_PROBLEM_WITH_RECIPE
)
def test_metrics_that_are_normal_for_the_recipe_are_no_problem(tmp_path, changes, recipe):
    assert find_problems(tmp_path, changes, recipe) == []


def test_a_task_with_unsolved_groups_is_not_reported_as_solved(tmp_path):
    """Of 8 groups without variance, 6 earn 1 and 2 earn 0."""
    recipe = {"actor_rollout_ref": {"rollout": {"n": 2}}}
    columns = {
        "rollout/episodes": [16.0] * 6,
        "rollout/failed_frac": [0.0] * 6,
        "rollout/reward/mean": [0.75] * 6,
        "rollout/zero_variance_groups": [8.0] * 6,
        "actor/entropy": [0.8, 0.8, 0.4, 0.4, 0.2, 0.1],
    }
    episodes = []
    for group, reward in enumerate([1.0] * 6 + [0.0] * 2):
        for episode in make_episodes("stop", [reward] * 2):
            episode.group_id = f"1/{group}"
            episodes.append(episode)
    run = write_run(tmp_path, recipe, columns, episodes)
    [finding] = diagnosis.find_zero_variance_groups(run)
    assert finding.problem == (
        "In 100% of the groups all responses earn the same reward, mostly 1: no advantage, nothing "
        "to learn. But in 25% of these groups all responses earn less: each time, the policy gives "
        "nearly the same response."
    )
    assert "entropy_coeff" in finding.next_step
    for episode in episodes:
        episode.reward = 1.0
    (tmp_path / "solved").mkdir()
    run = write_run(tmp_path / "solved", recipe, columns, episodes)
    [finding] = diagnosis.find_zero_variance_groups(run)
    assert "The task is solved or too easy" in finding.problem


SECTIONS = {  # {case of PROBLEMS: the section of docs/guides/diagnosis.md}
    "falling reward": "3. A flat reward, and zero-variance groups",
    "zero variance": "3. A flat reward, and zero-variance groups",
    "flat reward": "3. A flat reward, and zero-variance groups",
    "rising entropy": "5. Entropy",
    "rollout engine": "7. Rollout engine against trainer",
}


@pytest.mark.parametrize(("case", "section"), SECTIONS.items())
def test_a_next_step_ends_with_the_section_that_explains_it(tmp_path, case, section):
    first = diagnose(tmp_path, PROBLEMS[case][0])[0]
    assert first.next_step.endswith(f' See docs/guides/diagnosis.md, "{section}".')


def shadow(first: float, last: float) -> dict[str, list[float]]:
    """Metrics of a run whose reward rises by 0.46, and the shadow reward from `first` to `last`."""
    reward = np.array(GOOD_RUN["rollout/reward/mean"])
    of_shadow = np.linspace(first, last, STEPS)
    return {
        "rollout/shadow_reward/mean": of_shadow.tolist(),
        "rollout/shadow_gap/mean": (reward - of_shadow).tolist(),
    }


@pytest.mark.parametrize("last", [0.25, 0.3])
def test_a_growing_gap_to_the_shadow_reward_is_reward_hacking(tmp_path, last):
    (finding,) = diagnose(tmp_path, shadow(0.3, last))
    assert finding.problem.startswith("Reward hacking: the reward rose from 0.3")
    assert "rollout/shadow_gap/mean" in finding.evidence and "probe" in finding.next_step


@pytest.mark.parametrize(("first", "last"), [(0.3, 0.76), (0.1, 0.56), (0.3, 0.74)])
def test_a_shadow_reward_that_rises_too_is_no_problem(tmp_path, first, last):
    assert find_problems(tmp_path, shadow(first, last)) == []


def test_a_gap_that_grows_while_the_reward_falls_is_no_hacking(tmp_path):
    changes = FALLING_REWARD | {"rollout/shadow_gap/mean": np.linspace(0, 0.5, STEPS).tolist()}
    changes["rollout/shadow_reward/mean"] = np.linspace(0.8, -0.2, STEPS).tolist()
    assert not any("hacking" in problem for problem in find_problems(tmp_path, changes))


def test_after_a_policy_collapse_the_optimizer_state_is_not_loaded(tmp_path):
    """Another learning rate is refused with that state (tests/runs/test_checkpoints.py)."""
    next_step = diagnose(tmp_path, PROBLEMS["rising entropy"][0])[0].next_step
    assert "divide actor_rollout_ref.actor.optim.lr by 10" in next_step
    assert "actor_rollout_ref.actor.checkpoint.load_contents=[model]" in next_step


@pytest.mark.parametrize(("changes", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_the_first_finding_is_the_problem(tmp_path, changes, expected):
    problems = find_problems(tmp_path, changes)
    assert problems and re.search(expected, problems[0]), problems


def test_the_next_step_names_a_parameter_that_changes_the_engines_probabilities(tmp_path):
    changes = {"training/rollout_probs_diff_mean": [0.2] * STEPS}
    recipe = {"actor_rollout_ref": {"rollout": {"n": 8, "repetition_penalty": 1.2, "top_k": 5}}}
    [finding] = [f for f in diagnose(tmp_path, changes, recipe) if "disagree" in f.problem]
    assert finding.next_step.startswith("the recipe sets rollout.top_k, rollout.repetition_penalty")
    assert "bug" not in finding.next_step
