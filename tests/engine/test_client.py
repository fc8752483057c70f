"""The client of the rollout engine distributes episodes over replicas."""

from __future__ import annotations

import asyncio

from kit.engine.client import Client
from tests.helpers.recipes import load


def test_all_turns_of_an_episode_go_to_the_same_replica(workspace):
    """The two replicas get the same number of episodes."""
    client = Client(load(workspace).recipe, {"a": 1, "b": 2})

    async def acquire_all() -> list[str]:
        return [(await client._acquire_server(f"episode-{i}"))[0] for i in range(64)]

    first = asyncio.run(acquire_all())
    assert first == asyncio.run(acquire_all())
    assert first.count("a") == first.count("b") == 32
