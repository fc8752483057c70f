"""Interpolations of a recipe that only the kit resolves."""

from __future__ import annotations

import copy

import pytest
from omegaconf import OmegaConf
from transformers import Qwen2Config

from kit.config import resources
from kit.config.load import load_config
from kit.runs import prepare

RESOLVERS = {
    "choose": resources.choose,
    "cores": resources.cores,
    "all_gpus": resources._all_gpus_of_root,
}


@pytest.fixture
def forget_resolvers():
    """A function that removes the resolvers of the kit, as in a process of Ray."""
    yield lambda: [OmegaConf.clear_resolver(name) for name in RESOLVERS]
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


@pytest.mark.parametrize(
    ("files", "sequences"),
    [
        (["math"], None),
        (["math_cpu", "cpu"], 64),
        (["math_cpu", "cpu", "deterministic"], 1),
        (["math_cpu", "cpu", "hf"], None),
    ],
)
def test_workers_resolve_their_settings_without_the_resolvers_of_the_kit(
    forget_resolvers, files, sequences
):
    """verl's workers get config.actor_rollout_ref with its interpolations."""
    config, _ = load_config(files, [])
    prepare.set_sizes(config, Qwen2Config())
    settings = copy.deepcopy(config.actor_rollout_ref)
    forget_resolvers()
    OmegaConf.resolve(settings)
    if sequences:
        assert settings.rollout.max_num_seqs == sequences
