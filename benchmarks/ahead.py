"""Simulate the gain of trainer.one_step_off on GPUs, without a GPU.

    python benchmarks/ahead.py [--steps 5] [--speed 100] [--out docs/ahead.png]

The simulation runs extras/one_step_off/ over a rollout engine and a trainer that only wait.
Their times are those that verl measured for DAPO with Qwen2.5-Math-7B and FSDP2 on 16 H20 GPUs
(verl's docs/advance/one_step_off.md). If both use all 16 GPUs in turn, sampling a batch takes 321 s
and training on it takes 374 s. If sampling has 4 GPUs and training 12, they take 458 s and 445 s.
There, a step of verl's one-step-off trainer took 520 s.

Half of the responses end after a fifth of the sampling time. While sampling and training share the
GPUs, each has half its speed. This is the worst case, because a few long responses slow an update
less. The script prints the seconds of a step, draws when the GPUs sampled and when they trained,
and prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform"}

import matplotlib.pyplot as plt
from driver import Verifier
from figures import save_light_and_dark
from matplotlib.figure import Figure
from verl.workers.rollout.llm_server import LLMServerClient

import inference
from env import Task
from extras.one_step_off import servers as ahead_servers
from kit.config.load import load_config
from kit.config.recipe import freeze
from kit.data.processor import TextProcessor
from kit.rollout.chat_template import ChatTemplate
from kit.rollout.client import Client
from kit.rollout.sampling import make_rollout_context, repeat_per_group
from kit.runs.cli import silence_libraries
from tests.helpers.rollouts import make_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 16  # of a batch
GROUP_SIZE = 8  # responses to a prompt
MAX_TOKENS = 1000  # of the longest response
SYNC_S = 1.0  # simulated seconds of a weight sync
TICK_S = 2.0  # simulated seconds between two updates of the progress
STOP_ID = 5


class Case(NamedTuple):
    """One bar of the comparison."""

    sampling_s: float  # for a batch
    training_s: float  # on a batch
    shares_gpus: bool  # whether sampling and training use the same GPUs
    one_step_off: int  # trainer.one_step_off


CASES = {
    "one after the other": Case(321.0, 374.0, True, 0),
    "one step ahead, same GPUs": Case(321.0, 374.0, True, 1),
    "one step ahead, separate GPUs": Case(458.0, 445.0, False, 1),
}


class Progress(NamedTuple):
    """The number of responses in progress from a time on."""

    time_s: float
    active: int


class Simulation(NamedTuple):
    """The simulated GPUs of a case, and when each step ended."""

    gpus: Gpus
    step_ends_s: list[float]  # the first is the start of the run


@dataclass
class Gpus:
    """The simulated rollout engine and trainer. All times are simulated seconds."""

    case: Case
    speed: float  # simulated seconds per second
    version: int = 0  # of the weights: the number of a step
    is_paused: bool = False  # whether sampling waits for new weights
    active: int = 0  # responses in progress
    is_training: bool = False
    sampled: list[Progress] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)  # (start, end) of each update
    started_at: float = 0.0  # of time.perf_counter
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def now(self) -> float:
        """Return the simulated seconds since the start of the run."""
        return (time.perf_counter() - self.started_at) * self.speed

    def change_active(self, change: int) -> None:
        """Record that responses have started or ended."""
        self.active += change
        self.sampled.append(Progress(self.now(), self.active))

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Sample the rest of a response, like verl's LLMServerClient.

        prompt_ids: the number of the prompt, the length of the response, and the tokens that were
        sampled before an interruption.
        """
        while self.is_paused:
            await asyncio.sleep(0.001)
        _, length, *sampled_ids = prompt_ids
        remaining = length - len(sampled_ids)
        version = self.version
        before = self.now()
        self.change_active(1)
        done = 0.0  # tokens
        while done < remaining and not self.is_paused:
            await asyncio.sleep(TICK_S / self.speed)
            slowdown = 2 if self.case.shares_gpus and self.is_training else 1
            now = self.now()
            done += (now - before) * MAX_TOKENS / self.case.sampling_s / slowdown
            before = now
        self.change_active(-1)
        count = min(remaining, int(done))
        return SimpleNamespace(
            token_ids=[STOP_ID] * count,
            log_probs=[-1.0] * count,
            stop_reason="aborted" if count < remaining else "completed",
            extra_fields={"global_steps": version},
        )

    def train(self) -> None:
        """Wait as long as an update takes."""
        begin = self.now()
        before = begin
        remaining_s = self.case.training_s
        self.is_training = True
        while remaining_s > 0:
            time.sleep(TICK_S / self.speed)
            slowdown = 2 if self.case.shares_gpus and self.active > 0 else 1
            remaining_s -= (self.now() - before) / slowdown
            before = self.now()
        self.is_training = False
        self.trained.append((begin, self.now()))

    # The methods of verl's CheckpointEngineManager that inference.Servers and one_step_off.Servers
    # call.
    def abort_replicas(self) -> None:
        """Interrupt all responses in progress."""
        self.is_paused = True
        time.sleep(0.005)

    def update_weights(self, step: int) -> None:
        """Wait as long as a weight sync takes."""
        time.sleep(SYNC_S / self.speed)
        self.version = step

    def resume_generation_replicas(self) -> None:
        """Let interrupted responses continue."""
        self.is_paused = False

    def sleep_replicas(self) -> None:
        """Do nothing: there is no memory to free."""

    def make_tasks(self, batch: int) -> list[Task]:
        """Make prompts of two ids: a number, and the length of the responses.

        The lengths have an exponential distribution, cut at MAX_TOKENS. One prompt has this length.
        """
        rate = 5 * 0.7 / MAX_TOKENS
        tasks = []
        for number in range(PROMPTS):
            drawn = 1 + int(self.rng.expovariate(rate))
            length = min(MAX_TOKENS, drawn) if number else MAX_TOKENS
            tasks.append(Task(f"{batch}:{number}", {}, "stub", [{}], [number, length]))
        return tasks


def make_servers(case: Case, gpus: Gpus, loop: Any) -> Any:
    """Return the kit's Servers over the simulated GPUs, without Ray, vLLM and Gym."""
    recipe = freeze(*load_config(["math"], [f"trainer.one_step_off={case.one_step_off}"]))
    tokenizer: Any = make_tokenizer("")
    processor = TextProcessor(tokenizer)
    inputs: Any = SimpleNamespace(
        tokenizer=processor.tokenizer,
        processor=processor,
        template=ChatTemplate(processor, {STOP_ID}),
        stop_ids={STOP_ID},
        model=SimpleNamespace(vocab_size=100),
    )
    servers: Any = {"stub": None}
    client = Client(recipe, servers, is_one_step_off=bool(case.one_step_off))
    context = make_rollout_context(recipe, client, inputs, timeout_s=1e6)
    context.max_response_length = MAX_TOKENS
    context.policy_version = 0

    def generate(_client: Any, _request_id: str, **arguments: Any) -> Any:
        return gpus.generate(**arguments)

    LLMServerClient.generate = generate  # type: ignore[method-assign]
    servers_class = ahead_servers.Servers if case.one_step_off else inference.Servers
    servers = object.__new__(servers_class)  # __init__ needs vLLM's replicas
    vars(servers).update(
        context=context,
        gym=Verifier(),
        loop=loop,
        checkpoint_manager=gpus,
        workers=None,
        is_asleep=False,
    )
    return servers


def simulate(case: Case, steps: int, speed: float) -> Simulation:
    """Run some steps in the order of Trainer.step."""
    gpus = Gpus(case, speed)
    step_ends_s = [0.0]
    with ahead_servers.BackgroundLoop() if case.one_step_off else asyncio.Runner() as loop:
        servers = make_servers(case, gpus, loop)
        gpus.started_at = time.perf_counter()
        requests = repeat_per_group(gpus.make_tasks(1), GROUP_SIZE, "1")
        for step in range(1, steps + 1):
            episodes = servers.rollout(requests, {})
            assert {episode.status for episode in episodes} == {"ok"}, episodes[0].error
            servers.sleep()
            requests = repeat_per_group(gpus.make_tasks(step + 1), GROUP_SIZE, str(step + 1))
            if case.one_step_off and step < steps:
                servers.start_rollout(requests, {})
            gpus.train()
            servers.update_weights(step)
            step_ends_s.append(gpus.now())
    return Simulation(gpus, step_ends_s)


def draw(simulations: dict[str, Simulation]) -> Figure:
    """Draw a panel for each case: the responses in progress, and below them the updates."""
    count = len(simulations)
    figure, axes = plt.subplots(
        count, 1, figsize=(10, 2 * count), sharex=True, layout="constrained"
    )
    for axis, (name, simulation) in zip(axes, simulations.items(), strict=True):
        draw_case(axis, name, simulation)
    last = max(simulation.step_ends_s[-1] for simulation in simulations.values())
    label = "simulated seconds; dotted lines: new weights reach vLLM"
    axes[-1].set(xlim=(0, last), xlabel=label)
    figure.suptitle(
        "Simulation, no GPU: times of DAPO with Qwen2.5-Math-7B on 16 H20, as verl measured them",
        fontsize=10,
    )
    return figure


def draw_case(axis: Any, name: str, simulation: Simulation) -> None:
    """Draw the panel of one case."""
    sampled = simulation.gpus.sampled
    times = [progress.time_s for progress in sampled]
    shares = [progress.active / (PROMPTS * GROUP_SIZE) for progress in sampled]
    axis.fill_between(times, shares, step="post", color="C0", alpha=0.6, lw=0)
    updates = [(begin, end - begin) for begin, end in simulation.gpus.trained]
    axis.broken_barh(updates, (-0.35, 0.25), color="C1")
    for end in simulation.step_ends_s[1:]:
        axis.axvline(end, color="0.5", lw=0.8, ls=":")
    seconds = compute_step_seconds(simulation)
    axis.set_title(f"{name}: {seconds:.0f} s a step (simulated)", fontsize=9, loc="left")
    axis.set(
        yticks=[-0.22, 0.5], yticklabels=["training", "responses\nin progress"], ylim=(-0.4, 1.05)
    )


def compute_step_seconds(simulation: Simulation) -> float:
    """Return the median seconds of a step.

    The first and the last step do not count, since sampling or training runs alone in them.
    """
    return median(end - begin for begin, end in pairwise(simulation.step_ends_s[1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of each case, at least 3")
    parser.add_argument("--speed", type=float, default=100.0, help="simulated seconds per second")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ahead.png")
    args = parser.parse_args()
    silence_libraries()
    simulations = {name: simulate(case, args.steps, args.speed) for name, case in CASES.items()}
    seconds = {name: compute_step_seconds(each) for name, each in simulations.items()}
    for name, value in seconds.items():
        print(f"{name:32}{value:8.0f} s a step")
    save_light_and_dark(partial(draw, simulations), args.out)
    rounded = {name: round(value) for name, value in seconds.items()}
    print(json.dumps({"benchmark": "ahead", **rounded}))


if __name__ == "__main__":
    main()
