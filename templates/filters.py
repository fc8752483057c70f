"""Filters: choose the episodes to train on.

    env: {filters: [{function: templates/filters.py:mask_ended, reasons: [length]}]}

To use your own: copy a function to your file, change it, and name it in the recipe. Other keys next
to `function` become arguments. Filters run in the order of the list. Each is called as
function(episodes) -> the episodes to keep. Failed episodes were dropped before. Rewards are the
verifier's, before env.reward.

A filter may also return copies with a mask of zeros. They have no loss. If the baseline of their
group is a mean of rewards, they still count for it. The estimator opo and the token baselines use
the mask, so they ignore such episodes. An agent's episode may have several training rows: mask each
of `episode.rows`, or drop `episode.branches`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gym_client
from kit.data.episode import Episode
from kit.data.selection import group_episodes, has_equal_values
from kit.errors import UserFunctionError


def drop_uniform(episodes: Sequence[Episode], metric: str = "reward") -> list[Episode]:
    """Drop zero-variance groups: if all episodes have the same reward, the advantage is 0.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2. metric: "reward"; "acc", whether the
    reward is the full one; or the name of a reward component.
    """
    kept: list[Episode] = []
    for group in group_episodes(episodes).values():
        if not has_equal_values([get_metric(episode, metric) for episode in group]):
            kept += group
    return kept


def get_metric(episode: Episode, metric: str) -> float:
    """Return the reward, the accuracy or a reward component. Raises UserFunctionError."""
    if metric == "reward":
        assert episode.reward is not None, f"{episode.row_id} was not verified"
        return episode.reward
    if metric == "acc":
        return float(episode.is_right)
    if metric not in episode.reward_components:
        names = ", ".join(["reward", "acc", *episode.reward_components])
        raise UserFunctionError(
            f"env.filters: drop_uniform: the episode of {episode.row_id} has no metric={metric}. "
            f"Use one of {names}."
        )
    return float(episode.reward_components[metric])


def drop_ended(episodes: Sequence[Episode], reasons: Sequence[str]) -> list[Episode]:
    """Drop the episodes that ended for one of `reasons` (length, turns, truncated, ...)."""
    return [episode for episode in episodes if episode.ended not in reasons]


def mask_ended(episodes: Sequence[Episode], reasons: Sequence[str]) -> list[Episode]:
    """Mask the episodes that ended for one of `reasons`. They still count for the baseline.

    With `length` this is DAPO's overlong filtering (section 3.4).
    """
    return [mask(episode) if episode.ended in reasons else episode for episode in episodes]


def mask(episode: Episode) -> Episode:
    """Copy an episode, with a mask of zeros."""
    zeros = [0] * len(episode.response_mask)
    return dataclasses.replace(episode, response_mask=zeros, branches=[])


def with_answer(episodes: Sequence[Episode], field: str, model: str, limit: int) -> list[Episode]:
    """Add an episode to each group: the row's own answer, as a response with the full reward.

    Each reward component is 1. The baseline is the group's, since it belongs to the prompt.
    For SPIN (templates/advantages.py:spin), which recognizes the new episode because it has no
    turn. The rollout engine has no log-probs for it, so the trainer's log-probs replace these.
    `rollout/filtered/with_answer` counts it as -1.

    field: the field of the row that has the answer, as text. model: the model whose tokenizer
    encodes the answer and adds its EOS token. limit: the most tokens of an answer. If it has more,
    it is not added. Raises UserFunctionError.
    """
    tokenizer = load_tokenizer(model)
    extended: list[Episode] = []
    for group in group_episodes(episodes).values():
        extended += group
        text = get_text(group[0], field)
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(ids) <= limit:
            extended.append(make_answer_episode(group[0], text, ids))
    return extended


@functools.cache
def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer  # takes seconds, and only one filter needs it

    return AutoTokenizer.from_pretrained(model)


def get_text(episode: Episode, field: str) -> str:
    """Return a text field of an episode's row. Raises UserFunctionError."""
    text = episode.row.get(field)
    if not isinstance(text, str):
        names = [name for name, value in episode.row.items() if isinstance(value, str)]
        raise UserFunctionError(
            f"env.filters: with_answer: the row {episode.row_id} has no text field={field}. "
            f"Use one of its texts: {', '.join(names) or 'none'}."
        )
    return text


def make_answer_episode(episode: Episode, text: str, ids: list[int]) -> Episode:
    """Copy an episode, with another response.

    It has the same reward components, since an advantage such as gdpo reads those of all episodes.
    """
    return dataclasses.replace(
        episode,
        response_ids=ids,
        response_mask=[1] * len(ids),
        log_probs=[0.0] * len(ids),
        turns=[],
        output=[gym_client.make_message(text)],
        branches=[],
        ended="stop",
        reward=episode.scale.full,
        turn_rewards=[],
        reward_components=dict.fromkeys(episode.reward_components, 1.0),
        verify_result={},
        timings={},
    )
