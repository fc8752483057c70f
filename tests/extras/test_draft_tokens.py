"""Speculative decoding by n-grams (configs/drafts.yaml) does not change the responses."""

from __future__ import annotations

import contextlib
import json

import httpx
import numpy as np
import pytest
import ray

import inference
from kit.engine.client import Client
from kit.engine.sampling import make_rollout_context
from tests.helpers.recipes import load
from tests.helpers.stack import AGREE, SESSION


@contextlib.contextmanager
def second_engine(stack, *changes, overlays=()):
    """Yield the manager of a second vLLM in the session, with the initial weights of the model."""
    recipe = load(stack.workspace, *SESSION, *changes, overlays=overlays).recipe
    manager = stack.servers.loop.run(inference.start_standalone_servers(recipe, start_rank=1))
    try:
        yield manager
    finally:
        for handle in manager.server_handles:
            ray.kill(handle)


def count_accepted(address: str) -> float:
    """Read from vLLM's metrics how many draft tokens it has accepted."""
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.soak
def test_draft_tokens_change_no_response(stack):
    """Greedy responses are equal with and without drafts.

    For sampled ones, the log-probs of the engine and of the trainer agree.
    """
    # At a low temperature, responses repeat themselves. At 1, vLLM may accept no draft.
    changes = ["data.max_response_length=200", "actor_rollout_ref.rollout.temperature=0.1"]
    changes.append("actor_rollout_ref.rollout.disable_log_stats=false")
    with second_engine(stack, *changes, overlays=["drafts"]) as manager:
        with stack.trainer("undrafted", *changes, "trainer.total_training_steps=1") as trainer:
            without = trainer.rollout(trainer.inputs.validation, "val", validate=True)
        with stack.trainer("drafted", *changes, overlays=["drafts"]) as trainer:
            addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
            context = make_rollout_context(
                trainer.recipe, Client(trainer.recipe, addresses), trainer.inputs, 60.0
            )
            servers = trainer.servers
            trainer.servers = inference.Servers(
                trainer.recipe, manager, None, context, servers.gym, servers.loop
            )
            drafted = trainer.rollout(trainer.inputs.validation, "val", validate=True)
            assert count_accepted(manager.server_addresses[0]) > 0
            metrics = trainer.step_or_skip()
    assert [e.response_ids for e in drafted] == [e.response_ids for e in without]
    assert max(len(e.response_ids) for e in drafted) > 20
    assert metrics["training/rollout_probs_diff_max"] < AGREE
    assert metrics["rollout/failed_frac"] == 0
    items = []
    for line in (trainer.run.folder / "rollouts/step_1.jsonl").read_text().splitlines():
        items += json.loads(line)["response"]["output"]
    log_probs = np.concatenate([item["generation_log_probs"] for item in items])
    # The mean of -log_prob must equal the entropy, within four standard errors.
    error = log_probs.std() / len(log_probs) ** 0.5
    assert error < 0.05
    assert -log_probs.mean() == pytest.approx(metrics["actor/entropy"], abs=4 * error)
