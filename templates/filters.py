"""Filters: which episodes are trained on. A recipe names a list, applied in order:

    env: {filters: [templates/filters.py:drop_uniform, {function: templates/filters.py:mask_ended, reasons: [length]}]}

Copy one into a file of your own, change it, name that. function(episodes) -> some of them, or copies with a mask of
zeros: those carry no loss, and count for the baseline of their group where that is a mean of rewards (not for opo and
the token baselines, which weigh by the mask). Failures are gone before; rewards are the verifier's, not yet shaped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kit.episodes import groups
from kit.errors import PluginError


def drop_uniform(episodes: Sequence[Any], metric: str = "reward") -> list[Any]:
    """Groups whose episodes are all worth the same teach nothing: drop them (DAPO, section 3.2; rejection sampling).

    metric: reward (the verifier's), acc (whether that is 1 or more), or one of its components.
    """

    def worth(episode: Any) -> float:
        if metric in ("reward", "acc"):
            return float(episode.reward if metric == "reward" else episode.reward >= 1.0)
        if metric not in episode.reward_components:
            has = ", ".join(["reward", "acc", *episode.reward_components])
            raise PluginError(f"env.filters: drop_uniform: metric={metric}; the episode of {episode.row_id} has {has}")
        return float(episode.reward_components[metric])

    return [e for group in groups(episodes).values() if len({worth(e) for e in group}) > 1 for e in group]


def drop_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """Compact filtering: no episode that ended for one of `reasons` (length, turns, truncated, ...)."""
    return [e for e in episodes if e.ended not in reasons]


def mask_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """As drop_ended, but they stay in their group's baseline (DAPO's overlong filtering, section 3.4)."""
    return [
        dataclasses.replace(e, response_mask=[0] * len(e.response_mask)) if e.ended in reasons else e for e in episodes
    ]
