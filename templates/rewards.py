"""Rewards: what an episode is worth. A recipe names one, with its settings:

    env: {reward: {function: templates/rewards.py:overlong, limit: 1024, buffer: 0.2}}

Copy one into a file of your own, change it, name that. function(episode) -> float; it sees every kept episode, after
the filters, and its own word replaces the verifier's (`episode.reward`). What an episode has: user_functions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import PluginError


def overlong(episode: Any, limit: int, buffer: float = 0.2, penalty: float = 1.0) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): the last part, `buffer`, of
    `limit` tokens (data.max_response_length) costs up to `penalty`, linearly; the paper's are 4,096 of 20,480 tokens.

    With a limit of 100, a right answer of 80 tokens is worth 1, of 90 tokens 0.5, of 100 tokens 0.
    """
    over = len(episode.response_ids) - limit * (1 - buffer)  # tokens
    return float(episode.reward) - penalty * min(max(over / (limit * buffer), 0.0), 1.0)


def weighted(episode: Any, weights: Mapping[str, float]) -> float:
    """The reward plus weights[name] * reward_components[name]. Raises PluginError for a component that it lacks."""
    for name in weights:
        if name not in episode.reward_components:
            has = ", ".join(episode.reward_components) or "none"
            raise PluginError(
                f"env.reward: no reward component {name}; the episode of {episode.row_id} has {has}"
            )
    return float(episode.reward) + sum(
        w * episode.reward_components[name] for name, w in weights.items()
    )


def components(episode: Any) -> float:
    """Name two rewards, for advantages that take several (gdpo): verdict, the verifier's word, and finished, 1 where
    the answer came to its own end."""
    episode.reward_components |= {
        "verdict": float(episode.reward),
        "finished": float(episode.ended == "stop"),
    }
    return float(episode.reward)
