"""Tests the updates of actor and critic, and SFT, with worker groups that record each batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu

import training
from extras import sft
from kit.config.recipe import Recipe
from tests.helpers.workers import (
    ACTOR,
    FUSED,
    RecordingGroup,
    changed,
    is_close,
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
