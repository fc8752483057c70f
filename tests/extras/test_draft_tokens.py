"""Speculative decoding by n-grams (configs/drafts.yaml) does not change the responses."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import ray

import inference
from extras import monitor
from kit.rollout.client import Client
from kit.rollout.sampling import make_rollout_context
from tests.helpers.recipes import load
from tests.helpers.stack import AGREE, SESSION


@contextlib.contextmanager
def second_engine(stack, *changes, overlays=()):
    """Yield the manager of a second vLLM in the session, with the initial weights of the model."""
    recipe, _ = load(stack.workspace, *SESSION, *changes, overlays=overlays)
    manager = stack.servers.loop.run(inference.start_standalone_servers(recipe, start_rank=1))
    try:
        yield manager
    finally:
        for handle in manager.server_handles:
            ray.kill(handle)


@pytest.mark.soak
def test_draft_tokens_change_no_response(stack):
    """Greedy responses are equal with and without drafts.

    For sampled ones, the log-probs of the engine and of the trainer agree.
    """
    # At a low temperature, responses repeat themselves. At 1, vLLM may accept no draft.
    changes = ["data.max_response_length=200", "actor_rollout_ref.rollout.temperature=0.1"]
    with second_engine(stack, *changes, overlays=["drafts"]) as manager:
        with stack.trainer("undrafted", *changes, "trainer.total_training_steps=1") as trainer:
            without = trainer.rollout(trainer.inputs.validation, "val", validate=True)
        accepted = monitor.track_draft_acceptance(manager.server_addresses)
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
            accepted_greedy = accepted()["rollout/drafts_accepted_frac"]
            metrics = trainer.step_or_skip()
            accepted_sampled = accepted()["rollout/drafts_accepted_frac"]
            accepted_since = accepted()
    assert [e.response_ids for e in drafted] == [e.response_ids for e in without]
    assert max(len(e.response_ids) for e in drafted) > 20
    assert accepted_greedy > 0.1
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
    assert 0 < accepted_sampled < 1
    assert accepted_since == {}
