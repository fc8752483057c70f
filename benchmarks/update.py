"""The actor's update alone, again and again on one step's episodes: seconds, CPU seconds, page faults, memory.

    python benchmarks/update.py runs/x/rollouts/step_1.jsonl [--rounds 4] [key=value ...]

The recipe is the demo's with the changes; no vLLM is started, and the first update, which warms up, is left out. To
try a change of kit/cpu/cpu_engine.py or of a setting in minutes: all else stands still.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path

from measure import ROOT

sys.path.insert(0, str(ROOT))
import ray

from kit.config.load import load_config
from kit.data.rollout_files import load_replay
from kit.runs import launch, preparation
from kit.runs.run_dir import Run


def usage(pid: int) -> tuple[int, float, float, float]:
    """(page faults, CPU seconds in it and in the kernel, GiB resident) of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**30
    return int(fields[7]), int(fields[11]) / 100, int(fields[12]) / 100, resident


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("changes", nargs="*")
    args = parser.parse_args()
    settings = ["trainer.experiment_name=bench-update", "env.val_files=[]", *args.changes]
    config, _ = load_config(["math_cpu", "cpu"], settings)
    launch.begin_imports(config)
    data = prepare.prepare(config)
    import training

    kept = load_replay(args.rollouts, data.train)[0]
    seconds = []
    with Run(config) as run, contextlib.ExitStack() as stack:
        workers, _ = launch.start(run, data, stack, sample=False)
        pid = ray.get(
            workers.actor.workers[0].__ray_call__.remote(lambda _: __import__("os").getpid())
        )
        for i in range(args.rounds + 1):
            batch = training.build_batch(
                kept, data.tokenizer.pad_token_id, config.actor_rollout_ref.rollout.temperature
            )
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            training.compute_advantages(batch, config)
            before, began = usage(pid), time.perf_counter()
            training.update_actor(workers.actor, batch, config)
            taken, after = time.perf_counter() - began, usage(pid)
            faults, user, system = (b - a for a, b in zip(before[:3], after[:3], strict=True))
            told = f"{taken:.1f} s; CPU {user:.1f} and in the kernel {system:.1f}; {faults / 1000:.0f}k page faults"
            print(f"{'update' if i else 'first '} {told}; {after[3]:.2f} GiB resident", flush=True)
            seconds += [taken] if i else []
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in kept)
    print(f"median {statistics.median(seconds):.1f} s for {len(kept)} answers of {tokens} tokens")


if __name__ == "__main__":
    main()
