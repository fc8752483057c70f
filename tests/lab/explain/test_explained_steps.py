"""Tests that `explain` names planted episodes, with FSDP and a recorded step of a tiny model."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.run import checkpoints, replay
from lab.explain import command
from lab.explain.gradients import call_workers, find_trainer
from tests.helpers.recipes import metrics_of
from tests.helpers.runs import assert_same
from tests.helpers.stack import NO_EVALUATION

CHANGES = ["trainer.total_training_steps=2", "trainer.save_freq=1", NO_EVALUATION]
PLANTED = 19  # the line of the planted episode


@pytest.fixture(scope="module")
def recorded(stack) -> Path:
    """The folder of a run of one step."""
    with stack.trainer("to_explain", *CHANGES) as trainer:
        trainer.step_or_skip()
        return trainer.run.folder


@contextlib.contextmanager
def replaying(stack, recorded: Path, plant: Callable[[dict], None], *changes: str):
    """Yield a Trainer before step 1, with one episode of the recording changed by `plant`."""
    lines = [json.loads(line) for line in (recorded / "rollouts/step_1.jsonl").open()]
    plant(lines[PLANTED])
    folder = stack.workspace / "planted"
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text((recorded / "config.yaml").read_text())
    path = folder / "rollouts" / "step_1.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with stack.trainer("explained", *CHANGES, *changes) as trainer:
        loaded = replay.load(replay.Recording({1: path}), trainer.recipe, trainer.inputs)
        trainer.servers = replay.ReplayServers(loaded)
        trainer.update_weights()
        yield trainer


def name_planted(recorded: Path) -> dict:
    lines = (recorded / "rollouts/step_1.jsonl").read_text().splitlines()
    record = json.loads(lines[PLANTED])
    return {"row": record["_episode"]["row_id"], "episode": record["_ng_rollout_index"]}


def plant_nothing(record: dict) -> None:
    """Leave the episode as it is."""


def plant_nan_reward(record: dict) -> None:
    record["reward"] = record["_episode"]["reward"] = math.nan


def plant_nan_log_prob(record: dict) -> None:
    record["response"]["output"][-1]["generation_log_probs"][0] = math.nan


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (plant_nan_reward, "its reward is nan"),
        (plant_nan_log_prob, "1 of its recorded log-probs are NaN or infinite"),
    ],
)
def test_a_planted_episode_has_the_blame(stack, recorded, plant, reason):
    with replaying(stack, recorded, plant) as trainer:
        explanation = command.explain_step(trainer)
    (culprit,) = explanation.blame
    assert {key: culprit[key] for key in ("row", "episode")} == name_planted(recorded)
    assert reason in culprit["reasons"] and explanation.reason
    path = command.write(explanation, trainer.run.folder)
    assert json.loads(path.read_text())["blame"][0]["row"] == culprit["row"]


def test_the_parts_add_up_to_the_gradient_of_the_recorded_update(stack, recorded):
    """And no weight changes."""
    saved = stack.workspace / "after_explain"
    with replaying(stack, recorded, plant_nothing) as trainer:
        explanation = command.explain_step(trainer)
        trainer.workers.actor.save_checkpoint(str(saved), None, 0, None)
        assert "optimizer_step" not in call_workers(trainer.workers.actor, list_attributes)
    assert not explanation.blame and not explanation.reason
    update = next(m for m in metrics_of(recorded) if "actor/grad_norm" in m)
    assert explanation.gradient_norm == pytest.approx(update["actor/grad_norm"], rel=1e-4)
    assert sum(group["share"] for group in explanation.groups) == pytest.approx(1.0, abs=1e-4)
    cosines = [g["cosine"] for g in explanation.groups if g["cosine"] is not None]
    assert len(cosines) > 2 and all(-1 <= cosine <= 1 for cosine in cosines)
    assert explanation.signal_to_noise > 0
    assert explanation.importance["ess"] > 0.999
    model = "model_world_size_1_rank_0.pt"
    before, after = (checkpoints.read(folder / model) for folder in (stack.fresh, saved))
    assert_same(before, after)


def list_attributes(worker) -> list[str]:
    """List the attributes of the engine's object in a worker."""
    return list(vars(find_trainer(worker).engine))
