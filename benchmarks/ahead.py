"""Simulate the gain of trainer.one_step_off on GPUs, without a GPU.

one_step_off.py runs over a rollout engine and a trainer that only wait.

    python benchmarks/ahead.py [--steps 5] [--speed 100] [--out docs/ahead.png]

Times are those that verl measured (docs/advance/one_step_off.md: DAPO, Qwen2.5-Math-7B, FSDP2, 16
H20): on the same 16 GPUs a batch is sampled in 321 s and trained on in 374; on 4 and 12 of them in
458 and 445, where a step of verl's one-step-off trainer took 520. Half of the responses end after
a fifth of that time. If sampling and training share the GPUs, each has half its speed, the worst
case: few responses slow an update less. Prints seconds a step, draws when the GPUs sampled and
trained, and prints one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform"}

from driver import Verifier
from verl.workers.rollout.llm_server import LLMServerClient

import inference
from env import Task
from kit.config.load import load_config
from kit.extras import one_step_off
from kit.rollout.client import Client
from kit.rollout.sampler import make_sampler_context, repeat_per_group
from kit.runs.cli import silence_libraries

PROMPTS, MEMBERS, LONGEST, SYNC_S = 16, 8, 1000, 1.0  # LONGEST: tokens of the longest answer
CASES = {  # seconds for a batch: sampling, training; whether on the same GPUs; a step ahead
    "one after the other": (321.0, 374.0, True, 0),
    "one step ahead, same GPUs": (321.0, 374.0, True, 1),
    "one step ahead, separate GPUs": (458.0, 445.0, False, 1),
}


@dataclass
class Gpus:
    """The sampler and the trainer: the time that they take, and when they took it."""

    sampling_s: float
    training_s: float
    same: bool
    speed: float
    version: int = 0
    held: bool = False  # for new weights
    active: int = 0  # answers under way
    trains: bool = False
    sampled: list[tuple[float, int]] = field(default_factory=list)  # (time, answers under way)
    trained: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin, self.draw = 0.0, random.Random(0)

    def now(self) -> float:
        """Seconds on the clock of the GPUs."""
        return (time.perf_counter() - self.begin) * self.speed

    def count(self, change: int) -> None:
        self.active += change
        self.sampled.append((self.now(), self.active))

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """The rest of an answer, of which the prompt's length says how long it is in all, and how
        much there is.
        """
        while self.held:
            await asyncio.sleep(0.001)
        _, length, *there = prompt_ids
        left, begin, version = length - len(there), self.now(), self.version
        self.count(1)
        done = 0.0
        while done < left and not self.held:
            await asyncio.sleep(2.0 / self.speed)
            now = self.now()
            done += (now - begin) * LONGEST / self.sampling_s / (1 + (self.same and self.trains))
            begin = now
        self.count(-1)
        got = min(left, int(done))
        told = {"global_steps": version}
        reason = "aborted" if got < left else "completed"
        return SimpleNamespace(
            token_ids=[5] * got, log_probs=[-1.0] * got, stop_reason=reason, extra_fields=told
        )

    def train(self) -> None:
        begin, left, self.trains = self.now(), self.training_s, True
        before = begin
        while left > 0:
            time.sleep(2.0 / self.speed)
            left -= (self.now() - before) / (1 + (self.same and self.active > 0))
            before = self.now()
        self.trains = False
        self.trained.append((begin, self.now()))

    # what kit/extras/one_step_off.py asks of verl's CheckpointEngineManager
    def abort_replicas(self) -> None:
        self.held = True
        time.sleep(0.005)

    def update_weights(self, step: int) -> None:
        time.sleep(SYNC_S / self.speed)
        self.version = step

    def resume_generation_replicas(self) -> None:
        self.held = False

    def sleep_replicas(self) -> None:
        """Nothing to free."""

    def tasks(self, batch: int) -> list[Task]:
        """Prompts whose second id is the length of their responses: exponential, truncated."""
        lengths = [
            min(LONGEST, 1 + int(self.draw.expovariate(5 * 0.7 / LONGEST))) for _ in range(PROMPTS)
        ]
        lengths[0] = LONGEST
        return [
            Task(f"{batch}:{i}", {}, "stub", [{}], [i, length]) for i, length in enumerate(lengths)
        ]


def simulate(case: str, steps: int, speed: float) -> tuple[Gpus, list[float]]:
    """(what was done when, when each step ended), by the order of Trainer.step."""
    sampling_s, training_s, same, is_ahead = CASES[case]
    gpus = Gpus(sampling_s, training_s, same, speed)
    config, _ = load_config(["math"], [f"trainer.one_step_off={is_ahead}"])
    model, tokenizer = SimpleNamespace(vocab_size=100), SimpleNamespace(decode=lambda ids, **_: "")
    data = SimpleNamespace(tokenizer=tokenizer, stop_ids={5}, model=model)
    client = Client(config, {"stub": None}, bool(is_ahead))
    policy = make_sampler_context(config, client, data, 1e6)  # type: ignore[arg-type]
    policy.max_response_length, policy.policy_version = LONGEST, 0
    # type: ignore[assignment, method-assign]
    LLMServerClient.generate = lambda _, request_id, **asked: gpus.generate(**asked)
    with (
        one_step_off.BackgroundLoop() if is_ahead else asyncio.Runner() as loop,
        contextlib.suppress(KeyboardInterrupt),
    ):
        servers: Any = object.__new__(one_step_off.Servers if is_ahead else inference.Servers)
        vars(servers).update(
            context=policy,
            gym=Verifier(),
            loop=loop,
            checkpoint_manager=gpus,
            rollout_workers=None,
            is_asleep=False,
        )
        gpus.begin, ended = time.perf_counter(), [0.0]
        requests = repeat_per_group(gpus.tasks(1), MEMBERS, "1")
        for step in range(1, steps + 1):
            episodes = servers.rollout(requests, {})
            assert {e.status for e in episodes} == {"ok"}, episodes[0].error
            servers.sleep()
            requests = repeat_per_group(gpus.tasks(step + 1), MEMBERS, str(step + 1))
            if is_ahead and step < steps:
                servers.start_rollout(requests, {})
            gpus.train()
            servers.update_weights(step)
            ended.append(gpus.now())
    return gpus, ended


def draw(found: dict[str, tuple[Gpus, list[float]]], out: Path) -> None:
    """Draw for each case the responses in progress, and below it when the trainer was at work."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(found), 1, figsize=(10, 2 * len(found)), sharex=True, layout="constrained"
    )
    for axis, (case, (gpus, ended)) in zip(axes, found.items(), strict=True):
        times, active = zip(*gpus.sampled, strict=True)
        axis.fill_between(
            times,
            [a / (PROMPTS * MEMBERS) for a in active],
            step="post",
            color="C0",
            alpha=0.6,
            lw=0,
        )
        axis.broken_barh([(b, e - b) for b, e in gpus.trained], (-0.35, 0.25), color="C1")
        for end in ended[1:]:
            axis.axvline(end, color="0.3", lw=0.8, ls=":")
        title = f"{case}: {per_step(ended):.0f} s a step (simulated)"
        axis.set_title(title, fontsize=9, loc="left")
        axis.set(
            yticks=[-0.22, 0.5],
            yticklabels=["training", "responses\nin progress"],
            ylim=(-0.4, 1.05),
        )
    axes[-1].set(
        xlim=(0, max(ended[-1] for _, ended in found.values())),
        xlabel="simulated seconds; dotted lines: new weights reach vLLM",
    )
    figure.suptitle(
        "Simulation, no GPU: times of DAPO with Qwen2.5-Math-7B on 16 H20, as verl measured them",
        fontsize=10,
    )
    figure.savefig(out, dpi=110)


def per_step(ended: list[float]) -> float:
    """Median seconds of the middle steps. The first and the last sample or train alone."""
    return median(end - begin for begin, end in pairwise(ended[1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--speed", type=float, default=100.0, help="seconds of the GPUs in one of the clock's"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "ahead.png"
    )
    args = parser.parse_args()
    silence_libraries()
    found = {case: simulate(case, args.steps, args.speed) for case in CASES}
    for case, (_, ended) in found.items():
        print(f"{case:32}{per_step(ended):8.0f} s a step")
    draw(found, args.out)
    print(
        json.dumps(
            {
                "benchmark": "ahead",
                **{case: round(per_step(ended)) for case, (_, ended) in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
