"""The kit's advantages and KL terms (training.compute_advantages, apply_kl), and verl's losses, against their papers.

A reference is the paper's equation as loops over episodes and tokens. Where verl does otherwise, the text says
"Departs:" and the test holds verl to what it does. Tolerances: float64 goes in, and rewards are multiples of 1/4, so
only the rounding of sums is left: EXACT. SINGLE is for float32 inside verl: quotients of counts (Bessel's correction
in `masked_whiten`, gpg's alpha) and the casts of `group_mean_std` and gdpo, which each cost up to 2^-24.
"""

import copy
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU, RECIPE
from omegaconf import OmegaConf
from torch.nn.functional import logsigmoid
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass

import training
from kit.config import user_functions
from kit.config.load import load_config
from kit.data.episode import Episode, TurnSpan
from kit.data.selection import select_trainable
from kit.errors import UserFunctionError
from templates.advantages import distill, preference, spin
from templates.losses import dpo, sppo

EXACT, SINGLE = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 2e-6, "atol": 2e-6}
SEEDS = range(10)  # a seed also picks the case: odd or even, and one of the five modes
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
assert_close = np.testing.assert_allclose


@functools.cache
def recipe():
    return load_config((str(CPU), str(RECIPE)), [])[0]


def episode(group, reward, mask=(1,), rewards=None, status="ok"):
    """An Episode, and what estimators need beyond it: `rewards` and more by token, and the greedy answer's reward."""
    T = len(mask)
    e = Episode("r", group, "s", [1], [2] * T, list(mask), [-0.5] * T, reward=reward, status=status)
    e.rewards, e.reward_components = (
        rewards or [0.0] * (T - 1) + [reward],
        {"right": reward, "format": 0.0},
    )
    e.values, e.pi, e.squares, e.greedy = np.zeros(T), np.full(T, 0.5), np.full(T, 0.5), 0.25
    return e


def group_of(*rewards, group="g"):
    return [episode(group, r) for r in rewards]


def random_episodes(seed, gaps=True):
    """Groups of 2, 3 and 5, shuffled, of many lengths, with ties, observed gaps and failures, which `keep` drops.
    Odd seeds have a reward on every token, as a KL term in the reward makes it."""
    rng, made = np.random.default_rng(seed), []
    for group in "aabbbccccccdd":
        T, reward = int(rng.integers(2, 10)), float(rng.choice([-0.5, 0, 0.25, 1]))
        mask, pi = np.ones(T, int), rng.uniform(0.05, 0.95, T)
        if gaps and T > 3:
            mask[slice(*sorted(rng.choice(np.arange(1, T), 2, replace=False)))] = 0
        rewards = rng.normal(size=T) * mask * (seed % 2)
        rewards[-1] += reward
        e = episode(group, reward, mask.tolist(), rewards.tolist())
        e.values, e.pi, e.squares = (
            rng.normal(size=T),
            pi,
            pi**2 + (1 - pi) ** 2 * rng.uniform(size=T),
        )
        e.greedy, e.reward_components = (
            rng.normal(),
            {"right": reward, "format": rng.integers(0, 3) / 4},
        )
        made.append(e)
    for failed in made[5], made[-1]:  # which leaves d alone
        failed.status, failed.reward = "http_500", None
    rng.shuffle(made)
    kept, _ = select_trainable(made)
    assert sorted(e.group_id for e in kept) == list("aabbbccccc")
    return kept


def padded(rows):
    return np.array(
        [list(row) + [0.0] * (max(map(len, rows)) - len(row)) for row in rows], dtype=float
    )


def advantages(episodes, name, **algorithm):
    """(advantages, returns) [B, R] as the loop of algorithm.py gets them; 0 on tokens that were not sampled."""
    batch, settings = (
        training.build_batch(episodes, 0, 1.0),
        OmegaConf.merge(recipe().algorithm, algorithm),
    )
    b, mask = batch.batch, batch.batch["response_mask"]
    for key, ours in [
        ("token_level_rewards", "rewards"),
        ("values", "values"),
        ("sum_pi_squared", "squares"),
    ]:
        b[key] = torch.tensor(padded([getattr(e, ours) for e in episodes]))
    b["old_log_probs"] = torch.tensor(padded([np.log(e.pi) for e in episodes]))
    if name == "remax":
        b["reward_baselines"] = torch.tensor([e.greedy for e in episodes], dtype=torch.float64)
    settings.adv_estimator = name
    training.compute_advantages(batch, OmegaConf.create({"algorithm": settings}))
    if name not in (
        "gae",
        "remax",
    ):  # which leave values on observed tokens, for the loss's mask to remove
        assert not (b["advantages"] * (1 - mask)).any()
    return (b["advantages"] * mask).double().numpy(), (b["returns"] * mask).double().numpy()


def sampled(e):
    return [t for t, m in enumerate(e.response_mask) if m]


def over_answers(scalar, episodes, value=lambda e: sum(e.rewards)):
    """scalar(r, rs, e, peers) on each sampled token of e: r = value(e), and rs those of its peers in the group."""
    rows = []
    for e in episodes:
        peers = [x for x in episodes if x.group_id == e.group_id and x is not e]
        rows.append(
            scalar(value(e), [value(x) for x in peers], e, peers) * np.array(e.response_mask)
        )
    return rows


def whitened(rows, episodes):
    """Zero mean and unit variance (+ 1e-8) over all sampled tokens of the batch."""
    values = [row[t] for row, e in zip(rows, episodes, strict=True) for t in sampled(e)]
    m, scale = np.mean(values), math.sqrt(np.var(values, ddof=1) + 1e-8)
    return [(row - m) / scale * e.response_mask for row, e in zip(rows, episodes, strict=True)]


def to_go(e, gamma=1.0):
    """The discounted sum of rewards from each sampled token on; observed tokens take no time."""
    g, out = 0.0, np.zeros(len(e.rewards))
    for t in reversed(sampled(e)):
        out[t] = g = e.rewards[t] + gamma * g
    return out


def normed(r, rs, *_, divide=True):
    return (r - np.mean([r, *rs])) / (np.std([r, *rs], ddof=1) + 1e-6 if divide else 1.0)


def gdpo(episodes):
    parts = [
        over_answers(normed, episodes, lambda e, k=key: e.reward_components[k]) for key in WEIGHTS
    ]
    return whitened(
        [1.0 * right + 0.5 * form for right, form in zip(*parts, strict=True)], episodes
    )


def token_baseline(episodes):
    rows = [np.zeros(len(e.rewards)) for e in episodes]
    for row, e in zip(rows, episodes, strict=True):
        for k, t in enumerate(sampled(e)):
            alive = [x for x in episodes if x.group_id == e.group_id and len(sampled(x)) > k]
            w = [sum(1 - 2 * x.pi[j] + x.squares[j] for j in sampled(x)[: k + 1]) for x in alive]
            b = sum(to_go(x)[sampled(x)[k]] * wx for x, wx in zip(alive, w, strict=True)) / (
                sum(w) + 1e-8
            )
            row[t] = to_go(e)[t] - (b if len(alive) > 1 else 0.0)
    return rows


WEIGHTS = {"right": 1.0, "format": 0.5}
GDPO = {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())}
outcome = functools.partial(functools.partial, over_answers)
centred = functools.partial(normed, divide=False)
ESTIMATORS = {  # name: (reference, tolerance)
    # Shao et al., arXiv:2402.03300, section 4.1.2: (r_i - mean(r)) / std(r). Departs: std + 1e-6.
    "grpo": (outcome(normed), EXACT),
    "grpo_vectorized": (outcome(normed), SINGLE),
    # Liu et al., arXiv:2601.05242: GRPO of each component, weighted sum, normalised over the batch. Departs: over
    # tokens, not answers, so long ones weigh more.
    "gdpo": (gdpo, SINGLE),
    # Tang et al., arXiv:2503.19595, leave-one-out pass@k: max(r) - max of the others. Departs: over the std + 1e-6.
    "grpo_passk": (
        outcome(lambda r, rs, *_: (max(r, *rs) - max(rs)) / (np.std([r, *rs], ddof=1) + 1e-6)),
        EXACT,
    ),
    # Ahmadian et al., arXiv:2402.14740, the RLOO estimator: r_i - mean of the others.
    "rloo": (outcome(lambda r, rs, *_: r - np.mean(rs)), EXACT),
    "rloo_vectorized": (outcome(lambda r, rs, *_: r - np.mean(rs)), EXACT),
    # Hao et al., arXiv:2505.23585: r_i - sum(l r) / sum(l), l an answer's length, here its sampled tokens.
    "opo": (
        outcome(
            lambda r, rs, e, es: (
                r - np.average([r, *rs], weights=[len(sampled(x)) for x in (e, *es)])
            )
        ),
        EXACT,
    ),
    # Chu et al., arXiv:2504.02546: alpha (r_i - mean(r)) / F_norm, F_norm = 1, alpha = B / (B - M). Departs: M is
    # the paper's number of answers in groups of equal rewards; verl's B - M counts rewards that are not 0.
    "gpg": (
        lambda es: over_answers(
            lambda *a: len(es) / sum(sum(e.rewards) != 0 for e in es) * centred(*a), es
        ),
        SINGLE,
    ),
    # Hu et al., arXiv:2501.03262: the return from token t on, normalised over the batch; with baseline, the
    # answer's reward - its group's mean. Departs: the latter's normalisation is over tokens, not answers.
    "reinforce_plus_plus": (lambda es: whitened([to_go(e) for e in es], es), SINGLE),
    "reinforce_plus_plus_baseline": (lambda es: whitened(over_answers(centred, es), es), SINGLE),
    # Li et al., arXiv:2310.10505, Algorithm 1: the return from token t on - the reward of the greedy answer.
    "remax": (lambda es: [(to_go(e) - e.greedy) * e.response_mask for e in es], EXACT),
    # Li et al., arXiv:2602.07078: b_t = sum(G_t W_t) / sum(W_t), W_t = sum over j <= t of 1 - 2 pi_j + sum pi^2, over
    # those of the group that have a t-th token. Departs: + 1e-8, and b_t = 0 where one is alone (its own baseline).
    "optimal_token_baseline": (token_baseline, EXACT),
    "tir_optimal_token_baseline": (token_baseline, EXACT),
}
BY_RETURN = ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantage_is_the_papers(name, seed):
    (reference, tolerance), episodes = (
        ESTIMATORS[name],
        random_episodes(seed, name != "optimal_token_baseline"),
    )
    assert_close(advantages(episodes, name, **GDPO)[0], padded(reference(episodes)), **tolerance)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_the_sum_of_discounted_td_errors(seed):
    """Schulman et al., arXiv:1506.02438, eq. 16; after a sampled token comes the next sampled one. Departs:
    advantages are whitened over the batch's tokens, after the returns are made."""
    episodes, (gamma, lam) = random_episodes(seed), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)][seed % 3]
    raw, returns = ([np.zeros(len(e.rewards)) for e in episodes] for _ in range(2))
    for e, row, back in zip(episodes, raw, returns, strict=True):
        v = [e.values[t] for t in sampled(e)] + [0.0]  # nothing comes after the end
        delta = [e.rewards[t] + gamma * v[k + 1] - v[k] for k, t in enumerate(sampled(e))]
        row[sampled(e)] = [
            sum((gamma * lam) ** n * d for n, d in enumerate(delta[k:])) for k in range(len(delta))
        ]
        back[sampled(e)] = row[sampled(e)] + v[:-1]
    got = advantages(episodes, "gae", gamma=gamma, lam=lam)
    assert_close(got[0], padded(whitened(raw, episodes)), **SINGLE)
    assert_close(got[1], padded(returns), **EXACT)


def test_reinforce_plus_plus_whitens_over_the_batch_and_discounts_by_algorithm_gamma():
    episodes = random_episodes(0)
    got, returns = advantages(episodes, "reinforce_plus_plus", gamma=0.9)
    assert_close(returns, padded([to_go(e, 0.9) for e in episodes]), **EXACT)
    tokens = np.concatenate([got[i, sampled(e)] for i, e in enumerate(episodes)])
    assert_close([tokens.mean(), tokens.std(ddof=1)], [0, 1], atol=1e-6)


def test_grpo_without_the_std_is_dr_grpo_and_with_it_has_bessels_correction():
    """Dr. GRPO: Liu et al., arXiv:2503.20783, section 3.2. Which std, arXiv:2402.03300 does not say; n would give 1."""
    episodes = random_episodes(0)
    got = advantages(episodes, "grpo", norm_adv_by_std_in_grpo=False)[0]
    assert_close(got, padded(over_answers(centred, episodes)), **EXACT)
    assert_close(
        advantages(group_of(0.0, 1.0), "grpo")[0][:, 0], [-(0.5**0.5), 0.5**0.5], rtol=1e-5
    )


@pytest.mark.parametrize("name", ["grpo_vectorized", "gdpo"])
def test_norm_adv_by_std_in_grpo_false_is_ignored_by_vectorized_grpo_and_gdpo(name):
    """Departs: compute_advantage hands the key to `grpo` alone; these two divide by the std all the same."""
    yes, no = (
        advantages(random_episodes(0), name, norm_adv_by_std_in_grpo=f, **GDPO)[0]
        for f in (True, False)
    )
    np.testing.assert_array_equal(yes, no)


def test_rloo_is_the_leave_one_out_mean_and_remax_the_greedy_baseline_and_pass_at_k_the_lead_of_the_best():
    episodes = group_of(1.0, 0.0, 0.5)  # the greedy answer got 0.25
    assert_close(advantages(episodes, "rloo")[0][:, 0], [0.75, -0.75, 0.0], **EXACT)
    assert_close(advantages(episodes, "remax")[0][:, 0], [0.75, -0.25, 0.25], **EXACT)
    assert_close(
        advantages(episodes, "grpo_passk", norm_adv_by_std_in_grpo=False)[0][:, 0],
        [0.5, 0, 0],
        **EXACT,
    )
    assert not advantages(group_of(1.0, 1.0, 0.5), "grpo_passk")[
        0
    ].any()  # of two best, neither is needed


def test_gpg_counts_rewards_that_are_not_zero():
    """Departs: one group of two differs: alpha = B / (B - M) = 2. verl has 4/3 of 0 1, 1 1, and 4 of -1 0, 0 0."""
    for shift, alpha in [(0.0, 4 / 3), (-1.0, 4.0)]:
        episodes = group_of(shift, 1 + shift) + group_of(1 + shift, 1 + shift, group="h")
        assert_close(
            advantages(episodes, "gpg")[0][:, 0], alpha * np.array([-0.5, 0.5, 0, 0]), **SINGLE
        )


def test_gdpo_sees_components_only_so_neither_shaping_nor_kl_in_the_reward():
    """Departs: token_level_rewards, which hold what env.reward made of the verdict and the KL term, go unread."""
    episodes = random_episodes(0)
    before = advantages(episodes, "gdpo", **GDPO)[0]
    for i, e in enumerate(episodes):
        e.rewards = [r - 3.0 * i for r in e.rewards]
    np.testing.assert_array_equal(before, advantages(episodes, "gdpo", **GDPO)[0])


@pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if name not in ("remax", "reinforce_plus_plus")]
)
def test_a_group_of_one_gets_its_raw_reward(name):
    """Why `keep` drops it: there is nothing to compare with, and where the batch is whitened all others move, too.
    Departs: rloo_vectorized gives 0, where rloo gives the reward; grpo_passk ends the run."""
    episodes = [*group_of(0.0, 0.0), episode("h", 1.0)]
    if name == "grpo_passk":
        with pytest.raises(ValueError, match="at least 2"):
            advantages(episodes, name)
        return
    white = np.array([-1, -1, 2]) / 3**0.5
    expected = {
        "rloo_vectorized": [0, 0, 0],
        "gpg": [0, 0, 3],
        "gdpo": white,
        "reinforce_plus_plus_baseline": white,
    }
    assert_close(
        advantages(episodes, name, **GDPO)[0][:, 0], expected.get(name, [0, 0, 1]), **SINGLE
    )


@pytest.mark.parametrize("name", [*BY_RETURN, "grpo_passk"])
def test_a_failed_episode_left_in_the_batch_moves_its_siblings(name):
    """Why `keep` drops it: rewards are averaged without a mask. Only opo weighs by length, which is 0 here."""
    good = group_of(1.0, 0.5, 0.75)
    moved = np.abs(
        advantages([*good, episode("g", 0.0, [0])], name)[0][:3] - advantages(good, name)[0]
    ).max()
    assert moved > 0.05 if name != "opo" else moved == 0


@pytest.mark.parametrize("name", [*ESTIMATORS, "gae"])
def test_equal_rewards_teach_nothing(name):
    """Where float32 holds the reward and its sums. The greedy answer got as much, and values are all 0."""
    assert_close(
        advantages([episode(g, 0.25, [1, 1]) for g in "aabbb"], name, **GDPO)[0], 0, atol=1e-6
    )


def test_equal_rewards_that_float32_cannot_hold_may_teach_something():
    """to_batch makes float32 scores. The mean of three 0.9 is a rounding off, its std no larger: each gets 0.056."""
    for reward, low, high in [(1.0, 0, 0), (0.25, 0, 0), (0.9, 0.01, 0.1), (170.72, 0.1, 1)]:
        batch = training.build_batch(group_of(reward, reward, reward), 0, 1.0)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        training.compute_advantages(batch, recipe())
        assert low <= batch.batch["advantages"].abs().max() <= high


@pytest.mark.parametrize("name", [*ESTIMATORS, "gae"])
def test_an_observed_gap_changes_no_sampled_tokens_advantage(name):
    """Departs: optimal_token_baseline compares answers at equal positions, observed tokens counted."""
    plain = random_episodes(1, gaps=False)
    gapped = [copy.copy(e) for e in plain]
    observed = {"response_mask": 0, "rewards": 0.0, "values": 9.0, "pi": 0.7, "squares": 0.6}
    for i, e in enumerate(gapped):
        for key, fill in {"response_ids": 2, "log_probs": 0.0, **observed}.items():
            by_token, at = list(getattr(e, key)), 1 + i % (len(plain[i].rewards) - 1)
            setattr(e, key, by_token[:at] + [fill] * (1 + i % 3) + by_token[at:])
    before, after = (advantages(episodes, name, **GDPO)[0] for episodes in (plain, gapped))
    kept = padded([after[i, sampled(e)] for i, e in enumerate(gapped)])
    assert np.allclose(kept, before, rtol=1e-6, atol=1e-6) == (name != "optimal_token_baseline")


def agg_weights(mask, mode, width=None):  # what each token's loss counts for in the sum [B, R]
    answers, out = sum(bool(row.any()) for row in mask), np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        out[i, t] = {
            "token-mean": 1 / mask.sum(),  # DAPO, Yu et al., arXiv:2503.14476, section 3.3
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / answers,
            "seq-mean-token-mean": 1 / answers / mask[i].sum(),  # GRPO, arXiv:2402.03300, eq. 3
            "seq-mean-token-sum-norm": 1
            / answers
            / (width or mask.shape[1]),  # Dr. GRPO, arXiv:2503.20783
        }[mode]
    return out


def ppo(x, old, a, low=0.2, high=0.28, c=math.inf):
    """(loss, derivative by x) of a token: Schulman et al., arXiv:1707.06347, eq. 7, with DAPO's two bounds
    (arXiv:2503.14476, section 3.1) and, for A < 0, dual-clip PPO's floor c A (Ye et al., arXiv:1912.09729)."""
    r = math.exp(x - old)
    objective = min(r * a, np.clip(r, 1 - low, 1 + high) * a)
    objective = max(objective, c * a) if a < 0 else objective
    return -objective, -r * a if objective == r * a else 0.0


def sapo(x, old, a):
    r, tau = math.exp(x - old), 1.0 if a > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * p * a, -4 * p * (1 - p) * r * a


def by_token(loss):
    return lambda d: {at: loss(d.x[at], d.old[at], d.a[at]) for at in d.tokens}


def stopped(weight):
    """- sg(weight(pi, pi_old, A)) A log pi."""
    return by_token(
        lambda x, old, a: tuple(-weight(math.exp(x), math.exp(old), a) * a * v for v in (x, 1))
    )


def dppo(divergence):
    def weight(pi, mu, a):
        return min(pi / mu, 3.0) * (
            divergence(mu, pi) <= (0.28 if a > 0 else 0.2) or (pi > mu) != (a > 0)
        )

    return stopped(weight)


def by_answer(loss):
    return lambda d: {  # loss(log ratios of the token's answer, its own log ratio, A)
        at: loss([d.log_r[x] for x in d.tokens if x[0] == at[0]], d.log_r[at], d.a[at])
        for at in d.tokens
    }


def gmpo(log_ratios, log_r, a):
    clipped = [min(v, 0.28) if a > 0 else max(v, -0.2) for v in log_ratios]
    value = -a * math.prod(math.exp(v) for v in clipped) ** (1 / len(clipped))
    return value, value * (log_r <= 0.28 if a > 0 else log_r >= -0.2)


def covariances(d):
    a, x = np.mean([d.a[at] for at in d.tokens]), np.mean([d.x[at] for at in d.tokens])
    return {at: (d.a[at] - a) * (d.x[at] - x) for at in d.tokens}


def clip_cov(d):
    cov, out = covariances(d), by_token(ppo)(d)
    return {at: (0.0, 0.0) if 1 < cov[at] < 5 and out[at][1] else out[at] for at in d.tokens}


def kl_cov(d, fraction=0.2, beta=0.1):
    ranked = sorted(d.tokens, key=covariances(d).get)
    out = by_token(lambda x, old, a: (-math.exp(x - old) * a,) * 2)(d)
    for at in ranked[-max(1, int(fraction * len(ranked))) :]:
        out[at] = (
            out[at][0] + beta * abs(d.log_r[at]),
            out[at][1] + beta * math.copysign(1, d.log_r[at]),
        )
    return out


LOSSES = {  # name: tokens -> {token: (loss, derivative by x)}
    "vanilla": by_token(functools.partial(ppo, c=3.0)),
    "bypass_mode": by_token(functools.partial(ppo, c=3.0)),  # with verl's default of it, ppo_clip
    # Qi et al., arXiv:2602.04879: truncated r A, cut where the policy leaves the trust region. The gradient is the
    # paper's, the value that of sg(r) A log pi. Departs: truncated at clip_ratio_c, whose default is dual-clip's 3.
    "dppo_tv": dppo(lambda mu, pi: abs(mu - pi)),
    "dppo_kl": dppo(lambda p, q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))),
    # Gao et al., arXiv:2511.20347: (4 / tau) sigmoid(tau (r - 1)) A, whose derivative by r is 4 p (1 - p) A.
    "sapo": by_token(sapo),
    # Chu et al., arXiv:2504.02546: A log pi.
    "gpg": stopped(lambda *_: 1.0),
    # Richemond et al., arXiv:2405.19107, DRO-V's gradient of the policy. Departs: its quadratic term is around the
    # old policy, where the paper has the reference, and of tokens, where the paper has answers. Here beta = 0.3.
    "dro": by_token(lambda x, old, a: (-a * x + 0.15 * (x - old) ** 2, -a + 0.3 * (x - old))),
    # MiniMax, arXiv:2506.13585, eq. 4 and 5: sg(clip(r)) A log pi. Departs: the lower bound is on by default.
    "cispo": stopped(lambda pi, mu, _: np.clip(pi / mu, 0.8, 1.28)),
    # Cui et al., arXiv:2505.22617: PPO, no gradient on (here all) tokens whose covariance is in (1, 5); r A and a KL
    # penalty on the tokens of largest covariance. Departs: Clip-Cov's tokens also lose their loss, and are not drawn
    # from those that PPO clips; KL-Cov's KL is |log r|, which on-policy has no gradient.
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    # Zheng et al., arXiv:2507.18071, eq. 5 and 7: PPO's loss of s = (pi / pi_old)^(1 / length) of the answer, so that
    # the loss by x_t is sloped by s A / length. verl has eq. 14's sg(s) pi / sg(pi), so A may be a token's.
    "gspo": by_answer(lambda log_ratios, _, a: ppo(np.mean(log_ratios), 0.0, a)),
    # Zhao et al., arXiv:2507.20673: A times the geometric mean of ratios, each clipped on the side that A pushes it
    # to. Departs: bounds of log ratios are clip_ratio_*, 0.2 by default where the paper has 0.4.
    "geo_mean": by_answer(gmpo),
}
SETTINGS = {"clip_cov_ratio": 1.0, "kl_cov_ratio": 0.2, "dro_beta": 0.3}


def random_tokens(seed, of_answers=False, on_policy=False):
    """Log-probs x and old [B, R], advantages a, weights w and a mask with padding, gaps and a row of filling."""
    rng, B, R = np.random.default_rng(seed), 8, 9
    mask = (np.arange(R) < rng.integers(2, R + 1, B)[:, None]) & (rng.random((B, R)) < 0.8)
    mask[:, 0], mask[-1] = True, False
    x = rng.uniform(-3, -0.05, (B, R))
    old = x if on_policy else np.minimum(x - rng.normal(0, 0.8, (B, R)), -0.02)
    a, w = (
        np.broadcast_to(v, (B, R))
        for v in (rng.normal(0, 1.5, (B, 1)), rng.uniform(0.2, 2, (B, 1)))
    )
    if not of_answers:
        a, w = rng.normal(0, 1.5, (B, R)), rng.uniform(0.2, 2, (B, R))
    tokens = [tuple(at) for at in np.argwhere(mask)]
    return SimpleNamespace(x=x, old=old, log_r=x - old, a=a, w=w, mask=mask, tokens=tokens)


def actor(policy_loss=None, **changes):
    """The actor's configuration as verl's workers get it: verl's defaults, and changes."""
    config = OmegaConf.create(
        OmegaConf.to_container(recipe().actor_rollout_ref, resolve=True)
    ).actor
    changes = {
        "clip_ratio_high": 0.28,
        **changes,
        "policy_loss": {**SETTINGS, **(policy_loss or {})},
    }
    return omega_conf_to_dataclass(OmegaConf.merge(config, changes))


def loss_and_gradient(name, d, mode="token-mean", config=None, weights=None):
    """verl's loss and its gradient by x, with the mask as bool, as verl's ppo_loss hands it over."""
    old, x, a, mask = (torch.tensor(v) for v in (d.old, d.x, d.a, d.mask))
    weights = None if weights is None else torch.tensor(weights)
    loss = core_algos.get_policy_loss_fn(name)
    loss = loss(
        old, x.requires_grad_(), a, mask, mode, config=config or actor(), rollout_is_weights=weights
    )[0]
    loss.backward()
    return loss.item(), x.grad.numpy()


def assert_same(got, loss, gradient):
    assert_close(got[0], loss, **EXACT)
    assert_close(got[1], gradient, **EXACT)


def test_every_estimator_and_loss_of_verl_has_a_reference():
    assert {*ESTIMATORS, "gae"} == {e.value for e in core_algos.AdvantageEstimator}
    assert set(LOSSES) == set(core_algos.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_its_gradient_are_the_papers(name, seed):
    """Odd seeds have weights of rollout correction. Departs: bypass_mode does not read them; sapo and geo_mean read
    no mode, and the latter's mean is over all rows, filling included; gspo is the paper's by seq-mean-token-mean."""
    d, mode = random_tokens(seed, of_answers=name == "geo_mean"), MODES[seed % 5]
    only = "seq-mean-token-mean" if name in ("sapo", "geo_mean") else None
    loss, gradient, weights = 0.0, np.zeros(d.x.shape), agg_weights(d.mask, only or mode)
    weights *= d.w if seed % 2 and name != "bypass_mode" else 1.0
    weights *= 7 / 8 if name == "geo_mean" else 1.0
    for at, (value, slope) in LOSSES[name](d).items():
        loss, gradient[at] = loss + weights[at] * value, weights[at] * slope
    assert_same(loss_and_gradient(name, d, mode, weights=d.w if seed % 2 else None), loss, gradient)


@pytest.mark.parametrize("seed", SEEDS)
def test_bypass_reinforce_is_truncated_importance_sampling(seed):
    """Ionides 2008, Truncated Importance Sampling: - sg(w) A log pi, w = min(pi / mu, 2) of token or answer."""
    d, level = random_tokens(seed), ["token", "sequence"][seed % 2]
    loss, gradient, weights = 0.0, np.zeros(d.x.shape), agg_weights(d.mask, "token-mean")
    for i, t in d.tokens:
        span = [(i, t)] if level == "token" else [at for at in d.tokens if at[0] == i]
        gradient[i, t] = (
            -weights[i, t] * min(math.exp(sum(d.log_r[at] for at in span)), 2.0) * d.a[i, t]
        )
        loss += gradient[i, t] * d.x[i, t]
    config = actor({"rollout_correction": {"loss_type": "reinforce", "rollout_is": level}})
    assert_same(loss_and_gradient("bypass_mode", d, config=config), loss, gradient)


@pytest.mark.parametrize("name", core_algos.POLICY_LOSS_REGISTRY)
def test_on_policy_every_loss_raises_log_probs_by_the_advantage(name):
    """The sign: a loss goes down, so where the policy has not moved its gradient is REINFORCE's, - A."""
    d = random_tokens(0, of_answers=True, on_policy=True)
    d.x = d.old = d.x[:-1]
    d.a, d.mask = d.a[:-1], d.mask[:-1]  # without the row of filling, over which geo_mean averages
    config = actor({"clip_cov_lb": 1e9, "clip_cov_ub": 1e9})  # no token is chosen
    gradient = loss_and_gradient(name, d, "seq-mean-token-mean", config)[1]
    assert_close(gradient, -d.a * agg_weights(d.mask, "seq-mean-token-mean"), **EXACT)


def pull(name, ratios, a, **changes):
    """The gradient on the tokens of one answer over - A / length: the weight that the loss gives each."""
    x = np.full((1, len(ratios)), -3.0)
    d = SimpleNamespace(
        x=x, old=x - np.log(ratios), a=np.full(x.shape, a), mask=np.full(x.shape, True)
    )
    return pytest.approx(-loss_and_gradient(name, d, config=actor(**changes))[1][0] / a * x.size)


def test_clip_higher_gives_more_room_above_than_below():
    """DAPO, arXiv:2503.14476, section 3.1. Departs: clip_ratio is unread, as both bounds have defaults."""
    assert pull("vanilla", [1.25, 1.29, 0.79], 1.0) == [1.25, 0, 0.79]
    assert pull("vanilla", [1.25, 1.29, 0.79], -1.0) == [1.25, 1.29, 0]
    assert pull("vanilla", [1.25], 1.0, clip_ratio_high=0.2) == [0]
    assert pull("vanilla", [1.25], 1.0, clip_ratio=0.01) == [1.25]


def test_dual_clip_lets_go_of_bad_tokens_that_grew_cispo_of_none_and_gspo_of_whole_answers():
    assert pull("vanilla", [2.9, 3.1], -1.0) == [2.9, 0] and pull(
        "vanilla", [3.1], -1.0, clip_ratio_c=10.0
    ) == [3.1]
    assert pull("cispo", [3.1, 0.1], 1.0) == [1.28, 0.8] and pull("cispo", [3.1, 0.1], -1.0) == [
        1.28,
        0.8,
    ]
    assert pull("gspo", [2.0, 1.0], 1.0) == [0, 0] and pull("gspo", [2.0, 0.5], 1.0) == [1, 1]
    assert pull("vanilla", [2.0, 1.0], 1.0) == [0, 1] and pull("vanilla", [2.0, 0.5], 1.0) == [
        0,
        0.5,
    ]


def test_dppo_truncates_at_dual_clips_default_of_3():
    """Departs: verl's code falls back to 20, and the paper wants it large, but clip_ratio_c always has a value."""
    assert pull("dppo_tv", [5.0], -1.0) == [3.0] and pull(
        "dppo_tv", [5.0], -1.0, clip_ratio_c=20.0
    ) == [5.0]


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_by_hand_of_random_tokens_and_in_micro_batches(mode):
    """With the totals that verl's engine hands over; it sums micro-batches and averages ranks, here 2."""
    by_hand = dict(zip(MODES, [7 / 4, 7, 7 / 2, (4 + 1) / 2, 7 / 2 / 4], strict=True))[mode]
    losses, mask = (
        torch.tensor([[4.0, 9, 9, 9], [1.0, 1, 1, 9]]),
        torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]),
    )
    assert core_algos.agg_loss(losses, mask, mode) == by_hand
    d = random_tokens(0)
    losses, mask = torch.tensor(d.x), torch.tensor(d.mask)
    totals = {
        "batch_num_tokens": len(d.tokens),
        "global_batch_size": 7,
        "loss_scale_factor": 5,
        "dp_size": 2,
    }
    parts = [core_algos.agg_loss(losses[i::3], mask[i::3], mode, **totals).item() for i in range(3)]
    assert_close(sum(parts) / 2, (d.x * agg_weights(d.mask, mode, 5)).sum(), **EXACT)
    assert_close(
        core_algos.agg_loss(losses, mask, mode).item(),
        (d.x * agg_weights(d.mask, mode)).sum(),
        **EXACT,
    )


def test_dr_grpos_norm_and_geo_mean_depend_on_the_split_into_micro_batches():
    """Departs: the former divides by the width of the tensor, so by the longest answer of a micro-batch, unless
    loss_scale_factor is set; the latter reads no totals, so each of 2 micro-batches has twice its gradient."""
    mode, short, wide = (
        "seq-mean-token-sum-norm",
        torch.ones(2, 4),
        torch.nn.functional.pad(torch.ones(2, 4), (0, 4)),
    )
    assert core_algos.agg_loss(wide, wide, mode) == core_algos.agg_loss(short, short, mode) / 2
    assert core_algos.agg_loss(wide, wide, mode, loss_scale_factor=4) == core_algos.agg_loss(
        short, short, mode
    )
    d = random_tokens(0, of_answers=True)
    half = SimpleNamespace(x=d.x[:4], old=d.old[:4], a=d.a[:4], mask=d.mask[:4])
    assert_close(
        loss_and_gradient("geo_mean", half)[1], 2 * loss_and_gradient("geo_mean", d)[1][:4], **EXACT
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_is_half_the_larger_of_two_squares(seed):
    """arXiv:1707.06347, eq. 9. Departs: halved, and clipped around the old value (see arXiv:2005.12729, section 3)."""
    d, mode = random_tokens(seed), MODES[seed % 5]
    loss, gradient, weights = 0.0, np.zeros(d.x.shape), agg_weights(d.mask, mode)
    for at in d.tokens:
        error, clipped = (
            v - d.a[at] for v in (d.x[at], np.clip(d.x[at], d.old[at] - 0.5, d.old[at] + 0.5))
        )
        loss += weights[at] * max(error**2, clipped**2) / 2
        gradient[at] = weights[at] * error * (error**2 >= clipped**2)
    v, old, returns, mask = (torch.tensor(x) for x in (d.x, d.old, d.a, d.mask))
    got = core_algos.compute_value_loss(v.requires_grad_(), returns, old, mask, 0.5, mode)[0]
    got.backward()
    assert_same((got.item(), v.grad.numpy()), loss, gradient)


KL = {  # (value, derivative by log p = x); Schulman 2020, joschu.net/blog/kl-approx.html; k3: arXiv:2402.03300, eq. 4
    "k1": lambda x, q: (x - q, 1.0),
    "abs": lambda x, q: (abs(x - q), math.copysign(1, x - q)),
    "k2": lambda x, q: ((x - q) ** 2 / 2, x - q),
    "k3": lambda x, q: (math.exp(q - x) - (q - x) - 1, 1 - math.exp(q - x)),  # Departs: cut at 10
}
KL |= {"kl": KL["k1"], "mse": KL["k2"], "low_var_kl": KL["k3"]}
KL |= {
    f"{k}+": lambda x, q, f=KL[k]: (f(x, q)[0], x - q) for k in ("k1", "k3", "low_var_kl")
}  # k2's derivative


@pytest.mark.parametrize("kind", KL)
def test_kl_penalty_and_its_gradient(kind):
    d = random_tokens(0)
    x = torch.tensor(d.x, requires_grad=True)
    got = core_algos.kl_penalty(x, torch.tensor(d.old), kind)
    got.sum().backward()
    assert_same((got.detach().numpy(), x.grad.numpy()), *np.vectorize(KL[kind])(d.x, d.old))
    assert (
        core_algos.kl_penalty(torch.tensor(-5.0), torch.tensor(0.0), "k3") == 10
    )  # of e^5 - 6 = 142


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_all_kl_estimates_but_k2_have_the_kls_mean_and_only_k2_and_those_with_a_plus_its_gradient(
    kind,
):
    """Expected over a vocabulary of 5, exactly. As a loss, k1 pulls nowhere and k3 along the reversed KL."""
    rng = np.random.default_rng(0)
    logits, q = (
        torch.tensor(rng.normal(size=5), requires_grad=True),
        torch.tensor(rng.normal(size=5)).log_softmax(0),
    )
    p = logits.log_softmax(0)
    kl, estimate = (
        (p.exp() * (p - q)).sum(),
        (p.exp().detach() * core_algos.kl_penalty(p, q, kind)).sum(),
    )
    true, got = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (kl, estimate))
    assert torch.isclose(estimate, kl) == (kind != "k2")
    assert torch.allclose(got, {"k1": 0 * p, "k3": p.exp() - q.exp()}.get(kind, true))


@pytest.mark.parametrize(("kind", "target"), [("k1", 0.1), ("k2", 0.1), ("k2", 40.0)])
def test_kl_in_the_reward_is_taken_from_sampled_tokens_only(kind, target):
    """Ziegler et al., arXiv:1909.08593, section 2.2: R - beta log(pi / ref), and the controller of beta."""
    episodes, rng = random_episodes(0), np.random.default_rng(0)
    batch, expected = training.build_batch(episodes, 0, 1.0), padded([e.rewards for e in episodes])
    old, ref = rng.normal(size=(2, *expected.shape))
    batch.batch["old_log_probs"], batch.batch["ref_log_prob"] = torch.tensor(old), torch.tensor(ref)
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.25, "target_kl": target, "horizon": 100}
    config = OmegaConf.create({"algorithm": {"kl_ctrl": kl_ctrl, "kl_penalty": kind}})
    controller = training.make_kl_controller(
        config, 0.5
    )  # as far as it had come, and not where it began
    metrics = training.apply_kl_penalty(batch, controller, config)
    spent = np.vectorize(lambda x, q: KL[kind](x, q)[0])(old, ref)
    for i, e in enumerate(episodes):
        expected[i, sampled(e)] -= 0.5 * spent[i, sampled(e)]
    assert_close(batch.batch["token_level_rewards"].numpy(), expected, **EXACT)
    assert (batch.batch["token_level_rewards"] != batch.batch["token_level_scores"]).any()
    kl = np.mean([np.mean(spent[i, sampled(e)]) for i, e in enumerate(episodes)])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert (
        controller.value
        == pytest.approx(0.5 * (1 + np.clip(kl / target - 1, -0.2, 0.2) * 10 / 100))
        != 0.5
    )
    assert training.make_kl_controller(config, 0.0).value == 0.25  # of a run that begins


# --- of templates/ -------------------------------------------------------------------------------


def gradient_in_parts(loss, d, advantages, mode, rows):
    """(loss, gradient by x) of a mini-batch that comes in micro-batches, as verl's engine adds them. rows: of each."""
    config, x = actor(), torch.tensor(d.x, requires_grad=True)
    totals = {
        "dp_size": 1,
        "batch_num_tokens": len(d.tokens),
        "global_batch_size": int(d.mask.any(axis=1).sum()),
    }
    config.global_batch_info.update(totals)
    old, mask = torch.tensor(d.old), torch.tensor(d.mask)
    parts = [
        loss(old[part], x[part], advantages[part], mask[part], mode, config)[0] for part in rows
    ]
    sum(parts).backward()
    return sum(parts).item(), x.grad.numpy()


@pytest.mark.parametrize("seed", SEEDS)
def test_sppo_regresses_an_answers_log_ratio_on_how_often_it_wins(seed):
    """Wu et al., arXiv:2405.00675, Algorithm 1: (log pi(y)/pi_t(y) - eta (P(y > pi_t) - 1/2))^2, mean over answers; P
    is the mean over the K answers to the prompt. Departs: of rewards the larger wins; eta = 1."""
    d, rng = random_tokens(seed), np.random.default_rng(seed)
    groups, rewards = np.array(list("ababbbcd")), rng.choice([0.0, 0.25, 1.0], 8)  # d is filling
    loss, gradient, answers = 0.0, np.zeros(d.x.shape), sum(d.mask.any(axis=1))
    for i in range(7):
        wins = [
            1.0 if rewards[i] > r else 0.5 if rewards[i] == r else 0.0
            for r in rewards[groups == groups[i]]
        ]
        error = d.log_r[i][d.mask[i]].sum() - 1.0 * (np.mean(wins) - 0.5)
        loss, gradient[i] = loss + error**2 / answers, 2 * error / answers * d.mask[i]
    by_token = torch.zeros(d.x.shape, dtype=torch.float64)
    by_token[:, -1] = torch.tensor(rewards)
    advantages, _ = preference(by_token, torch.tensor(d.mask), groups)
    assert_same(
        gradient_in_parts(sppo, d, advantages, MODES[3], (slice(0, 3), slice(3, 8))), loss, gradient
    )
    with pytest.raises(UserFunctionError, match="seq-mean-token-mean"):
        gradient_in_parts(sppo, d, advantages, MODES[0], [slice(0, 8)])


@pytest.mark.parametrize("seed", SEEDS)
def test_spins_gradient_is_that_of_its_loss(seed):
    """Chen et al., arXiv:2401.01335, eq. 4.7: log(1 + exp(-lambda [log p(y)/p_t(y) - log p(y')/p_t(y')])), by autograd.
    a has three answers of the policy's, b one, c none and d not the row's: these two teach nothing."""
    d, index = random_tokens(seed, on_policy=True), list("aaaabbcd")
    d.mask[-1, 0] = True
    own, ref = [1, 4, 6], torch.tensor(np.random.default_rng(seed).normal(-1, 0.5, d.x.shape))
    mask, x = torch.tensor(d.mask), torch.tensor(d.x, requires_grad=True)
    ratio = ((x - ref) * mask).sum(dim=1)
    pairs = {1: [0, 2, 3], 4: [5]}
    losses = [
        -logsigmoid(0.1 * (ratio[y] - ratio[other])) / len(some)
        for y, some in pairs.items()
        for other in some
    ]
    (sum(losses) / len(pairs)).backward()
    turn = torch.where(mask, 0, -1)
    turn[own] = -1
    advantages, _ = spin(mask, turn, index, torch.tensor(d.old), ref)
    got = gradient_in_parts(dpo, d, advantages, MODES[2], (slice(0, 3), slice(3, 8)))[
        1
    ]  # a pair is cut in two
    assert_close(got, x.grad.numpy(), **EXACT)


def test_distillation_follows_the_reverse_kl():
    """Agarwal et al., arXiv:2306.13649, section 3 with lambda = 1 and KL(student || teacher): the gradient of the kit's
    advantages, and minus their mean, expected over a vocabulary of 5, exactly. Nothing on what was observed."""
    rng = np.random.default_rng(0)
    logits, q = (
        torch.tensor(rng.normal(size=5), requires_grad=True),
        torch.tensor(rng.normal(size=5)).log_softmax(0),
    )
    p = logits.log_softmax(0)
    kl = (p.exp() * (p - q)).sum()
    a = distill(p.detach()[None], q[None], torch.ones(1, 5, dtype=torch.int64))[0][
        0
    ]  # [5], of each token there is
    assert_close(-(p.exp() * a).sum().item(), kl.item(), **EXACT)
    got, true = (
        torch.autograd.grad(v, logits, retain_graph=True)[0]
        for v in (-(p.exp().detach() * a * p).sum(), kl)
    )
    assert_close(got.numpy(), true.numpy(), **EXACT)
    assert distill(p.detach()[None], q[None], torch.tensor([[1, 1, 0, 1, 0]]))[0][
        0, [2, 4]
    ].tolist() == [0, 0]


# --- a function in the place of verl's ------------------------------------------------------------

ASKS = """
def by_name(token_level_rewards, response_mask, turn, index, gamma, lam, rollout_is_weights, config):
    weight = 0.25 if rollout_is_weights is None else rollout_is_weights
    same = (index[:, None] == index).sum(axis=1)[:, None]
    size = response_mask.new_tensor(same)
    return response_mask * gamma * weight, token_level_rewards * lam + (turn == 1) * size * config.get("extra", 0)
"""


def test_an_estimator_of_ones_own_gets_each_thing_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(ASKS)
    monkeypatch.chdir(tmp_path)
    user_functions.register(["mine.py:by_name", "vanilla"])
    made = [*group_of(1.0, 0.5), episode("h", 0.25, [1, 0, 1])]
    made[2].turns = [TurnSpan(0, 1, 1), TurnSpan(2, 3, 3)]
    batch = training.build_batch(made, 0, 1.0)
    b = batch.batch
    b["token_level_rewards"] = b["token_level_scores"] * 2
    settings = OmegaConf.merge(
        recipe().algorithm, {"adv_estimator": "mine.py:by_name", "gamma": 0.9, "lam": 0.5}
    )
    config = OmegaConf.create({"algorithm": settings})
    training.compute_advantages(batch, config)
    assert_close(b["advantages"], [[0.225, 0, 0]] * 2 + [[0.225, 0, 0.225]], **SINGLE)
    assert_close(b["returns"], [[1.0, 0, 0], [0.5, 0, 0], [0, 0, 0.25]], **SINGLE)
    b["rollout_is_weights"] = torch.full((3, 3), 2.0)
    config.algorithm.extra = 3
    training.compute_advantages(batch, config)
    assert_close(b["advantages"], [[1.8, 0, 0]] * 2 + [[1.8, 0, 1.8]], **SINGLE)
    assert_close(b["returns"], [[1.0, 0, 0], [0.5, 0, 0], [0, 0, 3.25]], **SINGLE)


def test_gamma_lam_and_the_std_are_the_recipes_and_not_verls_defaults():
    """The partner of the tests above: with other numbers the same call gives other advantages."""
    made = random_episodes(0)
    gae = {
        (gamma, lam): advantages(made, "gae", gamma=gamma, lam=lam)[1]
        for gamma in (0.9, 0.5)
        for lam in (0.9, 0.5)
    }
    for one, returns in gae.items():
        for other, others in gae.items():
            assert np.allclose(returns, others) == (one == other)
    divided, not_divided = (
        advantages(made, "grpo", norm_adv_by_std_in_grpo=by)[0] for by in (True, False)
    )
    assert not np.allclose(divided, not_divided)
