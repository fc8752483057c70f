"""What asks vLLM's servers for answers, in the process that wants them."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from omegaconf import DictConfig
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from kit.data.episodes import ABORTED, Versions

PAUSE_S = 0.1  # before the rest of an answer is asked for


class Client(LLMServerClient):
    """verl's client, and its router in the same process, since this one alone asks it: as a Ray actor, which verl makes
    of it, it imports verl for 15 s while the first request waits, and takes 0.8 GB.

    servers: handles by address. ahead: of a request that the servers ended for new weights, the rest is asked for once
    they have them (as by verl's FullyAsyncLLMServerClient, which keeps the first and the last version alone).
    """

    def __init__(self, config: DictConfig, servers: dict[str, Any], ahead: bool = False):
        super().__init__(config)
        deterministic = config.actor_rollout_ref.rollout.full_determinism
        self.servers, self.ahead = servers, ahead
        self.router = GlobalRequestLoadBalancer(servers, full_determinism=deterministic)

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        key: Any = zlib.crc32(
            request_id.encode()
        )  # the hash of a text differs from process to process
        return self.router.acquire_server(key)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.router.release_server(server_id)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, **other: Any
    ) -> Any:
        ids, log_probs, versions = list[int](), list[float](), Versions()
        limit = sampling_params["max_tokens"]
        while True:
            asked = {**sampling_params, "max_tokens": limit - len(ids)}
            output = await super().generate(
                request_id, prompt_ids=prompt_ids + ids, sampling_params=asked, **other
            )
            if not self.ahead:
                return output
            ids += output.token_ids
            log_probs += output.log_probs or []
            versions.append((len(output.token_ids), output.extra_fields.get("global_steps")))
            if output.stop_reason not in ABORTED or len(ids) == limit:
                output.token_ids, output.log_probs, output.extra_fields["versions"] = (
                    ids,
                    log_probs,
                    versions,
                )
                output.stop_reason = "completed"
                return output
            await asyncio.sleep(PAUSE_S)
