"""Test doubles of servers, workers and checkpoints that record each call of the training loop."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gym_client
import training
from kit.data.episode import Episode, append_tokens
from kit.run import checkpoints, cli, finite_check
from kit.run.checkpoints import LoopState
from kit.run.launch import Started
from tests.helpers.recipes import load

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
REFILL = "algorithm.filter_groups"
# no evaluation and no checkpoint
QUIET = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
# Recorded functions of training.py that need no worker.
IN_PROCESS = (
    "to_batch",
    "build_batch",
    "apply_kl_penalty",
    "apply_rollout_correction",
    "compute_advantages",
    "compute_step_metrics",
)


class Servers:
    """Servers that record each request. Episodes have 3 tokens.

    fails: True, or the group whose episodes fail. reward(i, group id): the reward of the i-th
    response of a batch.
    """

    is_asleep = False
    fails: bool | str = False

    def __init__(self, calls: list[str]):
        self.calls = calls
        self.rollouts: list[SimpleNamespace] = []
        self.started: list[SimpleNamespace] = []  # of trainer.one_step_off
        self.version = 0
        self.reward = lambda i, group_id: float(i % 3 == 0)

    def rollout(self, requests, sampling, on_done, baselines=False):
        self.calls.append("rollout" if sampling["temperature"] else "validate")
        self.rollouts.append(
            SimpleNamespace(requests=requests, sampling=sampling, baselines=baselines)
        )
        episodes = []
        for i, request in enumerate(requests):
            task = request.task
            has_failed = self.fails in (True, request.id.group_id)
            episode = Episode(
                task.row_id,
                request.id.group_id,
                task.server,
                task.prompt_ids,
                row=task.row,
                ended="stop",
                status="timeout" if has_failed else "ok",
                policy_versions=[(3, self.version)],
                reward_components={"right": 0.5},
                baseline=0.25 if baselines else None,
            )
            episode.output.append(gym_client.make_message("six"))
            append_tokens(episode, [5, 6, 1], [-1.0, -2.0, -3.0])
            episode.reward = None if has_failed else self.reward(i, episode.group_id)
            episodes.append(episode)
            on_done(i, episode)
        return episodes

    def start_rollout(self, requests, sampling, baselines):
        self.calls.append("start_rollout")
        self.started.append(
            SimpleNamespace(requests=requests, sampling=sampling, baselines=baselines)
        )

    def sleep(self):
        self.calls.append("sleep")
        self.is_asleep = True

    def update_weights(self, step):
        self.calls.append(f"update_weights {step}")
        self.is_asleep = False
        self.version = step
        return {}


class Recorder:
    """The calls of servers and workers in order, and the arguments of the last call by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.calls: list[str] = []
        self.servers = Servers(self.calls)
        self.arguments: dict[str, tuple[Any, ...]] = {}  # of the last call, by name
        actor: Any = "actor"
        self.workers = training.Workers(actor, None, None)
        self.started: tuple[Any, ...] = ()  # the arguments of launch.start

    def record(self, owner, name, function=None):
        """Record the calls of owner.name. function: a replacement for it."""
        original = function or getattr(owner, name)

        def call(*arguments, **named):
            self.arguments[name] = (*arguments, *named.values())
            self.calls.append(name)
            return original(*arguments, **named)

        self.monkeypatch.setattr(owner, name, call)

    def start(self, run, inputs, stack, samples=True):
        """Replace kit.run.launch.start."""
        self.started = (run, inputs, stack, samples)
        return Started(self.workers, self.servers if samples else None)

    def list_stages(self) -> list[str]:
        """Return the calls of servers, workers and checkpoints."""
        return [name for name in self.calls if name not in IN_PROCESS]


def replace_checkpoints(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace saving, loading and exporting. The new functions record calls."""

    def save(_workers, folder, state, _config):
        calls.append(f"save {state.step}")
        checkpoint = folder / f"global_step_{state.step}"
        checkpoint.mkdir(parents=True)
        return checkpoint

    def export(checkpoint, _target):
        calls.append(f"export {checkpoints.step_of(checkpoint)}")

    def load_state(_workers, checkpoint):
        calls.append(f"load {checkpoint.name}")
        step = checkpoints.step_of(checkpoint)
        return LoopState(step=step, batches=step)

    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(checkpoints, "load", load_state)
    monkeypatch.setattr(finite_check, "find_nonfinite_weights", lambda _: [])
    monkeypatch.setattr("kit.run.export.export", export)


def make_recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replace everything outside the loop by doubles. Functions of workers have fixed results."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr("kit.run.launch.start", recorder.start)
    # config.yaml and report.html take a second of each run, and no test of the loop reads them
    monkeypatch.setattr("kit.run.run_files.write_yaml", lambda _: "")
    monkeypatch.setattr("kit.run.run_files.RunFiles.write_report", lambda _: None)
    replace_checkpoints(recorder.calls, monkeypatch)

    def add_old_log_probs(_actor, batch, _config):
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"] - 0.5
        return {"actor/entropy": 0.125}

    def compute_ref_log_probs(_workers, batch, _config):
        return batch.batch["rollout_log_probs"] - 1.0

    def compute_log_probs(_actor, batch, _config):  # of the comparison at the first step
        return {"log_probs": batch.batch["rollout_log_probs"].clone()}

    def compute_values(_critic, batch, _config):
        return torch.full_like(batch.batch["rollout_log_probs"], 0.25)

    def add_reward_model_scores(_model, episodes, _inputs, _config):
        for episode in episodes:
            episode.reward_components["reward_model"] = 4.0

    recorder.record(training, "add_old_log_probs", add_old_log_probs)
    monkeypatch.setattr(training, "compute_log_probs", compute_log_probs)
    # these old log-probs are not those of the sampler
    monkeypatch.setattr(finite_check, "raise_if_engines_differ", lambda *_: None)
    recorder.record(training, "compute_ref_log_probs", compute_ref_log_probs)
    recorder.record(training, "compute_values", compute_values)
    recorder.record(training, "add_reward_model_scores", add_reward_model_scores)
    recorder.record(training, "update_actor", lambda *_: {"actor/pg_loss": 0.5})
    recorder.record(training, "update_critic", lambda *_: {"critic/vf_loss": 0.75})
    for name in IN_PROCESS:
        recorder.record(training, name)
    return recorder


def make_plan(workspace, *changes, resume_from=None) -> cli.Plan:
    """Return the plan of the tiny recipe with changes."""
    recipe, inputs, features = load(workspace, *changes)
    return cli.Plan(recipe, inputs, resume_from, None, [], features=features)


def read_run_lines(trainer, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read a JSONL file of the run's folder."""
    return [json.loads(line) for line in (trainer.run.folder / name).read_text().splitlines()]


def list_row_ids(requests) -> list[str]:
    return [request.task.row_id for request in requests]


def list_group_ids(requests) -> list[str]:
    return [request.id.group_id for request in requests]
