"""Repeat the actor's update on the episodes of one step: seconds, CPU, page faults, memory.

    python benchmarks/update.py runs/x/rollouts/step_1.jsonl [--rounds 4] [key=value ...]

The recipe is the demo's, with the changes key=value. They must not turn on a critic, a reference or
old log-probs before the update. vLLM does not run. The first update is a warm-up, and the median
leaves it out. Use this command to test a change of kit/cpu/cpu_engine.py or of a setting within
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT

sys.path.insert(0, str(ROOT))
import ray

from kit.config.load import load_config
from kit.data.rollout_files import load_replay
from kit.runs import cli, launch, prepare
from kit.runs.run import Run


class Usage(NamedTuple):
    """The resources that a process has used so far, and its memory now."""

    page_faults: int
    user_s: float  # CPU seconds in the process
    system_s: float  # CPU seconds in the kernel
    resident_gib: float


def read_usage(pid: int) -> Usage:
    """Read the usage of a process from /proc.

    /proc counts CPU time in hundredths of a second, and memory in pages of 4 KiB.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(int(fields[7]), int(fields[11]) / 100, int(fields[12]) / 100, pages * 4096 / 2**30)


def get_pid(_worker: Any) -> int:
    """In a worker: return its process id."""
    return os.getpid()


def measure_update(update: Callable[[], Any], pid: int, label: str) -> float:
    """Run one update, print the resources that it used, and return its seconds."""
    before = read_usage(pid)
    started_at = time.perf_counter()
    update()
    seconds = time.perf_counter() - started_at
    after = read_usage(pid)
    user_s = after.user_s - before.user_s
    system_s = after.system_s - before.system_s
    faults = (after.page_faults - before.page_faults) / 1000
    print(
        f"{label} {seconds:.1f} s; CPU time {user_s:.1f} s in the process and {system_s:.1f} s in "
        f"the kernel; {faults:.0f}k page faults; {after.resident_gib:.2f} GiB resident",
        flush=True,
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rollouts", type=Path, help="a rollouts file of the demo's task")
    parser.add_argument(
        "--rounds", type=int, default=4, help="updates after the warm-up (default: 4)"
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    args = parser.parse_args()
    settings = ["trainer.experiment_name=bench-update", "env.val_files=[]", *args.changes]
    config, defaults = load_config(["math_cpu", "cpu"], settings)
    recipe, inputs = prepare.prepare(config, defaults, on_features=cli.begin_imports)
    import training

    episodes = load_replay(args.rollouts, inputs.train)[0]
    seconds = []
    with Run(recipe) as run, contextlib.ExitStack() as stack:
        workers = launch.start(run, inputs, stack, samples=False).workers
        pid = ray.get(workers.actor.workers[0].__ray_call__.remote(get_pid))
        for i in range(args.rounds + 1):
            batch = training.to_batch(episodes, inputs, recipe)
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            training.compute_advantages(batch, recipe)
            update = functools.partial(training.update_actor, workers.actor, batch, recipe)
            update_s = measure_update(update, pid, "update" if i else "first ")
            if i:
                seconds.append(update_s)
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in episodes)
    median = statistics.median(seconds)
    print(f"median {median:.1f} s for {len(episodes)} episodes with {tokens} tokens together")


if __name__ == "__main__":
    main()
