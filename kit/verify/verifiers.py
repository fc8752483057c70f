"""Send each row to its verifier: a server of NeMo Gym, or processes with a Python verifier.

The rest of the kit sees one object, the `VerifierRouter`. A recipe without Python verifiers has no
pools: then every row goes to a Gym server.

Convenience: a row of any verifier has the same session.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import gym_client
from gym_client import FIRST, EpisodeIndex, Json, RunResult, Session
from kit.recipe.recipe import Recipe
from kit.verify.concurrency import ConcurrencyLimits
from kit.verify.masks import find_mask
from kit.verify.python_verifiers.pool import SessionSource
from kit.verify.python_verifiers.session import EpisodeSession


class VerifierRouter:
    """All verifiers of a run by name. Use as `async with VerifierRouter(...)`.

    pools: {name: pool} of the Python verifiers. `gym` has every other verifier.
    """

    def __init__(self, gym: gym_client.Gym, pools: Mapping[str, SessionSource]):
        self.gym = gym
        self.pools = pools

    async def __aenter__(self) -> VerifierRouter:
        await self.gym.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self.pools.values():
            await pool.close()
        await self.gym.__aexit__()

    async def kind(self, name: str) -> str:
        """Return the kind of the verifier, as `gym_client.Gym.kind` does. Raises GymError."""
        if name in self.pools:
            return await self.pools[name].kind()
        return await self.gym.kind(name)

    async def run(
        self, name: str, row: Json, timeout_s: float, vocabulary: int | None, index: EpisodeIndex
    ) -> RunResult:
        """Have a Gym server run an episode, as `gym_client.Gym.run` does. Raises GymError."""
        return await self.gym.run(name, row, timeout_s, vocabulary, index)

    @contextlib.asynccontextmanager
    async def session(
        self, name: str, row: Json, index: EpisodeIndex = FIRST
    ) -> AsyncIterator[Session | EpisodeSession]:
        """Open a session with the verifier for one episode of `row`. Raises GymError."""
        pool = self.pools.get(name)
        opening = pool.session(row) if pool else self.gym.session(name, row, index)
        async with opening as session:
            yield session

    async def aggregate(self, name: str, records: Sequence[Json]) -> Json | None:
        """Return the metrics of a Gym server over `records`. A Python verifier has none."""
        if name in self.pools:
            return None
        return await self.gym.aggregate(name, records)


def make_verifiers(
    recipe: Recipe,
    urls: Mapping[str, str],
    pools: Mapping[str, SessionSource],
    share: int = 1,
) -> tuple[VerifierRouter, ConcurrencyLimits]:
    """Make the router of the recipe's verifiers, and the limits of the calls to Gym servers.

    urls: {name: url} of the Gym servers.
    pools: {name: pool} of the Python verifiers.
    share: the number of processes that share the limits. This process gets one part.
    """
    settings = recipe.gym
    limits = ConcurrencyLimits(share)
    gym = gym_client.Gym(
        urls,
        settings.timeout_s,
        limits.resolve(settings.concurrency),
        settings.attempts,
        settings.outage_budget_s,
        {name: server.kind for name, server in settings.servers.items()},
        settings.max_reward,
        max(gym_client.MAX_TOOL_CHARS, recipe.rollout.multi_turn.max_tool_response_length),
        find_mask,
    )
    return VerifierRouter(gym, pools), limits
