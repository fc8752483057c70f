"""Tests of values in recipes that depend on other keys."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from kit.config.load import load_config


@pytest.mark.parametrize(
    ("files", "is_one_at_a_time"),
    [
        (["deterministic"], False),
        (["cpu"], False),
        (["cpu", "deterministic"], True),
        (["deterministic", "cpu"], True),
    ],
)
def test_determinism_samples_one_response_at_a_time_on_a_cpu_only(files, is_one_at_a_time):
    """Kernels of a GPU do not depend on the size of a batch, so a GPU would only be slow."""
    config, _ = load_config(["math", *files], [])
    count = config.actor_rollout_ref.rollout.max_num_seqs
    assert (count == 1) == is_one_at_a_time and count >= 1


def test_choose_takes_one_of_two_values():
    recipe = OmegaConf.create({"key": True, "value": "${choose:${key},1,${other}}", "other": 64})
    assert recipe.value == 1
    recipe.key = False
    assert recipe.value == 64
