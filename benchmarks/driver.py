"""Measure the driver's time for each episode of a step, without Ray, vLLM, a model or a server.

    python benchmarks/driver.py [--episodes 64 1024 5120 16384] [--repeat 3]

A stub samples 2,000 ids for each episode and returns 500 responses a second, which is a million
tokens a second. Another stub verifies each response immediately. The code between them is
Quintet's:

    rollout    inference.rollout
    write      Run.write_episodes
    keep       selection of the episodes to train on, and metrics
    to_batch   training.build_batch
    pack       training.update_actor for eight ranks, whose workers are a stub

The script prints a line for each number of episodes: milliseconds of one core per episode by stage,
from the fastest repetition, the peak memory, and the longest delay of the event loop (`stall`). The
goals are 1 ms per episode in all stages together, and a delay of at most 100 ms. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform"}

import numpy as np
import torch
from measure import machine
from verl.utils import tensordict_utils as tu

import gym_client
import inference
import training
from env import Task
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data import metrics, rollout_files, selection
from kit.engine.sampling import RolloutContext, make_rollout_context, repeat_per_group
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe, build
from kit.run.cli import silence_libraries
from kit.run.run import Run
from tests.helpers.rollouts import make_tokenizer

STAGES = ("rollout", "write", "keep", "to_batch", "pack")
TOKENS = 2000  # of a response
RATE = 500.0  # responses a second
GROUP_SIZE = 8  # responses to a prompt
STOP_ID = 2
VOCABULARY = 150_000
RESPONSE_TEXT = "The answer is 42. " * 400  # for the verifier and the rollouts file


class Sampler:
    """A stub of the rollout engine's client, with `count` responses.

    Log-probs have the digits of 32-bit numbers. No two responses share an object, as if they came
    from another process.
    """

    def __init__(self, count: int):
        rng = np.random.default_rng(0)
        self.waits_s = rng.uniform(0, count / RATE, count).tolist()
        self.responses = []  # (ids, log-probs)
        for _ in range(count):
            ids = [*rng.integers(3, VOCABULARY, TOKENS - 1).tolist(), STOP_ID]
            log_probs = np.log(rng.random(TOKENS, np.float32)).tolist()
            self.responses.append((ids, log_probs))

    async def generate(self, *_: Any, **__: Any) -> Any:
        """Return the next response, after its wait."""
        await asyncio.sleep(self.waits_s.pop())
        ids, log_probs = self.responses.pop()
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={}
        )


class Verifier:
    """A stub of gym_client.Gym. The rewards are 1 and 0 in turn."""

    verified = 0  # number of responses

    async def kind(self, _: str) -> str:
        return "verify"

    @contextlib.asynccontextmanager
    async def session(self, *_: Any) -> AsyncIterator[Any]:
        """Open a session without tools."""
        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=self.verify)

    async def verify(self, *_: Any) -> gym_client.VerifyResult:
        """Return the next reward."""
        await asyncio.sleep(0)
        self.verified += 1
        return gym_client.VerifyResult(float(self.verified % 2), {}, 0.1, {"answer": "42"})


@contextlib.contextmanager
def measure_stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Record in `seconds` the CPU time that this process uses in the context."""
    begin = time.process_time()
    yield
    seconds[name] = time.process_time() - begin


def make_recipe(count: int) -> Recipe:
    """Return configs/math.yaml for one step of `count` episodes on eight ranks."""
    prompts = count // GROUP_SIZE
    changes = [
        f"data.train_batch_size={prompts}",
        "trainer.n_gpus_per_node=8",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        # Otherwise update_actor fetches the old log-probs from the workers, which are a stub.
        "algorithm.recompute_old_log_probs=true",
    ]
    return build(read_source(["math"], changes))


def make_tasks(count: int) -> list[Task]:
    """Make `count` tasks with the same row and a prompt of 100 tokens."""
    messages = [{"role": "user", "content": "What is 6 * 7? " * 10}]
    row = {"responses_create_params": {"input": messages}, "answer": "42"}
    return [Task(f"rows:{i}", row, "stub", messages, [*range(3, 103)]) for i in range(count)]


def make_context(recipe: Recipe, count: int) -> RolloutContext:
    """Return the context of a rollout in which all `count` episodes run concurrently."""
    tokenizer: Any = make_tokenizer(RESPONSE_TEXT)
    inputs: Any = SimpleNamespace(
        template=ChatTemplate(TextProcessor(tokenizer), {STOP_ID}),
        scales={},
        model=SimpleNamespace(vocab_size=VOCABULARY),
    )
    client: Any = Sampler(count)
    context = make_rollout_context(recipe, client, inputs, timeout_s=600.0)
    context.max_response_length = TOKENS
    context.episode_slots = asyncio.Semaphore(count)
    return context


def return_metrics(data: Any) -> Any:
    """Return the result of an update, as the actor's workers do."""
    return tu.get_tensordict({}, {"metrics": {"pg_loss": [0.0]}})


def measure(count: int) -> dict[str, float]:
    """Run one step of `count` episodes -> milliseconds per episode by stage, and `stall` in ms."""
    recipe = make_recipe(count)
    context = make_context(recipe, count)
    tasks = make_tasks(count // GROUP_SIZE)
    requests = repeat_per_group(tasks, GROUP_SIZE, "1")
    run = Run(recipe)
    (run.folder / "rollouts").mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    delays_s = [0.0]
    # Not asyncio.run: it handles SIGINT, and for that it calls repr on the result.
    loop = asyncio.new_event_loop()
    verifier: Any = Verifier()
    with measure_stage("rollout", seconds):
        watch = loop.create_task(watch_delays(delays_s))
        episodes = loop.run_until_complete(inference.rollout(requests, {}, context, verifier))
        watch.cancel()
    loop.run_until_complete(asyncio.sleep(0))  # the canceled task ends
    loop.close()
    with measure_stage("write", seconds):
        rollout_files.assign_record_indices(episodes, tasks)
        run.files.write_episodes("step_1", episodes, tasks)
    with measure_stage("keep", seconds):
        selection.check_failures(episodes, 0.5)
        metrics.update_pass_rates(episodes, {})
        kept, _ = selection.select_trainable(episodes)
        metrics.compute_rollout_metrics(episodes, kept)
    with measure_stage("to_batch", seconds):
        batch = training.build_batch(kept, 0, 1.0)
    batch.batch["advantages"] = batch.batch["token_level_scores"]
    workers: Any = SimpleNamespace(update_actor=return_metrics)
    with measure_stage("pack", seconds):
        training.update_actor(workers, batch, recipe)
    assert len(kept) == count and batch.batch["responses"].shape == torch.Size([count, TOKENS])
    values = {name: 1000 * seconds[name] / count for name in STAGES}
    return values | {"total": sum(values.values()), "stall": 1000 * max(delays_s)}


async def watch_delays(delays_s: list[float]) -> None:
    """Sleep again and again, and record by how many seconds each wake-up is late."""
    pause_s = 0.01
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(pause_s)
        delays_s.append(time.perf_counter() - begin - pause_s)


def read_peak_memory_gb() -> float:
    """Return the peak memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 1024, 5120, 16384])
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "driver", **machine()}
    silence_libraries()
    columns = (*STAGES, "total", "stall", "peak_gb")
    print("episodes" + "".join(f"{name:>10}" for name in columns))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        measure(GROUP_SIZE)  # fills caches and imports
        before_gb = read_peak_memory_gb()
        for count in sorted(args.episodes):  # ascending, because the peak memory never falls
            values = min(
                [measure(count) for _ in range(args.repeat)], key=lambda each: each["total"]
            )
            values["peak_gb"] = read_peak_memory_gb() - before_gb
            print(f"{count:8d}" + "".join(f"{values[name]:10.3f}" for name in columns), flush=True)
            result[str(count)] = {name: round(value, 3) for name, value in values.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
