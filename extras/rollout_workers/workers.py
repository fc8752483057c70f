"""The worker processes: Ray actors, and the object that calls them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import inference
from gym_client import GymError
from kit.data.episode import Episode
from kit.engine.client import Client
from kit.engine.inputs import RunInputs
from kit.engine.interfaces import OnDone
from kit.engine.sampling import EpisodeRequest, RolloutContext, Sampling, make_rollout_context
from kit.errors import RunError
from kit.recipe.keys import ROLLOUT
from kit.recipe.recipe import Recipe
from kit.recipe.resources import cores
from kit.run.features import RunPart
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.verifiers import make_verifiers

MAX_CALLS = 10_000  # concurrent calls of one actor; a call is a group of episodes


def split_limits(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe of one of `count` workers: each limit is divided by `count`, rounded up.

    The limits are those of calls to a server, verifier processes and concurrent responses.
    """
    parts = {
        name: limit if limit == "auto" else divide_up(limit, count)
        for name, limit in recipe.gym.concurrency.items()
    }
    processes = divide_up(recipe.env.verifier_pool.processes or cores(), count)
    return recipe.change(
        f"gym.concurrency={json.dumps(parts)}",
        f"env.verifier_pool.processes={processes}",
        f"{ROLLOUT}.max_num_seqs={divide_up(recipe.rollout.max_num_seqs, count)}",
    )


def divide_up(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)


class RolloutWorker:
    """One worker: a Ray actor."""

    def __init__(
        self,
        recipe: Recipe,
        servers: dict[str, Any],
        urls: Mapping[str, str],
        inputs: RunInputs,
        timeout_s: float,
        logs: Path,
        parts: Sequence[RunPart],
    ):
        client = Client(recipe, servers, bool(recipe.trainer.one_step_off))
        self.context = make_rollout_context(
            recipe, client, inputs, timeout_s, [part.after_episode for part in parts]
        )
        self.context.samples = None  # the driver has them
        count = recipe.rollout.agent.num_workers
        specs = dict(inputs.verifiers.specs)
        for part in parts:
            specs |= part.verifiers()
        pools = make_pools(recipe, specs, logs)
        self.verifiers, self.limits = make_verifiers(recipe, urls, pools, count)

    async def open(self) -> None:
        """Open the client of the Gym servers, in the actor's event loop."""
        await self.verifiers.__aenter__()

    async def rollout(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, baselines: bool
    ) -> tuple[list[Episode], dict[str, float]]:
        """Run episodes as inference.rollout does. Returns them with the worker's metrics.

        Raises RunError if the run has to end, and the errors of vLLM's servers.
        """
        rollout = inference.rollout_with_baselines if baselines else inference.rollout
        verifiers: Any = self.verifiers
        try:
            episodes = await rollout(requests, sampling, self.context, verifiers)
        except GymError as error:
            raise RunError(str(error)) from None
        return episodes, self.limits.metrics()

    async def set_policy_version(self, step: int) -> None:
        """Record that the vLLM servers have the weights of a step."""
        self.context.policy_version = step

    async def mark_restarted(self, server: str) -> None:
        """Record that a Gym server was restarted."""
        self.verifiers.gym.mark_restarted(server)


class RolloutWorkers:
    """All workers of a run, with the methods that inference.Servers calls."""

    def __init__(
        self,
        recipe: Recipe,
        context: RolloutContext,
        urls: Mapping[str, str],
        inputs: RunInputs,
        logs: Path,
        parts: Sequence[RunPart],
    ):
        self.context = context
        count = recipe.rollout.agent.num_workers
        this_node = ray.get_runtime_context().get_node_id()
        worker_class = ray.remote(RolloutWorker).options(
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(this_node, soft=False),
        )
        worker_inputs = SimpleNamespace(
            template=inputs.template,
            model=inputs.model,
            verifiers=inputs.verifiers,
            scales=inputs.scales,
        )
        arguments = (
            split_limits(recipe, count),
            context.client.servers,
            urls,
            worker_inputs,
            context.timeout_s,
            logs,
            parts,
        )
        self.workers: list[Any] = [worker_class.remote(*arguments) for _ in range(count)]
        self.worker_metrics: dict[Any, dict[str, float]] = {}  # {worker: its last metrics}
        ray.get([worker.open.remote() for worker in self.workers])

    async def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone,
        baselines: bool = False,
    ) -> list[Episode]:
        """Run episodes as inference.rollout does, or with `baselines` rollout_with_baselines.

        When the last episode of a group ends, `on_done` is called for each of them, and with
        `baselines` once more, since the greedy episode counts, too.
        """
        group_indices: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            group_indices.setdefault(request.id.group_id, []).append(index)
        episodes: list[Any] = [None] * len(requests)

        async def run_group(worker: Any, indices: list[int]) -> None:
            group = [requests[index] for index in indices]
            ended = await self._call(worker, group, sampling, baselines)
            for index, episode in zip(indices, ended, strict=True):
                episodes[index] = episode
                on_done(index, episode)
            if baselines:
                on_done(indices[0], ended[0])

        workers = itertools.cycle(self.workers)
        calls = [run_group(next(workers), indices) for indices in group_indices.values()]
        await asyncio.gather(*calls)
        return episodes

    async def _call(
        self, worker: Any, group: list[EpisodeRequest], sampling: Sampling, baselines: bool
    ) -> list[Episode]:
        """Run one group in a worker. Raises the worker's own exceptions, not Ray's."""
        episodes: list[Episode]
        try:
            call = worker.rollout.remote(group, sampling, baselines)
            episodes, self.worker_metrics[worker] = await call
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        for episode in episodes:
            if episode.status == "ok" and not episode.policy_versions:  # a server has run it
                assert self.context.samples  # of the policy endpoint, which is in this process
                try:
                    inference.take_samples(episode, self.context.samples)
                except GymError as error:
                    inference.record_failure(episode, error)
        return episodes

    def set_policy_version(self, step: int) -> None:
        """Record in all workers that the vLLM servers have the weights of a step."""
        ray.get([worker.set_policy_version.remote(step) for worker in self.workers])

    def mark_restarted(self, server: str) -> None:
        """Report a restarted Gym server to all workers. Call it from any thread."""
        for worker in self.workers:
            worker.mark_restarted.remote(server)

    def metrics(self) -> dict[str, float]:
        """Return the sums of the workers' metrics: calls in progress, limits."""
        totals: dict[str, float] = {}
        for metrics in self.worker_metrics.values():
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals
