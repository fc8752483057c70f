"""Tests which files `--replay` takes, where it starts, and what it does with another recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gym_client
import training
from kit.data.episode import Episode, append_tokens
from kit.data.fingerprint import Fingerprint
from kit.data.rollout_files import to_record, write_record
from kit.errors import ConfigError, RunError
from kit.recipe.redaction import write_yaml
from kit.run import checkpoints, identity, replay
from tests.helpers.recipes import load, make_partial

SIZES = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]


def write_step(folder: Path, step: int, inputs, token: int = 0, groups=("0", "1")) -> Path:
    """Write a rollouts file with two episodes of each group. token: the sampled id; 0: `7`."""
    path = folder / "rollouts" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    sampled = token or inputs.tokenizer.encode("7", add_special_tokens=False)[-1]
    task = inputs.train[0]
    with path.open("wb") as out:
        for k in range(2 * len(groups)):
            group_id = f"{step}/{groups[k // 2]}"
            episode = Episode(task.row_id, group_id, task.server, [5], row=task.row)
            episode.reward = float(k % 2)
            episode.output.append(gym_client.make_message("7"))
            append_tokens(episode, [sampled, sampled], [-1.0, -1.0])
            write_record(out, to_record(episode, 0, k))
    return path


def write_checkpoint(folder: Path, step: int) -> Path:
    checkpoint = folder / "checkpoints" / f"global_step_{step}"
    checkpoint.mkdir(parents=True)
    checkpoints.write_manifest(checkpoint)
    return checkpoint


# --- files and checkpoints -----------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "rollouts" / name).touch()


def test_a_pattern_names_steps_in_the_order_of_their_numbers(tmp_path):
    touch(tmp_path, *(f"step_{n}.jsonl" for n in (8, 9, 10, 11)))
    recording = replay.find_recording(f"{tmp_path}/rollouts/step_*.jsonl")
    assert list(recording.files) == [8, 9, 10, 11]
    assert (recording.first, recording.last, recording.steps) == (8, 11, "8_11")
    one = replay.find_recording(f"{tmp_path}/rollouts/step_9.jsonl")
    assert (one.steps, one.folder) == ("9", tmp_path)


@pytest.mark.parametrize("names", [[], ["val_3.jsonl"], ["step_1.jsonl", "step_3.jsonl"]])
def test_files_of_other_than_consecutive_steps_are_an_error(tmp_path, names):
    touch(tmp_path, *names)
    with pytest.raises(ConfigError, match="consecutive steps"):
        replay.find_recording(f"{tmp_path}/rollouts/*.jsonl")


def test_a_replay_starts_from_the_step_before_its_first(tmp_path):
    saved = {step: write_checkpoint(tmp_path, step) for step in (1, 2, 3)}
    touch(tmp_path, "step_3.jsonl", "step_4.jsonl")
    recording = replay.find_recording(f"{tmp_path}/rollouts/step_*.jsonl")
    values = {"experiment_name": "again", "default_local_dir": "runs/again/checkpoints"}
    trainer = make_partial({"trainer": values}).trainer
    checkpoint, changes = replay.prepare(trainer, recording)
    assert checkpoint == saved[2]
    assert changes == [
        "trainer.experiment_name=again_replay_3_4",
        "trainer.default_local_dir=runs/again_replay_3_4/checkpoints",
        "trainer.val_before_train=false",
        "env.val_files=[]",
        "env.shadow_verifier=null",
    ]
    named = trainer.model_copy(
        update={"resume_mode": "resume_path", "resume_from_path": str(saved[3])}
    )
    with pytest.raises(ConfigError, match=r"weights after step 2, but .* of another step"):
        replay.prepare(named, recording)
    shutil.rmtree(saved[2])
    with pytest.raises(ConfigError, match="global_step_2 is not complete: there is no such folder"):
        replay.prepare(trainer, recording)
    touch(tmp_path, "step_1.jsonl")
    first = replay.find_recording(f"{tmp_path}/rollouts/step_1.jsonl")
    assert replay.prepare(trainer, first)[0] is None


# --- the checks of the episodes and of the recipe ------------------------------------------------


def write_recipe(folder: Path, recipe) -> None:
    (folder / "config.yaml").write_text(write_yaml(recipe.redacted()))


def test_a_recording_of_another_model_or_one_that_was_cut_is_refused(workspace, tmp_path):
    recipe, inputs, _ = load(workspace, *SIZES)
    write_step(tmp_path, 1, inputs)
    recording = replay.find_recording(f"{tmp_path}/rollouts/step_1.jsonl")
    assert len(replay.load(recording, recipe, inputs).tasks) == len(inputs.train)
    write_step(tmp_path, 1, inputs, token=inputs.model.vocab_size)
    with pytest.raises(ConfigError, match="another model or tokenizer"):
        replay.load(recording, recipe, inputs)
    write_step(tmp_path, 1, inputs, token=inputs.tokenizer.encode("8", add_special_tokens=False)[0])
    with pytest.raises(ConfigError, match="another model or tokenizer"):
        replay.load(recording, recipe, inputs)
    path = write_step(tmp_path, 1, inputs)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"step_1\.jsonl ends within an episode, so others"):
        replay.load(recording, recipe, inputs)


def test_only_keys_that_change_the_update_make_a_replay_off_policy(workspace, tmp_path):
    recipe, inputs, _ = load(workspace, *SIZES)
    path = write_step(tmp_path, 1, inputs)
    recording = replay.Recording({1: path})
    missing = [f"{tmp_path}/config.yaml is missing"]
    assert replay.load(recording, recipe, inputs).changes == missing
    write_recipe(tmp_path, recipe)
    other = recipe.change("trainer.save_freq=1", "env.keep_rollouts=3", "trainer.logger=[console]")
    same = replay.load(recording, other.change("critic.optim.lr=0.5"), inputs)
    assert same.changes == [] and "the weights are those of the recorded run" in same.note
    changed = replay.load(recording, recipe.change("algorithm.adv_estimator=rloo"), inputs)
    assert changed.changes == ["algorithm.adv_estimator grpo -> rloo"]
    assert "off-policy" in changed.note


def test_replaced_weights_make_a_replay_off_policy(workspace, tmp_path):
    key = "actor_rollout_ref.model.path"
    file = "model"
    recipe, inputs, _ = load(workspace, *SIZES)
    recording = replay.Recording({1: write_step(tmp_path, 1, inputs)})
    write_recipe(tmp_path, recipe)
    values = identity.read_run(tmp_path).values | {key: file}
    (tmp_path / "config.yaml").write_text(write_yaml(values))
    path = tmp_path / "config.fingerprint.json"
    identity.write_fingerprint(path, Fingerprint({}, {key: "before"}))
    for digest, changes in (("before", []), ("after", [f"the content of {key}={file}"])):
        now = Fingerprint(values, {key: digest})
        assert replay.load(recording, recipe, inputs, now).changes == changes


class Batch(SimpleNamespace):
    def __len__(self):
        return len(self.batch["response_mask"])


@pytest.mark.parametrize(
    ("shift", "recorded"), [(0.0, None), (1e-3, 0.0), (0.3, None), (0.3, 0.0), (0.3, 0.1)]
)
def test_a_step_whose_policy_is_not_the_sampler_is_off_policy(
    monkeypatch, capsys, tmp_path, shift, recorded
):
    """The limit is twice the distance that the recorded run has measured."""
    behavior = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3)
    tensors = {"response_mask": mask, "turn": torch.zeros(2, 3), "rollout_log_probs": behavior}
    tensors |= {"responses": mask, "attention_mask": mask}
    batch = Batch(batch=tensors, non_tensor_batch={"episode": np.arange(2)})
    present = behavior + shift * torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    monkeypatch.setattr(training, "compute_log_probs", lambda *_: {"log_probs": present})

    def set_old(batch, log_probs):
        batch.batch["old_log_probs"] = log_probs
        return {"actor/entropy": 0.5}

    monkeypatch.setattr(training, "set_old_log_probs", set_old)
    recording = replay.Recording({step: tmp_path / f"{step}.jsonl" for step in (4, 5)})
    known = {} if recorded is None else {5: recorded}
    plan = replay.Replay(recording, [], [], known)
    correction = SimpleNamespace(bypass_mode=False, rollout_is=None, rollout_rs=None)
    recipe = SimpleNamespace(
        algorithm=SimpleNamespace(rollout_correction=correction),
        is_on_policy=False,
        trainer=SimpleNamespace(replay_min_ess=0.1),
    )
    metrics = replay.set_old_log_probs(plan, 5, None, batch, recipe)
    is_off_policy = shift == 0.3 and recorded != 0.1
    assert torch.equal(tensors["old_log_probs"], behavior if is_off_policy else present)
    assert metrics["replay/staleness"] == (1 if is_off_policy else 0)
    assert ("step 5 is off-policy" in capsys.readouterr().out) is is_off_policy
    assert bool(plan.changes) is is_off_policy  # also from the next step on
    recipe.trainer.replay_min_ess = 1.1
    plan.changes.append("x")
    with pytest.raises(RunError, match="the effective sample size"):
        replay.set_old_log_probs(plan, 5, None, batch, recipe)
