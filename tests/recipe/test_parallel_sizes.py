"""Tests that the GPUs that share something divide the machine and the model."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from kit.recipe import parallel_sizes
from kit.recipe.keys import ACTOR, ROLLOUT
from kit.recipe.load import read_source
from kit.recipe.settings import make_settings

TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
POLICY = LlamaConfig(hidden_size=48, num_attention_heads=24, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"{ACTOR}.fsdp_config.fsdp_size=3"], rf"8 GPUs .* multiple of {ACTOR}\..*fsdp_size=3"),
        (
            ["trainer.resource_pools.critic=6", "critic.fsdp.fsdp_size=4"],
            r"6 GPUs must be a multiple of critic\.fsdp\.fsdp_size=4",
        ),
        (
            ["trainer.resource_pools.ref=2", f"{ACTOR}.ulysses_sequence_parallel_size=4"],
            "2 GPUs must be a multiple of .*ulysses_sequence_parallel_size=4",
        ),
        ([f"{TENSOR}=3"], "8 GPUs must be a multiple of .*data_parallel_size = 3"),
        ([f"{TENSOR}=2", f"{ROLLOUT}.data_parallel_size=2"], ""),
    ],
)
def test_groups_of_gpus_divide_the_machine(changes, message):
    source = read_source(["math"], ["trainer.n_gpus_per_node=8", *changes])
    problems = list(parallel_sizes.check_gpus(make_settings(source, "train")))
    assert len(problems) == bool(message), problems
    assert re.search(message, "".join(problems))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=6"], r"=6: .*heads.*: 1, 2, 4, 8\."),
        ([f"{TENSOR}=16"], "of the policy equally. Use one of: 1, 2, 4, 8"),
        (
            [
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
                "actor_rollout_ref.model.use_remove_padding=false",
            ],
            "needs .*use_remove_padding=true",
        ),
    ],
)
def test_gpus_that_share_a_model_divide_its_heads(changes, message):
    settings = make_settings(read_source(["math"], changes), "train")
    problems = list(parallel_sizes.check_models(settings, {"policy": POLICY}))
    assert len(problems) == bool(message), problems
    assert re.search(message, "".join(problems))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_every_gpu_gets_as_many_heads(heads, key_heads, gpus):
    """As verl and vLLM divide them: a GPU has whole key-value heads, or a copy of one."""
    model: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    model.get_text_config = lambda: model
    is_shared = parallel_sizes.can_share(model, gpus)
    per_gpu = [list(range(heads))[rank::gpus] for rank in range(gpus)]
    copies = max(1, gpus // key_heads)
    slots = [head for head in range(key_heads) for _ in range(copies)]
    keys_per_gpu = [slots[rank::gpus] for rank in range(gpus)]
    assert is_shared == all(
        len({len(part) for part in parts}) == 1 for parts in (per_gpu, keys_per_gpu)
    )
    problems = parallel_sizes.check_heads("key", gpus, 24, "policy", model)
    for size in re.findall(r"\d+", "".join(problems).rpartition(":")[2]):
        assert heads % int(size) == 0 == 24 % int(size)
