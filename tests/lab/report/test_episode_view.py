"""The episodes of the report page: their tokens, and the episodes whose tokens are shown."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd

import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import to_record
from lab.report import episode_view
from lab.report.run_data import SavedEpisode
from tests.helpers.recipes import row


def test_each_turn_has_the_advantages_of_its_tokens():
    episode = Episode("x:1", "1/0", "s", [5], row=row(), reward=1.0, ended="stop")
    episode.output.append(gym_client.message("one"))
    append_tokens(episode, [6, 7], [-1.0, -2.0])
    episode.output.append(gym_client.function_call_output("c", "seen"))
    append_tokens(episode, [8, 8, 8])
    episode.output.append(gym_client.message("two"))
    append_tokens(episode, [9], [-3.0])
    record = to_record(episode, 0, 0)

    advantages = np.array([0.25, 0.5, -0.75])
    items = episode_view.build_episode_view(record, advantages, with_tokens=True)["items"]
    turns = [(item["ids"], item["advantages"]) for item in items if "ids" in item]
    assert turns == [([6, 7], [0.25, 0.5]), ([9], [-0.75])]

    one_for_all = np.array([0.5])  # the same advantage for all tokens
    items = episode_view.build_episode_view(record, one_for_all, with_tokens=True)["items"]
    assert [item["advantages"] for item in items if "ids" in item] == [[0.5], [0.5]]


def test_tokens_of_the_best_and_worst_of_the_latest_steps_come_first(monkeypatch):
    """The tokens of other episodes are on the page only if there is room left."""
    rewards = [0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0]
    frame = pd.DataFrame(
        {"status": "ok", "tokens": 10, "reward": rewards * 2, "file": ["a"] * 7 + ["b"] * 7}
    )
    by_file = frame.groupby("file")["reward"]
    frame["best"] = by_file.rank(ascending=False, method="first")
    frame["worst"] = by_file.rank(method="first")
    records = [SavedEpisode("step", 1 + i // 7, {"number": i}) for i in range(14)]
    monkeypatch.setattr(episode_view, "MAX_PAGE_TOKENS", 130)
    run = SimpleNamespace(episodes=frame, records=records)
    chosen = episode_view.choose_episodes_with_tokens([run])
    ranks = episode_view.rank_episodes(frame)
    assert ranks[:7] == ["worst", "worst", "worst", "", "best", "best", "best"]
    numbers = [candidate.record["number"] for candidate in chosen]
    assert numbers == [7, 8, 9, 11, 12, 13, 0, 1, 2, 4, 5, 6, 10]
