"""Tests that the GPUs that share something divide the machine and the model."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3MoeConfig

from kit.config import checks, parallel_sizes
from kit.config.load import ACTOR, ROLLOUT, load_config
from kit.config.recipe import find_parallelism, freeze
from kit.errors import ConfigError
from kit.extras.megatron import Megatron
from tests.helpers.recipes import load

TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
BATCH = ["data.train_batch_size=24", f"{ACTOR}.ppo_mini_batch_size=24"]  # for 24 GPUs
POLICY = LlamaConfig(
    hidden_size=48,
    num_attention_heads=24,
    num_key_value_heads=4,
    intermediate_size=36,
    vocab_size=190,
)
EXPERTS = Qwen3MoeConfig(
    num_attention_heads=8,
    num_key_value_heads=2,
    moe_intermediate_size=12,
    num_experts=6,
    num_hidden_layers=6,
    vocab_size=192,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"{ACTOR}.fsdp_config.fsdp_size=3"], rf"8 GPUs .* multiple of {ACTOR}\..*fsdp_size=3"),
        (["actor_rollout_ref.ref.fsdp_config.fsdp_size=6"], "8 GPUs must be a multiple of .*=6"),
        (
            ["trainer.resource_pools.critic=6", "critic.fsdp.fsdp_size=4"],
            r"6 GPUs must be a multiple of critic\.fsdp\.fsdp_size=4",
        ),
        (
            ["trainer.resource_pools.ref=2", f"{ACTOR}.ulysses_sequence_parallel_size=4"],
            "2 GPUs must be a multiple of .*ulysses_sequence_parallel_size=4",
        ),
        (
            ["trainer.nnodes=3", *BATCH, f"{TENSOR}=6"],
            "= 6 must divide the 8 GPUs of a node, or fill",
        ),
        (
            ["trainer.nnodes=3", *BATCH, f"{TENSOR}=6", f"{ROLLOUT}.data_parallel_size=4"],
            "= 24 must divide the 8 GPUs of a node",
        ),
        (["trainer.nnodes=2", f"{TENSOR}=16", f"{ACTOR}.fsdp_config.fsdp_size=4"], ""),
        ([f"{TENSOR}=2", f"{ROLLOUT}.data_parallel_size=2"], ""),
        ([f"{ACTOR}.fsdp_config.fsdp_size=16"], ""),  # verl takes it as all GPUs
    ],
)
def test_groups_of_gpus_divide_the_machine(changes, message):
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=8", *changes])
    split = find_parallelism(config, []).model
    problems = list(checks.check_sizes(config, "train", split))
    assert len(problems) == bool(message), problems
    assert re.search(message, "".join(problems))


@pytest.mark.parametrize(
    ("changes", "policy", "message"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=5"], POLICY, "24 attention heads and the 4 key"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=6"], POLICY, r"=6: .*heads.*: 1, 2, 4, 8\."),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=8"], POLICY, ""),  # each key-value head twice
        ([f"{TENSOR}=8"], POLICY, "cannot share the 36 MLP channels of the policy equally"),
        ([f"{TENSOR}=4"], POLICY, ""),
        ([f"{TENSOR}=3"], POLICY, "Use one of: 1, 2, 4"),
        ([f"{TENSOR}=8"], EXPERTS, "the 12 channels of an expert of the policy"),
        ([f"{TENSOR}=8", f"{ROLLOUT}.expert_parallel_size=8"], EXPERTS, ""),
        ([f"{TENSOR}=2", f"{ROLLOUT}.expert_parallel_size=2"], POLICY, "has no experts"),
        (
            [
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
                "actor_rollout_ref.model.use_remove_padding=false",
            ],
            POLICY,
            "needs .*use_remove_padding=true",
        ),
    ],
)
def test_gpus_that_share_a_model_divide_it(changes, policy, message):
    recipe = freeze(*load_config(["math"], changes))
    problems = list(parallel_sizes.check_models(recipe, {"policy": policy}))
    assert len(problems) == bool(message), problems
    assert re.search(message, "".join(problems))


def test_each_model_that_is_trained_or_asked_is_checked():
    recipe = freeze(*load_config(["math"], [f"{ACTOR}.ulysses_sequence_parallel_size=8"]))
    models = {"policy": POLICY, "teacher": LlamaConfig(hidden_size=48, num_attention_heads=12)}
    (problem,) = parallel_sizes.check_models(recipe, models)
    assert (
        "8 GPUs cannot share the 12 attention heads and the 12 key-value heads of the teacher"
        in (problem)
    )


def test_a_model_that_cannot_be_shared_is_an_error_before_anything_starts(workspace):
    with pytest.raises(ConfigError, match=f"{TENSOR}=4: 4 GPUs cannot share the 2 attention heads"):
        load(workspace, "trainer.n_gpus_per_node=4", f"{TENSOR}=4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tensor_model_parallel_size=16", "16 GPUs cannot share the 8 attention heads"),
        ("pipeline_model_parallel_size=4", "4 GPUs cannot share the 6 layers"),
        ("expert_model_parallel_size=4", "4 GPUs cannot share the 6 experts"),
        ("expert_model_parallel_size=3", ""),
    ],
)
def test_megatron_divides_heads_layers_and_experts(change, message):
    changes = [f"{ACTOR}.megatron.tensor_model_parallel_size=1", f"{ACTOR}.megatron.{change}"]
    config, defaults = load_config(["math", "megatron"], changes)
    recipe = freeze(config, defaults)
    problems = list(Megatron(config, "train").check_model(recipe, EXPERTS))
    assert len(problems) == bool(message)
    assert message in "".join(problems)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_every_gpu_gets_as_many_heads(heads, key_heads, gpus):
    """As verl and vLLM divide them: a GPU has whole key-value heads, or a copy of one."""
    model: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    model.get_text_config = lambda: model
    is_shared = not parallel_sizes.list_indivisible(model, gpus, parallel_sizes.HEADS)
    per_gpu = [list(range(heads))[rank::gpus] for rank in range(gpus)]
    copies = max(1, gpus // key_heads)
    slots = [head for head in range(key_heads) for _ in range(copies)]
    keys_per_gpu = [slots[rank::gpus] for rank in range(gpus)]
    assert is_shared == all(
        len({len(part) for part in parts}) == 1 for parts in (per_gpu, keys_per_gpu)
    )
    problems = parallel_sizes.check_shares("key", gpus, 24, "policy", model, parallel_sizes.HEADS)
    for size in re.findall(r"\d+", "".join(problems).rpartition(":")[2]):
        assert heads % int(size) == 0 == 24 % int(size)
