"""Plant small bugs, one at a time, and list those that the fast tests do not catch: `make mutate`.

    .venv/bin/python benchmarks/mutate.py                      every file of mutate.yaml
    .venv/bin/python benchmarks/mutate.py --only training.py     one file
    .venv/bin/python benchmarks/mutate.py --only training.py --planted     its planted bugs

A mutant is a file with one edit. verl takes a minute to import, so that each mutant is tried in a
process forked from one that has imported every library, but no module of the project and no test:

1. The tests of a file run once, unchanged. That gives the lines of the file that each test
executes, and its seconds. 2. Each mutant is tried by the tests that execute its line, the fastest
first, until one fails. A mutant that no test
   executes survives. A mutant whose tests take far longer than before is caught, as a timeout.

Results go to runs/mutate/<file>.jsonl. A second run skips the mutants that were caught in the same
source, and the survivors if the tests have not changed. mutate.yaml holds the tests of each file,
the bugs planted by hand, and the survivors that are accepted, with the reason. Exits with 1 if
fewer than 85% of a required file's mutants are caught.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import importlib.machinery
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
from mutants import Mutant, find_mutants, plant  # noqa: E402

RESULTS = ROOT / "runs" / "mutate"
PROJECT = (
    "algorithm",
    "inference",
    "training",
    "env",
    "gym_client",
    "gym_messages",
    "kit",
    "templates",
    "conftest",
    "test_",
    # helpers of the tests, which import the modules above
    "fault_server",
    "http_doubles",
    "judge_doubles",
    "learning",
    "rollout_doubles",
    "tiny_models",
    "trainer_doubles",
    "turn_doubles",
    "worker_doubles",
    "verifier_helpers",
)
KEPT = (
    "kit.cpu.platform",
    "kit.rollout.verl_patches",
)  # which verl imports, and which change verl: once a process
SLOW_TEST_S = 8.0
REQUIRED = 0.85
FIXTURES = {"stack", "values", "chromium"}  # tests that use one start the whole stack, or a browser


def is_project(name: str) -> bool:
    return name.startswith(PROJECT) and not name.startswith(KEPT)


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


# --- the process that mutants are forked from ----------------------------------------------------


def warm(names: list[str]) -> None:
    """Import what the tests need, then forget the project's own modules."""
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.rollout.verl_patches",
    }
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import pytest  # noqa: F401

    for name in ["inference", "training", "algorithm", *names]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name in [name for name in sys.modules if is_project(name)]:
        del sys.modules[name]
    gc.collect()
    # or each child's garbage collector goes over, and copies, all that is imported here: 10 s
    gc.freeze()


class Finder:
    """Imports the mutated source in place of the file's; everything else is imported as usual."""

    def __init__(self, file: str, source: str):
        self.name = file.removesuffix(".py").replace("/", ".")
        self.path = str(ROOT / file)
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        loader = importlib.machinery.SourceFileLoader(name, self.path)
        # type: ignore[method-assign]
        loader.get_code = lambda _: compile(self.source, self.path, "exec")
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class Plugin:
    """pytest's: chooses the tests, and writes down what each did."""

    def __init__(self, file: str, chosen: dict[str, float] | None):
        self.path = str(ROOT / file)
        self.chosen = chosen
        self.lines: dict[str, set[int]] = defaultdict(
            set
        )  # by test; "" for the import of the module
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.now = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen is None:
            items[:] = [item for item in items if not FIXTURES & set(item.fixturenames)]
        else:
            items[:] = [item for item in items if item.nodeid in self.chosen]
            items.sort(key=lambda item: self.chosen[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        """Python's trace function: notes the lines of the file that are executed."""
        if frame.f_code.co_filename != self.path:
            return None
        self.lines[self.now].add(frame.f_lineno)
        return self.trace


def in_child(work: Any, log: Path) -> int:
    """Fork a process that calls `work` with its output in `log`; its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    code = 70
    try:
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_tests(plugin: Plugin, files: list[str], place: Path, *more: str) -> int:
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = [
        f"-pno:{name}" for name in ("cacheprovider", "unraisableexception", "threadexception")
    ]
    arguments = ["-q", *plugins, "--assert=plain", "--durations=0", f"--basetemp={place}", *more]
    return int(pytest.main([*arguments, *files], plugins=[plugin]))


# --- step 1: which test executes which line ------------------------------------------------------


def measure(file: str, tests: list[str], folder: Path) -> dict[str, Any]:
    """The seconds and the lines of each test of `file`, from runs/mutate if neither it nor they
    have changed.
    """
    kept = RESULTS / f"{file.replace('/', '.')}.lines.json"
    key = digest(ROOT / file, *(ROOT / test for test in tests))
    if kept.is_file():
        found = json.loads(kept.read_text())
        if found["key"] == key:
            return found
    plugin = Plugin(file, None)

    def work() -> int:
        threading.settrace(plugin.trace)
        sys.settrace(plugin.trace)
        code = run_tests(plugin, tests, folder / "unchanged")
        sys.settrace(None)
        lines = {name: sorted(found) for name, found in plugin.lines.items()}
        names = [name for name in sys.modules if not is_project(name)]
        seconds = dict(plugin.seconds)
        kept.write_text(
            json.dumps(
                {
                    "key": key,
                    "lines": lines,
                    "seconds": seconds,
                    "modules": names,
                    "failed": plugin.failed,
                }
            )
        )
        return code

    kept.unlink(missing_ok=True)
    log = RESULTS / f"{file.replace('/', '.')}.log"
    os.waitpid(in_child(work, log), 0)
    if not kept.is_file():
        raise SystemExit(f"the tests of {file} did not run to their end; see {log}")
    return json.loads(kept.read_text())


def tests_of(mutant: Mutant, measured: dict[str, Any]) -> dict[str, float]:
    """{test: seconds} of those that execute the mutant's lines; all of them for what runs at
    import.
    """
    fast = {
        name: seconds
        for name, seconds in measured["seconds"].items()
        if seconds < SLOW_TEST_S and name not in measured["failed"]
    }
    if not mutant.lines:
        return fast
    wanted = set(mutant.lines)
    return {
        name: seconds
        for name, seconds in fast.items()
        if wanted & set(measured["lines"].get(name, ()))
    }


# --- step 2: the mutants -------------------------------------------------------------------------


def try_mutants(
    file: str, mutants: list[Mutant], measured: dict[str, Any], jobs: int, end: float
) -> Iterator[dict[str, Any]]:
    """The result of each mutant, as it comes: caught, timeout or survived. None starts after the
    time `end`.
    """
    waiting = list(reversed(mutants))
    running: dict[int, tuple[Mutant, float, tempfile.TemporaryDirectory[str]]] = {}
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            tests = tests_of(mutant, measured)
            if not tests:
                yield mutant.record("survived", "no test executes it")
                continue
            folder = tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True)
            deadline = time.monotonic() + 15 + 4 * sum(tests.values())
            running[start_mutant(file, mutant, tests, Path(folder.name))] = (
                mutant,
                deadline,
                folder,
            )
        for pid, (mutant, deadline, folder) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() > deadline
            if not done and not late:
                continue
            if not done:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            by = Path(folder.name, "failed")
            name = by.read_text() if by.is_file() else "its import"
            code = os.waitstatus_to_exitcode(status)
            result = "timeout" if late and not done else "caught" if code else "survived"
            yield mutant.record(result, name if result == "caught" else "")
            folder.cleanup()
            del running[pid]
        time.sleep(0.02)


def start_mutant(file: str, mutant: Mutant, tests: dict[str, float], folder: Path) -> int:
    def work() -> int:
        sys.meta_path.insert(0, Finder(file, mutant.source))
        plugin = Plugin(file, tests)
        files = sorted({name.partition("::")[0] for name in tests})
        code = run_tests(plugin, files, folder / "tests", "-x")
        Path(folder, "failed").write_text(plugin.failed[0] if plugin.failed else "its import")
        return code

    return in_child(work, folder / "log")


def known_results(path: Path, source: str, tests: str) -> dict[str, dict[str, Any]]:
    """{mutant: result} of earlier runs that still hold."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        record = json.loads(line)
        if record["source"] == source and (
            record["result"] != "survived" or record["tests"] == tests
        ):
            found[record["mutant"]] = record
    return found


def check_file(
    file: str, settings: dict[str, Any], options: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], bool]:
    """The results of a file's mutants, known ones and those of this run; whether all were tried."""
    tests = [f"tests/{name}" for name in settings["files"][file]["tests"]]
    source = (ROOT / file).read_text()
    planted = [plant(file, source, one) for one in settings["planted"] if one["file"] == file]
    made = [] if options.planted else find_mutants(file, source)
    of = len(made)
    if of > options.sample:
        made = random.Random(f"{options.seed} {file}").sample(made, options.sample)
    made.sort(key=lambda mutant: mutant.line)
    measured = measure(file, tests, folder)
    if measured["failed"]:
        print(
            f"{file}: without {', '.join(measured['failed'])}, which fail in the unchanged source"
        )
    warm(measured["modules"])
    unchanged = Mutant(file, "", 0, [], "no edit", source)
    (control,) = try_mutants(file, [unchanged], measured, 1, math.inf)
    if control["result"] != "survived":
        raise SystemExit(
            f"{file}: {control['by'] or 'a timeout'} in a forked process without a mutant; make "
            f"it pass there"
        )
    path = RESULTS / f"{file.replace('/', '.')}.jsonl"
    keys = {"source": digest(ROOT / file), "tests": digest(*(ROOT / test for test in tests))}
    known = known_results(path, **keys)
    mutants = planted + made
    fresh = [mutant for mutant in mutants if mutant.name not in known]
    print(
        f"{file}: {len(made)} of {of} mutants, {len(planted)} planted; {len(fresh)} to try",
        flush=True,
    )
    with path.open("a") as out:
        for record in try_mutants(file, fresh, measured, options.jobs, options.end):
            known[record["mutant"]] = record | keys
            out.write(json.dumps(known[record["mutant"]]) + "\n")
            out.flush()
    left = [mutant for mutant in mutants if mutant.name not in known]
    if left:
        print(
            f"{file}: {len(left)} mutants were not tried within --minutes; run the same command "
            f"again"
        )
    return [known[mutant.name] for mutant in mutants if mutant.name in known], not left


def report(file: str, results: list[dict[str, Any]], settings: dict[str, Any]) -> bool:
    """Print a file's table; whether enough of its mutants were caught."""
    reasons = {one["mutant"]: one["reason"] for one in settings["accepted"] if one["file"] == file}
    survivors = [record for record in results if record["result"] == "survived"]
    timeouts = sum(record["result"] == "timeout" for record in results)
    rate = 1 - len(survivors) / max(1, len(results))
    for record in sorted(survivors, key=lambda record: record["line"]):
        why = reasons.get(record["mutant"]) or record["by"] or "no test fails"
        print(f"  {file}:{record['line']} {record['mutant']}  # {why}")
    print(
        f"{file}: {len(results)} mutants, {len(results) - len(survivors)} caught ({timeouts} of "
        f"them timeouts), "
        f"{len(survivors)} survived: {rate:.1%} caught",
        flush=True,
    )
    return rate >= REQUIRED or not settings["files"][file].get("required")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="plant bugs and list those that the fast tests do not catch"
    )
    parser.add_argument("--only", help="one file of mutate.yaml, as training.py")
    parser.add_argument(
        "--planted", action="store_true", help="only the bugs written in mutate.yaml"
    )
    parser.add_argument(
        "--sample", type=int, default=320, help="mutants of a file, at most; drawn by --seed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="after which no more mutants are tried"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="mutants that are tried at the same time"
    )
    options = parser.parse_args()
    settings = yaml.safe_load((ROOT / "benchmarks" / "mutate.yaml").read_text())
    files = [options.only] if options.only else list(settings["files"])
    if unknown := [file for file in files if file not in settings["files"]]:
        raise SystemExit(
            f"--only {unknown[0]}: benchmarks/mutate.yaml has no tests of it; add them"
        )
    os.chdir(ROOT)
    RESULTS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    options.end = begin + 60 * options.minutes
    warm([])
    good = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        for file in files:
            results, whole = check_file(file, settings, options, Path(folder))
            good.append(report(file, results, settings) and whole)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
