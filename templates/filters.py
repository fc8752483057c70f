"""Filters: which episodes are trained on. A recipe names a list, applied in order:

    env: {filters: [templates/filters.py:drop_uniform, {function: templates/filters.py:mask_ended, reasons: [length]}]}

Copy one into a file of your own, change it, name that. function(episodes) -> some of them, or copies with a mask of
zeros: those carry no loss, and count for the baseline of their group where that is a mean of rewards (not for opo and
the token baselines, which weigh by the mask). Failures are gone before; rewards are the verifier's, not yet shaped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gym_client
from kit.data.episodes import groups
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
            raise PluginError(
                f"env.filters: drop_uniform: metric={metric}; the episode of {episode.row_id} has {has}"
            )
        return float(episode.reward_components[metric])

    return [
        e
        for group in groups(episodes).values()
        if len({worth(e) for e in group}) > 1
        for e in group
    ]


def drop_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """Compact filtering: no episode that ended for one of `reasons` (length, turns, truncated, ...)."""
    return [e for e in episodes if e.ended not in reasons]


def mask_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """As drop_ended, but they stay in their group's baseline (DAPO's overlong filtering, section 3.4)."""
    return [
        dataclasses.replace(e, response_mask=[0] * len(e.response_mask))
        if e.ended in reasons
        else e
        for e in episodes
    ]


@functools.cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer  # takes seconds, which other filters need not wait for

    return AutoTokenizer.from_pretrained(model)


def with_answer(episodes: Sequence[Any], field: str, model: str, limit: int) -> list[Any]:
    """Each group, and beside what was sampled one more episode: the row's own answer, as if the policy had said it,
    with a reward of 1. For SPIN (templates/advantages.py:spin). The trainer's log-probs stand in for the sampler's.

    field: of the row, what is to follow the prompt, as text; the tokenizer of `model` and its EOS end it. An answer of
    more than `limit` tokens is left out. It has no turn, by which one knows it, and `rollout/filtered/with_answer`
    counts it as -1.
    """
    tokenizer, found = _tokenizer(model), []
    for group in groups(episodes).values():
        e = group[0]
        if not isinstance(text := e.row.get(field), str):
            has = (
                ", ".join(name for name, value in e.row.items() if isinstance(value, str)) or "none"
            )
            raise PluginError(
                f"env.filters: with_answer: field={field}: the row {e.row_id} has no such text; it has {has}"
            )
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        said = {
            "response_ids": ids,
            "response_mask": [1] * len(ids),
            "log_probs": [0.0] * len(ids),
            "turns": [],
        }
        rest = {
            "output": [gym_client.message(text)],
            "ended": "stop",
            "reward": 1.0,
            "turn_rewards": [],
            "timings": {},
        }
        own = dataclasses.replace(
            e, **said, **rest, reward_components={}, verdict={}, baseline=None
        )
        found += [*group, *([own] if len(ids) <= limit else [])]
    return found
