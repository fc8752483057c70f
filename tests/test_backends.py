"""Sampling by another backend than vLLM (docs/backends.md), beside the session's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib

import pytest
import ray
from conftest import SESSION, drop, load
from test_steps import AGREE

import inference
import training
from kit.client import Client


@contextlib.contextmanager
def trainer_over(stack, name, workers, manager, *changes):
    """A Trainer over workers and servers that are not the session's."""
    with stack.trainer(name, *changes, overlays=[name], workers=workers) as trainer:
        addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        policy = inference.make_policy(trainer.config, Client(trainer.config, addresses), trainer.data, 60.0)
        was = trainer.servers
        trainer.servers = inference.Servers(trainer.config, manager, workers.actor, policy, was.gym, was.loop)
        trainer.publish()
        yield trainer


@pytest.fixture(scope="module")
def hf(stack):
    """An actor of its own, and transformers beside it: (workers, manager)."""
    importlib.import_module("kit.hf")
    config, _ = load(stack.workspace, *SESSION, overlays=["hf"])
    workers = training.start_workers(config)
    manager = stack.servers.loop.run(inference.start_servers(config, workers.actor))
    yield workers, manager
    for handle in manager.server_handles:
        ray.kill(handle)
    drop(workers)


def test_greedy_answers_of_transformers_are_those_of_vllm(stack, hf):
    with stack.trainer("greedy") as trainer:
        theirs = trainer.rollout(trainer.data.train, "greedy", validate=True)
    with trainer_over(stack, "hf", *hf) as trainer:
        ours = trainer.rollout(trainer.data.train, "greedy", validate=True)
    assert len(ours) == len(theirs) > 7
    for one, two in zip(ours, theirs, strict=True):
        assert (one.status, one.response_ids, one.reward) == (two.status, two.response_ids, two.reward)
        assert one.log_probs == pytest.approx(two.log_probs, abs=AGREE)


def test_it_learns_from_what_transformers_sample(stack, hf):
    """And samples from the weights that it learned, with top_k, top_p and a seed for each request."""
    with trainer_over(stack, "hf", *hf, "actor_rollout_ref.actor.optim.lr=0.01") as trainer:
        rewards = []
        while len(rewards) < 40 and (len(rewards) < 4 or sum(rewards[-3:]) / 3 < 0.5):
            metrics = trainer.advance()
            assert metrics["training/rollout_probs_diff_max"] < AGREE and metrics["rollout/failed_frac"] == 0
            rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(reward, 2) for reward in rewards])
    assert sum(rewards[-3:]) / 3 >= 0.5
    workers, manager = hf
    workers.actor.load_checkpoint(str(stack.fresh))  # which says more than sevens
    ways = ["actor_rollout_ref.rollout.full_determinism=true", "actor_rollout_ref.rollout.top_k=3"]
    with trainer_over(stack, "hf", workers, manager, *ways, "actor_rollout_ref.rollout.top_p=0.9") as trainer:
        tasks = trainer.data.train
        same = [trainer.servers.rollout(*trainer.asked(tasks, "1")[:2]) for _ in range(2)]
        assert [e.response_ids for e in same[0]] == [e.response_ids for e in same[1]]
        assert len({tuple(e.response_ids) for e in same[0]}) > 5


def test_transformers_end_answers_for_new_weights(stack, hf):
    """A step ahead: what is under way ends as it is, and goes on."""
    server = hf[1].server_handles[0]
    asked = {"max_tokens": 500, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}

    async def unequal():
        """Answers of other lengths in one batch."""
        limits = [2, 9, 4, 9, 3]
        free = {**asked, "ignore_eos": False}
        both = [server.generate.remote(prompt_ids=[5], sampling_params=free | {"max_tokens": n}) for n in limits * 8]
        return [(n, await answer) for n, answer in zip(limits * 8, both, strict=True)]

    found = stack.servers.loop.run(unequal())
    assert all(0 < len(a.token_ids) == len(a.log_probs) <= n and a.stop_reason == "completed" for n, a in found)
    assert any(len(a.token_ids) < n for n, a in found)  # by a stop token

    async def cut():
        under_way = [server.generate.remote(prompt_ids=[5, 6], sampling_params=asked, request_id="x") for _ in range(2)]
        await asyncio.sleep(0.3)
        await server.abort_all_requests.remote()
        answers = [await each for each in under_way]
        await server.resume_generation.remote()
        return answers, await server.generate.remote(prompt_ids=[5, 6], sampling_params=asked | {"max_tokens": 3})

    answers, after = stack.servers.loop.run(cut())
    assert {a.stop_reason for a in answers} == {"aborted"} and all(0 < len(a.token_ids) < 500 for a in answers)
    assert len(after.token_ids) == len(after.log_probs) == 3
