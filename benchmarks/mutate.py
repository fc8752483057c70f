"""Plant small bugs, one at a time, and list those that the fast tests do not catch.

    make mutate                                                all files of mutate.yaml
    .venv/bin/python benchmarks/mutate.py --only training.py   one file

A mutant is a file with one edit. For each file:

1. The tests of the file run once on the unchanged source. This measures the time of each test and
   the lines of the file that it executes.
2. The tests that execute the mutant's lines run on each mutant, the fastest test first, until one
   fails. Then the mutant is caught. If the tests take far longer than before, it counts as caught,
   with the result `timeout`. If no test fails, or no test executes the lines, the mutant survives.

verl takes a minute to import. So each mutant is tested in a forked process. Its parent has imported
all libraries, but no tests and no modules of the project.

Results are in runs/mutate/<file>.jsonl. If you run the command again, it skips mutants that were
caught in the same source. It skips survivors only if the tests have not changed either.

mutate.yaml lists the tests of each file, and the bugs written by hand. The exit status is 1 if
fewer than 85% of a required file's mutants are caught, or if there was no time for all mutants.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
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
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from mutants import Mutant, find_mutants, plant  # noqa: E402

RESULTS = ROOT / "runs" / "mutate"
# Prefixes of the project's own modules, which each forked process imports again.
ROOT_MODULES = ("algorithm", "inference", "training", "env", "gym_client")
PROJECT = (*ROOT_MODULES, "kit", "extras", "lab", "templates", "tests")
# verl imports these modules, and they patch verl. A process can import them only once.
KEPT = ("kit.cpu.platform", "kit.engine.verl_patches")
SLOW_TEST_S = 8.0  # slower tests are not used
REQUIRED = 0.85  # fraction of the mutants of a required file that must be caught
FAST = "not slow and not docs and not soak"  # the tests that are used


def is_project(name: str) -> bool:
    """Whether a module belongs to the project, and is imported again in each forked process."""
    return name.startswith(PROJECT) and not name.startswith(KEPT)


def digest(*paths: Path) -> str:
    """Return a short hash of the contents of some files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


# --- the process that mutants are forked from ----------------------------------------------------


def warm(names: list[str]) -> None:
    """Import all that the tests need. Then remove the project's modules from sys.modules."""
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": ",".join(KEPT)}
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import pytest  # noqa: F401

    for name in ["inference", "training", "algorithm", *names]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name in [name for name in sys.modules if is_project(name)]:
        del sys.modules[name]
    gc.collect()
    # Otherwise the garbage collector of each child visits all objects that are imported here. That
    # copies their memory, which takes 10 s.
    gc.freeze()


class Finder:
    """A finder for sys.meta_path. It imports `source` instead of the text of `file`."""

    def __init__(self, file: str, source: str):
        self.name = file.removesuffix(".py").replace("/", ".")
        self.path = str(ROOT / file)
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        loader: Any = importlib.machinery.SourceFileLoader(name, self.path)
        loader.get_code = lambda _: compile(self.source, self.path, "exec")
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class Plugin:
    """A plugin of pytest. It selects tests, and records their times, failures and lines of `file`.

    chosen: seconds of each test to run, by node id. None: all tests.
    """

    def __init__(self, file: str, chosen: dict[str, float] | None):
        self.path = str(ROOT / file)
        self.chosen = chosen
        # executed lines of `file` by test; "" has those that ran before the first test
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.current_test = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = self.chosen
        if chosen is not None:
            items[:] = [item for item in items if item.nodeid in chosen]
            items.sort(key=lambda item: chosen[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current_test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        """A trace function for sys.settrace. It records the executed lines of the file."""
        if frame.f_code.co_filename != self.path:
            return None
        self.lines[self.current_test].add(frame.f_lineno)
        return self.trace


def start_child(work: Any, log: Path) -> int:
    """Fork a process that calls `work` and writes its output to `log`. Return its process id."""
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


def run_tests(plugin: Plugin, files: list[str], temporary: Path, *more: str) -> int:
    """Run pytest in this process. Return its exit status."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    unused = ("cacheprovider", "unraisableexception", "threadexception")
    arguments = [*(f"-pno:{name}" for name in unused), "-m", FAST, "--assert=plain"]
    arguments += [f"--basetemp={temporary}", *more, *files]
    return int(pytest.main(arguments, plugins=[plugin]))


# --- step 1: which test executes which line ------------------------------------------------------


def measure(file: str, tests: list[str], folder: Path) -> dict[str, Any]:
    """Measure the seconds of each test of `file`, and the lines of `file` that it executes.

    If neither the file nor its tests have changed, read an earlier result from runs/mutate.
    """
    saved = RESULTS / f"{file.replace('/', '.')}.lines.json"
    key = digest(ROOT / file, *(ROOT / test for test in tests))
    if saved.is_file():
        measured = json.loads(saved.read_text())
        if measured["key"] == key:
            return measured
    plugin = Plugin(file, None)

    def work() -> int:
        threading.settrace(plugin.trace)
        sys.settrace(plugin.trace)
        code = run_tests(plugin, tests, folder / "unchanged")
        sys.settrace(None)
        measured = {"key": key, "seconds": plugin.seconds, "failed": plugin.failed}
        measured["lines"] = {name: sorted(lines) for name, lines in plugin.lines.items()}
        measured["modules"] = [name for name in sys.modules if not is_project(name)]
        saved.write_text(json.dumps(measured))
        return code

    saved.unlink(missing_ok=True)
    log = RESULTS / f"{file.replace('/', '.')}.log"
    os.waitpid(start_child(work, log), 0)
    if not saved.is_file():
        raise SystemExit(f"The tests of {file} did not finish. See {log}.")
    return json.loads(saved.read_text())


def tests_of(mutant: Mutant, measured: dict[str, Any]) -> dict[str, float]:
    """Return {test: seconds} of the tests that execute the mutant's lines.

    If the mutant's lines run at import, return all tests.
    """
    chosen = {}
    for name, seconds in measured["seconds"].items():
        lines = measured["lines"].get(name, ())
        executes = not mutant.lines or not set(lines).isdisjoint(mutant.lines)
        if executes and seconds < SLOW_TEST_S and name not in measured["failed"]:
            chosen[name] = seconds
    return chosen


# --- step 2: the mutants -------------------------------------------------------------------------


def try_mutants(
    file: str, mutants: list[Mutant], measured: dict[str, Any], jobs: int, end: float
) -> Iterator[dict[str, Any]]:
    """Test mutants, `jobs` concurrently, and yield the record of each as it ends.

    Its result is caught, timeout or survived. After the time `end`, no further mutant is started.
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
            pid = start_mutant(file, mutant, tests, Path(folder.name))
            running[pid] = (mutant, deadline, folder)
        for pid, (mutant, deadline, folder) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            is_late = time.monotonic() > deadline
            if not ended and not is_late:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            failed = Path(folder.name, "failed")
            by = failed.read_text() if failed.is_file() else "its import"
            code = os.waitstatus_to_exitcode(status)
            result = "timeout" if not ended else "caught" if code else "survived"
            yield mutant.record(result, by if result == "caught" else "")
            folder.cleanup()
            del running[pid]
        time.sleep(0.02)


def start_mutant(file: str, mutant: Mutant, tests: dict[str, float], folder: Path) -> int:
    """Start a process that runs some tests on a mutant. Return its process id.

    The process writes the name of the test that failed to folder/failed.
    """

    def work() -> int:
        sys.meta_path.insert(0, Finder(file, mutant.source))
        plugin = Plugin(file, tests)
        files = sorted({name.partition("::")[0] for name in tests})
        code = run_tests(plugin, files, folder / "tests", "-x")
        Path(folder, "failed").write_text(plugin.failed[0] if plugin.failed else "its import")
        return code

    return start_child(work, folder / "log")


def read_results(path: Path, source: str, tests: str) -> dict[str, dict[str, Any]]:
    """Read {mutant: record} of earlier runs. Leave out records that may not hold any more."""
    records = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        record = json.loads(line)
        if record["source"] == source and (
            record["result"] != "survived" or record["tests"] == tests
        ):
            records[record["mutant"]] = record
    return records


def check_file(
    file: str, settings: dict[str, Any], options: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], bool]:
    """Test the mutants of a file. Return their records, and whether all mutants have one.

    The records include those of earlier runs.
    """
    tests = [f"tests/{name}" for name in settings["files"][file]["tests"]]
    source = (ROOT / file).read_text()
    planted = [plant(file, source, one) for one in settings["planted"] if one["file"] == file]
    drawn = find_mutants(file, source)
    total = len(drawn)
    if total > options.sample:
        drawn = random.Random(f"0 {file}").sample(drawn, options.sample)
    drawn.sort(key=lambda mutant: mutant.line)
    measured = measure(file, tests, folder)
    if measured["failed"]:
        print(f"{file}: not used, because they fail on the unchanged source: {measured['failed']}")
    warm(measured["modules"])
    unchanged = Mutant(file, "", 0, [], "no edit", source)
    (control,) = try_mutants(file, [unchanged], measured, 1, math.inf)
    if control["result"] != "survived":
        problem = f"{control['by']} fails" if control["by"] else "the tests take too long"
        raise SystemExit(f"{file}: {problem} in a forked process with the unchanged source.")
    path = RESULTS / f"{file.replace('/', '.')}.jsonl"
    keys = {"source": digest(ROOT / file), "tests": digest(*(ROOT / test for test in tests))}
    records = read_results(path, **keys)
    mutants = planted + drawn
    untested = [mutant for mutant in mutants if mutant.name not in records]
    print(f"{file}: {len(drawn)} of {total} mutants and {len(planted)} bugs written by hand, ")
    print(f"{len(untested)} of them not tested yet", flush=True)
    with path.open("a") as out:
        for record in try_mutants(file, untested, measured, options.jobs, options.end):
            records[record["mutant"]] = record | keys
            out.write(json.dumps(records[record["mutant"]]) + "\n")
            out.flush()
    left = [mutant for mutant in mutants if mutant.name not in records]
    if left:
        print(f"{file}: {len(left)} mutants were not tested within --minutes. Run this again.")
    return [records[mutant.name] for mutant in mutants if mutant.name in records], not left


def report(file: str, results: list[dict[str, Any]], settings: dict[str, Any]) -> bool:
    """Print the survivors and the totals of a file. Return whether it has enough caught mutants."""
    survivors = [record for record in results if record["result"] == "survived"]
    timeouts = sum(record["result"] == "timeout" for record in results)
    rate = 1 - len(survivors) / max(1, len(results))
    for record in sorted(survivors, key=lambda record: record["line"]):
        print(f"  {file}:{record['line']} {record['mutant']}  # {record['by'] or 'no test fails'}")
    print(
        f"{file}: {len(results)} mutants, {len(results) - len(survivors)} caught ({timeouts} of "
        f"them by a timeout), {len(survivors)} survived: {rate:.1%} caught",
        flush=True,
    )
    return rate >= REQUIRED or not settings["files"][file].get("required")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="test one file of mutate.yaml, such as training.py")
    parser.add_argument("--sample", type=int, default=320, help="most mutants of a file")
    parser.add_argument("--minutes", type=float, default=40.0, help="start no mutant after this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tested concurrently")
    options = parser.parse_args()
    settings = yaml.safe_load((ROOT / "benchmarks" / "mutate.yaml").read_text())
    files = [options.only] if options.only else list(settings["files"])
    if unknown := set(files) - settings["files"].keys():
        raise SystemExit(f"benchmarks/mutate.yaml lists no tests for {unknown}. Add them.")
    os.chdir(ROOT)
    RESULTS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    options.end = begin + 60 * options.minutes
    warm([])
    good = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        for file in files:
            results, is_complete = check_file(file, settings, options, Path(folder))
            good.append(report(file, results, settings) and is_complete)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
