"""The client of the rollout engine, in the process that runs the episodes.

Convenience: saves 15 s and 0.8 GB at the start; it also records each version of the weights.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from kit.data.episode import ABORTED, PolicyVersion, PolicyVersions
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from verl.workers.rollout.replica import TokenOutput

RESUME_PAUSE_S = 0.1  # before the rest of an aborted response is requested


class Client(LLMServerClient):
    """verl's client, with verl's router in the same process.

    verl runs the router as a Ray actor. That actor imports verl for 15 s while the first request
    waits, and takes 0.8 GB. Here no other process needs this router.

    servers: {address: Ray handle}. is_one_step_off: if the servers abort a request to load new
    weights, this client requests the rest of the response. verl's FullyAsyncLLMServerClient does
    the same, but it records only the first and the last version of the weights.
    """

    def __init__(
        self, recipe: Recipe, servers: dict[str, ActorHandle], is_one_step_off: bool = False
    ):
        super().__init__(recipe.for_verl())
        self.servers = servers
        self.is_one_step_off = is_one_step_off
        is_deterministic = recipe.rollout.full_determinism
        self.router = GlobalRequestLoadBalancer(servers, full_determinism=is_deterministic)

    async def _acquire_server(self, request_id: str, **_: object) -> tuple[str, ActorHandle]:
        key: Any = zlib.crc32(request_id.encode())  # hash() differs from process to process
        return self.router.acquire_server(key)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.router.release_server(server_id)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, **other: object
    ) -> TokenOutput:
        """Sample one response. If it is aborted, request the rest."""
        if not self.is_one_step_off:
            return await super().generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **other
            )
        ids: list[int] = []
        log_probs: list[float] = []
        versions: PolicyVersions = []
        max_tokens = sampling_params["max_tokens"]
        while True:
            output = await super().generate(
                request_id,
                prompt_ids=prompt_ids + ids,
                sampling_params={**sampling_params, "max_tokens": max_tokens - len(ids)},
                **other,
            )
            ids += output.token_ids
            log_probs += output.log_probs or []
            step = output.extra_fields.get("global_steps")
            versions.append(PolicyVersion(len(output.token_ids), step))
            if output.stop_reason not in ABORTED or len(ids) == max_tokens:
                output.token_ids = ids
                output.log_probs = log_probs
                output.extra_fields["versions"] = versions
                output.stop_reason = "completed"
                return output
            await asyncio.sleep(RESUME_PAUSE_S)
