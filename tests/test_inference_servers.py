"""Tests the start, sleep and weight updates of the vLLM servers of inference.py with doubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import inference
from tests.helpers.rollouts import make_context, make_recipe


class Manager:
    """A double of verl's LLMServerManager that records its arguments and the start of servers."""

    instances: list[Manager]
    events: list[str]

    def __init__(self, config, **more):
        self.config = config
        self.more = more
        self.instances.append(self)

    async def _initialize_llm_servers(self):
        self.events.append("servers start")
        await asyncio.sleep(0.1)
        self.events.append("servers call the workers")
        await asyncio.sleep(0.6)
        self.events.append("servers are ready")

    def get_replicas(self):
        return ["replica"]


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(Manager, "instances", [], raising=False)
    monkeypatch.setattr(Manager, "events", [], raising=False)
    monkeypatch.setattr(inference, "LLMServerManager", Manager)
    return Manager


@pytest.mark.parametrize(
    ("changes", "is_concurrent", "has_other_gpus"),
    [
        ({}, False, False),
        ({"engine_kwargs": {}}, False, False),
        ({"engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 9}}}, True, False),
        ({"nnodes": 2}, True, True),
    ],
    ids=["measures memory", "no engine arguments", "fixed cache size", "separate GPUs"],
)
def test_servers_and_models_load_concurrently_only_if_vllm_measures_no_memory(
    manager, changes, is_concurrent, has_other_gpus
):
    actor = SimpleNamespace(init_model=lambda: manager.events.append("models loaded"))
    servers = asyncio.run(inference.start_servers(make_recipe(**changes), actor))
    assert [servers] == manager.instances
    assert servers.more == {"worker_group": None if has_other_gpus else actor}
    events = ["servers start", "servers call the workers", "servers are ready"]
    concurrent = [*events[:2], "models loaded", events[2]]
    assert manager.events == (concurrent if is_concurrent else ["models loaded", *events])


@pytest.mark.parametrize(("nnodes", "expected"), [(0, 3), (2, 2)])
def test_standalone_servers_load_the_weights_of_the_model_folder(manager, nnodes, expected):
    recipe = make_recipe(nnodes=nnodes)
    servers = asyncio.run(inference.start_standalone_servers(recipe, start_rank=5))
    rollout = servers.config.actor_rollout_ref.rollout
    assert (rollout.load_format, rollout.nnodes) == ("auto", expected)
    assert servers.more == {"start_rank": 5}
    assert manager.events[-1] == "servers are ready"
    assert recipe == make_recipe(nnodes=nnodes)  # the recipe of the caller is not changed
    assert asyncio.run(inference.start_standalone_servers(recipe)).more == {"start_rank": 0}


class RecordingCheckpointManager:
    """A double of verl's CheckpointEngineManager that records its calls."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.calls: list[object] = []

    def sleep_replicas(self):
        self.calls.append("sleep")

    def update_weights(self, step):
        self.calls.append(step)


class RecordingWorkers:
    """A double of features.EpisodeWorkers that records its calls."""

    def __init__(self):
        self.calls: list[object] = []

    async def rollout(self, *arguments):
        self.calls.append(arguments)
        return ["from the workers"]

    def set_policy_version(self, step):
        self.calls.append(step)


@pytest.fixture
def make_servers(monkeypatch):
    monkeypatch.setattr(Manager, "get_replicas", lambda: ["replica"])
    monkeypatch.setattr(inference, "CheckpointEngineManager", RecordingCheckpointManager)

    def make(actor="actor", workers=None) -> inference.Servers:
        context = make_context(None)
        # as for a model whose image tokens must not be sampled
        processor: Any = SimpleNamespace(sampling_params=lambda: {"logit_bias": {9: -100.0}})
        context.processor = processor
        loop = asyncio.Runner()
        manager: Any = Manager
        gym: Any = "gym"
        return inference.Servers(make_recipe(), manager, actor, context, gym, loop, workers)

    return make


def test_weights_have_the_number_of_their_step(make_servers):
    workers = RecordingWorkers()
    servers = make_servers(workers=workers)
    arguments = servers.checkpoint_manager.arguments
    assert arguments["config"].backend == "naive"
    assert (arguments["actor_wg"], arguments["replicas"]) == ("actor", ["replica"])
    assert not servers.is_asleep and servers.context.policy_version is None
    servers.sleep()
    assert servers.is_asleep
    servers.update_weights(4)
    assert not servers.is_asleep and servers.context.policy_version == 4
    assert (servers.checkpoint_manager.calls, workers.calls) == (["sleep", 4], [4])
    make_servers().update_weights(4)  # without rollout workers


def test_servers_without_an_actor_keep_their_weights_and_never_sleep(make_servers):
    workers = RecordingWorkers()
    servers = make_servers(actor=None, workers=workers)
    servers.sleep()
    servers.update_weights(4)
    assert (servers.checkpoint_manager, servers.is_asleep) == (None, False)
    assert (servers.context.policy_version, workers.calls) == (None, [])


def test_a_rollout_runs_here_or_in_the_workers_with_the_sampling_of_the_call(
    make_servers, monkeypatch
):
    for name in ("rollout", "rollout_with_baselines"):

        async def record(*arguments, name=name):
            return [name, *arguments]

        monkeypatch.setattr(inference, name, record)
    sampling = {"temperature": 0.4, "logit_bias": {9: -100.0}}
    servers = make_servers()
    arguments = ["requests", sampling, servers.context, servers.gym, print]
    result = servers.rollout("requests", {"temperature": 0.4}, print)
    assert result == ["rollout", *arguments]
    assert servers.context.endpoint_sampling == sampling
    result = servers.rollout("requests", {"temperature": 0.4}, print, baselines=True)
    assert result == ["rollout_with_baselines", *arguments]
    assert servers.rollout("requests", {"temperature": 0.4})[5](0, None) is None

    workers = RecordingWorkers()
    servers = make_servers(workers=workers)
    result = servers.rollout("requests", {"temperature": 0.4}, print, baselines=True)
    assert result == ["from the workers"]
    assert workers.calls == [("requests", sampling, print, True)]
