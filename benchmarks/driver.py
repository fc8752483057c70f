"""The driver's cost of a step, per episode: no Ray, no vLLM, no model, no server.

    python benchmarks/driver.py [--tokens 2000] [--episodes 64 1024 5120 16384] [--repeat 3] [--rate
    500]

A stub samples `tokens` ids for each episode, `rate` answers a second (500: a million tokens, more
than 32 H100 give), and another verifies it immediately. Everything between them is Quintet's:
`inference.rollout`, `Run.write_episodes`, what is kept and its metrics, `training.to_batch`, and
the packing of an update for eight ranks (`training.update_actor`, whose workers are a stub). Prints
ms of one core per episode by stage, of the fastest repetition, and by how much the event loop was
late at most; one JSON line last. Held against: 1 ms an episode altogether, however many there are,
and 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # before this folder, which has a gym_client too
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform"}

import numpy as np
import torch
from measure import machine
from verl.utils import tensordict_utils as tu

import gym_client
import inference
import training
from env import Task
from kit.config.load import load_config
from kit.data import metrics, rollout_files, selection
from kit.rollout.sampler import make_sampler_context, repeat_per_group
from kit.runs.cli import silence_libraries
from kit.runs.run_dir import Run

STAGES = ("rollout", "write", "keep", "to_batch", "pack")
PROMPT, MEMBERS, STOP = 100, 8, 2  # tokens, answers to a prompt, the id that ends an answer
SAID = "The answer is 42. " * 400  # the text of an answer, for the verifier and the file


class Sampler:
    """`count` answers of so many ids each, with log-probs of 32 bits; no two share an object, as
    off the wire.
    """

    def __init__(self, count: int, tokens: int, rate: float):
        rng = np.random.default_rng(0)
        self.waits = rng.uniform(0, count / rate, count).tolist()  # seconds
        self.answers = [
            (
                [*rng.integers(3, 150_000, tokens - 1).tolist(), STOP],
                np.log(rng.random(tokens, np.float32)).tolist(),
            )
            for _ in range(count)
        ]

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        await asyncio.sleep(self.waits.pop())
        ids, log_probs = self.answers.pop()
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={}
        )


class Verifier:
    """Stands for gym_client.Gym: every session's answer is worth 0 or 1, in turn."""

    verdicts = 0

    async def kind(self, server: str) -> str:
        return "verify"

    @contextlib.asynccontextmanager
    async def session(
        self, server: str, row: dict[str, Any], index: gym_client.EpisodeIndex
    ) -> AsyncIterator[Any]:
        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=self.verify)

    async def verify(
        self, response: dict[str, Any], token_ids: list[int]
    ) -> gym_client.VerifyResult:
        await asyncio.sleep(0)
        self.verdicts += 1
        return gym_client.VerifyResult(
            float(self.verdicts % 2), {}, 0.1, {"extracted_answer": "42"}
        )


@contextlib.contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    begin = time.process_time()
    yield
    seconds[name] = time.process_time() - begin


def measure(count: int, tokens: int, rate: float) -> dict[str, float]:
    """Seconds of the processor in each stage of one step of `count` episodes; stall: the longest of
    the event loop.
    """
    sizes = [
        f"data.train_batch_size={count // MEMBERS}",
        "trainer.n_gpus_per_node=8",
        f"actor_rollout_ref.rollout.n={MEMBERS}",
    ]
    config, _ = load_config(
        ["math"], [*sizes, f"actor_rollout_ref.actor.ppo_mini_batch_size={count // MEMBERS}"]
    )
    tokenizer = SimpleNamespace(decode=lambda ids, **_: SAID)
    model = SimpleNamespace(vocab_size=150_000)
    data = SimpleNamespace(tokenizer=tokenizer, stop_ids={STOP}, model=model)
    policy = make_sampler_context(config, Sampler(count, tokens, rate), data, 600.0)  # type: ignore[arg-type]
    policy.max_response_length, policy.episode_slots = tokens, asyncio.Semaphore(count)
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "What is 6 * 7? " * 10}]},
        "answer": "42",
    }
    prompt = [{"role": "user", "content": "?"}]
    tasks = [
        Task(f"rows:{i}", row, "stub", prompt, list(range(3, 3 + PROMPT)))
        for i in range(count // MEMBERS)
    ]
    requests = repeat_per_group(tasks, MEMBERS, "1")
    run = Run(config)
    (run.folder / "rollouts").mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    stalls: list[float] = []
    loop = (
        asyncio.new_event_loop()
    )  # asyncio.run would take SIGINT, which a run has, and to that end repr the episodes
    with stage("rollout", seconds):
        watching = loop.create_task(watch(stalls))
        made = loop.run_until_complete(inference.rollout(requests, {}, policy, Verifier()))  # type: ignore[arg-type]
        watching.cancel()
    loop.close()
    with stage("write", seconds):
        rollout_files.assign_record_indices(made, tasks)
        run.write_episodes("step_1", made, tasks)
    with stage("keep", seconds):
        selection.check_failures(made, 0.5)
        metrics.update_pass_rates(made, {})
        kept, _ = selection.select_trainable(made)
        metrics.compute_rollout_metrics(made, kept)
    with stage("to_batch", seconds):
        batch = training.build_batch(kept, 0, 1.0)
    batch.batch["advantages"] = batch.batch["token_level_scores"]
    workers = SimpleNamespace(
        update_actor=lambda data: tu.get_tensordict({}, {"metrics": {"pg_loss": [0.0]}})
    )
    with stage("pack", seconds):
        training.update_actor(workers, batch, config)
    assert len(kept) == count and batch.batch["responses"].shape == torch.Size([count, tokens])
    return seconds | {"stall": max(stalls, default=0.0)}


async def watch(stalls: list[float]) -> None:
    """Seconds that the event loop was late by, each time that it was asked for its turn."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(0.01)
        stalls.append(time.perf_counter() - begin - 0.01)


def memory_gb() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 1024, 5120, 16384])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, default=500.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "driver", **machine(), "tokens": args.tokens}
    silence_libraries()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        measure(MEMBERS, 8, 1e6)  # imports, caches
        before = memory_gb()
        print(
            "episodes"
            + "".join(f"{name:>10}" for name in (*STAGES, "total"))
            + "   ms/episode    peak GB   stall, ms"
        )
        for count in sorted(args.episodes):  # so that the peak so far is that of the last
            best = min(
                (measure(count, args.tokens, args.rate) for _ in range(args.repeat)),
                key=lambda s: sum(s[n] for n in STAGES),
            )
            ms = {name: 1000 * best[name] / count for name in STAGES}
            ms |= {
                "total": sum(ms.values()),
                "peak_gb": memory_gb() - before,
                "stall": 1000 * best["stall"],
            }
            *columns, peak, stall = ms.values()
            print(
                f"{count:8d}"
                + "".join(f"{v:10.3f}" for v in columns)
                + f"{peak:24.2f}{stall:12.0f}",
                flush=True,
            )
            result[str(count)] = {name: round(value, 3) for name, value in ms.items()}
            result["ms_per_episode"] = result[str(count)]["total"]  # of the most
    print(json.dumps(result))


if __name__ == "__main__":
    main()
