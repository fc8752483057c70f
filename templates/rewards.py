"""Rewards: compute the reward to train on from a verified episode.

    env: {reward: {function: templates/rewards.py:overlong, limit: 1024, buffer: 0.2}}

To use your own: copy a function to your file, change it, and name it in the recipe. Other keys next
to `function` become arguments. It is called as function(episode) -> float for each episode that
passed the filters. Its result replaces the verifier's reward, `episode.reward`.
kit/data/episode.py lists the attributes of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import UserFunctionError


def overlong(episode: Any, limit: int, buffer: float = 0.2, penalty: float = 1.0) -> float:
    """Subtract DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13).

    The punishment grows linearly from 0 to `penalty`, over the last `buffer` * `limit` tokens
    before `limit`. In the paper these are 4,096 of 20,480 tokens.

    limit: data.max_response_length. With a limit of 100, a right response has the reward 1 at 80
    tokens, 0.5 at 90 tokens, and 0 at 100 tokens.
    """
    buffer_start = limit * (1 - buffer)  # tokens
    excess = len(episode.response_ids) - buffer_start  # tokens
    fraction = min(max(excess / (limit * buffer), 0.0), 1.0)
    return float(episode.reward) - penalty * fraction


def lower_partial(episode: Any, weight: float, full: float | None = None) -> float:
    """Multiply a reward below `full` by `weight`, so that nearly right earns much less than right.

    If a verifier pays 0.92 for a response with a period too many, the policy has little reason to
    leave it out. Once all its responses have one, none shows that it can earn more.

    full: None for what the verifier pays for a right answer.
    """
    reward = float(episode.reward)
    is_full = episode.is_right if full is None else reward >= full
    return reward if is_full else weight * reward


def weighted(episode: Any, weights: Mapping[str, float]) -> float:
    """Return the reward plus weights[name] * reward_components[name], for each name.

    Raises UserFunctionError if the episode does not have a component.
    """
    bonus = 0.0
    for name, weight in weights.items():
        if name not in episode.reward_components:
            names = ", ".join(episode.reward_components) or "none"
            raise UserFunctionError(
                f"env.reward: the episode of {episode.row_id} has no reward component {name}. "
                f"Use one of its components: {names}."
            )
        bonus += weight * episode.reward_components[name]
    return float(episode.reward) + bonus


def components(episode: Any) -> float:
    """Add two reward components, for an advantage that combines several rewards (gdpo).

    The component `verifier` is the verifier's reward. `finished` is 1 if the policy ended its
    response, else 0. The reward stays.
    """
    episode.reward_components["verifier"] = float(episode.reward)
    episode.reward_components["finished"] = float(episode.ended == "stop")
    return float(episode.reward)
