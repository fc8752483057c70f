"""Findings and numbers of the report that need no run: cut answers, pauses, advantages of several turns."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import row

import gym_client
from kit.data.episodes import Episode, append, as_record, open_records, write
from kit.extras.report import diagnosis, report_page
from kit.extras.report.run_data import Folder


def folder_of(path, columns, episodes=()) -> Folder:
    """A run's folder with metrics, {name: values by step from 1}, and the episodes of its last step."""
    count = len(next(iter(columns.values())))
    lines = [
        {"step": i + 1} | {name: values[i] for name, values in columns.items()}
        for i in range(count)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(json.dumps({"data": {"max_response_length": 100}}))
    (path / "rollouts").mkdir()
    with open_records(path / "rollouts" / f"step_{count}.jsonl", "w") as out:
        for i, e in enumerate(episodes):
            write(out, as_record(e, 0, i))
    return Folder(path)


def ended(reason, rewards, status="ok"):
    return [
        Episode("x:1", "1/0", "s", [5], row=row(), reward=r, ended=reason, status=status)
        for r in rewards
    ]


@pytest.mark.parametrize(
    ("cut", "whole", "frac", "found"),
    [
        ([0.0, 0.1], [0.9, 1.0], 0.5, True),
        ([0.9, 1.0], [0.0, 0.1], 0.5, False),  # cut ones earn more
        ([0.4, 0.6], [0.5, 0.5], 0.5, False),  # as much
        ([0.0, 0.1], [0.9, 1.0], 0.25, False),  # few are cut
        ([0.9, 1.0], [0.0, 0.1], 0.9, True),  # so many that it matters in any case
    ],
)
def test_cut_answers_are_a_finding_if_they_earn_less_than_whole_ones(
    tmp_path, cut, whole, frac, found
):
    episodes = [*ended("length", cut), *ended("stop", whole), *ended("stop", [None], "timeout")]
    run = folder_of(
        tmp_path, {"rollout/ended/length_frac": [frac] * 6, "rollout/episodes": [5.0] * 6}, episodes
    )
    told = list(diagnosis.cut_answers(run))
    assert len(told) == found
    if found:
        worth = f"They earn {np.mean(cut):.3g}, whole ones {np.mean(whole):.3g}."
        assert (
            told[0].what
            == f"{frac:.0%} of the answers are cut at data.max_response_length=100. {worth}"
        )


def test_the_pause_before_a_resume_is_not_counted_as_time(tmp_path):
    """Six steps of 60 s, and two days between the third and the fourth."""
    times = [0.0, 60.0, 120.0, 172920.0, 172980.0, 173040.0]
    run = folder_of(
        tmp_path, {"time": times, "rollout/episodes": [8.0] * 6, "rollout/reward/mean": [0.5] * 6}
    )
    assert diagnosis.headline(run) == "6 steps to 6, 4.0 min; reward 0.5 -> 0.5"


def test_a_headline_names_each_score_once(tmp_path):
    columns = {
        "time": [0.0, 60.0],
        "rollout/episodes": [8.0] * 2,
        "val-core/s/acc/mean@1": [0.5, 1.0],
    }
    run = folder_of(tmp_path, {**columns, "val-aux/s/acc/mean@1_failed_as_0": [0.25, 0.5]})
    assert diagnosis.headline(run) == "2 steps to 2, 1.0 min; held-out s/acc/mean@1 0.5 -> 1"


def test_each_turn_is_shown_with_the_advantages_of_its_tokens():
    e = Episode("x:1", "1/0", "s", [5], row=row(), reward=1.0, ended="stop")
    e.output.append(gym_client.message("one"))
    append(e, [6, 7], [-1.0, -2.0])
    e.output.append(gym_client.function_call_output("c", "seen"))
    append(e, [8, 8, 8])
    e.output.append(gym_client.message("two"))
    append(e, [9], [-3.0])
    record = as_record(e, 0, 0)
    shown = report_page.detail(record, np.array([0.25, 0.5, -0.75]), tokens=True)["items"]
    told = [(item["ids"], item["advantages"]) for item in shown if "ids" in item]
    assert told == [([6, 7], [0.25, 0.5]), ([9], [-0.75])]
    shown = report_page.detail(record, np.array([0.5]), tokens=True)["items"]
    assert [item["advantages"] for item in shown if "ids" in item] == [[0.5], [0.5]]  # one for all
