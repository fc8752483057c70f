"""Tests that a replay of several steps gives the weights of the recorded run, with FSDP and vLLM.

The recorded run has refilled batches (DAPO), and its second step is skipped.
"""

from __future__ import annotations

import contextlib

import pytest

from kit.run import replay
from tests.helpers.recipes import metrics_of
from tests.helpers.runs import UNEQUAL, assert_same_checkpoints
from tests.helpers.stack import NO_EVALUATION

# At most five groups of a batch count, so each step has two batches. Those of step 2 are dropped.
FILTER = """
def keep(episodes):
    kept = []
    for episode in episodes:
        batch, group = map(int, episode.group_id.split("/"))
        if batch not in (3, 4) and group < 5:
            kept.append(episode)
    return kept
"""
CHANGES = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=2",
    "env.filters=[keep_five.py:keep]",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    NO_EVALUATION,
]
RLOO = "algorithm.adv_estimator=rloo"


@contextlib.contextmanager
def replaying(stack, name: str, recording: replay.Recording, *changes: str):
    """Yield a Trainer that trains on a recording from the initial weights."""
    with stack.trainer(name, *CHANGES, *changes) as trainer:
        loaded = replay.load(recording, trainer.recipe, trainer.inputs)
        trainer.servers = replay.ReplayServers(loaded)
        trainer.update_weights()
        yield trainer


@pytest.fixture
def recording(stack) -> replay.Recording:
    (stack.workspace / "keep_five.py").write_text(FILTER)
    with stack.trainer("to_replay", *CHANGES) as trainer:
        for _ in range(4):
            trainer.step_or_skip()
        return replay.find_recording(f"{trainer.run.folder}/rollouts/step_*.jsonl")


def test_a_replay_has_the_weights_of_the_recorded_run_and_another_loss_has_not(stack, recording):
    assert list(recording.files) == [1, 2, 3, 4]
    with replaying(stack, "same", recording) as trainer:
        assert trainer.servers.replay.changes == []
        for _ in range(4):
            trainer.step_or_skip()
        same = trainer.run.folder
    name = "checkpoints/global_step_4"
    assert assert_same_checkpoints(recording.folder / name, same / name) == 4
    expected = metrics_of(recording.folder)
    assert len(expected) == 4 and "actor/pg_loss" not in expected[1]
    for before, after in zip(expected, metrics_of(same), strict=True):
        other = (*UNEQUAL, "training/weights_proved")  # a replay has no rollout engine
        kept = {k: v for k, v in before.items() if not k.startswith(other)}
        assert {k: after[k] for k in kept} == kept
        if "actor/pg_loss" in before:
            assert after["replay/staleness"] == 0 and after["replay/ess"] > 0.999

    with replaying(stack, "other", recording, RLOO, "trainer.replay_min_ess=0") as trainer:
        assert len(trainer.servers.replay.changes) == 1
        steps = [dict(trainer.step_or_skip()) for _ in range(4)]
    assert [m.get("replay/staleness") for m in steps] == [0, None, 2, 3]
    assert steps[0]["replay/kl"] < 1e-6 < steps[2]["replay/kl"]
    assert steps[0]["replay/ess"] > 0.999 > steps[3]["replay/ess"]
    assert all(m["actor/grad_norm"] > 0 for m in (steps[0], steps[2], steps[3]))
    with pytest.raises(AssertionError, match="model"):
        assert_same_checkpoints(recording.folder / name, trainer.run.folder / name)
