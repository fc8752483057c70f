"""Functions of one's own: what a recipe may name, and the kit's pieces, each against plain Python or autograd."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, RECIPE, ROOT, load, tiny, write_rows
from omegaconf import OmegaConf

import checks
import config as recipes
import env
import own
import pieces
import training
from inference import Episode
from own import OwnError
from summary import summary

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
FILE = """
import not_there_at_all
"""
GOOD = """
def shorter(episode, per_token=0.001):
    return episode.reward - per_token * len(episode.response_ids)

def flat(token_level_rewards, response_mask):
    return response_mask, response_mask

def greedy_baseline(token_level_rewards, response_mask, answer_key):
    return response_mask, response_mask

def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return (advantages * log_prob).sum(), {}

def first(tasks, size, batch, seed, pass_rates):
    return tasks[:size]

def none(episodes):
    return []

NOT_A_FUNCTION = 3
"""


def episode(reward=1.0, length=3, group="g", ended="stop", **fields):
    response = list(range(length))
    return Episode("r", group, "s", [1], response, [1] * length, [-1.0] * length, reward=reward, ended=ended, **fields)


# --- naming a function in a recipe ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("env.reward=nowhere.py:f", r"env\.reward=nowhere\.py:f: no file nowhere\.py here"),
        ("env.reward=verdict", r"env\.reward=verdict: wants path\.py:function"),
        ("env.reward=good.py:longer", "has no function longer; it has shorter, flat"),
        ("env.reward=good.py:NOT_A_FUNCTION", "has no function NOT_A_FUNCTION"),
        ("env.reward={function: good.py:shorter, per_word: 1}", r"cannot be called with \(episode\) .*per_word"),
        ("env.filters=good.py:none", "env.filters=good.py:none: wants a list"),
        ("env.filters=[good.py:shorter, good.py:first]", r"cannot be called with \(episodes\)"),
        ("env.sampler=good.py:none", r"cannot be called with \(tasks, size, batch, seed, pass_rates\)"),
        ("env.reward=broken.py:f", "cannot be imported: ModuleNotFoundError.*not_there_at_all"),
        ("algorithm.adv_estimator=good.py:greedy_baseline", r"asks for answer_key; there is token_level_rewards, "),
        (f"{LOSS_MODE}=good.py:flat", r"cannot be called with \(old_log_prob, log_prob"),
    ],
)
def test_what_cannot_be_called_is_an_error_before_anything_starts(workspace, tmp_path, monkeypatch, change, named):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OwnError, match=named):
        load(workspace, change)


def test_functions_of_ones_own_are_taken_with_their_settings(workspace, tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    config, data = load(
        workspace,
        "env.reward={function: good.py:shorter, per_token: 0.5}",
        "env.filters=[good.py:none, pieces.py:drop_uniform]",
        "env.sampler=good.py:first",
        "algorithm.adv_estimator=good.py:flat",
        f"{LOSS_MODE}=good.py:loss",
    )
    assert data.reward(episode(length=3)) == 1.0 - 1.5
    assert [f([]) for f in data.filters] == [[], []] and data.filters[0]([1]) == []
    assert data.sampler(data.train, 2, 1, 0, {}) == data.train[:2]
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    own.register([config.algorithm.adv_estimator, OmegaConf.select(config, LOSS_MODE)])
    assert get_adv_estimator_fn("good.py:flat").__name__ == "flat"
    assert get_policy_loss_fn("good.py:loss").__name__ == "loss"
    assert not training.needs_critic(config) and not training.asks_for(config, "index")
    import ray

    # the loss goes to processes that have no such file
    travels = ray.cloudpickle.dumps(get_policy_loss_fn("good.py:loss"))
    name = get_policy_loss_fn("good.py:loss").__module__
    module = sys.modules.pop(name)
    try:
        assert ray.cloudpickle.loads(travels)(None, torch.ones(2), torch.ones(2), None, "", None)[0] == 2
    finally:
        sys.modules[name] = module


def test_verls_own_names_are_all_known():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator

    assert set(checks.ESTIMATORS) == {e.value for e in AdvantageEstimator} <= set(ADV_ESTIMATOR_REGISTRY)
    assert set(checks.LOSSES) <= set(POLICY_LOSS_REGISTRY)
    assert {n for n in POLICY_LOSS_REGISTRY if ".py:" not in n and n not in checks.LOSSES} <= {"plain_ratio"}
    alone = set()
    for name in checks.ESTIMATORS:
        if not training.asks_for(OmegaConf.create({"algorithm": {"adv_estimator": name}}), "index"):
            alone.add(name)
    assert alone == set(checks.ALONE)
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    assert set(checks.REJECTIONS) == SUPPORTED_ROLLOUT_RS_OPTIONS
    for mode in checks.VALUES["actor_rollout_ref.actor.loss_agg_mode"]:
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode)
    for kind in checks.KL:
        kl_penalty(torch.ones(1), torch.ones(1), kind)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["algorithm.adv_estimator=grppo"], r"verl has gae, .*; did you mean grpo\?"),
        ([f"{LOSS_MODE}=gsp"], r"did you mean gspo\?"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        ([f"{LOSS_MODE}=dro"], "needs actor_rollout_ref.actor.policy_loss.dro_beta"),
        ([f"{LOSS_MODE}=bypass_mode"], "set by algorithm.rollout_correction.bypass_mode=true"),
        (["algorithm.rollout_correction.bypass_mode=true", f"{LOSS_MODE}=gspo"], "has a loss of its own"),
        (["algorithm.filter_groups.enable=true"], "needs max_num_gen_batches"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"]
            + ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=remax"],
            r"rollout\.n=1: drop_uniform would drop",
        ),
        (["algorithm.rollout_correction.rollout_is=tokens"], "one of null, token, sequence"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "needs rollout_rs_threshold"),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=true"],
            "optimal_token_baseline needs the pass",
        ),
        (["algorithm.kl_ctrl.type=adaptve"], "one of fixed, adaptive"),
        (["algorithm.adv_estimator=vtrace"], "one of your own is path.py:function"),
        (["algorithm.rollout_correction.rollout_rs=foo"], "one of token_k1"),
        (["actor_rollout_ref.actor.loss_agg_mode=token_mean"], "one of token-mean"),
        (["algorithm.kl_penalty=k5"], "one of kl, "),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights=[1,2]"],
            "gdpo_reward_weights are 2, .* 1; give one weight for each key",
        ),
        (["critic.enable=true"], "the advantage decides"),
        (["actor_rollout_ref.model.lora_rank=8"], r"configs/lora\.yaml"),
        (["reward.reward_model.enable=true"], "needs reward.reward_model.model_path"),
        (["reward.reward_model.enable=true", "reward.reward_model.model_path=./no"], "no model folder"),
        (["reward.reward_model.enable=true", "reward.reward_model.model_path=tied"], "has no scalar head"),
        (["algorithm.adv_estimator={function: pieces.py:turn_grpo}"], "without settings"),
        (["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=pieces.py:turn_grpo"], "at least two answers"),
    ],
)
def test_what_does_not_go_together_is_an_error(workspace, monkeypatch, changes, named):
    monkeypatch.chdir(workspace)
    with pytest.raises(recipes.ConfigError, match=named):
        load(workspace, *changes)


def test_a_truncated_sampling_distribution_is_warned_of(workspace):
    for change, warned in (("top_p=0.9", True), ("top_k=20", True), ("temperature=0.9", False)):
        text = summary(*load(workspace, f"actor_rollout_ref.rollout.{change}"), "train")
        assert ("rollout_correction is biased" in text) == warned


def test_another_reward_does_not_inherit_settings(workspace):
    """dapo's shaper has a limit; what comes after it replaces it whole, unless it only changes a setting."""
    dapo = str(ROOT / "configs" / "dapo.yaml")

    def reward(*changes):
        return recipes.load_config([str(RECIPE), dapo, *changes[:1]], changes[1:])[0].env.reward

    assert reward(str(ROOT / "configs" / "reward_model.yaml")) == {
        "function": "pieces.py:weighted",
        "weights": {"reward_model": 0.2},
    }
    assert reward(dapo, "env.reward=x.py:f") == "x.py:f"
    assert reward(dapo, "env.reward={function: x.py:f, per_token: 1}") == {"function": "x.py:f", "per_token": 1}
    assert reward(dapo, "env.reward.penalty=0.5") == {
        "function": "pieces.py:overlong",
        "limit": 12,
        "penalty": 0.5,
    }


def overlays():
    recipe_files = {"base", "cpu", "smollm2"}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem not in recipe_files and not OmegaConf.load(path).get("gym"):
            yield path


@pytest.mark.parametrize("path", list(overlays()), ids=lambda path: path.stem)
def test_an_overlay_is_fifteen_lines_and_goes_over_either_recipe(workspace, path):
    assert len(path.read_text().splitlines()) <= 15
    for over in ("math.yaml", "math_cpu.yaml"):
        config, _ = recipes.load_config([str(ROOT / "configs" / over), str(path)], [])
        checks.check_algorithm(config)
        own.functions(config)
    changes = tiny(workspace)
    if path.stem == "reward_model":
        changes.append(f"reward.reward_model.model_path={workspace / 'scored'}")
    if path.stem == "sft":
        changes = [c for c in changes if not c.startswith("env.")]
        chat = {"messages": [{"role": "user", "content": "say 7"}, {"role": "assistant", "content": "7"}]}
        changes.append(f"env.train_files=[{write_rows(workspace / 'eight.jsonl', [chat] * 8)}]")
    config, _ = recipes.load_config([str(RECIPE), str(path), str(CPU)], [*changes, "data.train_batch_size=8"])
    recipes.prepare(config, "sft" if path.stem == "sft" else "train")


# --- rewards and filters -------------------------------------------------------------------------


def test_overlong_is_dapos_equation():
    def by_the_paper(length, longest, cache):  # equation 13
        if length <= longest - cache:
            return 0.0
        return (longest - cache - length) / cache if length <= longest else -1.0

    for length in (1, 80, 81, 90, 99, 100):
        given = pieces.overlong(episode(reward=1.0, length=length), limit=100, buffer=0.2)
        assert given == pytest.approx(1.0 + by_the_paper(length, 100, 20))


def test_rewards_of_several_parts():
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    assert pieces.weighted(e, {"reward_model": 0.2}) == pytest.approx(0.9)
    with pytest.raises(OwnError, match=r"no reward component other; the episode .* has reward_model"):
        pieces.weighted(e, {"other": 1.0})
    assert pieces.components(e) == 0.5
    assert e.reward_components == {"reward_model": 2.0, "verdict": 0.5, "finished": 0.0}


def groups(*rewards, **fields):
    return [episode(reward=r, group=str(g), **fields) for g, some in enumerate(rewards) for r in some]


def test_groups_all_right_or_all_wrong_are_dropped():
    made = groups([1, 1, 1], [0, 0], [0, 1], [0.5, 0.2])
    assert [e.group_id for e in pieces.drop_uniform(made)] == ["2", "2", "3", "3"]
    assert [e.group_id for e in pieces.drop_uniform(made, metric="acc")] == ["2", "2"]
    made[0].reward_components = {"style": 1.0}
    for e in made[1:]:
        e.reward_components = {"style": 0.0}
    assert [e.group_id for e in pieces.drop_uniform(made, metric="style")] == ["0"] * 3


def test_filters_apply_in_order_and_leave_no_group_of_one():
    made = groups([1, 0, 0], [1, 1, 0])
    made[0].ended = made[5].ended = "length"
    drop = lambda some: pieces.drop_ended(some, ["length"])  # noqa: E731
    # of group 0 two wrong ones are left, of group 1 two right ones: uniform only after the first filter
    assert pieces.keep(made, 2, [drop, pieces.drop_uniform]) == []
    assert pieces.keep(made, 2, [pieces.drop_uniform, drop]) == [made[1], made[2], made[3], made[4]]
    made[1].ended = "length"
    assert pieces.keep(made, 2, [drop]) == made[3:5]  # group 0 was left with one
    assert len(pieces.keep(made, 1, [drop])) == 3  # which an estimator that compares none may have


def test_masked_episodes_count_for_the_baseline_and_carry_no_loss():
    made = groups([1.0, 0.0, 0.0])
    made[0].ended = "length"
    kept = pieces.keep(made, 2, [lambda some: pieces.mask_ended(some, ["length"])])
    assert made[0].response_mask == [1, 1, 1]  # a copy was masked
    batch = training.to_batch(kept, 0, 1.0)
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    keys = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    settings = OmegaConf.create({"algorithm": {"adv_estimator": "grpo", **keys}})
    advantages = training.advantages(batch, settings).batch["advantages"]
    assert advantages[1, 0] == pytest.approx((0 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6)) and not advantages[0].any()
    for e in made:
        e.ended = "length"
    assert pieces.keep(made, 2, [lambda some: pieces.mask_ended(some, ["length"])]) == []  # nothing to learn from


def test_first_groups():
    made = groups([1, 0], [1, 0], [1, 0])
    assert pieces.first_groups(made, 2) == made[:4]


# --- samplers ------------------------------------------------------------------------------------


def task(i, file="a", weight=None):
    return env.Task(f"{file}:{i}", {}, "s", [], [1], file=file, weight=weight)


def test_a_curriculum_prefers_what_is_solved_half_of_the_time():
    tasks = [task(i) for i in range(3)]
    rates = {"a:0": 0.0, "a:1": 0.5, "a:2": 1.0}
    drawn = Counter(t.row_id for b in range(4000) for t in pieces.by_pass_rate(tasks, 1, b, 7, rates))
    wanted = np.array([0.05, 0.30, 0.05]) / 0.40
    assert np.abs(np.array([drawn[t.row_id] for t in tasks]) / 4000 - wanted).max() < 0.03
    batch = pieces.by_pass_rate(tasks, 2, 5, 7, rates)
    assert batch == pieces.by_pass_rate(tasks, 2, 5, 7, rates) and len({t.row_id for t in batch}) == 2
    mixed = [task(i, "a", 1.0) for i in range(2)] + [task(i, "b", 3.0) for i in range(2)]
    assert Counter(t.file for t in pieces.by_pass_rate(mixed, 8, 1, 7, {})) == {"a": 2, "b": 6}


def test_pass_rates_forget():
    import evaluation

    made = [episode(reward=r) for r in (1.0, 0.0, 0.5, 1.0)] + [episode(reward=None, status="timeout")]
    rates = evaluation.pass_rates(made, {})
    assert rates == {"r": 0.5}
    assert evaluation.pass_rates([episode(reward=1.0)], rates) == {"r": 0.75}


# --- turns ---------------------------------------------------------------------------------------


def played(seed=0, count=12):
    """Random conversations: (mask, token rewards, values), lists; three groups, turns paid at their last tokens."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        mask, rewards = [], []
        for k in range(rng.randint(1, 4)):
            said = rng.randint(1, 4)
            mask += [0] * (rng.randint(1, 3) if k else 0) + [1] * said
            rewards += [0.0] * (len(mask) - len(rewards) - 1) + [round(rng.random(), 2)]
        tail = rng.randint(0, 2)  # what was observed last
        rows.append((mask + [0] * tail, rewards + [0.0] * tail, [rng.gauss(0, 1) for _ in range(len(mask) + tail)]))
    return rows, [str(i % 3) for i in range(count)]


def padded(rows, part):
    width = max(len(r[0]) for r in rows)
    return torch.tensor([list(r[part]) + [0] * (width - len(r[0])) for r in rows], dtype=torch.float64)


def turns_of(mask):
    """[(first, end)] of each run of ones, by walking."""
    found, start = [], None
    for t, m in enumerate([*mask, 0]):
        if m and start is None:
            start = t
        if not m and start is not None:
            found.append((start, t))
            start = None
    return found


def turn_tensor(rows):
    turn = torch.full((len(rows), max(len(r[0]) for r in rows)), -1)
    for i, (mask, *_) in enumerate(rows):
        for k, (a, b) in enumerate(turns_of(mask)):
            turn[i, a:b] = k
    return turn


def test_grpo_per_step_is_the_papers():
    rows, index = played()
    turn = turn_tensor(rows)
    got, returns = pieces.turn_grpo(padded(rows, 1), padded(rows, 0), turn, index)
    assert torch.equal(got, returns)
    # what a filter masks, or rollout_rs rejects, changes no other token's advantage: the turns stay what they were
    masked = padded(rows, 0)
    masked[0], masked[1, 0] = 0, 0
    assert torch.equal(pieces.turn_grpo(padded(rows, 1), masked, turn, index)[0], got * masked)
    alone, _ = pieces.turn_grpo(padded(rows[:1], 1), padded(rows[:1], 0), turn_tensor(rows[:1]), ["a"])
    assert torch.isfinite(alone).all()
    paid = [[sum(rewards[a:b]) for a, b in turns_of(mask)] for mask, rewards, _ in rows]
    for i, (mask, _, _) in enumerate(rows):
        pool = [r for p, name in zip(paid, index, strict=True) if name == index[i] for r in p]
        normal = [(r - np.mean(pool)) / (np.std(pool, ddof=1) + 1e-6) for r in paid[i]]
        wanted = np.zeros(got.shape[1])
        for k, (a, b) in enumerate(turns_of(mask)):
            wanted[a:b] = sum(normal[k:])
        np.testing.assert_allclose(got[i], wanted, atol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.7, 0.0)])
def test_gae_over_turns_is_the_papers(gamma, lam):
    rows, _ = played(seed=1)
    mask = padded(rows, 0)
    got, returns = pieces.turn_gae(padded(rows, 1), padded(rows, 2), mask, turn_tensor(rows), gamma, lam)
    raw, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, (m, rewards, values) in enumerate(rows):
        spans = turns_of(m)
        V = [values[a] for a, _ in spans] + [0.0]
        r = [sum(rewards[a:b]) for a, b in spans]
        for k, (a, b) in enumerate(spans):  # equation 16: the sum of (gamma lam)^l delta_{k+l}
            later = [(gamma * lam) ** (j - k) * (r[j] + gamma * V[j + 1] - V[j]) for j in range(k, len(spans))]
            raw[i, a:b], targets[i, a:b] = sum(later), sum(later) + V[k]
    live = raw[mask.numpy() > 0]
    wanted = (raw - live.mean()) / math.sqrt(live.var(ddof=1) + 1e-8) * mask.numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(returns, targets, atol=1e-9)


def test_rewards_of_turns_sit_on_their_turns_and_what_is_added_on_the_last_token():
    e = episode(reward=0.7, length=7, turns=[(0, 2, 1), (4, 6, 3)], turn_rewards=[0.5, 0.25])
    e.response_mask = [1, 1, 0, 0, 1, 1, 0]
    scores = training.to_batch([e], 0, 1.0).batch["token_level_scores"][0]
    assert scores.tolist() == pytest.approx([0, 0.5, 0, 0, 0, 0.25, -0.05])
    assert training.to_batch([e], 0, 1.0).batch["turn"].tolist() == [[0, 0, -1, -1, 1, 1, -1]]


# --- a loss of one's own -------------------------------------------------------------------------


def test_online_dpos_gradient_is_that_of_dpos_loss():
    """Against autograd of -log sigmoid(beta * (difference of log-ratios)), mean over pairs; split in two as well."""
    from verl.workers.config import FSDPActorConfig

    dpo = own.load("docs/examples/online_dpo.py:dpo", LOSS_MODE)
    pairs = own.load("docs/examples/online_dpo.py:pairs", "algorithm.adv_estimator")
    torch.manual_seed(0)
    B, R = 8, 5
    mask = (torch.rand(B, R) < 0.8).double()
    rewards = torch.zeros(B, R, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1, 0, 0.5, 0.5, 0.5, 0.5, 0, 1], dtype=torch.float64)
    index = ["a", "a", "b", "b", "c", "c", "d", "d"]  # b and c are ties
    log_prob = torch.randn(B, R, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(B, R, dtype=torch.float64)

    ratio = ((log_prob - ref) * mask).sum(dim=1)
    by_hand = -(F.logsigmoid(0.1 * (ratio[0] - ratio[1])) + F.logsigmoid(0.1 * (ratio[7] - ratio[6]))) / 2
    (wanted,) = torch.autograd.grad(by_hand, log_prob)

    advantages, _ = pairs(rewards, mask, index, log_prob.detach(), ref)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    got = torch.zeros_like(wanted)
    for part in (slice(0, 3), slice(3, 8)):  # a pair may be cut in two
        config.global_batch_info.update({"dp_size": 1, "batch_num_tokens": None, "global_batch_size": B})
        loss, _ = dpo(None, log_prob[part], advantages[part], mask[part], "seq-mean-token-sum", config)
        got += torch.autograd.grad(loss, log_prob)[0]
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="seq-mean-token-sum"):
        dpo(None, log_prob, advantages, mask, "token-mean", config)


# --- supervised fine-tuning ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tied")


def test_every_word_of_the_assistant_is_learned_and_nothing_else(tokenizer):
    import sft

    said = [("user", "say 7"), ("assistant", "7"), ("user", "again"), ("assistant", "77")]
    messages = [{"role": role, "content": text} for role, text in said]
    e = sft.tokenize({"messages": messages}, tokenizer, {1}, "f:1")
    assert tokenizer.decode(e.prompt_ids) == "say 7 "
    assert tokenizer.decode(e.response_ids) == "7<end> again 77<end>"
    learned = [i for i, m in zip(e.response_ids, e.response_mask, strict=True) if m]
    assert tokenizer.decode(learned) == "7<end>77<end>"
    for row in ({}, {"messages": messages[:1]}, {"messages": "say 7"}):
        with pytest.raises(env.DataError, match="f:1: no `messages`"):
            sft.tokenize(row, tokenizer, {1}, "f:1")
    with pytest.raises(env.DataError, match="nothing comes before"):
        sft.tokenize({"messages": messages[1:2]}, tokenizer, {1}, "f:1")


def test_conversations_come_from_jsonl_and_parquet(tmp_path):
    import json

    import pyarrow
    import pyarrow.parquet

    import sft

    rows = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "7"}]} for i in range(3)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    for name in ("chats.jsonl", "chats.parquet"):
        read = list(sft.read_conversations(str(tmp_path / name)))
        assert [r for _, r in read] == rows and read[2][0].endswith(f"{name}:3")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(env.DataError, match=r"bad\.parquet: cannot be read"):
        list(sft.read_conversations(str(tmp_path / "bad.parquet")))
