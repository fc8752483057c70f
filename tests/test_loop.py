"""Tests the order of calls in a step and in a run, with doubles that record them."""

from __future__ import annotations

import pytest
import torch

import algorithm
import training
from kit.errors import ConfigError, NonFiniteStep, SkippedStep
from kit.runs import checkpoints
from tests.helpers.trainer import make_plan

RECOMPUTE = "algorithm.recompute_old_log_probs=true"


@pytest.mark.parametrize(
    ("changes", "forward_passes"),
    [
        ([], []),  # the forward pass of the update computes the old log-probs
        ([RECOMPUTE], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_epochs=2"], ["old_log_probs"]),
        (["algorithm.use_kl_in_reward=true"], ["old_log_probs", "ref"]),
        (["algorithm.rollout_correction.rollout_is=token"], ["old_log_probs"]),
        (["trainer.critic_warmup=1"], ["old_log_probs"]),
        (["algorithm.rollout_correction.bypass_mode=true"], []),
    ],
)
def test_vllm_sleeps_while_the_trainer_computes_updates_and_saves(
    workspace, loop_doubles, changes, forward_passes
):
    calls = loop_doubles.calls
    with algorithm.train(make_plan(workspace, "trainer.save_freq=1", *changes)) as trainer:
        assert calls == ["sleep", "update_weights 0"]
        calls.clear()
        trainer.step_or_skip()
    updates = [] if "trainer.critic_warmup=1" in changes else ["update_actor"]
    assert calls == ["rollout", "sleep", *forward_passes, *updates, "save 1", "update_weights 1"]


def test_a_run_changes_no_value_of_its_recipe(workspace, loop_doubles):
    plan = make_plan(
        workspace,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
    )
    before = plan.recipe.for_verl()
    with algorithm.train(plan) as trainer:
        trainer.fit()
        assert trainer.recipe is trainer.run.recipe is plan.recipe
    assert trainer.state.step == 3 and plan.recipe.for_verl() == before


def test_a_checkpoint_is_loaded_while_vllm_sleeps(workspace, loop_doubles, tmp_path):
    calls = loop_doubles.calls
    plan = make_plan(
        workspace, "trainer.total_training_steps=6", resume_from=tmp_path / "global_step_5"
    )
    with algorithm.train(plan) as trainer:
        assert calls == ["sleep", "load global_step_5", "update_weights 5"]
        trainer.fit()
    assert calls[3:5] == ["validate", "rollout"]
    assert calls[-4:] == ["save 6", "update_weights 6", "validate", "export 6"]


def test_a_run_that_resumes_after_its_last_step_evaluates_and_exports(
    workspace, loop_doubles, tmp_path, monkeypatch
):
    """Ctrl-C in the last step saves it. The same command then evaluates and exports.

    After the export, the same command is an error.
    """
    calls = loop_doubles.calls
    changes = ("trainer.total_training_steps=5", "trainer.val_before_train=false")
    plan = make_plan(workspace, *changes, resume_from=tmp_path / "global_step_5")
    with algorithm.train(plan) as trainer:
        trainer.fit()
    assert calls == ["sleep", "load global_step_5", "update_weights 5", "validate", "export 5"]

    folder = tmp_path / plan.recipe.trainer.default_local_dir
    (folder / "global_step_5").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "find_damage", lambda _: "")
    checkpoint, notes = checkpoints.find_resume_point(plan.recipe)
    assert checkpoint == folder.relative_to(tmp_path) / "global_step_5"
    assert "The last evaluation and the export remain" in notes[-1]
    export = tmp_path / "runs" / plan.recipe.trainer.experiment_name / "export"
    export.mkdir(parents=True)
    (export / checkpoints.EXPORTED).write_text("4\n")  # the export of an earlier step
    assert checkpoints.find_resume_point(plan.recipe)[0] == checkpoint
    (export / checkpoints.EXPORTED).write_text("5\n")
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        checkpoints.find_resume_point(plan.recipe)


def test_a_step_whose_episodes_all_failed_is_skipped_before_vllm_sleeps(workspace, loop_doubles):
    loop_doubles.servers.fails = True
    with algorithm.train(make_plan(workspace, "gym.max_failed_frac=1")) as trainer:
        message = r"no group is left to train on\. See runs/tiny/rollouts/step_1\.jsonl"
        with pytest.raises(SkippedStep, match=message):
            trainer.step()
        loop_doubles.calls.clear()
        trainer.step_or_skip()
    assert loop_doubles.calls == ["rollout"]


@pytest.mark.parametrize("name", ["add_old_log_probs", "update_actor"])
def test_a_nonfinite_step_raises_an_exception_with_reason_and_batch(
    workspace, loop_doubles, monkeypatch, name
):
    def break_step(_actor, batch, _config):
        log_probs = batch.batch["rollout_log_probs"]
        batch.batch["old_log_probs"] = torch.full_like(log_probs, float("nan"))
        return {"actor/grad_norm": float("nan")}

    monkeypatch.setattr(training, name, break_step)
    with algorithm.train(make_plan(workspace, RECOMPUTE)) as trainer:
        message = r"NaN or infinite|actor/grad_norm is nan"
        with pytest.raises(NonFiniteStep, match=message) as caught:
            trainer.step()
        assert "responses" in caught.value.batch.batch


def test_an_error_during_sampling_saves_the_state_of_the_last_update(
    workspace, loop_doubles, monkeypatch
):
    with pytest.raises(ValueError, match="a server's"):
        with algorithm.train(make_plan(workspace)) as trainer:
            trainer.step_or_skip()
            pass_rates = dict(trainer.saved_state.pass_rates)
            trainer.inputs.source.sampler = lambda tasks, size, *_: tasks[:1] * size
            trainer.collect()
            assert trainer.saved_state.pass_rates == pass_rates != trainer.state.pass_rates

            def fail(*_, **__):
                raise ValueError("a server's")

            monkeypatch.setattr(loop_doubles.servers, "rollout", fail)
            trainer.step_or_skip()
    assert loop_doubles.calls[-1] == "save 1"
    assert trainer.saved_state.batches == 1
    assert trainer.state.batches == 3
