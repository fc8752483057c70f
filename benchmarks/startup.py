"""Measure the time from the command to the first response, and the work of each process until then.

    python benchmarks/startup.py [key=value ...]

The demo is started twice, for one step each. Before the first start, its files are dropped from the
disk cache. Files that other processes have mapped stay there. The second start finds the files that
the first one has read.

Every 0.25 s, the command looks at each process of the run. It prints a table of each start: when a
process starts, its CPU seconds until the first response, and when it is first and last busy (over
half a core). Times are in seconds after the command. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import psutil
from measure import ROOT, demo, machine, role

EVERY = 0.25  # seconds between two samples
LEAST = 0.3  # CPU seconds; processes with less share one line per role


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
                name = role(process)
            except psutil.Error:
                continue  # the process has ended
            sample = (time.time() - self.begin, cpu.user + cpu.system)
            self.samples.setdefault(process.pid, []).append(sample)
            self.roles[process.pid] = name

    def table(self, end: float) -> list[dict[str, Any]]:
        """Return a line for each process that started before `end`, in order of their start.

        end: seconds after the command. Small processes of the same role share one line.
        """
        lines: list[dict[str, Any]] = []
        for pid, samples in self.samples.items():
            samples = [sample for sample in samples if sample[0] <= end]
            if not samples:
                continue
            line: dict[str, Any] = {
                "process": self.roles[pid],
                "there_s": samples[0][0],
                "cpu_s": samples[-1][1],
                "count": 1,
            }
            busy = find_busy_times(samples)
            line |= {"busy_from_s": min(busy, default=None), "busy_to_s": max(busy, default=None)}
            same = next(
                (x for x in lines if x["process"] == line["process"] and x["cpu_s"] < LEAST), None
            )
            if line["cpu_s"] < LEAST and same:
                same["count"] += 1
                same["cpu_s"] += line["cpu_s"]
            else:
                lines.append(line)
        return sorted(lines, key=lambda line: line["there_s"])


def find_busy_times(samples: list[tuple[float, float]]) -> list[float]:
    """Return the times of the samples before which the process used more than half a core."""
    first = samples[0][0] - EVERY
    busy = []
    for (before, cpu_before), (now, cpu_now) in zip(
        [(first, 0.0), *samples], samples, strict=False
    ):
        if cpu_now - cpu_before > (now - before) / 2:
            busy.append(now)
    return busy


def drop_disk_cache() -> None:
    """Drop the files of the environments and of the model from the disk cache."""
    os.sync()
    for folder in (".venv", ".venv-gym", "models"):
        for path in (ROOT / folder).resolve().rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def measure(label: str, changes: list[str]) -> dict[str, Any]:
    """Start the demo once. Print its table, and return its numbers."""
    sampler = Sampler()
    folder, rows = demo(f"bench-startup-{label}", 1, sampler, EVERY, changes)
    episode = find_value(rows, "timing_s/first_episode")
    start = find_value(rows, "timing_s/start")
    # The run writes config.yaml after the recipe is checked. Then its own times begin.
    checks = (folder / "config.yaml").stat().st_mtime - sampler.begin
    first = checks + episode
    lines = sampler.table(first)
    cpu_s = sum(line["cpu_s"] for line in lines)
    print(
        f"\n{label} disk cache: first response after {first:.1f} s. The recipe was checked after "
        f"{checks:.1f} s, and all processes had started after {checks + start:.1f} s. Until the "
        f"first response, they used {cpu_s:.1f} CPU seconds.\n"
    )
    print(f"{'process':<24}{'starts, s':>10}{'CPU, s':>10}{'busy from':>12}{'to':>8}")
    for line in lines:
        name = f"{line['process']} x {line['count']}" if line["count"] > 1 else line["process"]
        busy = f"{line['busy_from_s']:12.1f}{line['busy_to_s']:8.1f}" if line["busy_to_s"] else ""
        print(f"{name:<24}{line['there_s']:10.1f}{line['cpu_s']:10.1f}{busy}")
    for line in lines:
        line |= {key: round(value, 2) for key, value in line.items() if isinstance(value, float)}
    times = {
        "first_answer_s": first,
        "checks_s": checks,
        "start_s": start,
        "first_episode_s": episode,
    }
    return {name: round(value, 1) for name, value in times.items()} | {"processes": lines}


def find_value(rows: list[dict[str, Any]], name: str) -> float:
    """Return the first value of a metric."""
    return next(row[name] for row in rows if name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    args = parser.parse_args()
    about = machine()
    drop_disk_cache()
    result = {label: measure(label, args.changes) for label in ("cold", "warm")}
    print(json.dumps({"benchmark": "startup", **about, **result}))


if __name__ == "__main__":
    main()
