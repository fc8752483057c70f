"""Episodes driven by N actors of Ray (rollout.agent.num_workers), for batches that one process is too slow for.

Each has its own clients of vLLM and of Gym, its own verifiers that are functions, and a share of what the recipe allows
at once; a group of episodes goes to one of them whole. Requests carry the same ids as without, so that with
rollout.full_determinism the tokens are the same for any N. The address that agents ask (openai_server.py) stays the
driver's, and they run on its node, since Gym's servers listen to nobody else.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import gym_client
import inference
from inference import OnDone, Policy, Requests
from kit.config.load import to_plain
from kit.data.episodes import Episode
from kit.errors import RunError
from kit.extras.python_verifiers import verifier_pool
from kit.gym.concurrency import Places
from kit.rollout.client import Client


def client_of_gym(
    config: DictConfig, urls: Mapping[str, str], tokenizer: Any, logs: Path, share: int = 1
) -> tuple[verifier_pool.Verifiers, Places]:
    """(what verifies the rows, its places that are measured), as gym.* and env.verifier* of the recipe ask. share: of
    how many such processes this is one."""
    limits, measured = config.gym, Places(share)
    concurrency = measured.limits(to_plain(limits.concurrency))
    gym = gym_client.Gym(
        urls, limits.timeout_s, concurrency, limits.attempts, limits.outage_budget_s
    )
    return verifier_pool.Verifiers(
        gym, list(verifier_pool.of_recipe(config).values()), config, tokenizer, logs
    ), measured


def share(config: DictConfig, count: int) -> DictConfig:
    """The recipe of one of `count` that share what it allows at once: calls to a server, processes, answers."""
    config = copy.deepcopy(config)
    limits = to_plain(config.gym.concurrency)
    limits = limits if isinstance(limits, dict) else {"default": limits}
    part = {
        name: limit if limit == "auto" else -(-limit // count) for name, limit in limits.items()
    }
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.update(config, "gym.concurrency", part, merge=False)
    config.env.verifier_pool.processes = -(-verifier_pool.processes(config) // count)
    rollout.max_num_seqs = -(-rollout.max_num_seqs // count)
    return config


Played = tuple[list[Episode], dict[str, float]]  # and what stands at this process's places now


class Player:
    """One of them: an actor."""

    def __init__(
        self,
        config: DictConfig,
        servers: dict[str, Any],
        urls: dict[str, str],
        data: Any,
        deadline_s: float,
        logs: Path,
    ):
        client = Client(config, servers, bool(config.trainer.one_step_off))
        self.policy = inference.make_policy(config, client, data, deadline_s)
        count = config.actor_rollout_ref.rollout.agent.num_workers
        self.gym, self.places = client_of_gym(config, urls, data.tokenizer, logs, count)

    async def open(self) -> None:
        await self.gym.__aenter__()

    async def play(self, requests: Requests, sampling: dict[str, Any], baselines: bool) -> Played:
        """Raises RunError where the run has to end, and what vLLM's servers raise."""
        self.policy.sampling = sampling
        play_all = inference.rollout_with_baselines if baselines else inference.rollout
        try:
            return await play_all(requests, self.policy, self.gym), self.places.metrics()  # type: ignore[arg-type]
        except gym_client.GymError as error:
            raise RunError(str(error)) from None

    async def set_version(self, step: int) -> None:
        """The servers have the weights of that step now."""
        self.policy.version = step

    async def restarted(self, server: str) -> None:
        self.gym.gym.restarted(server)


class Players:
    """All of them, as inference.Servers asks."""

    def __init__(
        self, config: DictConfig, policy: Policy, urls: dict[str, str], data: Any, logs: Path
    ):
        count = config.actor_rollout_ref.rollout.agent.num_workers
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        make = ray.remote(Player).options(
            num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
        )
        known = SimpleNamespace(tokenizer=data.tokenizer, stop_ids=data.stop_ids, model=data.model)
        client: Any = policy.client
        given = share(config, count), client.servers, urls, known, policy.deadline_s, logs
        self.actors: list[Any] = [make.remote(*given) for _ in range(count)]
        self.told: dict[Any, dict[str, float]] = {}  # by actor, what stood at its places last
        ray.get([actor.open.remote() for actor in self.actors])

    async def rollout(
        self, requests: Requests, sampling: dict[str, Any], on_done: OnDone, baselines: bool = False
    ) -> list[Episode]:
        """inference.rollout, or rollout_with_baselines, by groups; `on_done` sees the episodes of a group together."""
        groups: dict[str, list[int]] = {}
        for index, (_, group_id) in enumerate(requests):
            groups.setdefault(group_id, []).append(index)
        episodes: list[Any] = [None] * len(requests)

        async def one(actor: Any, members: list[int]) -> None:
            try:
                asked = [requests[index] for index in members]
                played, self.told[actor] = await actor.play.remote(asked, sampling, baselines)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            for index, episode in zip(members, played, strict=True):
                episodes[index] = episode
                on_done(index, episode)

        dealt = zip(itertools.cycle(self.actors), groups.values(), strict=False)
        await asyncio.gather(*(one(actor, members) for actor, members in dealt))
        return episodes

    def set_version(self, step: int) -> None:
        """The servers have the weights of that step now; all of them know it."""
        ray.get([actor.set_version.remote(step) for actor in self.actors])

    def restarted(self, server: str) -> None:
        """A Gym server was started again; they will know it. From any thread."""
        for actor in self.actors:
            actor.restarted.remote(server)

    def metrics(self) -> dict[str, float]:
        """What they have in flight together."""
        told = self.told.values()
        return {
            name: sum(each.get(name, 0.0) for each in told)
            for name in {name for each in told for name in each}
        }
