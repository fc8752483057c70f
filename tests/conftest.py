"""Shared fixtures: a trivial Gym task for the tiny model, the stack, and hooks of pytest.

The model is random (helpers/models.py). The task asks for the digit 7. Gym's reasoning_gym server
gives the reward 1 for exactly this digit. If a longer response contains it, the reward is
len("7") / len(response). So a random model gets a low reward, and a trained one gets a high reward.

tests/helpers/stack.py says what the stack is.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest
import torch

from tests.helpers.models import make_model, make_vision_model
from tests.helpers.recipes import load, write_task
from tests.helpers.stack import SESSION, Stack, kill_workers, session

# A test may take any time on a machine that is busy.
hypothesis.settings.register_profile("quintet", deadline=None)
hypothesis.settings.load_profile("quintet")

# Tensors of tests are small, so more threads would only wait for each other.
torch.set_num_threads(1)

# If a shell starts the tests in the background, they ignore SIGINT, and so does every process that
# they start. Undo that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """Return a folder with rows and the models tied/, untied/ and scored/ (with a scalar head)."""
    folder = tmp_path_factory.mktemp("kit")
    make_model(folder / "tied", tied=True)
    make_model(folder / "untied", tied=False)
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    reward_model = AutoModelForTokenClassification.from_pretrained(
        folder / "tied", num_labels=1, dtype=torch.float32
    )
    reward_model.save_pretrained(folder / "scored")
    AutoTokenizer.from_pretrained(folder / "tied").save_pretrained(folder / "scored")
    write_task(folder)
    return folder


@pytest.fixture(scope="session")
def vision_model(workspace) -> Path:
    """Return the folder of a tiny model that reads images."""
    return make_vision_model(workspace / "vision", workspace / "untied")


# --- hooks of pytest ------------------------------------------------------------------------------

# Files whose tests start whole runs of algorithm.py, or replace signal handlers. They run in the
# same pytest process as the tests that use the stack.
STARTS_RUNS = (
    "test_cli",
    "test_reliability",
    "test_signals",
)
# Names in the code of a test that starts a Gym server or a command.
STARTERS = {"subprocess", "running_servers", "call_command", "GymServers"}
# Fixtures that start the model stack, or a browser.
SLOW_FIXTURES = {"stack", "values", "chromium"}
# In CI, a test may be skipped only if its reason begins with one of these texts.
SKIPS_IN_CI = ("needs root: ", "needs bubblewrap", "needs a coding agent: ")


def is_slow(item) -> bool:
    """Return whether a test has the mark, or starts the stack, a server, a command or a browser."""
    if item.get_closest_marker("slow"):
        return True
    if SLOW_FIXTURES & set(item.fixturenames) or item.path.stem in STARTS_RUNS:
        return True
    fixtures = [last.func for *_, last in item._fixtureinfo.name2fixturedefs.values()]
    waiting = [item.function, *fixtures]  # these, and the functions of tests/ that they use
    seen = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        function = inspect.unwrap(function)
        names = list_names(function.__code__)
        if function.__module__.startswith("tests."):
            if names & STARTERS:
                return True
            waiting += [function.__globals__.get(name) for name in names]
    return False


@functools.cache
def list_names(code: CodeType) -> frozenset[str]:
    """List the names that a function uses, also in functions inside of it."""
    inner = [list_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


def timeout_s(item: pytest.Item) -> float:
    """Return how many seconds a test may take, with its fixtures.

    pyproject.toml sets pytest-timeout's method `thread`. The method `signal` would use SIGALRM,
    which kit/run/stages.py needs. After a timeout, pytest's process ends. Then
    extras/supervisor/reaper.py kills the processes that a run started.
    """
    if item.get_closest_marker("soak"):
        return 3600.0
    return 600.0 if is_slow(item) else 120.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI, report a skipped test as failed, unless its reason is one of SKIPS_IN_CI."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPS_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {reason}"
    return report


@pytest.hookimpl(wrapper=True)  # before pytest reads the marks, and xdist the groups
def pytest_collection_modifyitems(items):
    """Put tests that share a fixture into one process, sort the tests, and set their timeouts.

    Slow tests get the mark `slow`, which `make fast` leaves out.

    Tests of whole runs come first. Otherwise the stack would stay idle in memory while they run.
    """
    for item in items:
        group = find_group(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(timeout_s(item)))
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
    items.sort(key=rank)
    return (yield)


def find_group(item) -> str:
    """Name the process that a test needs: for those with the stack, or with a module's fixture."""
    if "stack" in item.fixturenames or item.path.stem in STARTS_RUNS:
        return "stack"
    fixtures = [last for *_, last in item._fixtureinfo.name2fixturedefs.values()]
    return item.path.stem if any(fixture.scope == "module" for fixture in fixtures) else ""


def rank(item: pytest.Item) -> int:
    """Return the sort key of a test: whole runs first, then tests with the stack, then others."""
    if find_group(item) != "stack":
        return 3
    return 2 if "stack" in getattr(item, "fixturenames", ()) else 1


@pytest.fixture
def caplog(caplog, monkeypatch):
    """Return pytest's caplog, also for the kit's loggers after cli.silence_libraries has run.

    A module that vLLM imports sets the root logger to ERROR, so their level is set here.
    """
    for name in ("gym_client", "kit"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level(logging.WARNING, logger=name)
    return caplog


# --- doubles of the training loop ----------------------------------------------------------------


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Test doubles of everything that the training loop calls, which record calls (Recorder)."""
    from tests.helpers.trainer import make_recorder

    monkeypatch.chdir(tmp_path)
    return make_recorder(monkeypatch)


# --- the stack -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stack(workspace) -> Iterator[Stack]:
    """Return the stack, started once for all tests of a process."""
    with session(workspace) as running:
        yield running


@pytest.fixture(scope="session")
def values(stack):
    """Start a critic and a reward model. fresh_critic/ has the critic's initial weights."""
    from kit.run.workers import optional_roles, start_roles

    changes = [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=0.001",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={stack.workspace / 'scored'}",
        "env.val_files=[]",
    ]
    recipe = load(stack.workspace, *SESSION, *changes).recipe
    groups = start_roles(recipe, optional_roles(recipe))
    groups.critic.save_checkpoint(str(stack.workspace / "fresh_critic"), None, 0, None)
    yield groups
    kill_workers(groups)


# --- a browser -----------------------------------------------------------------------------------

CHROMIUM_FLAGS = [
    "--no-sandbox",  # a sandbox needs a user other than root
    "--disable-gpu",
    "--no-first-run",
    # without these, Chromium itself opens connections
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[object]:
    """Chromium, controlled by playwright. If it is not installed, Debian's package is unpacked."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    environment: dict[str, str | float | bool] = {**os.environ}
    if not program:
        folder = tmp_path_factory.mktemp("chromium")
        download_chromium(folder)
        program = folder / "usr/lib/chromium/chromium"
        libraries = sorted({str(path.parent) for path in folder.rglob("*.so*")})
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(program), args=CHROMIUM_FLAGS, env=environment
        )
        yield browser
        browser.close()


def download_chromium(folder: Path) -> None:
    """Download and unpack Debian's Chromium; skip the test if that fails."""
    (folder / "partial").mkdir()
    command = (
        "apt-get -qq -y --download-only --no-install-recommends "
        f"-o Dir::Cache::archives={folder} install chromium"
        f" && for each in {folder}/*.deb; do dpkg -x $each {folder}; done"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        error = done.stderr.strip()[-200:]
        pytest.skip(f"Chromium is not installed and cannot be downloaded: {error}")
