"""The kit's own rewards, filters, samplers, advantages and losses, each against plain Python or autograd."""

from __future__ import annotations

import ast
import functools
import math
import random
import re
import runpy
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import CPU, END, ROOT
from omegaconf import OmegaConf

import env
import training
from kit.config.load import load_config
from kit.data.episode import Episode, TurnSpan
from kit.data.metrics import update_pass_rates
from kit.data.selection import select_trainable, take_groups
from kit.errors import UserFunctionError
from templates import filters, samplers
from templates.advantages import pairs, sum_by_turn, turn_gae, turn_grpo
from templates.losses import dpo, sppo
from templates.reward import compute_score
from templates.rewards import components, overlong, weighted
from templates.task import Guess, rows


def episode(reward=1.0, length=3, group="g", ended="stop", **fields):
    response = list(range(length))
    return Episode(
        "r",
        group,
        "s",
        [1],
        response,
        [1] * length,
        [-1.0] * length,
        reward=reward,
        ended=ended,
        **fields,
    )


# --- rewards and filters -------------------------------------------------------------------------


def test_overlong_is_dapos_equation():
    def by_the_paper(length, longest, cache):  # equation 13
        if length <= longest - cache:
            return 0.0
        return (longest - cache - length) / cache if length <= longest else -1.0

    for length in (1, 80, 81, 90, 99, 100):
        given = overlong(episode(reward=1.0, length=length), limit=100, buffer=0.2)
        assert given == pytest.approx(1.0 + by_the_paper(length, 100, 20))


def test_rewards_of_several_parts():
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    assert weighted(e, {"reward_model": 0.2}) == pytest.approx(0.9)
    with pytest.raises(
        UserFunctionError,
        match=r"no reward component other\. Use one of its components: reward_model",
    ):
        weighted(e, {"other": 1.0})
    assert components(e) == 0.5
    for reason in ("stop", "length", "turns", "terminated", "truncated"):
        e = episode(reward=0.5, ended=reason)
        components(e)
        assert e.reward_components["finished"] == (reason == "stop")
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    components(e)
    assert e.reward_components == {"reward_model": 2.0, "verifier": 0.5, "finished": 0.0}


def groups(*rewards, **fields):
    return [
        episode(reward=r, group=str(g), **fields) for g, some in enumerate(rewards) for r in some
    ]


def test_groups_all_right_or_all_wrong_are_dropped():
    made = groups([1, 1, 1], [0, 0], [0, 1], [0.5, 0.2])
    assert [e.group_id for e in filters.drop_uniform(made)] == ["2", "2", "3", "3"]
    assert [e.group_id for e in filters.drop_uniform(made, metric="acc")] == ["2", "2"]
    made[0].reward_components = {"style": 1.0}
    for e in made[1:]:
        e.reward_components = {"style": 0.0}
    assert [e.group_id for e in filters.drop_uniform(made, metric="style")] == ["0"] * 3


def test_filters_apply_in_order_and_leave_no_group_of_one():
    made = groups([1, 0, 0], [1, 1, 0])
    made[0].ended = made[5].ended = "length"
    drop = lambda some: filters.drop_ended(some, ["length"])  # noqa: E731
    # of group 0 two wrong ones are left, of group 1 two right ones: uniform only after the first filter
    assert select_trainable(made, 2, [drop, filters.drop_uniform])[0] == []
    assert select_trainable(made, 2, [filters.drop_uniform, drop])[0] == [
        made[1],
        made[2],
        made[3],
        made[4],
    ]
    made[1].ended = "length"
    assert select_trainable(made, 2, [drop])[0] == made[3:5]  # group 0 was left with one
    assert (
        len(select_trainable(made, 1, [drop])[0]) == 3
    )  # which an estimator that compares none may have


def test_masked_episodes_count_for_the_baseline_and_carry_no_loss():
    made = groups([1.0, 0.0, 0.0])
    made[0].ended = "length"
    kept, _ = select_trainable(made, 2, [lambda some: filters.mask_ended(some, ["length"])])
    assert made[0].response_mask == [1, 1, 1]  # a copy was masked
    batch = training.build_batch(kept, 0, 1.0)
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    keys = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    settings = OmegaConf.create({"algorithm": {"adv_estimator": "grpo", **keys}})
    training.compute_advantages(batch, settings)
    advantages = batch.batch["advantages"]
    assert (
        advantages[1, 0] == pytest.approx((0 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6))
        and not advantages[0].any()
    )
    for e in made:
        e.ended = "length"
    assert (
        select_trainable(made, 2, [lambda some: filters.mask_ended(some, ["length"])])[0] == []
    )  # nothing to learn from


def test_a_rows_own_answer_stands_beside_what_was_sampled(workspace):
    made = groups([0.0, 1.0], [0.0, 0.5])
    for e, text in zip(made, ["7", "7", "7 7 7", "7 7 7"], strict=True):
        e.row, e.prompt_ids, e.turns = (
            {"answer": text, "n": 1},
            [5, int(e.group_id)],
            [TurnSpan(0, 3, 1)],
        )
    given = {"field": "answer", "model": str(workspace / "tied"), "limit": 4}
    found = filters.with_answer(made, **given)
    assert [e.group_id for e in found] == ["0", "0", "0", "1", "1"] and [
        found[i] for i in (0, 1, 3, 4)
    ] == made
    own = found[2]
    assert (
        own.response == "7" and own.response_ids[-1] == END and len(own.response_ids) == 2
    )  # as one samples it
    assert own.prompt_ids == made[0].prompt_ids and own.reward == 1.0 and own.turns == []
    b = training.build_batch(found, 0, 1.0).batch
    assert b["turn"].amax(dim=1).tolist() == [0, 0, -1, 0, 0] and b["response_mask"][
        2
    ].tolist() == [1, 1, 0]
    kept, _ = select_trainable(made, 2, [functools.partial(filters.with_answer, **given)])
    assert [e.response_ids for e in kept] == [e.response_ids for e in found]
    by_limit = [
        len(filters.with_answer(made, **{**given, "limit": limit})) for limit in (1, 2, 3, 5, 6)
    ]
    assert by_limit == [4, 5, 5, 5, 6]  # "7" and EOS are 2 tokens, "7 7 7" and EOS 6
    with pytest.raises(
        UserFunctionError, match=r"row r has no text field=n\. Use one of its texts: answer"
    ):
        filters.with_answer(made, **{**given, "field": "n"})


def test_first_groups():
    made = groups([1, 0], [1, 0], [1, 0])
    assert take_groups(made, 2) == made[:4]


# --- samplers ------------------------------------------------------------------------------------


def task(i, file="a", weight=None):
    return env.Task(f"{file}:{i}", {}, "s", [], [1], file=file, weight=weight)


def test_a_curriculum_prefers_what_is_solved_half_of_the_time():
    tasks = [task(i) for i in range(3)]
    rates = {"a:0": 0.0, "a:1": 0.5, "a:2": 1.0}
    drawn = Counter(
        t.row_id for b in range(4000) for t in samplers.by_pass_rate(tasks, 1, b, 7, rates)
    )
    wanted = np.array([0.05, 0.30, 0.05]) / 0.40
    assert np.abs(np.array([drawn[t.row_id] for t in tasks]) / 4000 - wanted).max() < 0.03
    batch = samplers.by_pass_rate(tasks, 2, 5, 7, rates)
    assert (
        batch == samplers.by_pass_rate(tasks, 2, 5, 7, rates)
        and len({t.row_id for t in batch}) == 2
    )
    mixed = [task(i, "a", 1.0) for i in range(2)] + [task(i, "b", 3.0) for i in range(2)]
    assert Counter(t.file for t in samplers.by_pass_rate(mixed, 8, 1, 7, {})) == {"a": 2, "b": 6}


def test_pass_rates_forget():
    made = [episode(reward=r) for r in (1.0, 0.0, 0.5, 1.0)] + [
        episode(reward=None, status="timeout")
    ]
    rates = update_pass_rates(made, {})
    assert rates == {"r": 0.5}
    assert update_pass_rates([episode(reward=1.0)], rates) == {"r": 0.75}


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
        rows.append(
            (
                mask + [0] * tail,
                rewards + [0.0] * tail,
                [rng.gauss(0, 1) for _ in range(len(mask) + tail)],
            )
        )
    return rows, [str(i % 3) for i in range(count)]


def padded(rows, part):
    width = max(len(r[0]) for r in rows)
    return torch.tensor(
        [list(r[part]) + [0] * (width - len(r[0])) for r in rows], dtype=torch.float64
    )


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
    got, returns = turn_grpo(padded(rows, 1), padded(rows, 0), turn, index)
    assert torch.equal(got, returns)
    # what a filter masks, or rollout_rs rejects, changes no other token's advantage: the turns stay what they were
    masked = padded(rows, 0)
    masked[0], masked[1, 0] = 0, 0
    assert torch.equal(turn_grpo(padded(rows, 1), masked, turn, index)[0], got * masked)
    alone, _ = turn_grpo(padded(rows[:1], 1), padded(rows[:1], 0), turn_tensor(rows[:1]), ["a"])
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
    got, returns = turn_gae(padded(rows, 1), padded(rows, 2), mask, turn_tensor(rows), gamma, lam)
    raw, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, (m, rewards, values) in enumerate(rows):
        spans = turns_of(m)
        V = [values[a] for a, _ in spans] + [0.0]
        r = [sum(rewards[a:b]) for a, b in spans]
        for k, (a, b) in enumerate(spans):  # equation 16: the sum of (gamma lam)^l delta_{k+l}
            later = [
                (gamma * lam) ** (j - k) * (r[j] + gamma * V[j + 1] - V[j])
                for j in range(k, len(spans))
            ]
            raw[i, a:b], targets[i, a:b] = sum(later), sum(later) + V[k]
    live = raw[mask.numpy() > 0]
    wanted = (raw - live.mean()) / math.sqrt(live.var(ddof=1) + 1e-8) * mask.numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(returns, targets, atol=1e-9)


def test_rewards_of_turns_sit_on_their_turns_and_what_is_added_on_the_last_token():
    e = episode(
        reward=0.7, length=7, turns=[TurnSpan(0, 2, 1), TurnSpan(4, 6, 3)], turn_rewards=[0.5, 0.25]
    )
    e.response_mask = [1, 1, 0, 0, 1, 1, 0]
    scores = training.build_batch([e], 0, 1.0).batch["token_level_scores"][0]
    assert scores.tolist() == pytest.approx([0, 0.5, 0, 0, 0, 0.25, -0.05])
    assert training.build_batch([e], 0, 1.0).batch["turn"].tolist() == [[0, 0, -1, -1, 1, 1, -1]]


def test_values_of_what_is_observed_go_to_the_turn_before():
    """Of [B, R] = [2, 6]; what is observed before the first turn goes to that."""
    turn = torch.tensor([[0, 0, -1, 1, -1, -1], [-1, 0, 1, 2, -1, -1]])
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
    assert sum_by_turn(values, turn).tolist() == [[7.0, 56.0, 0.0], [3.0, 4.0, 56.0]]


def test_a_reward_on_what_is_observed_is_that_of_the_turn_before():
    """As the kit pays it: what the reward has over the turns' goes to the last token, an observed one here."""
    made = [
        episode(reward=r, length=6, turns=[TurnSpan(0, 2, 1), TurnSpan(3, 4, 3)])
        for r in (1.0, 0.0)
    ]
    for e in made:
        e.response_mask = [1, 1, 0, 1, 0, 0]
    batch = training.build_batch(made, 0, 1.0).batch
    advantages, _ = turn_grpo(
        batch["token_level_scores"], batch["response_mask"], batch["turn"], ["a", "a"]
    )
    normal = (1.0 - 0.25) / (0.5 + 1e-6)  # rewards of the four turns: 0, 1, 0, 0
    others = -0.25 / (0.5 + 1e-6)
    first, second = advantages.tolist()
    assert first == pytest.approx([normal + others, normal + others, 0, normal, 0, 0])
    assert second == pytest.approx([2 * others, 2 * others, 0, others, 0, 0])


# --- a loss of one's own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "mode"), [(dpo, "seq-mean-token-sum"), (sppo, "seq-mean-token-mean")]
)
def test_a_loss_takes_the_weights_of_rollout_correction(loss, mode):
    """Not all the same: on one of two tokens, and on one of two answers."""
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(
        {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": 2}
    )
    old, advantages = torch.full((2, 2), -1.0), torch.tensor([[1.0, 1.0], [-0.5, -0.5]])
    mask = torch.ones(2, 2)

    def gradient(weights):
        log_prob = (old + torch.tensor([[0.25, 0.5], [0.25, -0.5]])).requires_grad_()
        loss(old, log_prob, advantages, mask, mode, config, weights)[0].backward()
        return log_prob.grad

    plain = gradient(None)
    assert plain.abs().min() > 0 and torch.equal(gradient(torch.ones(2, 2)), plain)
    by_answer = torch.tensor([[0.5, 0.5], [2.0, 2.0]])
    torch.testing.assert_close(gradient(by_answer), plain * by_answer)
    if loss is dpo:  # whose loss is a sum over tokens
        by_token = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
        torch.testing.assert_close(gradient(by_token), plain * by_token)


def test_online_dpos_gradient_is_that_of_dpos_loss():
    """Against autograd of -log sigmoid(beta * (difference of log-ratios)), mean over pairs; split in two as well."""
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    B, R = 8, 5
    mask = (torch.rand(B, R) < 0.8).double()
    rewards = torch.zeros(B, R, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1, 0, 0.5, 0.5, 0.5, 0.5, 0, 1], dtype=torch.float64)
    index = ["a", "a", "b", "b", "c", "c", "d", "d"]  # b and c are ties
    log_prob = torch.randn(B, R, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(B, R, dtype=torch.float64)

    ratio = ((log_prob - ref) * mask).sum(dim=1)
    by_hand = (
        -(F.logsigmoid(0.1 * (ratio[0] - ratio[1])) + F.logsigmoid(0.1 * (ratio[7] - ratio[6]))) / 2
    )
    (wanted,) = torch.autograd.grad(by_hand, log_prob)

    advantages, _ = pairs(rewards, mask, index, log_prob.detach(), ref)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    got = torch.zeros_like(wanted)
    for part in (slice(0, 3), slice(3, 8)):  # a pair may be cut in two
        config.global_batch_info.update(
            {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": B}
        )
        loss, _ = dpo(
            None, log_prob[part], advantages[part], mask[part], "seq-mean-token-sum", config
        )
        got += torch.autograd.grad(loss, log_prob)[0]
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="seq-mean-token-sum"):
        dpo(None, log_prob, advantages, mask, "token-mean", config)


# --- the ways to a task of one's own -------------------------------------------------------------


def test_the_server_to_copy_passes_its_own_test(tmp_path, monkeypatch):
    """Started for real, as a run starts it, by the test that is copied with it."""
    monkeypatch.chdir(ROOT)
    assert len((ROOT / "templates" / "verifier" / "app.py").read_text().splitlines()) <= 60
    runpy.run_path("templates/verifier/test_app.py")["test_the_verifier"](tmp_path)


def test_what_is_held_out_is_never_trained_on():
    made = runpy.run_path(str(ROOT / "templates" / "verifier" / "rows.py"))["rows"]
    asked = [
        {
            r["responses_create_params"]["input"][-1]["content"]
            for r in made(1, 200, 0, {}, held_out)
        }
        for held_out in (False, True)
    ]
    assert [len(some) for some in asked] == [12, 4] and not asked[0] & asked[1]
    assert made(1, 3, 0, {}) == made(1, 3, 0, {}) != made(2, 3, 0, {})


@pytest.mark.parametrize("top", [1, 2, 3, 50, 99])
def test_whoever_halves_finds_every_number(top):
    for number in range(1, top + 1):
        game, low, high, paid, done = Guess(), 1, top, [], False
        assert game.reset({"number": number, "top": top}) == f"Guess a number from 1 to {top}."
        while not done:
            middle = (low + high) // 2
            said, reward, done = game.step(f"I say {middle}.")
            low, high = (middle + 1, high) if said == "Higher." else (low, middle - 1)
            paid.append(reward)
        assert paid[-1] == sum(paid) == 1.0 and said is None


def test_a_guess_that_is_none_is_told_so_and_costs_a_turn():
    game = Guess()
    game.reset({"number": 1, "top": 3})
    assert [game.step(text) for text in ("no \u0663", "9" * 50)] == [
        ("Say a number.", 0.0, False),
        ("Lower.", 0.0, True),
    ]


def test_the_task_grows_with_what_was_solved_and_draws_from_its_arguments_alone():
    solved, not_yet = {1: {0: 1.0, 1: 0.5}}, {1: {0: 0.5, 1: 0.5}}
    tops = [
        rows(2, 1, 7, rates, highest=4)[0]["top"]
        for rates in ({}, not_yet, solved, {**solved, 2: {0: 1.0}})
    ]
    assert tops == [3, 3, 4, 4]
    assert rows(2, 5, 7, {}) == rows(2, 5, 7, {}) != rows(3, 5, 7, {})
    assert {r["number"] for r in rows(1, 100, 7, {})} == {1, 2, 3}


@pytest.mark.parametrize(
    ("said", "true", "score"),
    [
        ("so 18 + 24 = 42", "18 + 24 = 42", 1.0),
        ("#### 1,042.0", 1042, 1.0),
        ("42, or 41", "42", 0.0),
        ("\\boxed{41}", "42", 0.1),
        ("it is -4", "4", 0.0),
        ("", "42", 0.0),
    ],
)
def test_the_score_is_of_the_last_number(said, true, score):
    given = compute_score("sums", said, true, {}, form=0.1)
    assert (
        given["score"] == score
        and given["right"] == (score == 1.0)
        and given["boxed"] == ("boxed" in said)
    )


def test_a_row_without_an_answer_is_no_wrong_answer():
    with pytest.raises(ValueError, match="the row is at fault"):
        compute_score("sums", "42", "forty-two", {})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "templates").rglob("*.py")), ids=lambda path: path.name
)
def test_each_header_shows_what_of_a_recipe_names_it(path):
    """A line of YAML, of keys that there are, with functions, or folders, that there are."""
    if path.name.startswith("test_"):
        return
    (shown,) = re.findall(
        r"^    (\w.*)$", ast.get_docstring(ast.parse(path.read_text())), re.MULTILINE
    )
    OmegaConf.merge(load_config([str(CPU)], [])[0], yaml.safe_load(shown))
    named = re.findall(r"(templates/[\w./]+)(?::(\w+))?", shown)
    assert named and all(ROOT / file in (path, path.parent) for file, _ in named)
    text = path.read_text()
    assert all(
        re.search(rf"^(def|class) {name}\b", text, re.MULTILINE) for _, name in named if name
    )
