"""Tests of recipes whose steps would train nothing."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ConfigError
from kit.recipe.derive import Facts, RowFacts
from kit.recipe.keys import ACTOR
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.recipe.training_effect import find_long_warmups, warn_of_lost_updates
from tests.helpers.recipes import CPU, RECIPE, load, make_partial, tiny, write_chats

STEPS = 12
PPO = "algorithm.adv_estimator=gae"


def make_recipe(*changes, command="train", files=("math_cpu", "cpu")):
    source = read_source(files, [f"trainer.total_training_steps={STEPS}", *changes])
    return build(source, command, Facts(rows=RowFacts(None)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([PPO, "trainer.critic_warmup=12"], "critic_warmup=12: in 12 steps the policy would"),
        ([f"{ACTOR}.optim.lr_warmup_steps=12"], ""),
        ([f"{ACTOR}.optim.lr_warmup_steps=13"], "actor.optim: its warm-up of 13 steps .* 12"),
        ([PPO, "critic.optim.lr_warmup_steps=13"], "critic.optim: its warm-up of 13 steps"),
        (
            [PPO, "trainer.critic_warmup=4", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.75"],
            "actor.optim: its warm-up of 9 steps .* within 8",
        ),
    ],
)
def test_a_warm_up_that_outlasts_the_run_is_an_error(changes, message):
    problems = list(find_long_warmups(make_recipe(*changes)))
    assert len(problems) == bool(message)
    assert re.search(message, "".join(problems))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_start_counts_the_steps_of_the_rows(workspace, command):
    """Eight rows in batches of eight: one epoch is one step."""
    changes = ["trainer.total_epochs=2", "trainer.total_training_steps=null"]
    changes.append(f"{ACTOR}.optim.lr_warmup_steps=3")
    with pytest.raises(ConfigError, match=r"warm-up of 3 steps .* within 2"):
        if command == "train":
            load(workspace, *changes)
        else:
            from extras import sft

            chats = write_chats(workspace)
            files = [str(CPU), str(RECIPE)]
            sft.prepare(read_source(files, tiny(workspace, *changes, *chats)))


@given(st.sampled_from(["bf16", "fp16", "fp32"]), st.floats(-8, -3))
def test_a_rate_that_cannot_move_a_weight_is_a_warning(dtype, exponent):
    lr = 10**exponent
    actor = {
        "optim": {"lr": lr, "override_optimizer_config": None},
        "fsdp_config": {"model_dtype": dtype},
    }
    sections = {"actor": actor, "model": {"lora_rank": 0}}
    recipe = make_partial(
        {"actor_rollout_ref": sections, "model_engine": "dp", "trainer": {"critic_warmup": 0}}
    )
    warnings = list(warn_of_lost_updates(recipe))
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    weight = torch.tensor(0.02, dtype=precision)
    moved = (weight.double() + lr).to(precision)
    assert bool(warnings) == bool(moved == weight)


def test_lost_steps_and_updates_are_warnings_and_other_weights_are_not():
    coarse = [f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.optim.lr=1e-6"]
    (warning,) = warn_of_lost_updates(make_recipe(*coarse))
    assert "fsdp_config.model_dtype=bf16" in warning and "lr=1e-06" in warning
    adapter = make_recipe(*coarse, "actor_rollout_ref.model.lora_rank=4")
    assert not list(warn_of_lost_updates(adapter))
    (warning,) = warn_of_lost_updates(make_recipe("trainer.critic_warmup=3"))
    assert warning == "trainer.critic_warmup=3: without a critic, these steps train nothing."
    critic = [PPO, "critic.fsdp.model_dtype=bf16", "critic.optim.lr=1e-6"]
    (warning,) = warn_of_lost_updates(make_recipe(*critic))
    assert warning.startswith("critic.fsdp.model_dtype=bf16")
