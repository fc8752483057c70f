"""Tests which episodes are selected for training: complete groups that pass the filters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.data.episode import Episode
from kit.data.selection import check_failures, describe_nothing_left, select_trainable
from kit.errors import RunError
from tests.data.test_metrics import episode


def make_groups(*rewards):
    """Make the episodes of groups 1, 2, ... from the rewards of each group."""
    groups = enumerate(rewards, 1)
    return [episode("s", str(group), reward) for group, some in groups for reward in some]


def test_failed_episodes_and_groups_that_become_too_small_are_dropped():
    episodes = make_groups([1.0, None], [0.0, 1.0], [1.0, 0.0, 0.5])
    assert select_trainable(episodes) == (episodes[2:], {})
    assert select_trainable(episodes, 1) == ([episodes[0], *episodes[2:]], {})
    assert select_trainable(episodes, 3) == (episodes[4:], {})
    assert select_trainable([], 2) == select_trainable(episodes[:2], 2) == ([], {})


def keep_right(some):
    return [e for e in some if e.reward]


def mask_truncated(some):
    return [replace(e, response_mask=[0, 0]) if e.ended == "length" else e for e in some]


def mask_in_place(some):
    for e in some:
        e.response_mask = [0] * len(e.response_mask)
    return some


def test_each_filter_gets_the_result_of_the_one_before_in_complete_groups():
    seen = []

    def watch(some):
        seen.append([e.group_id for e in some])
        return some

    episodes = make_groups([1.0, None], [0.0, 1.0], [1.0, 1.0])
    kept, dropped = select_trainable(episodes, 2, [watch, keep_right, watch])
    # group 2 had one episode left, so it was dropped before the next filter
    assert seen == [["2", "2", "3", "3"], ["3", "3"]]
    assert kept == episodes[4:] and dropped == {"watch": 0, "keep_right": 1}


def test_each_filter_reports_how_many_unmasked_episodes_it_dropped():
    episodes = make_groups([1.0, 0.0, 1.0], [1.0, 0.0])
    episodes[0].ended = "length"
    episodes[3].response_mask = [0, 0]
    kept, dropped = select_trainable(episodes, 2, [mask_truncated, keep_right])
    # Group 1 keeps its masked episode. Group 2 has only a masked episode left, which is dropped.
    assert dropped == {"mask_truncated": 1, "keep_right": 2}
    assert [(e.group_id, e.response_mask) for e in kept] == [("1", [0, 0]), ("1", [1, 1])]
    assert select_trainable(episodes, 1, [mask_in_place])[1] == {"mask_in_place": 4}


def test_nothing_is_selected_if_every_token_is_masked():
    episodes = [episode("s", "1", reward, ended="length") for reward in (1.0, 0.0)]
    assert select_trainable(episodes, 2, [mask_truncated]) == ([], {"mask_truncated": 2})
    episodes[0].ended = "stop"
    kept, dropped = select_trainable(episodes, 2, [mask_truncated])
    assert [e.response_mask for e in kept] == [[1, 1], [0, 0]] and dropped == {"mask_truncated": 1}


def make_with_statuses(*statuses):
    episodes = [
        Episode(f"x:{i}", "g", "s", [1], status=status) for i, status in enumerate(statuses, 1)
    ]
    for e in episodes:
        e.error = f"error of {e.row_id}" if e.status != "ok" else ""
    return episodes


def test_a_step_without_a_group_says_what_happened_to_the_responses():
    """One response is the rest of its group, because the other one failed."""
    text = describe_nothing_left(make_with_statuses("ok", "timeout", "ok", "ok"), {"drop_all": 2})
    assert text.startswith(
        "of 4 responses 1 failed, 2 dropped by drop_all, 1 alone in their groups"
    )
    assert text.endswith("Use rows of which the policy solves some.")
    failed = describe_nothing_left(make_with_statuses("ok", "timeout", "timeout"), {})
    assert failed.endswith("Correct the verifier.")


def test_one_failure_more_than_the_recipe_allows_stops_the_run():
    check_failures([], 0.0)
    check_failures(make_with_statuses("ok", "timeout", "http_500", "ok"), 0.5)
    episodes = make_with_statuses("ok", "http_500", "timeout", "timeout")
    with pytest.raises(RunError, match=r"^3 of 4 episodes failed \(2 timeout, 1 http_500\).* x:2"):
        check_failures(episodes, 0.5)
