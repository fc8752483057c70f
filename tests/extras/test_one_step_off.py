"""One step ahead: the next batch is sampled while this one trains, over the real stack."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from concurrent.futures import Future

import pytest
import torch
from omegaconf import OmegaConf
from test_steps import AGREE, PATIENCE, UNTRAINED

import inference
from kit.errors import Stop
from kit.extras import one_step_off
from kit.rollout.client import Client
from kit.runs import checkpoints
from kit.runs.signals import Guard

LONG = ["data.max_response_length=400", "actor_rollout_ref.rollout.n=2", "env.val_files=[]"]


@contextlib.contextmanager
def stepping_ahead(stack, *changes):
    """A Trainer with configs/ahead.yaml over the session's vLLM, the session's loop in a thread of its own."""
    with stack.trainer("ahead", *changes, overlays=["ahead"]) as trainer:
        was, loop = trainer.servers, one_step_off.Loop()
        loop.loop = was.loop.get_loop()  # where the session's clients live
        thread = threading.Thread(target=loop.loop.run_forever)
        was.policy.client = Client(trainer.config, was.policy.client.servers, ahead=True)
        trainer.servers = one_step_off.Servers(
            trainer.config, was.manager, stack.workers.actor, was.policy, was.gym, loop
        )
        trainer.servers.policy.version = 0
        thread.start()
        try:
            yield trainer
        finally:
            loop.run(drop(trainer.servers))
            loop.loop.call_soon_threadsafe(loop.loop.stop)
            thread.join()


async def drop(servers):
    if servers.requests:
        servers.under_way.cancel()
        await asyncio.sleep(1)


def test_tokens_know_which_weights_sampled_them(stack, monkeypatch):
    """Answers that new weights cut go on under them. The trainer agrees with the sampler where they are the same."""
    sampling_params = inference.sampling_params  # every answer to its end
    monkeypatch.setattr(
        inference, "sampling_params", lambda *args: {**sampling_params(*args), "ignore_eos": True}
    )
    seen = []
    with stepping_ahead(stack, *LONG, "actor_rollout_ref.actor.optim.lr=0.02") as trainer:
        trainer.servers.policy.places = asyncio.Semaphore(
            2
        )  # of 16 episodes: longer than an update
        reward, learn = trainer.reward, trainer.learn
        monkeypatch.setattr(
            trainer, "reward", lambda kept: (seen.append([kept, None, None]), reward(kept))
        )

        def look(batch):
            seen[-1][1:] = batch.batch["old_log_probs"].exp(), trainer.servers.under_way.done()
            learn(batch)

        monkeypatch.setattr(trainer, "learn", look)
        metrics = [trainer.advance() for _ in range(3)]
    assert [m["rollout/staleness/max"] for m in metrics] == [0, 1, 1]
    assert 0 < metrics[1]["rollout/staleness/mean"] < 1
    assert all(m["rollout/failed_frac"] == 0 for m in metrics) and not any(
        done for *_, done in seen[:2]
    )
    cut, apart = 0, {0: [], 1: []}
    for step, (kept, trainers, _) in enumerate(seen, 1):
        for row, episode in enumerate(kept):
            versions = torch.tensor([v for count, v in episode.versions for _ in range(count)])
            assert len(versions) == len(episode.response_ids) == sum(episode.response_mask)
            off = (trainers[row, : len(versions)] - torch.tensor(episode.log_probs).exp()).abs()
            cut += len(set(versions.tolist())) == 2
            for age in (0, 1):
                apart[age] += off[versions == step - 1 - age].tolist()
    # four, unless new weights came just as the two that go side by side ended, which they do together
    assert cut >= 2 and max(apart[0]) < AGREE < max(apart[1])


def test_it_learns_a_step_ahead(stack):
    rewards = []
    with stepping_ahead(stack, "env.val_files=[]", "actor_rollout_ref.rollout.n=16") as trainer:
        while len(rewards) < PATIENCE and (len(rewards) < 3 or sum(rewards[-3:]) / 3 < 0.5):
            metrics = trainer.advance()
            assert (
                metrics["rollout/failed_frac"] == 0
                and "training/skipped_nonfinite_steps" not in metrics
            )
            rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    assert sum(rewards[:3]) / 3 < UNTRAINED and sum(rewards[-3:]) / 3 >= 0.5


def test_evaluations_and_checkpoints_leave_the_batch_under_way(stack):
    """Whose answers stay sampled; a checkpoint does not count it, so a resumed run asks the same prompts again."""
    with stepping_ahead(stack, "trainer.total_training_steps=3") as trainer:
        learn = trainer.learn
        trainer.learn = lambda batch: (
            trainer.servers.under_way.result(),
            learn(batch),
        )  # an update that takes long
        trainer.advance()
        trainer.learn, begun = learn, trainer.servers.requests
        assert {group.split("/")[0] for _, group in begun} == {"2"}
        trainer.evaluate()
        assert (
            trainer.scores
            and trainer.servers.requests is begun
            and trainer.servers.under_way.done()
        )
        folder = trainer.save()
        under_way = trainer.servers.under_way.result()
        trainer.advance()
        assert (
            trainer.metrics["rollout/staleness/max"] == 1
        )  # all of it from before the update, and trained on
        answers = {tuple(e.response_ids) for e in under_way}
        assert len(answers) > len(begun) / 4  # not the evaluation's greedy ones
        trainer.advance()
        assert not trainer.servers.requests  # the last step begins nothing
        state = checkpoints.load(stack.workers, folder)
    assert (state["step"], state["batches"]) == (1, 1)


def test_a_failure_under_way_is_told_when_its_turn_comes(stack):
    with stepping_ahead(stack, *LONG) as trainer:
        trainer.advance()
        trainer.servers.under_way.result()  # a fast one may have ended by now, and then cannot be cancelled
        trainer.servers.under_way = Future()
        trainer.servers.under_way.cancel()
        with pytest.raises(BaseException, match="") as caught:
            trainer.advance()
        assert type(caught.value).__name__ == "CancelledError"
        trainer.servers.requests = ()


def test_a_stop_ends_what_is_under_way(tmp_path, monkeypatch):
    """The wait of the driver, and then all episodes, in their thread."""
    monkeypatch.chdir(tmp_path)
    ended = []

    async def plays(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fails():
        return 1 / 0

    config = OmegaConf.create({"trainer": {"stage_timeout_s": 60}})
    guard = Guard(config, tmp_path, print, print)
    guard.listen()
    try:
        with pytest.raises(Stop), one_step_off.Loop() as loop:
            guard.loop = loop
            assert loop.run(asyncio.sleep(0, "answer")) == "answer"
            with pytest.raises(ZeroDivisionError):
                loop.run(fails())
            loop.start(plays("under way"))
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
            try:
                with guard.stage("gen"):
                    loop.run(plays("waited for"))
            finally:
                guard.end()
    finally:
        guard.give_back()
    assert sorted(ended) == ["under way", "waited for"] and not loop.thread.is_alive()
