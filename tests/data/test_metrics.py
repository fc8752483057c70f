"""Tests of the metrics of rollouts and evaluations: pass@k, failures and staleness by server."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from kit.data.episode import Branch, Episode, TurnSpan
from kit.data.metrics import (
    HIGH,
    LOW,
    compute_rollout_metrics,
    compute_score_interval,
    compute_scores,
    compute_validation_metrics,
    describe_score,
    name_test_set,
    read_test_set,
    update_pass_rates,
    warn_about_failures,
)
from tests.helpers.recipes import row


def make_verified(rewards):
    """Episodes with {row: their rewards}."""
    episodes = []
    for number, row_rewards in rewards.items():
        for reward in row_rewards:
            episodes.append(Episode(str(number), str(number), "s", [1], reward=reward))
    return episodes


def test_pass_at_k_is_the_chance_that_one_of_k_is_right():
    """By definition, it is the fraction of k-subsets that contain a right episode."""
    rewards = {0: [1.0, 0.0, 0.0, 0.5], 1: [0.0] * 4, 2: [1.0, 1.0, 2.0, 0.0]}
    metrics = compute_scores(make_verified(rewards), 4, "s")
    for k in (1, 2, 4):
        chances = []
        for row_rewards in rewards.values():
            subsets = list(combinations(row_rewards, k))
            chances.append(sum(any(r >= 1.0 for r in subset) for subset in subsets) / len(subsets))
        assert metrics[f"val-core/s/acc/pass@{k}"] == pytest.approx(sum(chances) / 3)
    assert metrics["val-core/s/reward/mean@4"] == pytest.approx(5.5 / 12)
    assert metrics["val-core/s/acc/mean@4"] == pytest.approx(4 / 12)
    # training reports the same values as `evaluate`
    assert compute_validation_metrics(make_verified(rewards), 4).items() > metrics.items()


def test_pass_at_k_is_computed_for_powers_of_two_and_for_n():
    """A row with too few episodes does not count."""
    metrics = compute_scores(make_verified({0: [1.0] * 5, 1: [0.0]}), 5, "s")
    ks = {int(name.rpartition("@")[2]) for name in metrics if "core" in name and "pass@" in name}
    assert ks == {1, 2, 4, 5} and metrics["val-core/s/acc/pass@1"] == 0.5
    assert metrics["val-core/s/acc/pass@5"] == 1.0


def test_copies_of_a_problem_are_one_row_of_an_interval():
    """30 problems, each 8 times in the file, are as 8 responses to each of 30 rows."""
    rewards = np.random.default_rng(0).random((30, 8)).round()
    copies = []
    responses = []
    for (problem, copy), reward in np.ndenumerate(rewards):
        task_row = row(f"question {problem}", extra_info={"index": 8 * problem + copy})
        for episodes, row_id in ((copies, f"r:{problem}.{copy}"), (responses, f"r:{problem}")):
            episodes.append(Episode(row_id, "0/0", "s", [1], row=task_row, reward=float(reward)))
    some = compute_scores(copies, 1, "s")
    others = compute_scores(responses, 8, "s")
    for end in (LOW, HIGH):
        name = "val-aux/s/acc/mean@{}" + end
        assert some[name.format(1)] == others[name.format(8)]
    for one in copies:  # the environment writes the prompts, so they may differ
        one.row = {"responses_create_params": {"input": []}}
    alone = compute_scores([replace(one, row={}) for one in copies], 1, "s")
    assert compute_scores(copies, 1, "s") == alone != some


def episode(server: str, group: str, reward: float | None, **changes) -> Episode:
    status = "ok" if reward is not None else "timeout"
    settings = {
        "response_ids": [1, 2],
        "response_mask": [1, 1],
        "turns": [TurnSpan(0, 2, 1)],
        "ended": "stop",
        **changes,
    }
    return Episode("x:1", group, server, [1], reward=reward, status=status, **settings)


def make_row_episode(row_id, reward, status="ok"):
    return Episode(row_id, "g", "s", [1], reward=reward, status=status)


def test_a_pass_rate_is_the_mean_of_the_old_rate_and_the_new_one():
    episodes = [make_row_episode("a", reward) for reward in (1.0, 0.0, 2.0, 0.999)]
    episodes += [make_row_episode("b", 1.0), make_row_episode("d", 0.0)]
    episodes += [make_row_episode(row_id, None, "timeout") for row_id in ("a", "c")]
    assert update_pass_rates(episodes, {}) == {"a": 0.5, "b": 1.0, "d": 0.0}
    before = {"a": 0.25, "b": 0.5, "d": 0.5, "e": 0.75}
    # the result has no rows without a new response
    assert update_pass_rates(episodes, before) == {"a": 0.375, "b": 0.75, "d": 0.25}


def test_an_evaluation_also_reports_scores_with_failures():
    """Four responses are right, and the verifier fails for four others."""
    from lab.report.metric_docs import find_metric

    episodes = [episode("s", str(i), 1.0) for i in range(4)]
    episodes += [episode("s", str(i), None) for i in range(4, 8)]
    episodes.append(episode("x", "9", 0.25, row={"data_source": "t"}))
    episodes.append(episode("u", "10", None))
    for e in episodes[4:8]:
        e.reward = 7.0  # the reward of a failed episode does not count
    metrics = compute_validation_metrics(episodes, 1)
    assert all(find_metric(name) for name in metrics)
    assert metrics.pop("val-aux/failed_frac") == 0.5
    assert compute_validation_metrics(episodes[:5], 1)["val-aux/failed_frac"] == 0.2
    scores = {name: value for name, value in metrics.items() if not name.endswith((LOW, HIGH))}
    assert scores == {
        "val-core/s/acc/mean@1": 1.0,
        "val-core/s/reward/mean@1": 1.0,
        "val-core/s/acc/pass@1": 1.0,
        "val-aux/s/acc/mean@1_failed_as_0": 0.5,
        "val-aux/s/reward/mean@1_failed_as_0": 0.5,
        "val-aux/s/response_length/mean": 2.0,
        "val-core/t/acc/mean@1": 0.0,
        "val-core/t/reward/mean@1": 0.25,
        "val-core/t/acc/pass@1": 0.0,
        "val-aux/t/acc/mean@1_failed_as_0": 0.0,
        "val-aux/t/reward/mean@1_failed_as_0": 0.25,
        "val-aux/t/response_length/mean": 2.0,
        "val-aux/u/acc/mean@1_failed_as_0": 0.0,
        "val-aux/u/reward/mean@1_failed_as_0": 0.0,
    }
    warnings = []
    warn_about_failures(metrics, warnings.append)
    assert [line[12:].partition(" over")[0].partition(". See")[0] for line in warnings] == [
        "val-core/s/acc/mean@1 is 1.000",
        "val-core/s/reward/mean@1 is 1.000",
        "val-core/u/acc/mean@1: no response was verified",
        "val-core/u/reward/mean@1: no response was verified",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}, "openai/gsm8k"),
        ({"data_source": None}, "score"),
        ({"data_source": "set_a", "agent_ref": {"name": "simple_agent"}}, "score"),
    ],
)
def test_a_row_of_verl_is_scored_under_its_data_source(fields, expected):
    from lab.report.metric_docs import find_metric

    assert name_test_set(fields, "score") == expected
    assert read_test_set(f"val-core/{expected}/reward/mean@4") == expected
    assert find_metric(f"val-core/{expected}/acc/pass@4")


def test_all_metrics_of_a_step():
    late = {"policy_versions": [(1, 4), (3, 2), (9, None)], "ended": "length"}
    turns = [TurnSpan(0, 1, 1), TurnSpan(1, 2, 2)]
    episodes = [
        episode("a", "1", 1.0, policy_versions=[(2, 3)], timings={"verify_call": 1.0}),
        episode("a", "1", 1.0, response_ids=[1, 2, 3, 4], **late),
        episode("a", "2", 0.0, timings={"verify_call": 3.0}, turns=turns),
        episode("a", "2", None, policy_versions=[(9, 0)], timings={"verify_call": 99.0}),
        episode("b", "3", 0.5, reward_components={"format": 0.5}),
    ]
    episodes[3].status = "http_500"
    assert compute_rollout_metrics(episodes, episodes[:2], step=6) == pytest.approx(
        {
            "rollout/episodes": 5.0,
            "rollout/kept": 2.0,
            "rollout/tokens": 17.0,
            "rollout/failed_frac": 0.2,
            "rollout/groups_dropped": 2.0,
            "rollout/zero_variance_groups": 1.0,
            "rollout/failed/http_500": 1.0,
            "rollout/staleness/mean": (2 * 2 + 1 * 1 + 3 * 3) / 6,
            "rollout/staleness/max": 3.0,
            "rollout/ended/stop_frac": 0.75,
            "rollout/ended/length_frac": 0.25,
            "rollout/turns/mean": 1.25,
            "rollout/tool_calls/mean": 0.0,
            "rollout/reward/mean": 0.625,
            "verify/latency_s/p50": 2.0,
            "verify/latency_s/p95": 2.9,
            "rollout/a/failed_frac": 0.25,
            "reward/a/mean": 2 / 3,
            "rollout/a/response_length/mean": 8 / 3,
            "rollout/b/failed_frac": 0.0,
            "reward/b/mean": 0.5,
            "rollout/b/response_length/mean": 2.0,
            "reward/b/format/mean": 0.5,
        }
    )


def test_the_tokens_and_turns_of_a_step_include_branches():
    branch = Branch([1] * 4, [2] * 3, turns=[TurnSpan(0, 3, 1)], policy_versions=[(3, 4)])
    with_branch = episode("a", "1", 1.0, branches=[branch, branch], policy_versions=[(2, 5)])
    episodes = [with_branch, episode("a", "1", 0.0)]
    plain = compute_rollout_metrics([replace(e, branches=[]) for e in episodes], episodes[1:])
    metrics = compute_rollout_metrics(episodes, episodes, step=6)
    assert metrics["agents/rows_per_episode"] == 2.0 and "agents/rows_per_episode" not in plain
    assert metrics["rollout/tokens"] == plain["rollout/tokens"] + 14
    assert metrics["rollout/turns/mean"] == plain["rollout/turns/mean"] + 1
    name = "rollout/a/response_length/mean"
    assert metrics[name] == plain[name] + 3
    assert metrics["rollout/staleness/mean"] == 6 / 8


def test_a_step_with_only_failures_has_no_rewards():
    metrics = compute_rollout_metrics([episode("a", "1", None), episode("a", "2", None)], [])
    assert (metrics["rollout/failed_frac"], metrics["rollout/failed/timeout"]) == (1.0, 2.0)
    assert not any("reward" in name or "turns" in name for name in metrics)


def test_a_score_is_shown_with_its_interval():
    """Of 4 right answers in 8, Wilson's interval is 0.215 to 0.785 (scipy's binomtest)."""
    episodes = make_verified({row: [float(row < 4)] for row in range(8)})
    metrics = compute_validation_metrics(episodes, 1)
    assert describe_score("val-core/s/acc/mean@1", metrics) == "0.500 [0.215, 0.785]"
    assert describe_score("x", {"x": 0.5}) == "0.500"


def test_the_interval_of_rewards_beyond_1_is_symmetric():
    interval = compute_score_interval([[-1.0], [3.0], [1.0]])
    assert interval[LOW] + interval[HIGH] == pytest.approx(2.0)
