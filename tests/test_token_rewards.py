"""Tests how rewards reach the trained tokens, and that equal rewards train nothing.

Each rule is tested for all of verl's estimators and all of templates/advantages.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo import core_algos

import algorithm
import training
from kit.data import token_rewards
from kit.data.episode import Episode, TurnSpan
from kit.errors import RunError, SkippedStep
from kit.recipe.user_functions import ADVANTAGE, load_function
from tests.helpers.cases import make_case
from tests.helpers.recipes import changed, make_partial
from tests.helpers.trainer import make_plan
from tests.helpers.workers import ACTOR

VERL = [estimator.value for estimator in core_algos.AdvantageEstimator]
# distill and spin read log-probs instead of rewards
CUSTOM = [
    f"templates/advantages.py:{name}" for name in ("turn_grpo", "turn_gae", "pairs", "preference")
]
COMPARES = [name for name in [*VERL, *CUSTOM] if not name.endswith("gae")]
GDPO = {"gdpo_reward_keys": ["right", "format"], "gdpo_reward_weights": [1.0, 0.5]}
BIG_FLOATS = st.floats(-1000, 1000, width=32)


@pytest.fixture(autouse=True, scope="module")
def custom_estimators():
    """Register the templates in verl, as a recipe that names them does."""
    for name in CUSTOM:
        core_algos.ADV_ESTIMATOR_REGISTRY[name] = load_function(name, ADVANTAGE)
    yield
    for name in CUSTOM:
        del core_algos.ADV_ESTIMATOR_REGISTRY[name]


def make_episode(group: str, reward: float, mask: list[int], **fields: Any) -> Episode:
    """Make a response of one turn, whose reward components have its reward."""
    defaults = {
        "turns": [TurnSpan(0, len(mask), 1)],
        "reward_components": {"right": reward, "format": reward},
    }
    return dataclasses.replace(make_case(group, reward, mask), **(defaults | fields))


@functools.cache
def make_settings(name: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    """Return a recipe with only the algorithm, as training.compute_advantages reads it."""
    return make_partial({"algorithm": {**GDPO, **dict(changes), "adv_estimator": name}})


def compute(episodes: list[Episode], name: str, **changes: Any) -> torch.Tensor:
    """Compute the advantages [B, R] of trained tokens, 0 elsewhere.

    Values and log-probs depend on the position. The greedy response of ReMax has the reward of the
    group's first episode.
    """
    batch = training.build_batch(episodes, 0, 1.0)
    tensors = batch.batch
    if name == "remax":
        greedy = {e.group_id: e.reward for e in reversed(episodes)}
        tensors["reward_baselines"] = torch.tensor([greedy[e.group_id] for e in episodes])
    shape = tensors["response_mask"].shape
    t = torch.arange(shape[1]).expand(shape)
    rows = torch.arange(shape[0])[:, None].expand(shape)
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    tensors["values"] = (torch.sin(t + rows) / 2).float()
    tensors["sum_pi_squared"] = torch.full(shape, 0.4)
    tensors["old_log_probs"] = -0.1 - (t % 3) / 10
    tensors["ref_log_prob"] = -0.2 - (rows % 3) / 10
    training.compute_advantages(batch, make_settings(name, tuple(changes.items())))
    return tensors["advantages"] * tensors["response_mask"]


# --- masked tokens --------------------------------------------------------------------------------


@given(st.data())
def test_rewards_move_to_trained_tokens_and_keep_their_total(data):
    width = data.draw(st.integers(1, 8))
    mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=width, max_size=width))])
    values = st.lists(st.integers(-8, 8), min_size=width, max_size=width)
    rewards = torch.tensor([data.draw(values)]) / 8
    carried = token_rewards.carry_rewards(rewards, mask)
    assert carried.sum() == rewards.sum()
    if not mask.any():
        assert torch.equal(carried, rewards)
        return
    assert not carried[mask == 0].any()
    # up to each trained token, nothing but its own later masked tokens is added
    for t in mask[0].nonzero()[:, 0].tolist():
        following = mask[0, t + 1 :].tolist() + [1]
        end = t + 1 + following.index(1)
        start = 0 if not mask[0, :t].any() else t
        assert carried[0, t] == rewards[0, start:end].sum(), (mask, rewards, carried)


def test_rewards_stay_in_their_turn_for_an_estimator_of_turns():
    mask = torch.tensor([[1, 0, 0, 0, 0, 1]])
    turn = torch.tensor([[0, 0, -1, 1, 1, 2]])
    rewards = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    carried = token_rewards.carry_rewards(rewards, mask, turn)
    # the second turn has no trained token, so its rewards stay
    assert carried.tolist() == [[3.0, 0.0, 0.0, 3.0, 4.0, 5.0]]


@pytest.mark.parametrize("name", [*VERL, *CUSTOM])
def test_the_reward_of_a_masked_tail_reaches_the_last_trained_token(name):
    """The advantages are those of the same responses without the masked tokens."""
    rewards = {"a": (1.0, 0.0, 0.5), "b": (0.25, 0.75)}
    cut, short = [], []
    for group, values in rewards.items():
        for i, reward in enumerate(values):
            length = 4 + i
            cut.append(make_episode(group, reward, [1] * length + [0, 0]))
            short.append(make_episode(group, reward, [1] * length))
    expected = compute(short, name)
    result = compute(cut, name)[:, : expected.shape[1]]
    assert expected.any()
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


# --- equal rewards --------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", COMPARES)
@given(
    reward=st.one_of(st.sampled_from([0.1, 0.2, 0.3, 0.7, 0.9, 1 / 3, 170.72, 1e-4]), BIG_FLOATS),
    size=st.integers(2, 9),
    groups=st.integers(1, 3),
)
def test_equal_rewards_give_exactly_zero_advantages(name, reward, size, groups):
    episodes = []
    for group in range(groups):
        # reinforce_plus_plus compares the whole batch; the others compare a group
        value = reward if name == "reinforce_plus_plus" else reward * (group + 1)
        for member in range(size):
            episodes.append(make_episode(str(group), value, [1] * (1 + member % 4)))
    assert not compute(episodes, name, gamma=1.0).any()


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", [*token_rewards.COMPARES_TOTALS, *CUSTOM[2:]])
@given(parts=st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3), size=st.integers(2, 5))
def test_equal_sums_of_turn_rewards_give_exactly_zero_advantages(name, parts, size):
    """The sums differ in their rounding: the first response has one reward, the others three."""
    turns = [TurnSpan(0, 1, 1), TurnSpan(1, 2, 2), TurnSpan(2, 3, 3)]
    episodes = [make_episode("a", sum(parts), [1, 1, 1])]
    for member in range(size):
        order = parts[member % 3 :] + parts[: member % 3]
        episodes.append(make_episode("a", sum(parts), [1] * 3, turns=turns, turn_rewards=order))
    assert not compute(episodes, name).any()


@pytest.mark.parametrize("name", COMPARES)
def test_a_group_of_equal_rewards_changes_no_other_group(name, monkeypatch):
    """Without rounding errors, that is: the rewards here are exact, and so are their means."""
    values = {"a": (0.5, 0.5, 0.5, 0.5), "b": (1.0, 0.0, 0.25, 0.75)}
    episodes = [make_episode(g, r, [1, 1]) for g, rs in values.items() for r in rs]
    levelled = compute(episodes, name)
    monkeypatch.setattr(token_rewards, "level_groups", lambda rewards, *_: rewards)
    plain = compute(episodes, name)
    torch.testing.assert_close(levelled, plain, atol=1e-6, rtol=1e-5)


def test_rewards_that_differ_are_never_levelled():
    rewards = torch.tensor([[0.9], [0.9 + 1e-5], [0.0], [0.0]])
    levelled = token_rewards.level_groups(rewards, ["a", "a", "b", "b"], 0.0)
    assert torch.equal(levelled, rewards)


def divide_by_deviation(token_level_rewards, response_mask):
    """Whiten without verl, as a user's estimator may: NaN for one token."""
    is_trained = response_mask.bool()
    values = token_level_rewards / token_level_rewards[is_trained].std()
    return values, values


WHITENS = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", CUSTOM[1])


@pytest.mark.parametrize("name", [*VERL, *CUSTOM, "mine.py:divide_by_deviation"])
def test_one_trained_token_skips_the_step_of_an_estimator_that_normalizes_over_tokens(
    name, monkeypatch
):
    monkeypatch.setitem(
        core_algos.ADV_ESTIMATOR_REGISTRY, "mine.py:divide_by_deviation", divide_by_deviation
    )
    episodes = [make_episode("a", 1.0, [1]), make_episode("a", 0.0, [0])]
    if name in (*WHITENS, "mine.py:divide_by_deviation"):
        with pytest.raises(SkippedStep, match=f"{name} normalizes over the trained tokens"):
            compute(episodes, name)
    else:  # one token is enough
        assert torch.isfinite(compute(episodes, name)).all()


# --- steps without a signal -----------------------------------------------------------------------

LOSSES = sorted(
    name for name in core_algos.POLICY_LOSS_REGISTRY if name != "bypass_mode" and ".py" not in name
)


@pytest.fixture(scope="module")
def recipe():
    return make_partial()


def make_batch(advantages: list[list[float]]) -> Any:
    batch = training.build_batch([make_episode("a", 1.0, [1, 0])] * len(advantages), 0, 1.0)
    batch.batch["advantages"] = torch.tensor(advantages)
    return batch


@pytest.mark.parametrize("loss", LOSSES)
def test_without_advantages_no_loss_of_verl_has_a_gradient(recipe, loss):
    settings = {"policy_loss.loss_mode": loss, "policy_loss.dro_beta": 0.3}
    recipe = changed(recipe, *[f"{ACTOR}.{key}={value}" for key, value in settings.items()])
    assert not training.loss_has_other_terms(recipe)


@pytest.mark.parametrize(
    "changes",
    [
        ["use_kl_loss=true", "kl_loss_coef=0.001"],
        ["entropy_coeff=0.01"],
        ["policy_loss.loss_mode=mine.py:loss"],
    ],
)
def test_a_kl_or_entropy_term_or_one_of_a_custom_loss_has_a_gradient(recipe, monkeypatch, changes):
    def with_regularizer(advantages, log_prob, **_):
        return (log_prob.square() - advantages * log_prob).mean(), {}

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "mine.py:loss", with_regularizer)
    recipe = changed(recipe, *[f"{ACTOR}.{change}" for change in changes])
    assert training.loss_has_other_terms(recipe)


@pytest.mark.parametrize("has_other_terms", [False, True])
def test_a_step_without_a_signal_does_not_update_the_actor(
    workspace, recorder, monkeypatch, capsys, has_other_terms
):
    """The advantage of a masked token is none."""

    def give_zeros(batch, _config):
        batch.batch["response_mask"][:, 1] = 0
        advantages = torch.zeros_like(batch.batch["token_level_rewards"])
        advantages[:, 1] = 5.0
        batch.batch["advantages"] = batch.batch["returns"] = advantages

    monkeypatch.setattr(training, "compute_advantages", give_zeros)
    changes = ["trainer.total_training_steps=1", f"{ACTOR}.use_kl_loss={has_other_terms}"]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.fit()
    assert ("update_actor" in recorder.calls) == has_other_terms
    text = "step 1 changes no weights: all advantages are 0 ("
    assert (text in capsys.readouterr().out.replace("\n", " ")) != has_other_terms


# --- names from outside ---------------------------------------------------------------------------

OWN_NAMES = sorted(
    set(training.build_batch([make_episode("a", 1.0, [1])], 0, 1.0).batch.keys())
    | {"uid", "advantages", "returns", "values", "old_log_probs", "ref_log_prob"}
    | {"token_level_rewards", "multi_modal_inputs", "temperature", "index"}
    | {"global_token_num", "compute_loss", "calculate_entropy", "reward_components", "component a"}
    | set(inspect.signature(core_algos.compute_gdpo_outcome_advantage).parameters)
)


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(
        st.one_of(st.sampled_from(OWN_NAMES), st.text(max_size=6)), min_size=1, max_size=5
    )
)
def test_no_name_of_a_component_replaces_a_tensor_or_an_array(names):
    groups, rewards = "aabb", (1.0, 0.0, 0.0, 1.0)
    plain, named = [], []
    for i, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
        components = dict.fromkeys(names, 100.0 + i)
        plain.append(make_episode(group, reward, [1, 1], reward_components={}))
        named.append(make_episode(group, reward, [1, 1], reward_components=components))
    one, two = (training.build_batch(episodes, 0, 1.0) for episodes in (plain, named))
    assert list(one.batch.keys()) == list(two.batch.keys())
    assert list(two.non_tensor_batch["uid"]) == list(groups)
    assert one.meta_info == two.meta_info
    for key in one.batch.keys():  # noqa: SIM118
        assert torch.equal(one.batch[key], two.batch[key]), key
    sent = training.select_worker_data(two)
    assert not sent.non_tensor_batch and set(sent.batch.keys()) <= set(one.batch.keys())
    for name in ("grpo", "rloo"):
        assert torch.equal(compute(plain, name), compute(named, name))


@pytest.mark.parametrize("key", ["uid", "response_mask", ""])
def test_gdpo_reads_a_component_of_any_name(key):
    values = (1.0, 0.0, 0.5, 0.25)
    named = [make_episode("a", 0.0, [1], reward_components={key: value}) for value in values]
    usual = [make_episode("a", 0.0, [1], reward_components={"right": value}) for value in values]
    result = compute(named, "gdpo", gdpo_reward_keys=(key,), gdpo_reward_weights=(1.0,))
    expected = compute(usual, "gdpo", gdpo_reward_keys=("right",), gdpo_reward_weights=(1.0,))
    assert expected.any() and torch.equal(result, expected)


def test_an_episode_without_a_component_of_gdpo_is_a_clear_error():
    components = [{"right": 1.0, "format": 0.0}, {"right": 0.0}]
    episodes = [make_episode("a", 1.0, [1, 1], reward_components=parts) for parts in components]
    with pytest.raises(RunError, match=r"algorithm\.gdpo_reward_keys has format.*only.*: right\."):
        compute(episodes, "gdpo")


def test_a_verifier_may_not_return_the_component_of_the_reward_model():
    episode = make_episode("a", 1.0, [1], reward_components={"reward_model": 1.0})
    with pytest.raises(RunError, match="reward component reward_model"):
        training.add_reward_model_scores(None, [episode], None, make_partial())
