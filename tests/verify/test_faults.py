"""Rollouts against a Gym server that fails in 30% of its calls, with each kind of fault.

No failed call becomes a reward. A group without a failed member has exactly the advantages of a run
without faults. The policy derives its response from the row, so two runs can be compared. The tests
run the Gym client over HTTP, and the rollout.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest
import torch

import inference
import training
from gym_client import Gym
from kit.chat.responses import parse_response
from kit.data.selection import select_trainable
from kit.verify.network import find_free_port
from tests.helpers.fault_server import (
    ENVIRONMENT_FAULTS,
    FAULTS,
    MEMBERS,
    TIMEOUT_S,
    FaultServer,
    FaultyEnvironment,
    RowPolicy,
    make_requests,
    serve,
)
from tests.helpers.recipes import ALGORITHM, make_partial
from tests.helpers.rollouts import chatml_tokenizer, context_of

RECIPE = make_partial({"algorithm": ALGORITHM})


def run(fault: str, with_tool: bool = False, is_environment: bool = False):
    """Run one rollout against a server with this fault. Return (episodes, the server)."""
    tokenizer = chatml_tokenizer()
    requests = make_requests(tokenizer, with_tool)
    timeout_s = TIMEOUT_S if fault in ("hang", "mixed") else 10 * TIMEOUT_S
    policy = RowPolicy(tokenizer, [request.task for request in requests])
    context = context_of(policy, tokenizer, timeout_s=timeout_s)

    server = FaultyEnvironment(fault, tokenizer) if is_environment else FaultServer(fault)
    context.samples = server.samples

    async def collect():
        async with (
            serve(server) as url,
            Gym({"faulty": url}, timeout_s=timeout_s, concurrency=64) as gym,
        ):
            return await inference.rollout(requests, {}, context, gym)

    return asyncio.run(collect()), server


def compute_advantages(episodes) -> dict[str, torch.Tensor]:
    """Compute the advantages of all sampled tokens: {row id: a vector}."""
    batch = training.build_batch(episodes, 0, 1.0)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    training.compute_advantages(batch, RECIPE)
    values = batch.batch["advantages"]
    sampled = batch.batch["response_mask"].bool()
    return {e.row_id: row[mask] for e, row, mask in zip(episodes, values, sampled, strict=True)}


@pytest.fixture(scope="module")
def faultless():
    """{with_tool: episodes} of runs without faults."""
    chat_tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    # The first call imports vLLM's parsers, which takes seconds. It must not count for a timeout.
    asyncio.run(parse_response(context_of(None, chatml_tokenizer()).template, [0], [chat_tool]))
    return {with_tool: run("", with_tool)[0] for with_tool in (False, True)}


@pytest.mark.parametrize("with_tool", [False, True], ids=["verify", "tool"])
@pytest.mark.parametrize("fault", [*FAULTS, "mixed"])
def test_no_failed_call_becomes_a_reward(fault, with_tool, faultless):
    honest = {e.row_id: e for e in faultless[with_tool]}
    assert {e.status for e in honest.values()} == {"ok"}
    assert len(honest) == sum(MEMBERS.values())
    assert all(e.reward == e.reward and e.response == str(e.reward) for e in honest.values())

    episodes, server = run(fault, with_tool)
    failed = check_failures(episodes, honest, fault, FAULTS)
    paths = {"/seed_session", "/verify"}
    if with_tool and fault not in ("500", "404"):
        paths.add("/look_up")
    assert set(server.faults) == paths  # the server failed on each of these paths
    assert bool(failed) == (fault != "delay")
    if fault in ("reset", "truncated json", "503"):  # with retries, fewer episodes fail than calls
        assert server.calls["/seed_session"] > len(episodes)
        assert len(failed) < sum(server.faults.values())
    check_advantages(episodes, honest)


@pytest.mark.parametrize("fault", [*ENVIRONMENT_FAULTS, "mixed"])
def test_no_failed_episode_of_an_environment_server_becomes_a_reward(fault, faultless):
    honest = {e.row_id: e for e in faultless[False]}
    episodes, server = run(fault, is_environment=True)
    failed = check_failures(episodes, honest, fault, ENVIRONMENT_FAULTS)
    assert set(server.faults) == {"/run"}
    assert bool(failed) == (fault != "delay")
    if fault in ("reset", "truncated json", "503", "failure"):
        assert len(failed) < server.faults["/run"]
    elif fault != "mixed":  # no retry, since another attempt would be another episode
        assert server.calls["/run"] == len(episodes)
    for e in failed:
        is_described = e.status.startswith("environment_")
        assert (e.failure.get("failure_reason") == "injected") == is_described
    check_advantages(episodes, honest)


def check_failures(episodes, honest, fault, faults):
    """Check the statuses and the rewards of all episodes, and return those that failed."""
    failed = [e for e in episodes if e.status != "ok"]
    allowed = set().union(*faults.values()) if fault == "mixed" else faults[fault]
    assert {e.status for e in failed} <= allowed, Counter(e.status for e in failed)
    assert all(e.reward is None and e.error for e in failed)
    assert all(e.reward == honest[e.row_id].reward for e in episodes if e.status == "ok")
    return failed


def check_advantages(episodes, honest):
    """Check that the remaining episodes have the advantages of the honest ones, bit for bit."""
    kept, _ = select_trainable(episodes)
    groups = defaultdict(list)
    for e in kept:
        groups[e.group_id].append(e)
    assert kept
    assert all(len(members) > 1 for members in groups.values())
    actual = compute_advantages(kept)
    expected = compute_advantages(list(honest.values()))
    whole = []
    for group, members in groups.items():
        if len(members) == MEMBERS[int(group)]:
            whole += members
    assert whole
    for e in whole:
        assert torch.equal(actual[e.row_id], expected[e.row_id]), e.row_id
    # A group with failed members has the advantages of a group that never had these members.
    without_failed = compute_advantages([honest[e.row_id] for e in kept])
    assert all(torch.equal(actual[e.row_id], without_failed[e.row_id]) for e in kept)


@pytest.mark.parametrize("with_tool", [False, True], ids=["verify", "tool"])
def test_a_short_outage_of_a_server_fails_no_episode(with_tool, faultless):
    """The outage lasts 2 s, which is longer than the pauses between three attempts."""
    tokenizer = chatml_tokenizer()
    requests = make_requests(tokenizer, with_tool)
    context = context_of(RowPolicy(tokenizer, [request.task for request in requests]), tokenizer)

    server = FaultServer()
    port = find_free_port()

    async def collect():
        async with Gym({"faulty": f"http://127.0.0.1:{port}"}, concurrency=64) as gym:
            async with serve(server, port):
                rollout = asyncio.create_task(inference.rollout(requests, {}, context, gym))
                while server.calls["/verify"] < 50:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(2.0)
            server.forget()  # a new process accepts the old cookies, without the sessions
            async with serve(server, port):
                return await rollout

    episodes = asyncio.run(collect())
    honest = {e.row_id: e.reward for e in faultless[with_tool]}
    assert Counter(e.status for e in episodes) == {"ok": len(honest)}
    assert {e.row_id: e.reward for e in episodes} == honest
