"""Rewards are compared by their scale: full, equal, and what a wrong answer earns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.metrics import (
    compute_scores,
    compute_scores_with_failures,
    count_zero_variance_groups,
)
from kit.data.reward_scale import UNKNOWN, RewardScale, are_equal, find_scale
from kit.data.rollout_files import from_record, to_record
from templates.filters import drop_uniform
from tests.helpers.cases import make_case

PARTS = st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=6)


@given(parts=PARTS, size=st.sampled_from([1e-9, 1e-3, 1.0, 100.0]), offset=st.sampled_from([0, -1]))
def test_sums_of_the_same_parts_are_equal_and_full(parts, size, offset):
    one, other = offset * size + sum(p * size for p in parts), offset * size
    for part in sorted(parts):
        other += part * size
    scale = RewardScale(offset * size, one)
    assert are_equal([one, other], scale.spread) and scale.is_full(other)
    assert not are_equal([one, one - size / 1000], scale.spread)
    assert not scale.is_full(one - size / 1000)


def test_rewards_with_a_large_common_part_differ():
    assert not are_equal([123456.0, 123456.01]) and not are_equal([1e9, 1e9 + 0.5])
    assert are_equal([0.1 + 0.2 - 0.3, 0.0])
    assert are_equal(np.float32([0.3, np.float32(0.1) + np.float32(0.2)]))


@pytest.mark.parametrize("scale", [(-1, 0), (0, 0.1), (0, 100), (0, 0.7 + 0.2 + 0.1), (-1, 1)])
def test_scores_count_full_rewards_of_any_scale(scale):
    nothing, full = scale
    rewards = [full, nothing, (nothing + full) / 2, full]
    episodes = [make_case("a", reward, [1]) for reward in rewards]
    for episode in episodes:
        episode.scale = RewardScale(nothing, full)
    assert compute_scores(episodes, 4, "s")["val-core/s/acc/mean@4"] == 0.5
    assert compute_scores(episodes, 4, "s")["val-core/s/acc/pass@2"] == 1 - 1 / 6
    saved = from_record(to_record(episodes[0], 0, 0), {})
    assert saved.scale == episodes[0].scale and saved.is_right
    episodes[3].status, episodes[3].reward = "http_500", None
    scores = compute_scores_with_failures(episodes, 4, "s")
    assert scores["val-aux/s/acc/mean@4_failed_as_0"] == 0.25
    assert scores["val-aux/s/reward/mean@4_failed_as_0"] == pytest.approx(
        (full + 2 * nothing + (nothing + full) / 2) / 4
    )


def test_a_group_is_uniform_by_the_rewards_that_are_trained_on():
    group = [make_case("a", 0.3, [1]), make_case("a", 0.1 + 0.2, [1])]
    assert count_zero_variance_groups(group) == 1 and not drop_uniform(group)
    group[1].shaped_reward = 1.0
    assert count_zero_variance_groups(group) == 0


def test_a_source_that_was_not_tried_has_the_scale_of_its_verifier():
    scales = {("s", "a"): RewardScale(0, 5), ("t", "a"): RewardScale(-1, 0)}
    assert find_scale(scales, "s", "a") == find_scale(scales, "s", "b") == RewardScale(0, 5)
    assert find_scale(scales, "u", "a") == UNKNOWN
    assert UNKNOWN.tells_apart and not RewardScale(0.2, 0.1 + 0.1).tells_apart
