"""From the command to the first answer: which process of the demo does what, and when.

    python benchmarks/startup.py [key=value ...]

Starts the demo for one step, twice: first with its files dropped from the disk cache as far as a
user can do that (what other processes have mapped stays), then with what the first left there.
Looks at every process each 0.25 s: seconds after the command at which it is there, and busy (over
half a core) first and last, and the CPU seconds that it has taken by the first answer. Prints a
table of each, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import psutil
from measure import ROOT, demo, machine, role

EVERY = 0.25  # seconds
LEAST = 0.3  # CPU seconds of a process that gets a separate line


class Look:
    """The work of each process at each look."""

    def __init__(self) -> None:
        self.begin = time.time()
        self.seen: dict[
            int, list[tuple[float, float]]
        ] = {}  # pid -> (seconds after the command, its CPU seconds)
        self.roles: dict[int, str] = {}  # the last one, since Ray's workers get theirs late

    def __call__(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                taken, name = process.cpu_times(), role(process)
            except psutil.Error:
                continue  # it ended since
            at = (time.time() - self.begin, taken.user + taken.system)
            self.seen.setdefault(process.pid, []).append(at)
            self.roles[process.pid] = name

    def table(self, end: float) -> list[dict[str, Any]]:
        """A line for each process that was there by `end`, seconds after the command; for small
        ones one a role.
        """
        lines: list[dict[str, Any]] = []
        for pid, looks in self.seen.items():
            looks = [look for look in looks if look[0] <= end]
            if not looks:
                continue
            pairs = list(zip([(looks[0][0] - EVERY, 0.0), *looks], looks, strict=False))
            busy = [now for (before, had), (now, has) in pairs if has - had > (now - before) / 2]
            line = {
                "process": self.roles[pid],
                "there_s": looks[0][0],
                "cpu_s": looks[-1][1],
                "count": 1,
            }
            line |= {"busy_from_s": min(busy, default=None), "busy_to_s": max(busy, default=None)}
            same = next(
                (x for x in lines if x["process"] == line["process"] and x["cpu_s"] < LEAST), None
            )
            if line["cpu_s"] < LEAST and same:
                same["count"], same["cpu_s"] = same["count"] + 1, same["cpu_s"] + line["cpu_s"]
            else:
                lines.append(line)
        return sorted(lines, key=lambda line: line["there_s"])


def forget() -> None:
    """Drop the files of the environments and of the model from the disk cache."""
    os.sync()
    for folder in (".venv", ".venv-gym", "models"):
        for path in (ROOT / folder).resolve().rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def measure(label: str, changes: list[str]) -> dict[str, Any]:
    """One start: printed, and its figures."""
    look = Look()
    folder, rows = demo(f"bench-startup-{label}", 1, look, EVERY, changes)
    episode, start = (
        next(row[f"timing_s/{name}"] for row in rows if f"timing_s/{name}" in row)
        for name in ("first_episode", "start")
    )
    checks = (
        folder / "config.yaml"
    ).stat().st_mtime - look.begin  # until the run is there, whose clock then starts
    first = checks + episode
    lines = look.table(first)
    print(
        f"\n{label} disk cache: first answer after {first:.1f} s (recipe checked {checks:.1f}, "
        f"all started",
        end=" ",
    )
    print(f"{checks + start:.1f}), {sum(line['cpu_s'] for line in lines):.1f} CPU seconds\n")
    print(f"{'process':<24}{'there, s':>10}{'CPU, s':>10}{'busy from':>12}{'to':>8}")
    for line in lines:
        name = f"{line['process']} x {line['count']}" if line["count"] > 1 else line["process"]
        busy = f"{line['busy_from_s']:12.1f}{line['busy_to_s']:8.1f}" if line["busy_to_s"] else ""
        print(f"{name:<24}{line['there_s']:10.1f}{line['cpu_s']:10.1f}{busy}")
    for line in lines:
        line |= {key: round(value, 2) for key, value in line.items() if isinstance(value, float)}
    told = {
        "first_answer_s": first,
        "checks_s": checks,
        "start_s": start,
        "first_episode_s": episode,
    }
    return {name: round(value, 1) for name, value in told.items()} | {"processes": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    about = machine()
    forget()
    result = {label: measure(label, args.changes) for label in ("cold", "warm")}
    print(json.dumps({"benchmark": "startup", **about, **result}))


if __name__ == "__main__":
    main()
