"""Tests old log-probs that the update's forward pass computes, and the loss of the workers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.utils.padding import left_right_2_no_padding
from worker_doubles import (
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

import training
from kit.data import worker_results
from training import FusedOutput


@pytest.fixture(autouse=True)
def fetch_from_doubles(monkeypatch, request):
    """Replace `fetch`, because the doubles are not Ray actors."""
    if "ranks" not in request.fixturenames:
        monkeypatch.setattr(worker_results, "fetch", lambda group: list(group.kept))


@pytest.fixture(scope="module")
def recipe(workspace) -> DictConfig:
    return two_rank_recipe(workspace)


# --- whether the pass is fused -------------------------------------------------------------------


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
    config = changed(recipe, *FUSED)
    assert training.fuses_old_log_probs(config)
    assert not training.fuses_old_log_probs(changed(config, change))


@pytest.mark.parametrize(
    ("name", "is_fused"),
    [("sum_pi_squared", False), ("rollout_log_probs", False), ("response_mask", True)],
)
def test_an_estimator_that_reads_results_of_the_pass_needs_a_separate_pass(
    recipe, tmp_path, name, is_fused
):
    """verl's estimators that read these results also read the old log-probs. A custom one may not.

    The pass also completes rollout_log_probs. A response that a filter adds has none.
    """
    file = tmp_path / "mine.py"
    file.write_text(f"def f({name}):\n    return {name}, {name}\n")
    config = changed(recipe, *FUSED, f"algorithm.adv_estimator={file}:f")
    assert training.fuses_old_log_probs(config) is is_fused


# --- the driver's side ---------------------------------------------------------------------------


def fused_output(row, is_padding, log_probs, entropy) -> FusedOutput:
    return FusedOutput(*map(torch.tensor, (row, is_padding, log_probs, entropy)))


def test_the_updates_pass_gives_old_log_probs_in_the_order_of_the_batch(recipe):
    """There are two micro-batches in another order. One has a padding row."""
    config = changed(recipe, *FUSED)
    lengths = [[7, 8], [7], [7, 8]]
    batch = make_update_batch([make_episode([5], response) for response in lengths])
    del batch.batch["old_log_probs"]
    outputs = [
        fused_output([2, 0], [False, True], [[-3.0, -3.5], [-9.0, -9.0]], [[0.3, 0.4], [9.0, 9.0]]),
        fused_output([1, 0], [False] * 2, [[-2.0, 0.0], [-1.0, -1.5]], [[0.5, 0.0], [0.1, 0.2]]),
    ]
    actor = RecordingGroup({"loss": [1.0]}, kept=outputs)
    metrics = training.update_actor(actor, batch, config)
    assert is_close(batch.batch["old_log_probs"], [[-1.0, -1.5], [-2.0, 0.0], [-3.0, -3.5]])
    assert metrics["actor/entropy"] == pytest.approx((0.1 + 0.2 + 0.5 + 0.3 + 0.4) / 5)
    differences = np.exp(-0.5) - np.exp([-1.0, -1.5, -2.0, -3.0, -3.5])
    mean = metrics["training/rollout_probs_diff_mean"]
    assert mean == pytest.approx(differences.mean(), rel=1e-5)
    assert metrics["actor/loss"] == 1.0
    assert any(name.startswith("rollout_corr/") for name in metrics)
    assert all(type(value) is float for value in metrics.values())


def test_old_log_probs_of_the_batch_are_kept(recipe):
    batch = make_update_batch([make_episode([5], [7])])
    output = fused_output([0], [False], [[-3.0]], [[0.3]])
    actor = RecordingGroup(kept=[output])
    metrics = training.update_actor(actor, batch, changed(recipe, *FUSED))
    assert is_close(batch.batch["old_log_probs"], [[-0.25]]) and metrics == {}


def test_an_update_that_is_not_fused_adds_no_old_log_probs(recipe):
    batch = make_update_batch([make_episode([5], [7])])
    del batch.batch["old_log_probs"]
    actor = RecordingGroup({"loss": [1.0]})
    assert training.update_actor(actor, batch, recipe) == {"actor/loss": 1.0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_sends_its_own_results_once(monkeypatch, ranks):
    """So the data that the driver gets does not grow with the square of the number of ranks."""
    processes = [[f"rank {rank}, micro-batch {k}" for k in range(2)] for rank in range(ranks)]

    def make_worker(kept):
        def remote(function):
            monkeypatch.setattr(worker_results, "kept", kept)  # of that process
            return function("worker")

        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))

    monkeypatch.setattr(worker_results.ray, "get", lambda calls: calls)
    group = SimpleNamespace(workers=[make_worker(kept) for kept in processes])
    expected = list(itertools.chain.from_iterable(processes))
    assert worker_results.fetch(group) == expected and len(expected) == 2 * ranks
    assert worker_results.fetch(group) == []  # the first call removed them


# --- the workers' side ---------------------------------------------------------------------------


@pytest.mark.parametrize(("computes", "coefficient"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@pytest.mark.parametrize("has_old", [True, False])
def test_the_fused_loss_uses_its_log_probs_as_the_old_ones(computes, coefficient, has_old):
    episodes = [make_episode([5], [7, 8]), make_episode([5, 6], [9])]
    data = left_right_2_no_padding(make_batch(episodes).to_tensordict())
    data["row"] = torch.tensor([1, 0])
    data["is_padding"] = torch.tensor([False, True])
    if has_old:
        data["old_log_probs"] = torch.full((2, 2), -7.0)
    model_output = {}
    for name in ("log_probs", "entropy"):
        numbers = (FACTORS[name] * data["input_ids"].values().double()).requires_grad_()
        offsets = data["input_ids"].offsets()
        model_output[name] = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
    seen = {}

    def loss(config, model_output, data, dp_group):
        seen["output"] = set(model_output)
        seen["old"] = data["old_log_probs"]
        seen["config"] = config
        seen["group"] = dp_group
        return "loss", {"pg_loss": 1.0}

    config = SimpleNamespace(calculate_entropy=computes, entropy_coeff=coefficient)
    result, metrics = training.compute_fused_loss(loss, config, model_output, data, "ranks")
    (output,) = worker_results.take(None)
    assert result == "loss" and metrics == {"pg_loss": 1.0} and not worker_results.kept
    assert seen["config"] is config and seen["group"] == "ranks"
    assert output.row.tolist() == [1, 0] and output.is_padding.tolist() == [False, True]
    assert not output.log_probs.requires_grad and not seen["old"].requires_grad
    assert is_close(output.log_probs, [[-0.05, -0.07], [-0.06, 0.0]])
    assert is_close(output.entropy, [[0.1, 0.14], [0.12, 0.0]])
    assert is_close(seen["old"].float(), [[-7.0] * 2] * 2 if has_old else output.log_probs)
    is_entropy_used = computes or coefficient
    assert seen["output"] == ({"log_probs", "entropy"} if is_entropy_used else {"log_probs"})


class LossRecorder:
    """An actor that records its loss."""

    def set_loss_fn(self, loss):
        self.loss = loss


@pytest.mark.parametrize("changes", [[], FUSED])
@pytest.mark.parametrize("name", ["gspo", "mine.py:loss"])
def test_the_actor_gets_the_recipes_loss(recipe, monkeypatch, changes, name):
    """A worker registers a custom loss before it calls verl's ppo_loss."""
    loss_settings = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.clip_ratio=0.3"]
    config = changed(recipe, *changes, *loss_settings)
    calls = []

    def ppo_loss(config, model_output, data, dp_group=None):
        calls.append((config, model_output, data, dp_group, POLICY_LOSS_REGISTRY.get(name)))
        return "loss", {}

    def fused_loss(loss, *arguments):
        calls.append("fused")
        return loss(*arguments)

    def custom_loss():
        """A loss of the recipe."""

    monkeypatch.setattr(training, "ppo_loss", ppo_loss)
    monkeypatch.setattr(training, "compute_fused_loss", fused_loss)
    is_custom = ".py:" in name
    if is_custom:
        monkeypatch.setitem(POLICY_LOSS_REGISTRY, name, custom_loss)
    actor = LossRecorder()
    training.set_policy_loss(actor, config)
    if is_custom:
        monkeypatch.delitem(POLICY_LOSS_REGISTRY, name)  # as in a worker's process
    assert actor.loss("output", "data", "ranks") == ("loss", {})
    assert calls[:-1] == (["fused"] if changes else [])
    settings, *arguments, registered = calls[-1]
    assert arguments == ["output", "data", "ranks"]
    assert settings.clip_ratio == 0.3 and settings.policy_loss.loss_mode == name
    assert registered is custom_loss if is_custom else registered is not None
