"""A training step in plain torch and transformers, one response at a time, from the papers.

It shares no code with training.py, verl or templates/. Each response is a float tensor [R]:
nothing is padded or packed. `run_step` changes the weights of a model in place, by SGD with
a learning rate of 1, so the change is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = list[Tensor]  # one tensor [R] for each response


class Data(NamedTuple):
    """What an advantage may read, for each response of a batch."""

    episodes: Sequence[Any]
    old: Rows  # log-probs of the tokens before the update
    ref: Rows  # by the reference
    values: Rows  # by the critic
    masks: Rows

    @property
    def rewards(self) -> Tensor:
        """Return the rewards [B], as env.reward shapes them."""
        return torch.tensor([e.shaped_reward for e in self.episodes], dtype=torch.float64)

    def groups(self) -> list[list[int]]:
        """Return the positions of the responses to each prompt."""
        names = [e.group_id for e in self.episodes]
        return [[i for i, g in enumerate(names) if g == name] for name in dict.fromkeys(names)]


class Recipe(NamedTuple):
    """An algorithm: its advantage, its loss of one response, and how losses are averaged."""

    advantage: Callable[[Data], Rows]
    loss: Callable[..., Tensor]  # (new, old, advantage, mask) -> [R]
    mode: str = "token-mean"
    is_on_policy: bool = False  # one optimizer step for the whole batch
    epochs: int = 1
    kl_coef: float = 0.0  # of the k3 estimate in the loss
    max_weight: float = 0.0  # of truncated importance sampling against the rollout engine
    has_critic: bool = False


def compute_log_probs(model: Any, episode: Any) -> Tensor:
    """Return the log-probs [R] of a response, by a model of transformers."""
    ids = torch.tensor([episode.prompt_ids + episode.response_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()  # [P+R, V]
    log_probs = logits.log_softmax(dim=-1)[len(episode.prompt_ids) - 1 : -1]  # [R, V]
    return log_probs.gather(1, torch.tensor(episode.response_ids)[:, None])[:, 0]


def run_step(model: Any, data: Data, recipe: Recipe, mini_batches: int) -> list[Tensor]:
    """Train the model on a batch, and return the advantages of each response."""
    advantages = recipe.advantage(data)
    live = [i for i, mask in enumerate(data.masks) if mask.any()]
    size = len(data.episodes) / mini_batches
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(recipe.epochs):
        for first in range(mini_batches):
            members = live[first::mini_batches]
            losses = [compute_loss(model, data, recipe, advantages, i) for i in members]
            masks = [data.masks[i] for i in members]
            optimizer.zero_grad()
            aggregate(losses, masks, recipe.mode, size).backward()
            optimizer.step()
    return advantages


def compute_loss(model: Any, data: Data, recipe: Recipe, advantages: Rows, i: int) -> Tensor:
    """Return the losses [R] of the tokens of response i."""
    new, old, mask = compute_log_probs(model, data.episodes[i]), data.old[i], data.masks[i]
    losses = recipe.loss(new, old, advantages[i], mask)
    if recipe.max_weight:
        engine = torch.tensor(data.episodes[i].log_probs)
        losses = losses * (old - engine).exp().clamp(max=recipe.max_weight)
    if recipe.kl_coef:
        difference = data.ref[i] - new
        losses = losses + recipe.kl_coef * (difference.exp() - difference - 1)
    return losses


def aggregate(losses: Rows, masks: Rows, mode: str, size: float) -> Tensor:
    """Average the losses of a mini-batch. size: its number of responses, also those all masked."""
    sums = torch.stack([(loss * mask).sum() for loss, mask in zip(losses, masks, strict=True)])
    counts = torch.stack([mask.sum() for mask in masks])
    if mode == "token-mean":
        return sums.sum() / counts.sum()
    if mode == "seq-mean-token-mean":
        return (sums / counts).sum() / size
    if mode == "seq-mean-token-sum":
        return sums.sum() / size
    assert mode == "seq-mean-token-sum / 24", mode
    return sums.sum() / size / 24


# --- losses of one response -----------------------------------------------------------------------


def ppo(low: float = 0.2, high: float = 0.2) -> Callable[..., Tensor]:
    """Schulman et al. 2017, equation 7, with dual clip at 3 (Ye et al. 2020, equation 5)."""

    def loss(new: Tensor, old: Tensor, a: Tensor, _mask: Tensor) -> Tensor:
        ratio = (new - old).exp()
        losses = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        return torch.where(a < 0, torch.minimum(losses, -a * 3.0), losses)

    return loss


def cispo(new: Tensor, old: Tensor, a: Tensor, _mask: Tensor) -> Tensor:
    return -(new - old).exp().clamp(max=1.2).detach() * a * new


def gspo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    mean = ((new - old) * mask).sum() / mask.sum()
    ratio = mean.detach().exp() * (new - new.detach()).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - 0.0003, 1 + 0.0004))


def log_likelihood(new: Tensor, _old: Tensor, a: Tensor, _mask: Tensor) -> Tensor:
    return -a * new


def sppo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    difference = ((new - old) * mask).sum() - (a * mask).sum() / mask.sum()
    return difference.square().expand_as(new)


# --- advantages -----------------------------------------------------------------------------------


def spread(scalars: Sequence[Any], data: Data) -> Rows:
    """Return the same advantage for all tokens of a response."""
    return [float(s) * mask for s, mask in zip(scalars, data.masks, strict=True)]


def in_groups(function: Callable[[Tensor, Data, list[int]], Tensor]) -> Callable[[Data], Rows]:
    """Return an advantage that compares the rewards of a group."""

    def advantage(data: Data) -> Rows:
        scalars = torch.zeros(len(data.episodes), dtype=torch.float64)
        for members in data.groups():
            scalars[members] = function(data.rewards[members], data, members)
        return spread(scalars.tolist(), data)

    return advantage


def normalize(r: Tensor, *_: Any) -> Tensor:
    return (r - r.mean()) / (r.std() + 1e-6)


def center(r: Tensor, *_: Any) -> Tensor:
    return r - r.mean()


def leave_one_out(r: Tensor, *_: Any) -> Tensor:
    return r - (r.sum() - r) / (len(r) - 1)


def length_weighted(r: Tensor, data: Data, members: list[int]) -> Tensor:
    lengths = torch.stack([data.masks[i].sum() for i in members])
    return r - (lengths * r).sum() / lengths.sum()


def gpg(data: Data) -> Rows:
    alpha = len(data.episodes) / int((data.rewards != 0).sum())
    return [alpha * row for row in in_groups(center)(data)]


def preference(r: Tensor, *_: Any) -> Tensor:
    return torch.stack([(x > r).double() + 0.5 * (x == r) for x in r]).mean(dim=1) - 0.5


def whiten(rows: Rows, masks: Rows) -> Rows:
    """Mean 0 and variance 1 over the trained tokens of a batch."""
    tokens = torch.cat([row[mask.bool()] for row, mask in zip(rows, masks, strict=True)])
    scale = torch.sqrt(tokens.var() + 1e-8)
    return [(row - tokens.mean()) / scale * mask for row, mask in zip(rows, masks, strict=True)]


def gdpo(data: Data) -> Rows:
    """Weigh two components: whether the response ended counts a fifth."""
    total = torch.zeros(len(data.episodes), dtype=torch.float64)
    finished = torch.tensor([float(e.ended == "stop") for e in data.episodes]).double()
    for weight, values in ((1.0, data.rewards), (0.2, finished)):
        for members in data.groups():
            total[members] += weight * normalize(values[members])
    return whiten(spread(total.tolist(), data), data.masks)


def reinforce_plus_plus(data: Data) -> Rows:
    """Return the return of each token, with a penalty of 0.01 times the k1 estimate of the KL."""
    rows = []
    for i, mask in enumerate(data.masks):
        rewards = -0.01 * (data.old[i] - data.ref[i]) * mask
        rewards[int(mask.nonzero().max())] += data.rewards[i]
        rows.append(rewards.flip(0).cumsum(0).flip(0))
    return whiten(rows, data.masks)


def remax(data: Data) -> Rows:
    return spread([e.shaped_reward - e.baseline for e in data.episodes], data)


def distill(data: Data) -> Rows:
    return [
        -(old - ref) * mask for old, ref, mask in zip(data.old, data.ref, data.masks, strict=True)
    ]


def log_ratio(data: Data, i: int) -> float:
    return float(((data.old[i] - data.ref[i]) * data.masks[i]).sum())


def online_dpo(data: Data) -> Rows:
    """Compute the gradient of -log sigmoid(0.1 * margin) for each group's best and worst."""
    weights = [0.0] * len(data.episodes)
    for members in data.groups():
        best = max(members, key=lambda i: data.rewards[i])
        worst = min(members, key=lambda i: data.rewards[i])
        if data.rewards[best] > data.rewards[worst]:
            margin = 0.1 * (log_ratio(data, best) - log_ratio(data, worst))
            weights[best] = 0.1 / (1 + math.exp(margin))
            weights[worst] = -weights[best]
    pairs = sum(w > 0 for w in weights)
    return spread([w * len(weights) / pairs for w in weights], data)


def spin(data: Data) -> Rows:
    """Do the same for the answer of each group, which has no turn, against its samples."""
    weights = [0.0] * len(data.episodes)
    for members in data.groups():
        (answer,) = (i for i in members if not data.episodes[i].turns)
        for i in members:
            if i != answer:
                margin = 0.1 * (log_ratio(data, answer) - log_ratio(data, i))
                weights[i] = -0.1 / (1 + math.exp(margin)) / (len(members) - 1)
                weights[answer] -= weights[i]
    return spread([w * len(weights) / len(data.groups()) for w in weights], data)


def turn_grpo(data: Data) -> Rows:
    """Return the sum of the normalized rewards of this turn and the later ones of the response."""
    rows = [torch.zeros_like(mask) for mask in data.masks]
    for members in data.groups():
        rewards = torch.tensor([r for i in members for r in data.episodes[i].turn_rewards]).double()
        for i in members:
            total = 0.0
            turns = zip(data.episodes[i].turns, data.episodes[i].turn_rewards, strict=True)
            for turn, reward in reversed(list(turns)):
                total += float((reward - rewards.mean()) / (rewards.std() + 1e-6))
                rows[i][turn.start : turn.end] = total
    return [row * mask for row, mask in zip(rows, data.masks, strict=True)]


def gae(data: Data) -> Rows:
    """Discount 0.9 and lambda 0.5, over the sampled tokens only."""
    rows = []
    for i, mask in enumerate(data.masks):
        row = torch.zeros_like(mask)
        following, later = 0.0, 0.0
        sampled = mask.nonzero()[:, 0].tolist()
        for t in reversed(sampled):
            reward = float(data.rewards[i]) if t == sampled[-1] else 0.0
            value = float(data.values[i][t])
            later = reward + 0.9 * following - value + 0.9 * 0.5 * later
            row[t], following = later, value
        rows.append(row)
    return whiten(rows, data.masks)


def turn_gae(data: Data) -> Rows:
    """Compute GAE with a turn as one action: its value is that of its first token."""
    rows = []
    for i, mask in enumerate(data.masks):
        row = torch.zeros_like(mask)
        following, later = 0.0, 0.0
        turns = zip(data.episodes[i].turns, data.episodes[i].turn_rewards, strict=True)
        for turn, reward in reversed(list(turns)):
            value = float(data.values[i][turn.start])
            later = reward + 0.9 * following - value + 0.9 * 0.5 * later
            row[turn.start : turn.end], following = later, value
        rows.append(row)
    return whiten(rows, data.masks)


GRPO = in_groups(normalize)
RECIPES = {
    "cispo": Recipe(GRPO, cispo),
    "curriculum": Recipe(GRPO, ppo()),
    "dapo": Recipe(GRPO, ppo(high=0.28)),
    "distill": Recipe(distill, ppo(), is_on_policy=True),
    "dr_grpo": Recipe(in_groups(center), ppo(), "seq-mean-token-sum / 24"),
    "gdpo": Recipe(gdpo, ppo()),
    "gpg": Recipe(gpg, log_likelihood, is_on_policy=True),
    "grpo": Recipe(GRPO, ppo(), "seq-mean-token-mean", kl_coef=0.04),
    "gspo": Recipe(GRPO, gspo, "seq-mean-token-mean"),
    "online_dpo": Recipe(online_dpo, log_likelihood, "seq-mean-token-sum", is_on_policy=True),
    "opo": Recipe(in_groups(length_weighted), ppo(), is_on_policy=True),
    "ppo": Recipe(gae, ppo(), has_critic=True),
    "reinforce_plus_plus": Recipe(reinforce_plus_plus, ppo()),
    "remax": Recipe(remax, ppo(), "seq-mean-token-sum", is_on_policy=True),
    "reward_model": Recipe(GRPO, ppo()),
    "rloo": Recipe(in_groups(leave_one_out), ppo(), "seq-mean-token-sum", is_on_policy=True),
    "rollout_correction": Recipe(GRPO, ppo(), max_weight=2.0),
    "spin": Recipe(spin, log_likelihood, "seq-mean-token-sum", is_on_policy=True),
    "sppo": Recipe(in_groups(preference), sppo, "seq-mean-token-mean", is_on_policy=True, epochs=2),
    "turn_gae": Recipe(turn_gae, ppo(), has_critic=True),
    "turn_grpo": Recipe(turn_grpo, ppo()),
}
