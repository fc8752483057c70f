"""Episodes and tokens for the tests that compare advantages and losses with their papers.

There are two tolerances:

- EXACT: the inputs are float64 and rewards are multiples of 1/4, so only sums are rounded.
- SINGLE: verl computes some values in float32, with an error of up to 2^-24 each. They are
  Bessel's correction in `masked_whiten`, gpg's alpha, and the casts of `group_mean_std` and gdpo.

"Departs:" marks a difference between verl and a paper. Such a test checks verl's behavior.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass

import training
from kit.data.episode import Episode
from kit.data.selection import select_trainable
from tests.helpers.recipes import make_partial

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 2e-6, "atol": 2e-6}
SEEDS = range(10)  # some tests also use it to select a variant or a mode
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
LOSS_SETTINGS = {"clip_cov_ratio": 1.0, "kl_cov_ratio": 0.2, "dro_beta": 0.3}
assert_close = np.testing.assert_allclose


@functools.cache
def tiny_actor() -> DictConfig:
    """Return the actor's section of the tiny recipe, without interpolations."""
    return make_partial().for_verl("actor_rollout_ref.actor")


# --- episodes ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Case(Episode):
    """An episode with the values that estimators read. T is the number of response tokens."""

    rewards: Any = None  # [T]
    values: Any = None  # [T] of the critic
    pi: Any = None  # [T] probabilities of the tokens
    squares: Any = None  # [T] sums of the squared probabilities of all tokens
    greedy: float = 0.25  # the reward of the greedy response
    reward_components: dict[str, float] = field(default_factory=dict)


def make_case(group, reward, mask=(1,), rewards=None, status="ok") -> Case:
    T = len(mask)
    return Case(
        row_id="r",
        group_id=group,
        server="s",
        prompt_ids=[1],
        response_ids=[2] * T,
        response_mask=list(mask),
        log_probs=[-0.5] * T,
        reward=reward,
        status=status,
        rewards=rewards or [0.0] * (T - 1) + [reward],
        values=np.zeros(T),
        pi=np.full(T, 0.5),
        squares=np.full(T, 0.5),
        reward_components={"right": reward, "format": 0.0},
    )


def make_group(*rewards, group="g") -> list[Case]:
    """Make responses of one token to one prompt."""
    return [make_case(group, reward) for reward in rewards]


def random_cases(seed: int, has_gaps: bool = True) -> list[Case]:
    """Shuffled groups of 2, 3 and 5 episodes with ties, various lengths, and observed tokens.

    Two episodes have failed and are dropped. One of them leaves a group of one, which is dropped
    too. With an odd seed, each token has a reward, as with a KL term in the reward.
    """
    rng = np.random.default_rng(seed)
    cases = []
    for group in "aabbbccccccdd":
        T = int(rng.integers(2, 10))
        reward = float(rng.choice([-0.5, 0, 0.25, 1]))
        mask = np.ones(T, int)
        pi = rng.uniform(0.05, 0.95, T)
        if has_gaps and T > 3:
            mask[slice(*sorted(rng.choice(np.arange(1, T), 2, replace=False)))] = 0
        rewards = rng.normal(size=T) * mask * (seed % 2)
        rewards[-1] += reward
        case = make_case(group, reward, mask.tolist(), rewards.tolist())
        case.values = rng.normal(size=T)
        case.pi = pi
        case.squares = pi**2 + (1 - pi) ** 2 * rng.uniform(size=T)
        case.greedy = rng.normal()
        case.reward_components = {"right": reward, "format": rng.integers(0, 3) / 4}
        cases.append(case)
    for failed in cases[5], cases[-1]:  # the second one leaves one episode in group d
        failed.status = "http_500"
        failed.reward = None
    rng.shuffle(cases)
    kept: Any = select_trainable(cases)[0]
    assert sorted(case.group_id for case in kept) == list("aabbbccccc")
    return kept


def pad(rows: Sequence[Any]) -> np.ndarray:
    """Pad rows of numbers to [B, R], with zeros on the right."""
    width = max(map(len, rows))
    return np.array([list(row) + [0.0] * (width - len(row)) for row in rows], dtype=float)


def list_sampled(case: Case) -> list[int]:
    """Return the positions of the sampled tokens."""
    return [t for t, m in enumerate(case.response_mask) if m]


def compute_advantages(cases, name, **algorithm) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, returns) [B, R] of training.compute_advantages; 0 on observed tokens."""
    batch = training.build_batch(cases, 0, 1.0)
    b = batch.batch
    mask = b["response_mask"]
    b["token_level_rewards"] = torch.tensor(pad([case.rewards for case in cases]))
    b["values"] = torch.tensor(pad([case.values for case in cases]))
    b["sum_pi_squared"] = torch.tensor(pad([case.squares for case in cases]))
    b["old_log_probs"] = torch.tensor(pad([np.log(case.pi) for case in cases]))
    if name == "remax":
        b["reward_baselines"] = torch.tensor([case.greedy for case in cases], dtype=torch.float64)
    settings = {**algorithm, "adv_estimator": name}
    training.compute_advantages(batch, make_partial({"algorithm": settings}))
    if name not in ("gae", "remax"):
        # these two have values on observed tokens, which the mask of the loss removes
        assert not (b["advantages"] * (1 - mask)).any()
    return (b["advantages"] * mask).double().numpy(), (b["returns"] * mask).double().numpy()


# --- tokens --------------------------------------------------------------------------------------


def random_tokens(seed: int, per_response: bool = False, on_policy: bool = False):
    """Random log-probs x and old, advantages a and weights w, all [B, R], and a mask.

    The mask has padding, observed tokens and a padding row. per_response: all tokens of a response
    have the same advantage and weight.
    """
    rng = np.random.default_rng(seed)
    B, R = 8, 9
    mask = (np.arange(R) < rng.integers(2, R + 1, B)[:, None]) & (rng.random((B, R)) < 0.8)
    mask[:, 0] = True
    mask[-1] = False
    x = rng.uniform(-3, -0.05, (B, R))
    old = x if on_policy else np.minimum(x - rng.normal(0, 0.8, (B, R)), -0.02)
    a = np.broadcast_to(rng.normal(0, 1.5, (B, 1)), (B, R))
    w = np.broadcast_to(rng.uniform(0.2, 2, (B, 1)), (B, R))
    if not per_response:
        a = rng.normal(0, 1.5, (B, R))
        w = rng.uniform(0.2, 2, (B, R))
    tokens = [tuple(at) for at in np.argwhere(mask)]
    return SimpleNamespace(x=x, old=old, log_r=x - old, a=a, w=w, mask=mask, tokens=tokens)


def weigh_tokens(mask: np.ndarray, mode: str, width: int | None = None) -> np.ndarray:
    """Return the weight of each token's loss in an aggregation mode, [B, R]."""
    responses = sum(bool(row.any()) for row in mask)
    weights = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        weights[i, t] = {
            "token-mean": 1 / mask.sum(),  # DAPO, Yu et al., arXiv:2503.14476, section 3.3
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / responses,
            # GRPO, arXiv:2402.03300, eq. 3
            "seq-mean-token-mean": 1 / responses / mask[i].sum(),
            # Dr. GRPO, arXiv:2503.20783
            "seq-mean-token-sum-norm": 1 / responses / (width or mask.shape[1]),
        }[mode]
    return weights


def make_actor_config(policy_loss=None, **changes):
    """Make the actor's configuration as verl's workers have it: verl's defaults and changes."""
    settings = {
        "clip_ratio_high": 0.28,
        **changes,
        "policy_loss": {**LOSS_SETTINGS, **(policy_loss or {})},
    }
    return omega_conf_to_dataclass(OmegaConf.merge(tiny_actor(), settings))


def compute_loss_and_gradient(name, d, mode="token-mean", config=None, weights=None):
    """Compute verl's loss and its gradient by x. The mask is bool, as in verl's ppo_loss."""
    old, x, a, mask = (torch.tensor(v) for v in (d.old, d.x, d.a, d.mask))
    x.requires_grad_()
    weights = None if weights is None else torch.tensor(weights)
    function = core_algos.get_policy_loss_fn(name)
    config = config or make_actor_config()
    loss, _ = function(old, x, a, mask, mode, config=config, rollout_is_weights=weights)
    loss.backward()
    return loss.item(), x.grad.numpy()


def assert_same(result, loss, gradient) -> None:
    """Assert that (loss, gradient) are as expected."""
    assert_close(result[0], loss, **EXACT)
    assert_close(result[1], gradient, **EXACT)
