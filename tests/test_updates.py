"""Tests the updates of actor and critic, and SFT, with worker groups that record each batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import left_right_2_no_padding

import training
from extras import sft
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
    rows_of,
    sent_rows,
    seven_episodes,
    two_rank_recipe,
)


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


# --- rows ----------------------------------------------------------------------------------------


def test_an_update_gets_each_live_row_once_in_whole_mini_batches(recipe):
    """Six of seven rows have tokens to train on. On 2 ranks, 2 mini-batches get 2 padding rows."""
    episodes = seven_episodes()
    actor = RecordingGroup({"pg_loss": [1.0, 3.0], "actor/grad_norm": [2.0], "mfu": [0.5]})
    batch = make_update_batch(episodes)
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    metrics = training.update_actor(actor, batch, recipe)
    assert metrics == {"actor/pg_loss": 2.0, "actor/grad_norm": 2.0}
    [(method, data)] = actor.calls
    assert method == "update_actor" and len(data) == 8
    rows = sent_rows(data)
    assert sorted(rows) == [0, 0, 1, 2, 3, 5, 6, 7]
    for row, ids, mask, advantage in zip(
        rows, rows_of(data), data["response_mask"], data["advantages"], strict=True
    ):
        e = episodes[row - 1] if row else episodes[0]
        assert ids == e.prompt_ids + e.response_ids
        live = len(e.response_ids) if row else 0
        assert mask.tolist() == [1] * live + [0] * (4 - live)
        assert set(advantage.tolist()) == {float(row)}
    assert not {"token_level_scores", "token_level_rewards"} & set(data.keys())
    sources = [max(row - 1, 0) for row in rows]
    assert is_close(data["rollout_log_probs"], batch.batch["rollout_log_probs"][sources])
    assert is_close(data["old_log_probs"], [[-0.25] * 4] * 8)
    # the padding was added to a copy
    assert all(torch.equal(batch.batch[name], tensor) for name, tensor in before.items())


def test_a_mini_batch_has_rows_of_every_part_of_the_batch(recipe):
    """The first mini-batch gets the 1st, 3rd, 5th... row, and the second one gets the others."""
    actor = RecordingGroup()
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    rows = sent_rows(actor.data)
    mini_batches = [rows[0:2] + rows[4:6], rows[2:4] + rows[6:8]]  # of both ranks
    assert sorted(mini_batches[0]) == [0, 1, 3, 6] and sorted(mini_batches[1]) == [0, 2, 5, 7]
    recipe = changed(recipe, "trainer.n_gpus_per_node=3")
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    rows = sent_rows(actor.data)  # of three ranks, a row of each mini-batch
    assert (sorted(rows[0::2]), sorted(rows[1::2])) == ([1, 3, 6], [2, 5, 7])


@pytest.mark.parametrize(
    ("rows", "mini_batches", "per_mini_batch"), [(7, 2, 4), (4, 1, 4), (2, 1, 2)]
)
def test_a_small_batch_is_split_into_fewer_mini_batches(recipe, rows, mini_batches, per_mini_batch):
    """Each rank gets a row of each mini-batch. The batches have 6, 3 and 2 rows with tokens."""
    actor = RecordingGroup()
    training.update_actor(actor, make_update_batch(seven_episodes()[:rows]), recipe)
    assert tu.get(actor.data, "mini_batch_size") == per_mini_batch
    assert tu.get(actor.data, "global_batch_size") == rows / mini_batches
    assert len(actor.data) == mini_batches * per_mini_batch


def test_a_batch_with_one_row_to_train_on_is_an_update(recipe):
    actor = RecordingGroup()
    training.update_actor(actor, make_update_batch(seven_episodes()[2:4]), recipe)
    assert sent_rows(actor.data) in ([1, 0], [0, 1])


def test_images_stay_with_their_rows(recipe):
    batch = make_update_batch(seven_episodes())
    actor = RecordingGroup()
    images = [{"pixels": i} for i in range(7)]
    batch.non_tensor_batch["multi_modal_inputs"] = np.array(images, dtype=object)
    training.update_actor(actor, batch, recipe)
    pixels = [image["pixels"] for image in tu.get(actor.data, "multi_modal_inputs")]
    assert pixels == [max(row - 1, 0) for row in sent_rows(actor.data)]
    assert "uid" not in actor.data


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_update_has_the_recipes_settings(recipe, shuffle):
    actor = RecordingGroup()
    recipe = changed(recipe, f"{ACTOR}.shuffle={str(shuffle).lower()}")
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    data = actor.data
    assert tu.get(data, "mini_batch_size") == 4 and tu.get(data, "global_batch_size") == 3.5
    assert tu.get(data, "epochs") == 2 and tu.get(data, "seed") == 7
    assert tu.get(data, "dataloader_kwargs") == {"shuffle": shuffle}
    assert tu.get(data, "compute_loss") is True and tu.get(data, "temperature") == 0.7
    assert tu.get(data, "distillation_use_topk") is False
    assert tu.get(data, "distillation_only") is False


@pytest.mark.parametrize(
    ("changes", "entropy"),
    [
        ([], False),
        ([f"{ACTOR}.entropy_coeff=0.1"], True),
        ([f"{ACTOR}.calculate_entropy=true"], True),
        (FUSED, True),  # for the metrics of an on-policy update
    ],
)
def test_the_entropy_is_computed_if_something_reads_it(recipe, changes, entropy):
    actor = RecordingGroup()
    recipe = changed(recipe, f"{ACTOR}.calculate_entropy=false", *changes)
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    assert tu.get(actor.data, "calculate_entropy") is entropy


def test_an_update_of_the_critic_has_the_settings_and_ranks_of_the_critic(recipe):
    changes = [
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=3",
        "critic.data_loader_seed=9",
        "critic.shuffle=true",
    ]
    recipe = changed(recipe, *changes, "trainer.resource_pools.critic=4", f"{ACTOR}.shuffle=false")
    critic = RecordingGroup({"vf_loss": [0.5, 1.0], "critic/lr": [0.1]})
    metrics = training.update_critic(critic, make_update_batch(seven_episodes()), recipe)
    assert metrics == {"critic/vf_loss": 0.75, "critic/lr": 0.1}
    [(method, data)] = critic.calls
    # 6 live rows on 4 ranks, in one mini-batch
    assert method == "train_mini_batch" and len(data) == 8
    assert tu.get(data, "mini_batch_size") == 8 and tu.get(data, "global_batch_size") == 7
    assert tu.get(data, "epochs") == 3 and tu.get(data, "seed") == 9
    assert tu.get(data, "dataloader_kwargs") == {"shuffle": True}
    assert tu.get(data, "compute_loss") is True


def test_utilization_is_a_metric_only_on_gpus(recipe):
    recipe = changed(recipe, "trainer.device=cuda")
    batch = make_update_batch(seven_episodes())
    actor = RecordingGroup({"mfu": [0.25, 0.75]})
    critic = RecordingGroup({"mfu": [0.5]})
    assert training.update_actor(actor, batch, recipe) == {"perf/mfu/actor": 0.5}
    assert training.update_critic(critic, batch, recipe) == {"perf/mfu/critic": 0.5}
    actor = RecordingGroup({"lr": [0.5]})
    assert training.update_actor(actor, batch, recipe) == {"actor/lr": 0.5}


# --- SFT -----------------------------------------------------------------------------------------


def test_sft_takes_one_step_on_the_tokens_of_the_response(recipe):
    episodes = seven_episodes()
    episodes[0].response_mask = [1, 0, 1]
    actor = RecordingGroup({"loss": [0.5]})
    metrics = sft.update_sft(actor, make_update_batch(episodes), recipe)
    assert metrics == {"actor/loss": 0.5}
    [(method, data)] = actor.calls
    assert method == "update_actor"
    assert tu.get(data, "epochs") == 1 and tu.get(data, "mini_batch_size") == len(data) == 6
    assert tu.get(data, "global_batch_size") == 7
    assert tu.get(data, "calculate_entropy") is False and tu.get(data, "compute_loss") is True
    assert tu.get(data, "distillation_use_topk") is False
    for row, mask, ids in zip(
        sent_rows(data), rows_of(data, "loss_mask"), rows_of(data), strict=True
    ):
        e = episodes[row - 1]
        assert mask == [0] * len(e.prompt_ids) + e.response_mask and len(mask) == len(ids)
    assert recipe.actor.ppo_epochs == 2  # the recipe is unchanged


def test_without_sft_the_loss_mask_is_that_of_the_response(recipe):
    actor = RecordingGroup()
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    assert torch.equal(actor.data["loss_mask"], actor.data["response_mask"])


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
