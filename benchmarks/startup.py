"""Measure the time from the command to the first response, and the work of each process until then.

    python benchmarks/startup.py [--config NAME ...] [key=value ...]

The demo, or another recipe, is started for one step. On a GPU, add --config math_cpu --config
one_gpu. To see what the fork server saves, run it again with
ray_kwargs.ray_init.runtime_env.env_vars.PRELOAD_MODULES=''. Every 0.25 s, the command looks at each
process of the run. It prints when a process starts, in seconds after the command, and its CPU
seconds until the first response. If the recipe has not run before, its files are not in the disk
cache, and the start takes longer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import psutil
from measure import DEMO, demo, machine, role

EVERY = 0.25  # seconds between two samples
START = "timing_s/start"
FIRST = "timing_s/first_episode"
LEAST = 0.3  # CPU seconds; processes with less are left out


class Sampler:
    """Samples the CPU time of each process. measure.demo calls it with the processes."""

    def __init__(self) -> None:
        self.begin = time.time()
        # {pid: [(seconds after the command, CPU seconds of the process)]}
        self.samples: dict[int, list[tuple[float, float]]] = {}
        self.roles: dict[int, str] = {}  # the latest role: Ray's workers get their titles late

    def __call__(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                cpu = process.cpu_times()
                self.roles[process.pid] = role(process)
            except psutil.Error:
                continue  # the process has ended
            sample = (time.time() - self.begin, cpu.user + cpu.system)
            self.samples.setdefault(process.pid, []).append(sample)

    def make_table(self, end: float) -> list[dict[str, Any]]:
        """Return a line for each process that used LEAST before `end`, in order of their start.

        end: seconds after the command.
        """
        lines = []
        for pid, samples in self.samples.items():
            before = [sample for sample in samples if sample[0] <= end]
            if before and before[-1][1] >= LEAST:
                start_s = round(before[0][0], 1)
                cpu_s = round(before[-1][1], 1)
                lines.append({"process": self.roles[pid], "start_s": start_s, "cpu_s": cpu_s})
        return sorted(lines, key=lambda line: line["start_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    parser.add_argument("--config", action="append", metavar="NAME", help="recipe (the demo's)")
    args = parser.parse_intermixed_args()
    about = machine()
    sampler = Sampler()
    folder, rows = demo("bench-startup", 1, sampler, EVERY, args.changes, args.config or DEMO)
    # The run writes config.yaml after the recipe is checked. Then its own times begin.
    checks_s = (folder / "config.yaml").stat().st_mtime - sampler.begin
    start_s = checks_s + next(row[START] for row in rows if START in row)
    first_s = checks_s + next(row[FIRST] for row in rows if FIRST in row)
    print(
        f"first response after {first_s:.1f} s; the recipe was checked after {checks_s:.1f} s, and "
        f"all processes had started after {start_s:.1f} s\n"
    )
    lines = sampler.make_table(first_s)
    print(f"{'process':<24}{'starts, s':>10}{'CPU, s':>10}")
    for line in lines:
        print(f"{line['process']:<24}{line['start_s']:10.1f}{line['cpu_s']:10.1f}")
    print(json.dumps({"benchmark": "startup", **about, "first_s": first_s, "processes": lines}))


if __name__ == "__main__":
    main()
