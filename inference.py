"""Episodes from verl's vLLM servers: token ids in, token ids out, each verified as soon as it ends.

    start_servers(config, actor)   vLLM replicas next to the actor's GPUs; loads the actor's models too
    sync_weights(...)              the actor's weights to every replica
    rollout(tasks, n, ...)         n episodes per task, all at once, verified by their Gym servers

An `Episode` is the one record that goes through the kit. Its ids and log-probs are those that vLLM
sampled, never re-tokenised text; text is decoded for the verifier and the logs only. An episode that
could not be generated or verified is data too: `status` says why, and no reward is made up for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import verl.workers.rollout.router
from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from env import Task
from gym_client import Gym, GymError, message_response
from training import WorkerGroup


@dataclass
class Episode:
    """One answer to one task. Lists are per response token unless a comment says otherwise."""

    row_id: str  # the task's file:line
    group_id: str  # episodes of one task in one step share it: the group of GRPO
    server: str  # the Gym server that verifies it
    prompt_ids: list[int]  # per prompt token
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)  # 1 = sampled by the policy, 0 = observed
    log_probs: list[float] = field(default_factory=list)  # the sampler's, at the sampling temperature
    response: str = ""  # decoded, special tokens left out
    truncated: bool = False  # ran into the length limit instead of stopping
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    status: str = "ok"  # or the reason of the failure, as in gym_client
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)  # seconds: generate, verify


def sampling_params(config: DictConfig, validate: bool) -> dict[str, Any]:
    """vLLM's sampling parameters from rollout.* (training) or rollout.val_kwargs.* (evaluation)."""
    source = config.actor_rollout_ref.rollout.val_kwargs if validate else config.actor_rollout_ref.rollout
    return {
        "temperature": source.temperature if source.do_sample else 0.0,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "max_tokens": config.data.max_response_length,
        "logprobs": True,
    }


# --- servers -------------------------------------------------------------------------------------


async def start_servers(config: DictConfig, actor: WorkerGroup) -> LLMServerManager:
    """Load the actor's models and start its vLLM servers; side by side where that is safe.

    vLLM sizes its KV cache by measuring free memory, which must not move meanwhile; told the size
    (engine_kwargs.vllm.kv_cache_memory_bytes) it does not measure, and both start at once.
    """
    vllm = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    # The router's process starts now, beside all else, and gets its class by value: importing verl for it would
    # take the process 15 s of a core, for which the first request would wait.
    ray.cloudpickle.register_pickle_by_value(verl.workers.rollout.router)
    manager = await LLMServerManager.create_empty(config=config, worker_group=actor)
    if not vllm.get("kv_cache_memory_bytes"):
        await asyncio.to_thread(actor.init_model)
    servers = asyncio.create_task(manager._initialize_llm_servers())
    if vllm.get("kv_cache_memory_bytes"):
        await asyncio.sleep(0.5)  # for the servers to ask the workers, which answer no one while they load, for devices
        await asyncio.to_thread(actor.init_model)
    await servers
    handles = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    await manager.global_load_balancer.add_servers.remote(handles)
    return manager


def weight_sync(config: DictConfig, actor: WorkerGroup, servers: LLMServerManager) -> CheckpointEngineManager:
    """verl's weight transfer; `update_weights(step)` on it makes the sampler's weights the trainer's."""
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    return CheckpointEngineManager(config=engine, actor_wg=actor, replicas=servers.get_replicas())


# --- episodes ------------------------------------------------------------------------------------


async def rollout(
    tasks: Sequence[Task],
    n: int,
    client: LLMServerClient,
    gym: Gym,
    tokenizer: Any,
    stop_ids: set[int],
    sampling: dict[str, Any],
    deadline_s: float,
    on_done: Callable[[Episode], None] = lambda _: None,
) -> list[Episode]:
    """n episodes for each task, in the order of the tasks; `on_done` sees each as it ends.

    deadline_s: for one generation; over it the episode's status is `generate_timeout`. Failures of the
    verifier become a status; a dead vLLM server raises (ray.exceptions.RayError).
    """

    async def one(task: Task, group_id: str) -> Episode:
        episode = Episode(task.row_id, group_id, task.server, task.prompt_ids)
        try:
            async with gym.session(task.server, task.row) as session:
                await generate(episode)
                start = time.perf_counter()
                verdict = await session.verify(message_response(episode.response))
                episode.timings["verify"] = time.perf_counter() - start
                episode.timings["verify_call"] = verdict.latency_s
                episode.reward, episode.reward_components = verdict.reward, verdict.components
        except GymError as error:
            episode.status, episode.error = error.reason, str(error)
        on_done(episode)
        return episode

    async def generate(episode: Episode) -> None:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s):
                output = await client.generate(
                    request_id=uuid.uuid4().hex, prompt_ids=episode.prompt_ids, sampling_params=dict(sampling)
                )
        except TimeoutError:
            raise GymError("generate_timeout", f"vLLM gave no answer within {deadline_s:g} s") from None
        episode.timings["generate"] = time.perf_counter() - start
        ids = list(output.token_ids)
        if output.stop_reason == "aborted" or not ids:
            raise GymError("aborted", f"vLLM ended the request without an answer ({output.stop_reason})")
        if output.log_probs is None or len(output.log_probs) != len(ids):
            raise GymError("no_log_probs", f"vLLM sent {len(ids)} tokens without a log-prob for each")
        episode.response_ids, episode.log_probs = ids, list(output.log_probs)
        episode.response_mask = [1] * len(ids)
        episode.truncated = ids[-1] not in stop_ids
        episode.response = tokenizer.decode(ids, skip_special_tokens=True)

    groups = [(task, uuid.uuid4().hex) for task in tasks]
    return await asyncio.gather(*[one(task, group_id) for task, group_id in groups for _ in range(n)])


def keep(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that may be trained on: verified, in groups of at least two.

    verl's group estimators sum rewards without a mask and give a group of one its raw reward as
    advantage, so a failed episode, or a group left with one, must be gone before the advantage.
    """
    ok = [e for e in episodes if e.status == "ok"]
    members: dict[str, int] = {}
    for e in ok:
        members[e.group_id] = members.get(e.group_id, 0) + 1
    return [e for e in ok if members[e.group_id] > 1]


def as_record(episode: Episode, prompt: str) -> dict[str, Any]:
    """An episode as one line of rollouts/step_N.jsonl: text and verdict, not ids."""
    record = dataclasses.asdict(episode)
    lengths = {"prompt_tokens": len(episode.prompt_ids), "response_tokens": len(episode.response_ids)}
    for key in ("prompt_ids", "response_ids", "response_mask", "log_probs"):
        del record[key]
    return {"prompt": prompt, **record, **lengths}
