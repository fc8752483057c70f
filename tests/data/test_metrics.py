"""Which episodes are trained on, and what they are worth: selection, pass@k, and metrics by server."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

import pytest
from omegaconf import OmegaConf

import algorithm
from kit.data.episodes import (
    Episode,
    check_failures,
    component_means,
    first_groups,
    groups,
    keep,
    pass_rates,
    rollout_metrics,
    scores,
    scores_with_failures,
    validation_metrics,
    warn_of_failures,
)
from kit.errors import RunError
from kit.extras.report.metric_docs import describe
from kit.runs.collect import scores_of


def verified(rewards):
    return [
        Episode(str(row), str(row), "s", [1], reward=r)
        for row, some in rewards.items()
        for r in some
    ]


def test_pass_at_k_is_the_chance_that_some_of_k_are_right():
    """Against its definition: the fraction of all k-subsets of a row's episodes that hold a right one."""
    rewards = {0: [1.0, 0.0, 0.0, 0.5], 1: [0.0] * 4, 2: [1.0, 1.0, 2.0, 0.0]}
    metrics = scores(verified(rewards), 4, "s")
    for k in (1, 2, 4):
        chances = []
        for row in rewards.values():
            subsets = list(combinations(row, k))
            chances.append(sum(any(r >= 1.0 for r in subset) for subset in subsets) / len(subsets))
        assert metrics[f"val-core/s/acc/pass@{k}"] == pytest.approx(sum(chances) / 3)
    assert metrics["val-core/s/reward/mean@4"] == pytest.approx(5.5 / 12)
    assert metrics["val-core/s/acc/mean@4"] == pytest.approx(4 / 12)
    assert (
        validation_metrics(verified(rewards), 4).items() > metrics.items()
    )  # training and `evaluate` say the same


@pytest.mark.parametrize(
    ("n", "of"), [(1, {1}), (3, {1, 2, 3}), (5, {1, 2, 4, 5}), (8, {1, 2, 4, 8})]
)
def test_pass_at_k_is_of_powers_of_two_and_of_all(n, of):
    found = {
        int(name.rpartition("@")[2])
        for name in scores(verified({0: [1.0] * n}), n, "s")
        if "pass@" in name
    }
    assert found == of


def test_rows_with_too_few_episodes_do_not_count_for_pass_at_k():
    metrics = scores(verified({0: [1.0], 1: [0.0, 0.0]}), 2, "s")
    assert metrics["val-core/s/acc/pass@1"] == 0.5 and metrics["val-core/s/acc/pass@2"] == 0.0


def episode(server: str, group: str, reward: float | None, **changes) -> Episode:
    status = "ok" if reward is not None else "timeout"
    settings = {
        "response_ids": [1, 2],
        "response_mask": [1, 1],
        "turns": [(0, 2, 1)],
        "ended": "stop",
        **changes,
    }
    return Episode("x:1", group, server, [1], reward=reward, status=status, **settings)


def test_metrics_are_by_server():
    episodes = [
        episode("a", "1", 1.0, reward_components={"format": 1.0}),
        episode("a", "1", 0.0, reward_components={"format": 0.5}, ended="length"),
        episode("b", "2", 0.5, turns=[(0, 1, 1), (1, 2, 3)]),
        episode("b", "2", None),
        episode("c", "3", None),
        episode("c", "3", None),
    ]
    metrics = rollout_metrics(episodes, keep(episodes)[0])
    assert metrics["rollout/failed_frac"] == 0.5 and metrics["rollout/failed/timeout"] == 3
    assert metrics["rollout/groups_dropped"] == 2  # b's has one member left, c's none
    assert metrics["rollout/episodes"] == 6 and metrics["rollout/kept"] == 2
    assert metrics["rollout/zero_variance_groups"] == 0 and metrics["rollout/reward/mean"] == 0.5
    assert metrics["reward/a/mean"] == 0.5 and metrics["reward/a/format/mean"] == 0.75
    assert metrics["reward/b/mean"] == 0.5 and "reward/c/mean" not in metrics
    assert [metrics[f"rollout/{s}/failed_frac"] for s in "abc"] == [0.0, 0.5, 1.0]
    assert metrics["rollout/ended/length_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/turns/mean"] == pytest.approx(4 / 3)


def test_groups_that_teach_nothing_and_what_filters_drop_are_counted():
    episodes = [
        episode("a", "1", 1.0),
        episode("a", "1", 1.0),
        episode("a", "2", 0.0),
        episode("a", "2", 1.0),
    ]
    assert rollout_metrics(episodes, episodes)["rollout/zero_variance_groups"] == 1

    def right(some):
        return [e for e in some if e.reward]

    def masked(some):
        return [replace(e, response_mask=[0, 0]) if e.group_id == "1" else e for e in some]

    kept, dropped = keep(episodes, 1, [right, masked])
    assert dropped == {"right": 1, "masked": 2} and len(kept) == 3
    assert keep(episodes, 2, [masked])[1] == {"masked": 2}


# --- selection -----------------------------------------------------------------------------------


def test_groups_are_in_order_of_appearance():
    a, b, c = episode("t", "2", 1.0), episode("s", "1", 1.0), episode("s", "2", 0.0)
    assert list(groups([a, b, c]).items()) == [("2", [a, c]), ("1", [b])]
    assert list(groups([a, b, c], "server").items()) == [("t", [a]), ("s", [b, c])]
    assert groups([]) == {}


def test_failed_episodes_and_groups_that_they_leave_too_small_are_not_kept():
    made = [
        episode("s", "1", 1.0),
        episode("s", "1", None),
        episode("s", "2", 0.0),
        episode("s", "2", 1.0),
    ]
    made += [episode("s", "3", 1.0), episode("s", "3", 0.0), episode("s", "3", 0.5)]
    assert keep(made) == (made[2:], {})
    assert keep(made, 1) == ([made[0], *made[2:]], {})
    assert keep(made, 3) == (made[4:], {})
    assert (
        keep([], 2) == ([], {}) and keep(made[:2], 2) == ([], {}) and keep(made[1:2], 1) == ([], {})
    )


def test_the_groups_that_are_kept_are_in_order_and_whole():
    made = [
        episode("s", name, reward)
        for name, reward in (("2", 1.0), ("1", 0.0), ("2", 0.0), ("1", 1.0))
    ]
    assert keep(made)[0] == [made[0], made[2], made[1], made[3]]


def right_alone(some):
    return [e for e in some if e.reward]


def masking_cut_ones(some):
    return [replace(e, response_mask=[0, 0]) if e.ended == "length" else e for e in some]


def doubling(some):
    return [*some, *some]


def test_filters_see_what_the_one_before_left_and_only_whole_groups():
    seen = []

    def watch(some):
        seen.append([e.group_id for e in some])
        return some

    made = [
        episode("s", "1", 1.0),
        episode("s", "1", None),
        episode("s", "2", 0.0),
        episode("s", "2", 1.0),
    ]
    made += [episode("s", "3", 1.0), episode("s", "3", 1.0)]
    kept, dropped = keep(made, 2, [watch, right_alone, watch])
    assert seen == [
        ["2", "2", "3", "3"],
        ["3", "3"],
    ]  # group 2 was left with one, and went before the next filter
    assert kept == made[4:] and dropped == {"watch": 0, "right_alone": 1}


def test_each_filter_says_how_many_episodes_with_something_to_learn_it_took_away():
    made = [episode("s", "1", 1.0, ended="length"), episode("s", "1", 0.0), episode("s", "1", 1.0)]
    made += [episode("s", "2", 1.0, response_mask=[0, 0]), episode("s", "2", 0.0)]
    kept, dropped = keep(made, 2, [masking_cut_ones, right_alone])
    # the masked one stays in its group; of group 2 the wrong one goes, and the one that is left was masked already
    assert dropped == {"masking_cut_ones": 1, "right_alone": 2}
    assert [(e.group_id, e.response_mask) for e in kept] == [("1", [0, 0]), ("1", [1, 1])]
    assert keep(made, 1, [doubling, right_alone, right_alone])[1] == {
        "doubling": -4,
        "right_alone": 4,
    }
    assert keep(made, 1, [lambda some: some[1:]])[1] == {"<lambda>": 1}
    assert keep(made, 1, [functools.partial(right_alone)])[1] == {"filter": 2}  # has no name


def test_where_every_token_is_masked_nothing_is_kept():
    made = [episode("s", "1", reward, ended="length") for reward in (1.0, 0.0)]
    assert keep(made, 2, [masking_cut_ones]) == ([], {"masking_cut_ones": 2})
    made[0].ended = "stop"
    kept, dropped = keep(made, 2, [masking_cut_ones])
    assert [e.response_mask for e in kept] == [[1, 1], [0, 0]] and dropped == {
        "masking_cut_ones": 1
    }


def test_the_first_groups_are_taken_whole():
    made = [episode("s", name, 1.0) for name in ("2", "1", "2", "3", "1")]
    assert first_groups(made, 0) == [] == first_groups([], 3)
    assert first_groups(made, 1) == [made[0], made[2]]
    assert first_groups(made, 2) == [made[0], made[2], made[1], made[4]]
    assert (
        first_groups(made, 3)
        == first_groups(made, 9)
        == [made[0], made[2], made[1], made[4], made[3]]
    )


# --- pass rates ----------------------------------------------------------------------------------


def of_row(row_id, reward, status="ok"):
    return Episode(row_id, "g", "s", [1], reward=reward, status=status)


def test_a_pass_rate_is_halfway_between_the_one_before_and_that_of_the_new_answers():
    made = [
        of_row("a", 1.0),
        of_row("a", 0.0),
        of_row("a", 2.0),
        of_row("a", 0.999),
        of_row("b", 1.0),
    ]
    made += [of_row("a", None, "timeout"), of_row("c", None, "timeout"), of_row("d", 0.0)]
    assert pass_rates(made, {}) == {
        "a": 0.5,
        "b": 1.0,
        "d": 0.0,
    }  # the first ones are what they are
    before = {"a": 0.25, "b": 0.5, "d": 0.5, "e": 0.75}
    assert pass_rates(made, before) == {
        "a": 0.375,
        "b": 0.75,
        "d": 0.25,
    }  # of rows without a new answer: nothing
    assert before == {"a": 0.25, "b": 0.5, "d": 0.5, "e": 0.75}
    assert pass_rates([of_row("a", None)], {"a": 0.5}) == {"a": 0.25}  # no reward, no pass
    assert pass_rates([], before) == {}


# --- failures ------------------------------------------------------------------------------------


def failing(*statuses):
    made = [Episode(f"x:{i}", "g", "s", [1], status=status) for i, status in enumerate(statuses, 1)]
    for e in made:
        e.error = f"error of {e.row_id}" if e.status != "ok" else ""
    return made


def test_as_many_failures_as_the_recipe_allows_pass_and_one_more_ends_the_run():
    check_failures([], 0.0)
    check_failures(failing("ok", "ok"), 0.0)
    check_failures(failing("ok", "timeout", "http_500", "ok"), 0.5)
    check_failures(failing("timeout"), 1.0)
    made = failing("ok", "http_500", "timeout", "timeout")
    with pytest.raises(RunError) as told:
        check_failures(made, 0.5)
    assert str(told.value) == (
        "3 of 4 episodes failed (2 timeout, 1 http_500), over gym.max_failed_frac=0.5; see failures.jsonl of the run; "
        "the first: x:2: error of x:2"
    )
    with pytest.raises(
        RunError, match=r"^1 of 2 episodes failed \(1 timeout\), over gym\.max_failed_frac=0;"
    ):
        check_failures(failing("ok", "timeout"), 0.0)


def test_an_evaluation_also_says_what_failures_hide():
    """Four right answers, and four that stall the verifier."""
    made = [episode("s", str(i), 1.0) for i in range(4)] + [
        episode("s", str(i), None) for i in range(4, 8)
    ]
    made += [episode("t", "9", 0.25), episode("u", "10", None)]
    for e in made[4:8]:
        e.reward = 7.0  # of a failed episode nothing counts
    metrics = validation_metrics(made, 1)
    assert metrics.pop("val-aux/failed_frac") == 0.5
    assert metrics == {
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
    assert all(describe(name) for name in metrics)
    told = []
    warn_of_failures(metrics, told.append)
    over = "is 1.000 over verified answers, 0.500 if a failed one counts as 0; see failures.jsonl of the run"
    assert told == [
        f"WARNING     val-core/s/acc/mean@1 {over}",
        f"WARNING     val-core/s/reward/mean@1 {over}",
        "WARNING     val-core/u/acc/mean@1: no answer was verified; see failures.jsonl of the run",
        "WARNING     val-core/u/reward/mean@1: no answer was verified; see failures.jsonl of the run",
    ]
    told.clear()
    warn_of_failures(validation_metrics(made[:4], 4), told.append)
    assert told == []


def test_an_evaluation_in_a_run_warns_on_the_console():
    run = mock.MagicMock(timing={"testing": 1.0})
    trainer = algorithm.Trainer.__new__(algorithm.Trainer)
    trainer.run, trainer.state, trainer.data = (
        run,
        {"step": 3},
        SimpleNamespace(validation=["a row"]),
    )
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"val_kwargs": {"n": 1}}}})
    made = [episode("s", "1", 1.0), episode("s", "2", None)]
    trainer.rollout = lambda *_, **__: made
    trainer.evaluate()
    told = [call.args[0] for call in run.say.call_args_list]
    assert [line.partition(" is ")[0] for line in told] == [
        "WARNING     val-core/s/acc/mean@1",
        "WARNING     val-core/s/reward/mean@1",
    ]
    assert run.log.call_args.args[1]["val-aux/s/acc/mean@1_failed_as_0"] == 0.5
    run.say.reset_mock()
    made.pop()
    trainer.evaluate()
    run.say.assert_not_called()


def test_failed_frac_of_an_evaluation_is_that_of_failures():
    made = [episode("s", "1", 1.0)] * 3 + [episode("s", "1", None)]
    assert validation_metrics(made, 4)["val-aux/failed_frac"] == 0.25
    assert validation_metrics(made[:3], 3)["val-aux/failed_frac"] == 0.0


def test_failures_count_as_zero_of_as_many_answers_as_were_asked_for():
    made = [episode("s", "1", r) for r in (2.0, 1.0, 0.5, None)]
    assert scores_with_failures(made, 4, "s") == {
        "val-aux/s/acc/mean@4_failed_as_0": 0.5,
        "val-aux/s/reward/mean@4_failed_as_0": 0.875,
    }


def test_the_command_evaluate_says_it_too_and_rollout_does_not():
    right, failed = [episode("s", "1", 1.0)], [episode("s", "1", None)]
    found = scores_of(right, failed, 2, validate=True)
    assert (
        found["val-core/s/acc/mean@2"] == 1.0 and found["val-aux/s/acc/mean@2_failed_as_0"] == 0.5
    )
    assert scores_of([], failed, 2, validate=True) == scores_with_failures(failed, 2, "s")
    found = scores_of(right, failed, 2, validate=False)
    assert found == scores(right, 2, "s", "rollout")
    assert scores_of([], failed, 2, validate=False) == {}


# --- metrics of a step ---------------------------------------------------------------------------


def test_all_metrics_of_a_step():
    """Exactly: what is there, and nothing else."""
    made = [
        episode("a", "1", 1.0, versions=[(2, 3)], timings={"verify_call": 1.0, "generate": 9.0}),
        episode(
            "a", "1", 1.0, versions=[(1, 4), (3, 2)], ended="length", response_ids=[1, 2, 3, 4]
        ),
        episode("a", "2", 0.0, timings={"verify_call": 3.0}, turns=[(0, 1, 1), (1, 2, 2)]),
        episode("a", "2", None, versions=[(9, 0)], timings={"verify_call": 99.0}),
        episode("b", "3", 0.5, reward_components={"format": 0.5}),
    ]
    made[3].status = "http_500"
    assert rollout_metrics(made, made[:2], step=6) == pytest.approx(
        {
            "rollout/episodes": 5.0,
            "rollout/kept": 2.0,
            "rollout/failed_frac": 0.2,
            "rollout/groups_dropped": 2.0,
            "rollout/zero_variance_groups": 1.0,
            "rollout/failed/http_500": 1.0,
            "rollout/staleness/mean": (2 * 2 + 1 * 1 + 3 * 3) / 6,
            "rollout/staleness/max": 3.0,
            "rollout/ended/stop_frac": 0.75,
            "rollout/ended/length_frac": 0.25,
            "rollout/turns/mean": 1.25,
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


def test_metrics_of_a_step_in_which_all_failed():
    made = [episode("a", "1", None), episode("a", "2", None)]
    made[1].status = "connect"
    assert rollout_metrics(made, []) == {
        "rollout/episodes": 2.0,
        "rollout/kept": 0.0,
        "rollout/failed_frac": 1.0,
        "rollout/groups_dropped": 2.0,
        "rollout/zero_variance_groups": 0.0,
        "rollout/failed/timeout": 1.0,
        "rollout/failed/connect": 1.0,
        "rollout/a/failed_frac": 1.0,
    }


def test_staleness_is_the_steps_between_the_weights_that_sampled_and_those_that_are_trained():
    """Step 5 trains the weights of step 4: what these sampled is 0 steps old."""
    fresh, old = (
        episode("a", "1", 1.0, versions=[(2, 4)]),
        episode("a", "1", 0.0, versions=[(6, 1), (9, None)]),
    )
    metrics = rollout_metrics([fresh], [fresh], step=5)
    assert metrics["rollout/staleness/mean"] == metrics["rollout/staleness/max"] == 0.0
    metrics = rollout_metrics([fresh, old], [fresh, old], step=5)
    assert metrics["rollout/staleness/mean"] == 18 / 8 and metrics["rollout/staleness/max"] == 3.0
    unknown = episode("a", "1", 0.0, versions=[(9, None)])
    assert not any(
        "staleness" in name for name in rollout_metrics([fresh, unknown], [unknown], step=5)
    )


def test_a_group_is_uniform_if_two_or_more_of_its_verified_answers_earn_the_same():
    def uniform(*rewards):
        return rollout_metrics([episode("a", "1", r) for r in rewards], [])[
            "rollout/zero_variance_groups"
        ]

    assert uniform(1.0, 1.0) == uniform(0.5, 0.5, None) == 1.0
    assert uniform(1.0) == uniform(1.0, None) == uniform(1.0, 0.0) == uniform(1.0, 1.0, 0.0) == 0.0


def test_components_are_means_by_server_and_name():
    made = [
        episode("b", "1", 1.0, reward_components={"x": 1.0}),
        episode("b", "1", 1.0, reward_components={"x": 0.0}),
    ]
    made += [
        episode("a", "1", 1.0, reward_components={"x": 3.0, "y": 0.25}),
        episode("a", "1", 1.0),
    ]
    found = component_means(made)
    assert list(found.items()) == [
        ("reward/a/x/mean", 3.0),
        ("reward/a/y/mean", 0.25),
        ("reward/b/x/mean", 0.5),
    ]
