"""trainer.one_step_off: vLLM samples the next batch during an update."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from concurrent.futures import CancelledError, Future

import pytest
import torch

from extras.one_step_off.servers import BackgroundLoop, Servers
from kit.engine import sampling
from kit.engine.client import Client
from kit.errors import Stop
from kit.run import checkpoints
from kit.run.console import Display
from kit.run.stages import Stages
from tests.helpers.stack import AGREE, PATIENCE, UNTRAINED

LONG_RESPONSES = [
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.n=2",
    "env.val_files=[]",
]


@contextlib.contextmanager
def one_step_off_trainer(stack, *changes):
    """Yield a Trainer with configs/ahead.yaml over the session's vLLM. Its loop is in a thread."""
    with stack.trainer("ahead", *changes, overlays=["ahead"]) as trainer:
        servers = trainer.servers
        loop = BackgroundLoop()
        loop.loop = servers.loop.get_loop()  # the session's clients belong to it
        thread = threading.Thread(target=loop.loop.run_forever)
        handles = servers.context.client.servers
        servers.context.client = Client(trainer.recipe, handles, is_one_step_off=True)
        servers.context.policy_version = 0
        trainer.servers = Servers(
            trainer.recipe,
            servers.manager,
            stack.workers.actor,
            servers.context,
            servers.gym,
            loop,
        )
        thread.start()
        try:
            yield trainer
        finally:
            loop.run(cancel_pending(trainer.servers))
            loop.loop.call_soon_threadsafe(loop.loop.stop)
            thread.join()


async def cancel_pending(servers):
    if servers.pending_requests:
        servers.pending.cancel()
        await asyncio.sleep(1)


def list_steps(versions) -> list[int]:
    """Return the step of the weights that sampled each token."""
    steps = []
    for version in versions:
        steps += [version.step] * version.token_count
    return steps


@pytest.mark.soak
def test_tokens_have_the_version_of_the_weights_that_sampled_them(stack, monkeypatch):
    """New weights interrupt responses, which then continue with the new weights.

    For tokens of the trainer's version, its probabilities agree with those of the rollout engine.
    """

    build_sampling_params = sampling.build_sampling_params

    def sample_to_the_limit(*args):
        return {**build_sampling_params(*args), "ignore_eos": True}

    monkeypatch.setattr(sampling, "build_sampling_params", sample_to_the_limit)
    steps = []  # lists of [episodes, the trainer's probabilities, whether the next batch was done]
    changes = [*LONG_RESPONSES, "actor_rollout_ref.actor.optim.lr=0.02"]
    with one_step_off_trainer(stack, *changes) as trainer:
        # With two of 16 episodes at a time, a batch takes longer than an update.
        trainer.servers.context.episode_slots = asyncio.Semaphore(2)
        shape_rewards = trainer.shape_rewards
        update = trainer.update

        def record_episodes(episodes):
            steps.append([episodes, None, None])
            shape_rewards(episodes)

        def record_update(batch):
            steps[-1][1] = batch.batch["old_log_probs"].exp()
            steps[-1][2] = trainer.servers.pending.done()
            update(batch)

        monkeypatch.setattr(trainer, "shape_rewards", record_episodes)
        monkeypatch.setattr(trainer, "update", record_update)
        metrics = [trainer.step_or_skip() for _ in range(3)]
    assert [m["rollout/staleness/max"] for m in metrics] == [0, 1, 1]
    assert 0 < metrics[1]["rollout/staleness/mean"] < 1
    assert all(m["rollout/failed_frac"] == 0 for m in metrics)
    assert not any(was_done for *_, was_done in steps[:2])
    interrupted = 0
    differences = {0: [], 1: []}  # by age in steps
    for step, (episodes, probabilities, _) in enumerate(steps, 1):
        for row, episode in enumerate(episodes):
            versions = torch.tensor(list_steps(episode.policy_versions))
            count = len(versions)
            assert count == len(episode.response_ids) == sum(episode.response_mask)
            sampled = torch.tensor(episode.log_probs).exp()
            difference = (probabilities[row, :count] - sampled).abs()
            interrupted += len(set(versions.tolist())) == 2
            for age in (0, 1):
                differences[age] += difference[versions == step - 1 - age].tolist()
    # Two syncs interrupt two responses each. If a sync comes when two responses end, it interrupts
    # none.
    assert interrupted >= 2 and max(differences[0]) < AGREE < max(differences[1])


@pytest.mark.soak
def test_it_learns_one_step_off(stack):
    rewards = []
    changes = ["env.val_files=[]", "actor_rollout_ref.rollout.n=16"]
    with one_step_off_trainer(stack, *changes) as trainer:
        while len(rewards) < PATIENCE and (len(rewards) < 3 or sum(rewards[-3:]) / 3 < 0.5):
            metrics = trainer.step_or_skip()
            assert metrics["rollout/failed_frac"] == 0
            assert "training/skipped_nonfinite_steps" not in metrics
            rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    assert sum(rewards[:3]) / 3 < UNTRAINED and sum(rewards[-3:]) / 3 >= 0.5


def test_evaluations_and_checkpoints_keep_the_batch_in_progress(stack):
    """A checkpoint does not count that batch, so a resumed run samples the same prompts again."""
    with one_step_off_trainer(stack, "trainer.total_training_steps=3") as trainer:
        servers = trainer.servers
        update = trainer.update

        def slow_update(batch):
            servers.pending.result()
            update(batch)

        trainer.update = slow_update
        trainer.step_or_skip()
        trainer.update = update
        requests = servers.pending_requests
        assert {request.id.group_id.split("/")[0] for request in requests} == {"2"}
        trainer.evaluate()
        assert trainer.scores
        assert servers.pending_requests is requests and servers.pending.done()
        folder = trainer.save()
        episodes = servers.pending.result()
        trainer.step_or_skip()
        # The step trained on this batch, which was sampled before the update.
        assert trainer.metrics["rollout/staleness/max"] == 1
        responses = {tuple(e.response_ids) for e in episodes}
        # Greedy responses, as in the evaluation, would be equal in each group.
        assert len(responses) > len(requests) / 4
        trainer.step_or_skip()
        assert not servers.pending_requests  # the last step starts no batch
        state = checkpoints.load(stack.workers, folder)
    assert (state.step, state.batches) == (1, 1)


def test_a_failure_of_the_batch_in_progress_is_raised_when_it_is_collected(stack):
    with one_step_off_trainer(stack, *LONG_RESPONSES) as trainer:
        trainer.step_or_skip()
        trainer.servers.pending.result()  # it has ended, so it cannot be canceled
        trainer.servers.pending = Future()
        trainer.servers.pending.cancel()
        with pytest.raises(CancelledError):
            trainer.step_or_skip()
        trainer.servers.pending_requests = ()


@contextlib.contextmanager
def running_stages(folder):
    stages = Stages(60, folder, Display("train", 1, 0))
    stages.install_handlers()
    try:
        yield stages
    finally:
        stages.restore_handlers()


def interrupt_stage(stages, loop, work):
    """Send SIGINT to this process while a stage waits for `work`."""
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        with stages.stage("gen"):
            loop.run(work)
    finally:
        stages.begin_shutdown()


def test_a_stop_ends_the_work_in_progress(tmp_path, monkeypatch):
    """The wait of the driver ends first, then all episodes in the thread of the loop."""
    monkeypatch.chdir(tmp_path)
    ended = []

    async def wait(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fail():
        return 1 / 0

    with running_stages(tmp_path) as stages:
        with pytest.raises(Stop), BackgroundLoop() as loop:
            stages.loop = loop
            assert loop.run(asyncio.sleep(0, "answer")) == "answer"
            with pytest.raises(ZeroDivisionError):
                loop.run(fail())
            loop.start(wait("in the background"))
            interrupt_stage(stages, loop, wait("in the stage"))
    assert sorted(ended) == ["in the background", "in the stage"] and not loop.thread.is_alive()
