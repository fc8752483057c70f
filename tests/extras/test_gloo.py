"""Weights reach the rollout engine's servers over gloo, with the calls of verl's manager."""

from __future__ import annotations

import asyncio
import concurrent.futures

import torch

from extras.gloo.engine import GlooCheckpointEngine


async def receive(engine) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights()}


def sync_weights(engines, weights, pool) -> list[dict[str, torch.Tensor]]:
    """Send weights from the first two engines. Return what each of the other two received."""
    metadata = [engine.prepare() for engine in engines]
    senders, receivers = GlooCheckpointEngine.build_topology(2, 2, metadata)
    arguments = {name: [*senders[name], *receivers[name]] for name in senders}
    joins = []
    for i, engine in enumerate(engines):
        keywords = {name: values[i] for name, values in arguments.items()}
        joins.append(pool.submit(engine.init_process_group, **keywords))
    assert not any(future.result(timeout=30) for future in joins)
    sends = [
        pool.submit(asyncio.run, engine.send_weights(iter(weights.items())))
        for engine in engines[:2]
    ]
    receives = [pool.submit(asyncio.run, receive(engine)) for engine in engines[2:]]
    assert not any(future.result(timeout=30) for future in sends)
    return [future.result(timeout=30) for future in receives]


def assert_equal(received: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert received.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(received[name], weight), name
        assert received[name].dtype == weight.dtype, name


def test_weights_reach_servers_on_separate_gpus(monkeypatch):
    """One of two ranks sends. Two workers of servers receive all weights, in each of two syncs."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    engines = [GlooCheckpointEngine(2**20, is_master=i == 0) for i in range(4)]
    weights = {
        "wide": torch.randn(700, 500),
        "half": torch.randn(3, 5).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "scalar": torch.tensor(7),
        "empty": torch.ones(2, 0),
    }
    # in a run, each engine is in its own process
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for received in sync_weights(engines, weights, pool):
                assert_equal(received, weights)
            weights["wide"] += 1
