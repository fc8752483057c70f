"""Reward shapers, filters, samplers and estimators that recipes name as `pieces.py:function`; copy one and change it.

    env.reward: {function: pieces.py:overlong, limit: 1024, buffer: 0.2}
    env.filters: [pieces.py:drop_uniform, {function: pieces.py:mask_ended, reasons: [length]}]
    env.sampler: pieces.py:by_pass_rate
    algorithm.adv_estimator: pieces.py:turn_grpo

How they are called is in own.py. Filters see the verifier's rewards, in groups of which failures are already gone;
the reward is shaped after them. A filter returns some of the episodes, or copies with a mask of zeros: those carry no
loss, and count for the baseline of their group where that is a mean of rewards (not for opo and the token baselines,
which weigh by the mask).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import verl.utils.torch_functional as verl_F

import env
from own import OwnError

# --- rewards: episode -> float -------------------------------------------------------------------


def overlong(episode: Any, limit: int, buffer: float = 0.2, penalty: float = 1.0) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): the last part, `buffer`, of
    `limit` tokens (data.max_response_length) costs up to `penalty`, linearly; the paper's are 4,096 of 20,480 tokens.

    With a limit of 100, a right answer of 80 tokens is worth 1, of 90 tokens 0.5, of 100 tokens 0.
    """
    over = len(episode.response_ids) - limit * (1 - buffer)  # tokens
    return float(episode.reward) - penalty * min(max(over / (limit * buffer), 0.0), 1.0)


def weighted(episode: Any, weights: Mapping[str, float]) -> float:
    """The reward plus weights[name] * reward_components[name]. Raises OwnError for a component that it lacks."""
    for name in weights.keys() - episode.reward_components.keys():
        has = ", ".join(episode.reward_components) or "none"
        raise OwnError(f"env.reward: weighted: no reward component {name}; the episode of {episode.row_id} has {has}")
    return float(episode.reward) + sum(w * episode.reward_components[name] for name, w in weights.items())


def components(episode: Any) -> float:
    """Name two rewards, for advantages that take several (gdpo): verdict, the verifier's word, and finished, 1 where
    the answer came to its own end."""
    episode.reward_components |= {"verdict": float(episode.reward), "finished": float(episode.ended == "stop")}
    return float(episode.reward)


# --- filters: episodes -> episodes ---------------------------------------------------------------


def groups(episodes: Sequence[Any]) -> dict[str, list[Any]]:
    """{group id: its episodes}, in order of appearance."""
    members = defaultdict(list)
    for episode in episodes:
        members[episode.group_id].append(episode)
    return dict(members)


def keep(
    episodes: Sequence[Any], members: int = 2, filters: Sequence[Callable[[list[Any]], list[Any]]] = ()
) -> list[Any]:
    """The episodes that may be trained on: verified, past the filters, in groups of at least `members`.

    verl's group estimators sum rewards without a mask and give a group of one its raw reward as advantage, so a
    failed episode, or a group left with one, must be gone before the advantage. Estimators that compare no answers
    (GAE, REINFORCE++) take groups of one. Where the filters masked every token, nothing is left.
    """
    kept = [e for e in episodes if e.status == "ok"]
    for function in (list, *filters):
        kept = [e for group in groups(function(kept)).values() if len(group) >= members for e in group]
    return kept if any(any(e.response_mask) for e in kept) else []


def first_groups(episodes: Sequence[Any], count: int) -> list[Any]:
    """The episodes of the first `count` groups."""
    return [e for group in list(groups(episodes).values())[:count] for e in group]


def drop_uniform(episodes: Sequence[Any], metric: str = "reward") -> list[Any]:
    """Groups whose episodes are all worth the same teach nothing: drop them (DAPO, section 3.2; rejection sampling).

    metric: reward (the verifier's), acc (whether that is 1 or more), or one of its components.
    """

    def worth(episode: Any) -> float:
        values = {**episode.reward_components, "reward": episode.reward, "acc": float(episode.reward >= 1.0)}
        if metric not in values:
            raise OwnError(f"drop_uniform: metric={metric}; an episode has {', '.join(values)}")
        return float(values[metric])

    return [e for group in groups(episodes).values() if len({worth(e) for e in group}) > 1 for e in group]


def drop_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """Compact filtering: no episode that ended for one of `reasons` (length, turns, truncated, ...)."""
    return [e for e in episodes if e.ended not in reasons]


def mask_ended(episodes: Sequence[Any], reasons: Sequence[str]) -> list[Any]:
    """As drop_ended, but they stay in their group's baseline (DAPO's overlong filtering, section 3.4)."""
    return [
        dataclasses.replace(e, response_mask=[0] * len(e.response_mask)) if e.ended in reasons else e for e in episodes
    ]


# --- samplers: tasks -> the tasks of a batch -----------------------------------------------------


def by_pass_rate(
    tasks: Sequence[env.Task], size: int, batch: int, seed: int, pass_rates: Mapping[str, float], floor: float = 0.05
) -> list[env.Task]:
    """A curriculum: rows by chance, without repetition, as p (1 - p) + floor of their recent pass rate p, so what is
    solved half of the time comes most often. Rows not seen yet count as half solved. Files with weights keep them.

    pass_rates: row_id -> p, an average over the row's last groups in which each counts twice the one before.
    """
    quotas = env.quotas(tasks, size) if any(t.weight for t in tasks) else {None: size}
    random, picked = np.random.default_rng([seed, batch]), []
    for file, quota in quotas.items():
        rows = [t for t in tasks if file is None or t.file == file]
        rates = np.array([pass_rates.get(t.row_id, 0.5) for t in rows])
        chances = rates * (1 - rates) + floor
        whole, rest = divmod(quota, len(rows))  # a quota of more rows than there are takes all, and then some
        some = random.choice(len(rows), rest, replace=False, p=chances / chances.sum())
        picked += rows * whole + [rows[i] for i in some]
    return picked


# --- advantages over turns: [B, R] tensors -> (advantages, returns), [B, R] ----------------------
# turn [B, R]: which of the policy's turns a token is of, from 0; -1: observed, or padding


def by_turn(values: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Sum [B, R] values over each turn -> [B, K], K the most turns of an episode; what is observed goes to the turn
    before it."""
    K = int(turn.max()) + 1
    owner = torch.cummax(turn, dim=1).values.clamp(min=0)  # [B, R]
    return torch.zeros(len(values), K, dtype=values.dtype).scatter_add(1, owner, values)  # [B, K]


def turn_grpo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, turn: torch.Tensor, index: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO per step (Shao et al. 2024, arXiv:2402.03300, section 4.1.3, process supervision): the rewards of all turns
    of a group are normalised together, and a turn's advantage is the sum of its own and all later ones.

    Rewards per turn come from servers of the step kind; a server that only verifies pays the last turn.
    """
    rewards = by_turn(token_level_rewards, turn)  # [B, K]
    exists = torch.arange(rewards.shape[1]) <= turn.amax(dim=1, keepdim=True)  # [B, K]
    normal = torch.zeros_like(rewards)
    for name in dict.fromkeys(index):
        mine = exists & torch.tensor([i == name for i in index])[:, None]  # [B, K]
        some = rewards[mine]
        if len(some) > 1:  # one turn has nothing to be compared with
            normal[mine] = (some - some.mean()) / (some.std() + 1e-6)
    to_go = normal.flip(1).cumsum(dim=1).flip(1)  # [B, K]
    advantages = to_go.gather(1, turn.clamp(min=0)) * response_mask  # [B, R]
    return advantages, advantages


def turn_gae(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    turn: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE with a turn as one action (Schulman et al. 2016, arXiv:1506.02438, equation 16): gamma and lam count turns.

    The state of a turn is what stands before its first token, so its value is the critic's there. All tokens of a turn
    share its advantage, whitened over the batch as verl does for its own GAE, and its return.
    """
    first = (turn >= 0) & (turn != torch.nn.functional.pad(turn, (1, 0), value=-1)[:, :-1])  # [B, R]
    V, rewards = by_turn(values * first, turn), by_turn(token_level_rewards, turn)  # [B, K]
    exists = torch.arange(V.shape[1]) <= turn.amax(dim=1, keepdim=True)  # [B, K]
    next_value = next_advantage = torch.zeros(len(V))  # [B]
    steps = []
    for k in reversed(range(V.shape[1])):
        delta = rewards[:, k] + gamma * next_value - V[:, k]  # [B]
        advantage = (delta + gamma * lam * next_advantage) * exists[:, k]
        next_value, next_advantage = V[:, k] * exists[:, k], advantage
        steps.append(advantage)
    advantages = torch.stack(steps[::-1], dim=1)  # [B, K]
    returns = (advantages + V).gather(1, turn.clamp(min=0)) * response_mask  # [B, R]
    spread = advantages.gather(1, turn.clamp(min=0))  # [B, R]
    return verl_F.masked_whiten(spread, response_mask) * response_mask, returns
