"""A recipe never changes. What follows from it is computed in one place."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kit.errors import ConfigError
from kit.recipe.recipe import Recipe
from tests.helpers.recipes import load

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return load(workspace).recipe


def test_nothing_can_write_to_a_recipe(recipe):
    for section, name in ((recipe.actor, "entropy_coeff"), (recipe.gym, "timeout_s")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 0.5)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.command = "sft"


def test_verls_classes_get_a_copy_that_they_may_change(recipe):
    copy = recipe.for_verl()
    assert copy == recipe.resolved
    copy.actor_rollout_ref.actor.entropy_coeff = 0.5
    assert recipe.actor.entropy_coeff == 0


# --- change --------------------------------------------------------------------------------------


def test_change_makes_another_recipe(recipe):
    changed = recipe.change(f"{ACTOR}.entropy_coeff=0.25", "env.keep_rollouts=3")
    assert (changed.actor.entropy_coeff, changed.env.keep_rollouts) == (0.25, 3)
    assert (recipe.actor.entropy_coeff, recipe.env.keep_rollouts) == (0, None)
    assert changed.rollout.max_model_len == recipe.rollout.max_model_len == 44


def test_change_computes_again_what_follows(recipe):
    changed = recipe.change("data.max_response_length=60", "trainer.total_training_steps=9")
    assert changed.rollout.max_model_len == recipe.rollout.max_model_len + 60 - 12
    assert changed.actor.optim.total_training_steps == 9
    assert changed.model.path == recipe.model.path


def test_change_loads_the_functions_of_the_recipe(recipe):
    changed = recipe.change("env.filters=[templates/filters.py:drop_uniform]")
    assert [f.__name__ for f in changed.functions.filters] == ["drop_uniform"]
    assert recipe.functions.filters == []
    assert recipe.compares_group and not recipe.has_critic
    changed = recipe.change("algorithm.adv_estimator=gae")
    assert changed.has_critic and not changed.compares_group


def test_an_invalid_change_is_an_error(recipe):
    with pytest.raises(ConfigError, match=r"gym\.timeout_s=0 must be"):
        recipe.change("gym.timeout_s=0")


# --- what follows --------------------------------------------------------------------------------


def test_sizes_follow_from_the_recipe(recipe):
    assert (recipe.optimizer_steps, recipe.max_prompt_batches, recipe.replicas) == (1, 1, 1)
    changed = recipe.change(
        f"{ACTOR}={{ppo_mini_batch_size: 2, ppo_epochs: 3}}",
        "critic.ppo_mini_batch_size=4",
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 5}",
        "trainer={nnodes: 2, n_gpus_per_node: 4, resource_pools: {critic: 1}}",
        "actor_rollout_ref.rollout={tensor_model_parallel_size: 2, n_gpus_per_node: 4}",
    )
    assert (changed.mini_batches(), changed.optimizer_steps) == (4, 12)
    assert changed.mini_batches("critic") == 2
    assert changed.max_prompt_batches == 5
    assert (changed.world_size(), changed.world_size("critic"), changed.all_gpus) == (8, 2, 10)
    assert (changed.rollout_gpus, changed.replicas) == (8, 4)
