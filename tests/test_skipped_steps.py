"""Tests of skipped steps, and of weights that are not saved, with FSDP and vLLM."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from kit.errors import NonFiniteStep, RunError, SkippedStep
from kit.run import finite_check
from tests.helpers.stack import NO_EVALUATION

# An estimator and a loss that return NaN in some steps.
NAN_FUNCTIONS = """
import torch
from verl.trainer.ppo.core_algos import agg_loss

calls = 0

def estimator(token_level_rewards, response_mask):
    global calls
    calls += 1
    advantages = token_level_rewards * response_mask
    if calls == 2:
        advantages = advantages * float('nan')
    return advantages * (1e6 if calls >= 4 else 1), advantages

def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **_):
    factor = float('nan') if advantages.abs().max() > 1e3 else 1.0
    losses = -advantages * torch.exp(log_prob - old_log_prob) * factor
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

def reward(episode):  # the same for every response, so that no advantage is 0
    return 1.0
"""


def test_nonfinite_steps_are_skipped_and_written_and_three_in_a_row_end_the_run(stack):
    """Step 2 has a NaN advantage. From step 4 on the loss is NaN, so verl skips the mini-batch."""
    (stack.workspace / "damage.py").write_text(NAN_FUNCTIONS)
    changes = [
        "trainer.total_training_steps=9",
        "trainer.save_freq=1",
        "algorithm.adv_estimator=damage.py:estimator",
        "env.reward=damage.py:reward",
        "actor_rollout_ref.actor.policy_loss.loss_mode=damage.py:loss",
        NO_EVALUATION,
    ]
    with pytest.raises(RunError, match="3 non-finite steps in a row, the last: actor/"):
        with stack.trainer("damaged", *changes) as trainer:
            while True:
                trainer.step_or_skip()
    folder = trainer.run.folder
    names = {path.name for path in (folder / "nonfinite").iterdir()}
    assert names == {"step_2.pt", "step_4.pt", "step_5.pt", "step_6.pt"}
    batch = torch.load(folder / "nonfinite" / "step_2.pt", weights_only=True)
    assert batch["advantages"].isnan().any() and len(batch["responses"]) == len(batch["uid"])
    saved = {path.name for path in (folder / "checkpoints").glob("global_step_*")}
    # the weights are finite after every step
    assert saved == {f"global_step_{n}" for n in range(1, 7)}


def scale_weights(worker):
    """Multiply the matrices of an actor by 1.5. Runs in the worker."""
    for weight in worker.actor.engine.module.parameters():
        if weight.dim() > 1:
            weight.detach().mul_(1.5)


def test_an_engine_with_other_weights_ends_the_run_before_the_first_update(stack):
    """With one optimizer step a batch, no stage before the update computes log-probs."""
    import ray

    message = "have the same weights before the first update.*or has other weights"
    try:
        with stack.trainer("other_weights", NO_EVALUATION) as trainer:
            assert trainer.recipe.is_on_policy
            workers = trainer.workers.actor.workers
            ray.get([worker.__ray_call__.remote(scale_weights) for worker in workers])
            with pytest.raises(RunError, match=message):
                trainer.step()
            assert "actor/grad_norm" not in trainer.metrics
    finally:
        stack.workers.actor.load_checkpoint(str(stack.fresh))


def set_nan(worker):
    """Set a weight of an actor to NaN. Runs in the worker."""
    weight = next(iter(worker.actor.engine.module.parameters()))
    weight.detach().to_local().view(-1)[0] = torch.nan


@pytest.mark.parametrize("bypass_mode", [False, True])
def test_weights_that_are_not_finite_are_never_saved(stack, capsys, bypass_mode):
    """The step may fail at any tensor. In bypass mode, no log-prob of the trainer is checked.

    The weights are not sent to vLLM, because NaN would stay in the KV cache that tests share.
    """
    import ray

    name = f"poisoned_{bypass_mode}"
    bypass = f"algorithm.rollout_correction.bypass_mode={str(bypass_mode).lower()}"
    changes = ["trainer.save_freq=1", NO_EVALUATION, bypass]
    try:
        with stack.trainer(name, *changes) as trainer:
            workers = trainer.workers.actor.workers
            ray.get([worker.__ray_call__.remote(set_nan) for worker in workers])
            with pytest.raises((NonFiniteStep, SkippedStep)):
                trainer.step()
            trainer.saved_state = replace(trainer.saved_state, step=trainer.state.step)
            assert trainer.save() is None
            output = capsys.readouterr().out.replace("\n", " ")
            assert "Not saved: NaN or infinity in " in output
            assert not list((trainer.run.folder / "checkpoints").glob("*"))
    finally:
        stack.workers.actor.load_checkpoint(str(stack.fresh))
        shutil.rmtree(stack.workspace / "runs" / name)
    assert finite_check.find_nonfinite_weights(stack.workers) == []
