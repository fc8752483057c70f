"""Tests the rewards, log-probs, advantages and updates of a step, and skipped steps."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import algorithm
import training
from kit.config.schedule import POSITION
from kit.errors import NonFiniteStep, RunError
from tests.helpers.trainer import ACTOR, CORRECTION, QUIET, make_plan, read_run_lines
from tests.helpers.workers import is_close

GAE = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8"]

# --- rewards -------------------------------------------------------------------------------------


def test_a_learned_reward_is_a_component_that_env_reward_can_read(workspace, recorder):
    """The means of the verifier's components are still over all episodes."""
    recorder.workers = training.Workers("actor", None, "reward model")
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        functions = trainer.recipe.functions._replace(
            reward=lambda e: e.reward + e.reward_components["reward_model"]
        )
        trainer.recipe = replace(trainer.recipe, functions=functions)
        metrics = trainer.step_or_skip()
        model, kept, inputs, recipe = recorder.arguments["add_reward_model_scores"]
        assert model == "reward model"
        assert inputs is trainer.inputs
        assert recipe is trainer.recipe
        assert [e.shaped_reward for e in kept] == [4.0 + float(i % 3 == 0) for i in range(64)]
        assert metrics["reward/reasoning_gym/reward_model/mean"] == 4.0
        assert "timing_s/reward_model" in metrics
        assert metrics["reward/reasoning_gym/right/mean"] == 0.5
        batch = recorder.arguments["compute_advantages"][0].batch
        assert batch["token_level_rewards"].sum(dim=1).tolist() == [e.shaped_reward for e in kept]
        trainer.metrics = {"reward/reasoning_gym/right/mean": 0.75}
        trainer.shape_rewards(kept)
        assert trainer.metrics["reward/reasoning_gym/right/mean"] == 0.75


def test_without_a_reward_model_no_scores_are_added(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        metrics = trainer.step_or_skip()
        assert "add_reward_model_scores" not in recorder.calls
        assert "timing_s/reward_model" not in metrics


# --- log-probs, values and advantages ------------------------------------------------------------


def test_each_learning_rate_starts_with_the_first_update_of_its_model(workspace, recorder):
    """With critic_warmup=2, the actor's schedule begins at step 3."""
    recorder.workers = training.Workers("actor", "critic", None)
    positions: dict[str, list[int]] = {"update_critic": [], "update_actor": []}
    for name, found in positions.items():

        def update(_model, batch, _recipe, found=found):
            found.append(batch.meta_info[POSITION])
            return {}

        recorder.record(training, name, update)
    changes = [*GAE, "trainer.critic_warmup=2"]
    with algorithm.train(make_plan(workspace, *QUIET, *changes)) as trainer:
        for _ in range(4):
            trainer.step_or_skip()
    assert positions == {"update_critic": [0, 1, 2, 3], "update_actor": [0, 1]}


def test_critic_warmup_trains_only_the_critic(workspace, recorder):
    """With critic_warmup=2, steps 1 and 2 compute old log-probs and update only the critic."""
    recorder.workers = training.Workers("actor", "critic", None)
    changes = [*GAE, "trainer.critic_warmup=2"]
    with algorithm.train(make_plan(workspace, *QUIET, *changes)) as trainer:
        for updates_actor in (False, False, True):
            recorder.calls.clear()
            metrics = trainer.step_or_skip()
            names = ("add_old_log_probs", "compute_values", "update_critic", "update_actor")
            calls = [name for name in recorder.calls if name in names]
            if updates_actor:
                assert calls == ["compute_values", "update_critic", "update_actor"]
            else:
                assert calls == ["add_old_log_probs", "compute_values", "update_critic"]
            assert ("actor/pg_loss" in metrics) == updates_actor
            assert ("timing_s/update_actor" in metrics) == updates_actor
            assert ("actor/entropy" in metrics) == (not updates_actor)
            assert ("timing_s/old_log_prob" in metrics) == (not updates_actor)
            assert metrics["critic/vf_loss"] == 0.75
            assert {"timing_s/values", "timing_s/update_critic"} <= set(metrics)
        batch = recorder.arguments["compute_advantages"][0]
        assert recorder.arguments["compute_values"] == ("critic", batch, trainer.recipe)
        assert recorder.arguments["update_critic"] == ("critic", batch, trainer.recipe)
        assert recorder.arguments["add_old_log_probs"][::2] == ("actor", trainer.recipe)
        assert set(batch.batch["values"].flatten().tolist()) == {0.25}
        assert metrics["critic/values/mean"] == 0.25


def test_the_adaptive_coefficient_of_a_kl_penalty_is_saved(workspace, recorder):
    settings = ["type=adaptive", "horizon=640", "kl_coef=0.4", "target_kl=0.1"]
    changes = ["algorithm.use_kl_in_reward=true"]
    changes += [f"algorithm.kl_ctrl.{setting}" for setting in settings]
    with algorithm.train(make_plan(workspace, *QUIET, *changes)) as trainer:
        metrics = trainer.step_or_skip()
        batch, controller, recipe = recorder.arguments["apply_kl_penalty"]
        assert controller is trainer.kl_controller
        assert recipe is trainer.recipe
        expected = (recorder.workers, batch, trainer.recipe)
        assert recorder.arguments["compute_ref_log_probs"] == expected
        tensors = batch.batch
        assert is_close(tensors["ref_log_prob"], tensors["rollout_log_probs"] - 1.0)
        penalty = 0.4 * 0.5 * torch.ones(64, 3)  # old - ref = 0.5 on each token
        assert is_close(tensors["token_level_rewards"], tensors["token_level_scores"] - penalty)
        assert metrics["actor/reward_kl_penalty_coeff"] == 0.4
        assert "timing_s/ref" in metrics
        new = 0.4 * (1 + 0.2 * 64 / 640)
        assert trainer.state.kl_coef == trainer.saved_state.kl_coef == pytest.approx(new)
        assert type(trainer.state.kl_coef) is float


def test_without_a_kl_penalty_rewards_are_the_scores(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET, f"{ACTOR}.use_kl_loss=true")) as trainer:
        trainer.step_or_skip()
        batch = recorder.arguments["compute_advantages"][0].batch
        assert torch.equal(batch["token_level_rewards"], batch["token_level_scores"])
        assert "apply_kl_penalty" not in recorder.calls
        assert "ref_log_prob" in batch
        assert trainer.state.kl_coef == 0.0


def test_rollout_engine_and_trainer_are_compared_if_both_log_probs_exist(workspace, recorder):
    """The difference is -0.5 on each token."""
    with algorithm.train(make_plan(workspace, *QUIET, f"{CORRECTION}.rollout_is=token")) as trainer:
        metrics = trainer.step_or_skip()
        batch, recipe = recorder.arguments["apply_rollout_correction"]
        assert recipe is trainer.recipe
        expected = np.full((64, 3), np.exp(-0.5))
        assert is_close(batch.batch["rollout_is_weights"], expected)
        assert any(name.startswith("rollout_corr/") for name in metrics)
        assert "timing_s/old_log_prob" in metrics
        assert metrics["actor/entropy"] == 0.125


def test_in_bypass_mode_the_rollout_engine_is_the_old_policy_and_the_loss_corrects(
    workspace, recorder
):
    plan = make_plan(workspace, *QUIET, f"{CORRECTION}.bypass_mode=true")
    with algorithm.train(plan) as trainer:
        trainer.step_or_skip()
        batch = recorder.arguments["update_actor"][1].batch
        assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
        assert not {"apply_rollout_correction", "add_old_log_probs"} & set(recorder.calls)


def test_without_old_log_probs_before_the_update_there_is_no_correction(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    unused = {
        "apply_rollout_correction",
        "add_old_log_probs",
        "compute_ref_log_probs",
        "compute_values",
        "update_critic",
    }
    assert not unused & set(recorder.calls)


# --- skipped steps -------------------------------------------------------------------------------


def test_a_step_whose_tokens_are_all_rejected_is_skipped(workspace, recorder, monkeypatch, capsys):
    def reject(batch, _config):
        batch.batch["response_mask"][:] = 0
        return {}

    monkeypatch.setattr(training, "apply_rollout_correction", reject)
    plan = make_plan(workspace, *QUIET, "algorithm.recompute_old_log_probs=true")
    with algorithm.train(plan) as trainer:
        trainer.run.files.nonfinite_steps = 2
        trainer.step_or_skip()
        assert "update_actor" not in recorder.calls
        assert recorder.calls[-1] == "update_weights 1"
        assert trainer.run.files.nonfinite_steps == 0
        assert trainer.metrics["training/skipped_nonfinite_steps"] == 0
        assert not (trainer.run.folder / "nonfinite").exists()
    output = capsys.readouterr().out.replace("\n", "")
    assert "step 1 skipped: algorithm.rollout_correction.rollout_rs rejected every token" in output


def break_update(*_, **__):
    return {"actor/grad_norm": math.nan}


def break_values(_critic, batch, _config):
    return torch.full_like(batch.batch["rollout_log_probs"], math.nan)


def break_advantages(batch, _config):
    nan = torch.full_like(batch.batch["token_level_rewards"], math.nan)
    batch.batch["advantages"] = nan
    batch.batch["returns"] = nan


@pytest.mark.parametrize(
    ("name", "function", "later_calls"),
    [
        ("compute_values", break_values, ["compute_advantages", "update_critic", "update_actor"]),
        ("compute_advantages", break_advantages, ["update_critic", "update_actor"]),
        ("update_actor", break_update, ["update_weights 1"]),
    ],
)
def test_a_nonfinite_step_stops_immediately_and_its_error_has_the_batch(
    workspace, recorder, monkeypatch, name, function, later_calls
):
    recorder.workers = training.Workers("actor", "critic", None)
    monkeypatch.setattr(training, name, function)
    with algorithm.train(make_plan(workspace, *QUIET, *GAE)) as trainer:
        with pytest.raises(NonFiniteStep) as caught:
            trainer.step()
        assert not set(later_calls) & set(recorder.calls)
        assert caught.value.batch.batch["responses"].tolist() == [[5, 6, 1]] * 64


def test_three_nonfinite_steps_in_a_row_end_the_run(workspace, recorder, monkeypatch, capsys):
    monkeypatch.setattr(training, "update_actor", break_update)
    message = r"3 non-finite steps in a row, the last: actor/grad_norm is nan.* See docs/"
    with pytest.raises(RunError, match=message):
        with algorithm.train(make_plan(workspace, *QUIET, "trainer.save_freq=1")) as trainer:
            for step in (1, 2):
                recorder.calls.clear()
                metrics = trainer.step_or_skip()
                assert metrics["training/skipped_nonfinite_steps"] == step
                assert trainer.run.files.nonfinite_steps == step
                assert recorder.calls[-2:] == [f"save {step}", f"update_weights {step}"]
                assert (trainer.run.folder / "nonfinite" / f"step_{step}.pt").is_file()
                assert trainer.saved_state.step == trainer.state.step == step
                line = read_run_lines(trainer)[-1]
                assert line["step"] == step
                assert line["training/skipped_nonfinite_steps"] == step
            trainer.step_or_skip()
    output = capsys.readouterr().out.replace("\n", "")
    reason = "actor/grad_norm is nan; the batch is in runs/tiny/nonfinite/step_1.pt"
    assert "step 1 has bad numbers after its update (verl skips only mini-batches " in output
    assert f"a non-finite gradient): {reason}" in output


def test_the_console_calls_a_step_skipped_only_if_it_has_no_update(
    workspace, recorder, monkeypatch, capsys
):
    monkeypatch.setattr(training, "compute_advantages", break_advantages)
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
        assert "update_actor" not in recorder.calls
    output = capsys.readouterr().out.replace("\n", "")
    assert re.search(r"step 1 skipped: \d+ of \d+ advantages", output)
    assert "after its update" not in output


def test_a_finite_step_resets_the_count_of_nonfinite_steps(workspace, recorder, monkeypatch):
    finite = training.update_actor
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        for update, count in ((break_update, 1), (break_update, 2), (finite, 0), (break_update, 1)):
            monkeypatch.setattr(training, "update_actor", update)
            metrics = trainer.step_or_skip()
            assert trainer.run.files.nonfinite_steps == count
            assert metrics.get("training/skipped_nonfinite_steps", 0) == count


def test_a_skipped_step_is_saved_and_evaluated_like_any_other(workspace, recorder):
    recorder.servers.fails = True
    changes = ["gym.max_failed_frac=1", "trainer.save_freq=1", "trainer.test_freq=1"]
    with algorithm.train(make_plan(workspace, *QUIET, *changes)) as trainer:
        recorder.calls.clear()
        metrics = trainer.step_or_skip()
        trainer.evaluate_if_due()
        assert recorder.calls == ["rollout", "save 1", "validate"]
        assert trainer.saved_state == trainer.state
        assert metrics["rollout/failed_frac"] == 1.0
        assert metrics["training/epoch"] == 1.0
