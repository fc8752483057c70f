"""Tests that NaN and infinity are reported by name if their token is in the mask."""

from __future__ import annotations

import math

import pytest
import torch

import training
from kit.errors import NonFiniteStep, RunError
from kit.run.finite_check import find_reason_to_skip, raise_if_engines_differ
from tests.helpers.recipes import changed, load, make_partial
from tests.helpers.workers import make_episode


def test_nonfinite_numbers_are_found_under_the_mask_and_named():
    settings = make_partial()

    def find(names="", value=math.nan, where=(0, 0), metrics=None, recipe=settings):
        episodes = [make_episode([5, 6], [7, 8]), make_episode([5], [7])]
        batch = training.build_batch(episodes, 0, 1.0)
        batch.batch["old_log_probs"] = torch.zeros(2, 2)
        batch.batch["advantages"] = torch.zeros(2, 2)
        for name in names.split():
            batch.batch[name][where] = value
        return find_reason_to_skip(batch, metrics or {}, recipe)

    assert find() == ""
    assert find(metrics={"actor/grad_norm": 3.0, "timing_s/gen": math.nan}) == ""
    for name in ("rollout_log_probs", "old_log_probs", "token_level_scores", "advantages"):
        assert find(name) == f"1 of 3 {name} are NaN or infinite"
        assert find(name, -math.inf) == f"1 of 3 {name} are NaN or infinite"
        assert find(name, where=(1, 1)) == ""  # padding
    both = find("rollout_log_probs old_log_probs", metrics={"actor/grad_norm": math.nan})
    tensors = "1 of 3 rollout_log_probs, 1 of 3 old_log_probs are NaN or infinite"
    assert both == f"{tensors}; actor/grad_norm is nan"
    assert find(metrics={"critic/vf_loss": math.nan}) == "critic/vf_loss is nan"
    difference = {"training/rollout_probs_diff_mean": 0.3}
    message = "the rollout engine's probabilities differ from the trainer's by 0.30"
    assert message in find(metrics=difference)
    assert "differ" in find(metrics={"training/rollout_probs_diff_mean": math.nan})
    # with a penalty, the engine changes its probabilities before it samples
    penalty = changed(settings, f"{ROLLOUT}.repetition_penalty=1.1")
    assert find(metrics=difference, recipe=penalty) == ""


ROLLOUT = "actor_rollout_ref.rollout"


def test_at_the_same_weights_engine_and_trainer_may_differ_by_rounding_only(workspace):
    """The divergence of a difference d of all log-probs is exp(d) - 1 - d: 0.00002 of 0.006."""
    exact = load(workspace).recipe
    coarse = changed(exact, f"{ROLLOUT}.dtype=bfloat16")
    batch = training.build_batch([make_episode([5, 6], [7, 8]), make_episode([5], [7])], 0, 1.0)

    def compare(recipe, difference, episodes=batch):
        log_probs = episodes.batch["rollout_log_probs"] + difference
        raise_if_engines_differ(episodes, log_probs, "llama", recipe)

    for recipe, allowed, too_much in ((exact, 0.006, 0.02), (coarse, 0.3, 0.4)):
        compare(recipe, allowed)
        compare(recipe, -allowed)
        for difference in (too_much, -too_much):
            message = f"their log-probs differ by {too_much:g} on average.* the model type llama"
            with pytest.raises(RunError, match=message):
                compare(recipe, difference)
    # parameters that change the engine's log-probs by design
    for change in ("top_p=0.9", "quantization=fp8", "+engine_kwargs.vllm.kv_cache_dtype=fp8"):
        compare(changed(exact, f"{ROLLOUT}.{change.removeprefix('+')}"), 5.0)
    compare(changed(exact, "trainer.one_step_off=1"), 0.006)
    with pytest.raises(RunError):  # its first batch has the first weights, too
        compare(changed(exact, "trainer.one_step_off=1"), 0.5)
    with pytest.raises(NonFiniteStep, match="NaN"):
        compare(exact, math.nan)
    compare(exact, torch.tensor([[0.0, 0.0], [0.0, math.nan]]))  # padding
