"""What episodes are worth: pass@k, and metrics by server."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from kit.episodes import Episode, keep, rollout_metrics, scores, validation_metrics


def verified(rewards):
    return [Episode(str(row), str(row), "s", [1], reward=r) for row, some in rewards.items() for r in some]


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
    assert validation_metrics(verified(rewards), 4).items() > metrics.items()  # training and `evaluate` say the same


def test_rows_with_too_few_episodes_do_not_count_for_pass_at_k():
    metrics = scores(verified({0: [1.0], 1: [0.0, 0.0]}), 2, "s")
    assert metrics["val-core/s/acc/pass@1"] == 0.5 and metrics["val-core/s/acc/pass@2"] == 0.0


def episode(server: str, group: str, reward: float | None, **changes) -> Episode:
    status = "ok" if reward is not None else "timeout"
    settings = {"response_ids": [1, 2], "response_mask": [1, 1], "turns": [(0, 2, 1)], "ended": "stop", **changes}
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
    assert metrics["rollout/groups_uniform"] == 0 and metrics["rollout/reward/mean"] == 0.5
    assert metrics["reward/a/mean"] == 0.5 and metrics["reward/a/format/mean"] == 0.75
    assert metrics["reward/b/mean"] == 0.5 and "reward/c/mean" not in metrics
    assert [metrics[f"rollout/{s}/failed_frac"] for s in "abc"] == [0.0, 0.5, 1.0]
    assert metrics["rollout/ended/length_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/turns/mean"] == pytest.approx(4 / 3)


def test_groups_that_teach_nothing_and_what_filters_drop_are_counted():
    episodes = [episode("a", "1", 1.0), episode("a", "1", 1.0), episode("a", "2", 0.0), episode("a", "2", 1.0)]
    assert rollout_metrics(episodes, episodes)["rollout/groups_uniform"] == 1

    def right(some):
        return [e for e in some if e.reward]

    def masked(some):
        return [replace(e, response_mask=[0, 0]) if e.group_id == "1" else e for e in some]

    kept, dropped = keep(episodes, 1, [right, masked])
    assert dropped == {"right": 1, "masked": 2} and len(kept) == 3
    assert keep(episodes, 2, [masked])[1] == {"masked": 2}
