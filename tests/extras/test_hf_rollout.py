"""Sampling with `generate` of transformers (configs/hf.yaml), next to the session's vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from types import SimpleNamespace

import pytest
import ray
import torch

import inference
from kit.engine.client import Client
from kit.engine.sampling import make_rollout_context
from kit.run.workers import start_workers
from tests.helpers.recipes import load
from tests.helpers.stack import AGREE, SESSION, kill_workers


@contextlib.contextmanager
def trainer_with_servers(stack, name, workers, manager, *changes):
    """Yield a Trainer with these workers and servers, which get the initial weights."""
    workers.actor.load_checkpoint(str(stack.fresh))
    with stack.trainer(
        name, *changes, overlays=[name], workers=workers, manager=manager
    ) as trainer:
        addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        context = make_rollout_context(
            trainer.recipe, Client(trainer.recipe, addresses), trainer.inputs, 60.0
        )
        servers = trainer.servers
        trainer.servers = inference.Servers(
            trainer.recipe, manager, workers.actor, context, servers.gym, servers.loop
        )
        trainer.update_weights()
        yield trainer


@pytest.fixture(scope="module")
def hf(stack):
    """A separate actor with a transformers server: (workers, manager)."""
    importlib.import_module("extras.hf_rollout")
    recipe = load(stack.workspace, *SESSION, overlays=["hf"]).recipe
    workers = start_workers(recipe)
    manager = stack.servers.loop.run(inference.start_servers(recipe, workers.actor))
    yield workers, manager
    for handle in manager.server_handles:
        ray.kill(handle)
    kill_workers(workers)


@pytest.mark.soak
def test_greedy_responses_of_transformers_and_vllm_are_equal(stack, hf):
    with stack.trainer("greedy") as trainer:
        of_vllm = trainer.rollout(trainer.inputs.train, "greedy", validate=True)
    with trainer_with_servers(stack, "hf", *hf) as trainer:
        of_transformers = trainer.rollout(trainer.inputs.train, "greedy", validate=True)
    assert len(of_transformers) == len(of_vllm) > 7
    for one, two in zip(of_transformers, of_vllm, strict=True):
        assert one.status == two.status
        assert one.response_ids == two.response_ids
        assert one.reward == two.reward
        assert one.log_probs == pytest.approx(two.log_probs, abs=AGREE)


def sample_tokens(requests, scores):
    """Sample a token of each row of scores [B, V]. Return tokens and log-probs [N, B]."""
    hf_rollout = importlib.import_module("extras.hf_rollout")
    sampler = hf_rollout.RecordingSampler(
        [hf_rollout.Request([5], params, None) for params in requests], scores[0].device
    )
    ids = torch.zeros(len(requests), 1, dtype=torch.long, device=scores[0].device)
    chosen = [sampler(ids, step_scores.clone()) for step_scores in scores]
    return torch.stack([rows.argmax(-1) for rows in chosen]), torch.stack(sampler.log_probs)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 4, "top_p": 0.8}])
def test_a_seed_gives_the_same_tokens_in_any_batch(settings):
    torch.manual_seed(0)
    seeds = [3, 4, 5, None]
    scores = torch.randn(20, len(seeds), 9) * 2
    requests = [{**settings, "seed": seed} for seed in seeds]
    tokens, log_probs = sample_tokens(requests, scores)
    again, log_probs_again = sample_tokens(requests[2::-1], scores[:, [2, 1, 0]])
    assert torch.equal(again, tokens[:, [2, 1, 0]])
    torch.testing.assert_close(log_probs_again, log_probs[:, [2, 1, 0]])
    assert tokens[:, 0].tolist() != tokens[:, 1].tolist()
    if settings:
        return
    # They are those of torch.multinomial with a generator of this seed, row by row.
    generator = torch.Generator().manual_seed(3)
    rows = scores[:, 0].log_softmax(-1)
    expected = [torch.multinomial(row.exp(), 1, generator=generator) for row in rows]
    assert tokens[:, 0].tolist() == torch.cat(expected).tolist()
    torch.testing.assert_close(log_probs[:, 0], rows.gather(1, tokens[:, :1])[:, 0])


def test_greedy_tokens_are_the_most_likely_and_top_k_1_leaves_one():
    scores = torch.randn(5, 2, 9)
    tokens, log_probs = sample_tokens([{"temperature": 0.0, "seed": 3}] * 2, scores)
    assert torch.equal(tokens, scores.argmax(-1))
    torch.testing.assert_close(log_probs, scores.log_softmax(-1).amax(-1))
    tokens, log_probs = sample_tokens([{"top_k": 1}] * 2, scores)
    assert torch.equal(tokens, scores.argmax(-1)) and log_probs.abs().max() == 0


@pytest.mark.soak
def test_each_response_of_a_batch_has_its_own_limit(stack, hf):
    """Each ends at its max_tokens or at a stop token, whichever is first."""
    server = hf[1].server_handles[0]
    limits = [2, 9, 4, 9, 3] * 40

    async def sample():
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        outputs = [
            server.generate.remote(prompt_ids=[5], sampling_params=sampling | {"max_tokens": limit})
            for limit in limits
        ]
        return [await output for output in outputs]

    with trainer_with_servers(stack, "hf", *hf):  # the initial weights also sample stop tokens
        outputs = stack.servers.loop.run(sample())
    for limit, output in zip(limits, outputs, strict=True):
        assert 0 < len(output.token_ids) == len(output.log_probs) <= limit
        assert output.stop_reason == "completed"
    assert any(len(output.token_ids) < limit for limit, output in zip(limits, outputs, strict=True))


def test_a_canceled_request_and_a_failed_batch_do_not_stop_the_server(monkeypatch):
    hf_rollout = importlib.import_module("extras.hf_rollout")
    monkeypatch.setattr(hf_rollout, "GATHER_S", 0.0)
    started = threading.Event()
    canceled = threading.Event()

    def generate_batch(batch):
        started.set()
        assert canceled.wait(10.0)
        if len(batch) == 2:
            raise ValueError("no memory")
        return [request.prompt_ids for request in batch]

    async def sample():
        server = hf_rollout.Server(SimpleNamespace(max_model_len=9, max_num_seqs=2), {})
        server.generate_batch = generate_batch
        batches = asyncio.create_task(server.run_batches())
        calls = [asyncio.create_task(server.generate([i], {"max_tokens": 1})) for i in (5, 6)]
        await asyncio.to_thread(started.wait, 10.0)
        calls[0].cancel()
        await asyncio.sleep(0)
        canceled.set()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0)
        later = await asyncio.wait_for(server.generate([7], {"max_tokens": 1}), 10.0)
        batches.cancel()
        return results, later

    results, later = asyncio.run(sample())
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], ValueError) and later == [7]
