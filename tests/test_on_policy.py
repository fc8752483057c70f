"""Tests an update that takes its own log-probs as the old ones, and the loss of the workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import left_right_2_no_padding

import training
from kit.config.recipe import Recipe
from tests.helpers.workers import (
    ACTOR,
    CORRECTION,
    FACTORS,
    FUSED,
    RecordingGroup,
    changed,
    is_close,
    make_batch,
    make_episode,
    make_update_batch,
    two_rank_recipe,
)


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


# --- whether an update is on-policy --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "algorithm.recompute_old_log_probs=true",
        "algorithm.use_kl_in_reward=true",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        "algorithm.adv_estimator=templates/advantages.py:pairs",  # needs old_log_probs
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
    ],
)
def test_old_log_probs_that_are_needed_before_the_update_need_a_separate_pass(recipe, change):
    recipe = changed(recipe, *FUSED)
    assert recipe.is_on_policy
    assert not changed(recipe, change).is_on_policy


@pytest.mark.parametrize(
    ("name", "is_on_policy"),
    [("sum_pi_squared", False), ("rollout_log_probs", False), ("response_mask", True)],
)
def test_an_estimator_that_reads_results_of_the_pass_needs_a_separate_pass(
    recipe, tmp_path, name, is_on_policy
):
    """verl's estimators that read these results also read the old log-probs. A custom one may not.

    The pass also completes rollout_log_probs. A response that a filter adds has none.
    """
    file = tmp_path / "mine.py"
    file.write_text(f"def f({name}):\n    return {name}, {name}\n")
    recipe = changed(recipe, *FUSED, f"algorithm.adv_estimator={file}:f")
    assert recipe.is_on_policy is is_on_policy


# --- the driver's side ---------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "computes_entropy"), [(FUSED, True), ([], False)])
def test_an_on_policy_update_computes_the_entropy_for_its_metrics(
    recipe, changes, computes_entropy
):
    metrics = {"loss": 1.0, "actor/entropy": 2.0, "training/rollout_probs_diff_mean": 0.5}
    actor = RecordingGroup({name: [value] for name, value in metrics.items()})
    result = training.update_actor(actor, make_update_batch(EPISODES), changed(recipe, *changes))
    assert tu.get(actor.data, "calculate_entropy") is computes_entropy
    assert result == {
        "actor/loss": 1.0,
        "actor/entropy": 2.0,
        "training/rollout_probs_diff_mean": 0.5,
    }
    assert all(type(value) is float for value in result.values())


# --- the workers' side ---------------------------------------------------------------------------

EPISODES = [
    make_episode([5], [7, 8]),
    make_episode([5, 6], [9]),
    make_episode([5], [3, 2, 4], mask=[1, 0, 1]),
    make_episode([5], [6, 1], turns=[]),  # a filter wrote it
]


def make_micro_batch(episodes, tokens, ranks=1):
    """A micro-batch as a worker gets it, and a model's outputs: FACTORS of its ids."""
    data = left_right_2_no_padding(make_batch(episodes).to_tensordict())
    tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens)
    model_output = {}
    for name in ("log_probs", "entropy"):
        numbers = (FACTORS[name] * data["input_ids"].values().double()).requires_grad_()
        offsets = data["input_ids"].offsets()
        model_output[name] = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
    return data, model_output


def no_loss(*arguments):
    return "loss", {}


@pytest.mark.parametrize(("computes", "coefficient"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@pytest.mark.parametrize("has_old", [True, False])
def test_the_on_policy_loss_uses_its_log_probs_as_the_old_ones(computes, coefficient, has_old):
    data, model_output = make_micro_batch(EPISODES[:2], tokens=3)
    if has_old:
        data["old_log_probs"] = torch.full((2, 2), -7.0)
    seen = {}

    def loss(config, model_output, data, dp_group):
        seen.update(output=set(model_output), old=data["old_log_probs"])
        seen.update(config=config, group=dp_group)
        return "loss", {"pg_loss": 1.0}

    config = SimpleNamespace(calculate_entropy=computes, entropy_coeff=coefficient)
    result, metrics = training.compute_on_policy_loss(loss, config, model_output, data, "ranks")
    assert result == "loss" and metrics["pg_loss"] == 1.0
    assert ("actor/entropy" in metrics) is not has_old
    assert seen["config"] is config and seen["group"] == "ranks"
    assert not seen["old"].requires_grad
    expected = [[-7.0] * 2] * 2 if has_old else [[-0.05, -0.07], [-0.06, 0.0]]
    assert is_close(seen["old"].float(), expected)
    is_entropy_used = computes or coefficient
    assert seen["output"] == ({"log_probs", "entropy"} if is_entropy_used else {"log_probs"})


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [3], [1, 2]]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_are_those_of_the_separate_pass(recipe, parts, ranks):
    """Of several micro-batches and ranks. Each rank has the same episodes here."""
    config = SimpleNamespace(calculate_entropy=False, entropy_coeff=0.0)
    batch = make_batch(EPISODES)
    tokens = int(batch.batch["response_mask"].sum()) * ranks
    results = []
    for part in parts:
        data, model_output = make_micro_batch([EPISODES[i] for i in part], tokens, ranks)
        results.append(training.compute_on_policy_loss(no_loss, config, model_output, data)[1])

    expected = training.add_old_log_probs(RecordingGroup(), batch, recipe)
    expected |= training.apply_rollout_correction(batch, recipe)
    assert len(results[0]) == 5
    for name in results[0]:
        metric = results[0][name].init_list()
        for result in results:
            metric.append(result[name])
        value = Metric.aggregate_dp([metric] * ranks)
        assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name


class LossRecorder:
    """An actor that records its loss."""

    def set_loss_fn(self, loss):
        self.loss = loss


@pytest.mark.parametrize("changes", [[], FUSED])
@pytest.mark.parametrize("name", ["gspo", "mine.py:loss"])
def test_the_actor_gets_the_recipes_loss(recipe, monkeypatch, changes, name):
    """A worker registers a custom loss before it calls verl's ppo_loss."""
    loss_settings = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.clip_ratio=0.3"]
    recipe = changed(recipe, *changes, *loss_settings)
    calls = []

    def ppo_loss(config, model_output, data, dp_group=None):
        calls.append((config, model_output, data, dp_group, POLICY_LOSS_REGISTRY.get(name)))
        return "loss", {}

    def on_policy_loss(loss, *arguments):
        calls.append("on-policy")
        return loss(*arguments)

    def custom_loss():
        """A loss of the recipe."""

    monkeypatch.setattr(training, "ppo_loss", ppo_loss)
    monkeypatch.setattr(training, "compute_on_policy_loss", on_policy_loss)
    is_custom = ".py:" in name
    if is_custom:
        monkeypatch.setitem(POLICY_LOSS_REGISTRY, name, custom_loss)
    actor = LossRecorder()
    training.set_policy_loss(actor, recipe)
    if is_custom:
        monkeypatch.delitem(POLICY_LOSS_REGISTRY, name)  # as in a worker's process
    assert actor.loss("output", "data", "ranks") == ("loss", {})
    assert calls[:-1] == (["on-policy"] if changes else [])
    settings, *arguments, registered = calls[-1]
    assert arguments == ["output", "data", "ranks"]
    assert settings.clip_ratio == 0.3 and settings.policy_loss.loss_mode == name
    assert registered is custom_loss if is_custom else registered is not None
