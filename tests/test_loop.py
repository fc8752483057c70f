"""The order of a step, and what a run does at its end: the loop over workers and servers that only write down calls."""

from __future__ import annotations

import pytest
import torch
from conftest import load
from omegaconf import OmegaConf

import algorithm
import gym_client
import training
from kit.data.episode import Episode, append_tokens
from kit.errors import ConfigError, NonFiniteStep, SkippedStep
from kit.runs import checkpoints, cli
from kit.runs.launch import Started


class Servers:
    """Episodes of 3 tokens whose rewards differ; or all of them failed."""

    is_asleep, fails = False, False

    def __init__(self, calls):
        self.calls = calls

    def rollout(self, requests, sampling, on_done, baselines=False):
        self.calls.append("rollout" if sampling["temperature"] else "validate")
        made = []
        for i, (task, group_id) in enumerate(requests):
            e = Episode(
                task.row_id, group_id, task.server, task.prompt_ids, row=task.row, ended="stop"
            )
            e.output.append(gym_client.message("six"))
            append_tokens(e, [5, 6, 1], [-1.0, -2.0, -3.0])
            e.status, e.reward = ("timeout", None) if self.fails else ("ok", float(i % 3 == 0))
            made.append(e)
            on_done(i, e)
        return made

    def sleep(self):
        self.calls.append("sleep")
        self.is_asleep = True

    def update_weights(self, step):
        self.calls.append(f"publish {step}")
        self.is_asleep = False


@pytest.fixture
def calls(workspace, tmp_path, monkeypatch):
    """What was called, in order: of the servers, of the workers, of the checkpoints."""
    made: list[str] = []
    servers = Servers(made)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "kit.runs.launch.start",
        lambda *_, **__: Started(training.Workers(object(), None, None), servers),
    )

    def measured(_, batch, __):
        made.append("old_log_probs")
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        return {}

    def referred(_, batch, __):
        made.append("ref")
        return batch.batch["rollout_log_probs"].clone()

    def updated(_, batch, __):
        made.append("update_actor")
        return {"actor/grad_norm": 1.0, "actor/pg_loss": 0.5}

    def saved(_, folder, state, __):
        made.append(f"save {state['step']}")
        (folder / f"global_step_{state['step']}").mkdir(parents=True)
        return folder / f"global_step_{state['step']}"

    def exported(checkpoint, target):
        made.append(f"export {checkpoints.step_of(checkpoint)}")

    def loaded(_, checkpoint):
        made.append(f"load {checkpoint.name}")
        step = checkpoints.step_of(checkpoint)
        return {"command": "train", "step": step, "batches": step, "pass_rates": {}, "kl_coef": 0.0}

    # A second of each run that no test of the loop looks at: its config.yaml and its report.html.
    monkeypatch.setattr("kit.runs.run_dir.public", lambda _: OmegaConf.create())
    monkeypatch.setattr("kit.runs.run_dir.Run.write_report", lambda _: None)
    monkeypatch.setattr(training, "add_old_log_probs", measured)
    monkeypatch.setattr(training, "compute_ref_log_probs", referred)
    monkeypatch.setattr(training, "update_actor", updated)
    for name, function in {"save": saved, "export": exported, "load": loaded}.items():
        monkeypatch.setattr(checkpoints, name, function)
    monkeypatch.setattr(checkpoints, "not_finite", lambda _: [])
    made_servers = servers
    return made, made_servers


def planned(workspace, *changes, resume_from=None):
    config, data = load(workspace, *changes)
    return cli.Plan(config, config, data, resume_from, [], [])


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ([], []),  # the update's own pass does it
        (["algorithm.recompute_old_log_probs=true"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_epochs=2"], ["old_log_probs"]),
        (["algorithm.use_kl_in_reward=true"], ["old_log_probs", "ref"]),
        (["algorithm.rollout_correction.rollout_is=token"], ["old_log_probs"]),
        (["trainer.critic_warmup=1"], ["old_log_probs"]),
        (["algorithm.rollout_correction.bypass_mode=true"], []),
    ],
)
def test_vllm_sleeps_while_the_trainer_measures_learns_and_saves(
    workspace, calls, changes, measured
):
    made, _ = calls
    with algorithm.train(planned(workspace, "trainer.save_freq=1", *changes)) as trainer:
        assert made == ["sleep", "publish 0"]
        made.clear()
        trainer.step_or_skip()
    learned = [] if "trainer.critic_warmup=1" in changes else ["update_actor"]
    assert made == ["rollout", "sleep", *measured, *learned, "save 1", "publish 1"]


def test_a_checkpoint_is_loaded_while_vllm_sleeps(workspace, calls, tmp_path):
    made, _ = calls
    plan = planned(
        workspace, "trainer.total_training_steps=6", resume_from=tmp_path / "global_step_5"
    )
    with algorithm.train(plan) as trainer:
        assert made == ["sleep", "load global_step_5", "publish 5"]
        trainer.fit()
    assert made[3:5] == ["validate", "rollout"]
    assert made[-4:] == ["save 6", "publish 6", "validate", "export 6"]


def test_steps_that_are_done_are_finished(workspace, calls, tmp_path, monkeypatch):
    """Ctrl-C in the last step saves it: the same command then evaluates and exports; and once more says so."""
    made, _ = calls
    changes = ("trainer.total_training_steps=5", "trainer.val_before_train=false")
    plan = planned(workspace, *changes, resume_from=tmp_path / "global_step_5")
    with algorithm.train(plan) as trainer:
        trainer.fit()
    assert made == ["sleep", "load global_step_5", "publish 5", "validate", "export 5"]

    folder = tmp_path / plan.config.trainer.default_local_dir
    (folder / "global_step_5").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "broken", lambda _: "")
    found, told = checkpoints.find_resume_point(plan.config)
    assert (
        found == folder.relative_to(tmp_path) / "global_step_5"
        and "what is left is the last evaluation" in told[-1]
    )
    export = tmp_path / "runs" / plan.config.trainer.experiment_name / "export"
    export.mkdir(parents=True)
    (export / checkpoints.EXPORTED).write_text("4\n")
    assert checkpoints.find_resume_point(plan.config)[0] == found  # the export is of an earlier step
    (export / checkpoints.EXPORTED).write_text("5\n")
    with pytest.raises(ConfigError, match="nothing left to train"):
        checkpoints.find_resume_point(plan.config)


def test_a_batch_that_failed_is_skipped_before_anybody_sleeps(workspace, calls):
    made, servers = calls
    servers.fails = True
    with algorithm.train(planned(workspace, "gym.max_failed_frac=1")) as trainer:
        with pytest.raises(
            SkippedStep, match=r"no group left to train on; see runs/tiny/rollouts/step_1\.jsonl"
        ):
            trainer.step()
        made.clear()
        trainer.step_or_skip()
    assert made == ["rollout"]


@pytest.mark.parametrize("name", ["old_log_probs", "update_actor"])
def test_damage_is_an_exception_that_carries_its_reason(workspace, calls, monkeypatch, name):
    def damaged(_, batch, __):
        batch.batch["old_log_probs"] = torch.full_like(
            batch.batch["rollout_log_probs"], float("nan")
        )
        return {"actor/grad_norm": float("nan")}

    monkeypatch.setattr(training, name, damaged)
    with algorithm.train(planned(workspace, "algorithm.recompute_old_log_probs=true")) as trainer:
        with pytest.raises(NonFiniteStep, match=r"NaN or infinite|actor/grad_norm is nan") as caught:
            trainer.step()
        assert "responses" in caught.value.batch.batch


def test_what_a_stop_saves_is_of_the_last_update(workspace, calls, monkeypatch):
    """An error while the next batch is sampled: the step that was learned is saved, with its own state."""
    made, servers = calls
    with pytest.raises(ValueError, match="a server's"):
        with algorithm.train(planned(workspace)) as trainer:
            trainer.step_or_skip()
            known = dict(trainer.saved_state["pass_rates"])
            trainer.inputs.source.sampler = lambda tasks, size, *_: tasks[:1] * size
            trainer.collect()
            assert trainer.saved_state["pass_rates"] == known != trainer.state["pass_rates"]

            def broken(*_, **__):
                raise ValueError("a server's")

            monkeypatch.setattr(servers, "rollout", broken)
            trainer.step_or_skip()
    assert (
        made[-1] == "save 1" and trainer.saved_state["batches"] == 1 and trainer.state["batches"] == 3
    )
