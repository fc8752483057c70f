"""Tests that a run starts its processes with the right GPUs, variables and folders."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inference
from kit.cpu import preload
from kit.errors import ConfigError, RunError
from kit.runs import cli, isolation, launch
from tests.helpers.recipes import ROOT, load


class Manager:
    """A double of verl's LLMServerManager that records its arguments."""

    instances: list[Manager]

    def __init__(self, config: Any, worker_group: Any = None, start_rank: int = 0):
        self.rollout = config.actor_rollout_ref.rollout
        self.worker_group = worker_group
        self.start_rank = start_rank
        self.instances.append(self)

    async def _initialize_llm_servers(self) -> None:
        pass


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Manager]:
    Manager.instances = []
    monkeypatch.setattr(inference, "LLMServerManager", Manager)
    return Manager.instances


SEPARATE = [
    "trainer.nnodes=4",
    "actor_rollout_ref.rollout.nnodes=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
]


@pytest.mark.parametrize(
    ("changes", "expected"), [(SEPARATE, 2), (SEPARATE[:1], 4)], ids=["separate", "shared"]
)
def test_a_rollout_engine_gets_the_number_of_nodes_from_the_recipe(
    workspace: Path, managers: list[Manager], changes, expected
) -> None:
    recipe, _ = load(workspace, *changes)
    before = recipe.rollout.nnodes
    asyncio.run(inference.start_standalone_servers(recipe, start_rank=4))
    (manager,) = managers
    rollout = manager.rollout
    assert (rollout.nnodes, rollout.load_format, manager.start_rank) == (expected, "auto", 4)
    assert recipe.rollout.nnodes == before  # the recipe is not changed


@pytest.mark.parametrize(
    ("changes", "shares_gpus"),
    [(SEPARATE, False), (SEPARATE[:1], True)],
    ids=["separate", "shared"],
)
def test_separate_servers_do_not_use_the_actors_gpus(
    workspace: Path, managers: list[Manager], changes, shares_gpus
) -> None:
    recipe, _ = load(workspace, *changes)
    actor = SimpleNamespace(init_model=lambda: None)
    asyncio.run(inference.start_servers(recipe, actor))
    assert (managers[0].worker_group is actor) == shares_gpus


def test_the_pythonpath_of_the_user_reaches_every_process(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["first", str(ROOT), "second"]))
    recipe, _ = load(workspace)
    expected = os.pathsep.join([str(ROOT), "first", "second"])
    assert (
        recipe.verl.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH
        == os.environ["PYTHONPATH"]
        == expected
    )


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_python_with_an_odd_path_is_quoted_for_ray(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_forked: bool
) -> None:
    """Ray inserts the path into a shell command.

    is_forked: Ray starts its workers through the fork server.
    """
    settings: list[dict[str, Any]] = []

    def record_and_stop(**arguments: Any) -> Any:
        settings.append(arguments)
        raise RunError("the end of this test")

    @contextlib.contextmanager
    def running(modules: str, log: Path) -> Iterator[Any]:
        yield SimpleNamespace(python="/tmp/a b/python", set_env=print)

    monkeypatch.setattr(launch.ray, "init", record_and_stop)
    monkeypatch.setattr(launch, "import_engine", lambda launch: None)
    monkeypatch.setattr(isolation, "make_ray_folder", lambda parent: f"{parent} made private")
    monkeypatch.setattr(preload.fork_server, "running", running)
    monkeypatch.setenv(preload.VARIABLE, "torch")
    python = "/tmp/a b/python" if is_forked else "/opt/my $(touch x)/python"
    recipe, inputs = load(workspace, "ray_kwargs.ray_init._temp_dir=/tmp/mine")
    run = SimpleNamespace(recipe=recipe, stages=SimpleNamespace(monitor=None), folder=tmp_path)
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="the end of"):
        starting = launch.Launch(run, inputs, stack, None)  # type: ignore[arg-type]
        if is_forked:
            preload.Preload(recipe.verl, "train").before_ray(starting)
        else:
            starting.python = python
        launch.start_ray(starting)
    assert shlex.split(settings[0]["runtime_env"]["py_executable"]) == [python]
    assert settings[0]["_temp_dir"] == "/tmp/mine made private"


def test_workers_run_with_the_python_of_the_run(workspace: Path) -> None:
    recipe, inputs = load(workspace)
    run = SimpleNamespace(recipe=recipe)
    with contextlib.ExitStack() as stack:
        starting = launch.Launch(run, inputs, stack, None)  # type: ignore[arg-type]
    assert starting.python == sys.executable


def test_a_long_tmpdir_is_an_error_before_anything_starts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = load(workspace)
    monkeypatch.setattr(isolation.tempfile, "tempdir", "/tmp/" + "x" * 80)
    with pytest.raises(RunError, match="Set TMPDIR to a shorter path"):
        cli.begin_imports((), recipe.verl)


# --- Ray does not start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"address": "local", "_temp_dir": "/short/ray"},
            "Ray did not start: The current node timed out during startup. Its logs are in "
            "/short/ray/session_latest/logs. If this machine is busy, start again when it is not. "
            'See docs/troubleshooting.md, "Ray".',
        ),
        (
            {"address": "10.0.0.1:6379"},
            "Ray at ray_kwargs.ray_init.address=10.0.0.1:6379 cannot be joined: The current node "
            "timed out during startup. Check `ray status` on this node. "
            'See docs/cluster.md, "Start Ray by hand".',
        ),
    ],
)
def test_a_ray_that_does_not_start_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    def fail(**_: str) -> None:
        raise Exception("\nThe current node timed out during startup.\nMore lines\n")

    monkeypatch.setattr(launch.ray, "init", fail)
    with pytest.raises(RunError) as raised:
        launch.init_ray(settings)
    assert str(raised.value) == message


def test_a_setting_that_ray_refuses_is_not_blamed_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: str) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(launch.ray, "init", fail)
    with pytest.raises(RunError, match="Ray did not start: no such option Its logs") as raised:
        launch.init_ray({"address": "local", "_temp_dir": "/short/ray"})
    assert "busy" not in str(raised.value)


def test_the_imports_end_before_an_error_of_rays_start_is_raised(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread that still imports when Python exits would print a traceback."""
    ended: list[str] = []

    def import_slowly(_: Any) -> None:
        time.sleep(0.3)
        ended.append("imports")

    def fail(**_: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(launch, "import_engine", import_slowly)
    monkeypatch.setattr(launch.ray, "init", fail)
    monkeypatch.setattr(isolation, "make_ray_folder", lambda parent: "/short/ray")
    recipe, inputs = load(workspace)
    run = SimpleNamespace(recipe=recipe, stages=SimpleNamespace(monitor=None), folder=tmp_path)
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="no such option"):
        launch.start_ray(launch.Launch(run, inputs, stack, None))  # type: ignore[arg-type]
    assert ended == ["imports"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/short/x"),
            "/short/x cannot be written: No space left on device. Free space there",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "a folder of the run cannot be written: Too many open files",
        ),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "The run did not start: [Errno 11] Resource temporarily unavailable. Correct this",
        ),
        (
            ImportError("libcudart.so.13: cannot open shared object file"),
            "a package cannot be imported: libcudart.so.13: cannot open shared object file",
        ),
        (RuntimeError("can't start new thread"), "may have no more processes (ulimit -u)"),
        (ConfigError("key=1 must be 2. Change it."), "key=1 must be 2. Change it."),
    ],
    ids=str,
)
def test_an_error_of_the_machine_during_the_start_is_one_line(
    error: Exception, message: str
) -> None:
    with pytest.raises(cli.EXPECTED_ERRORS) as raised, launch.explain_start_errors():
        raise error
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_bug_during_the_start_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), launch.explain_start_errors():
        raise KeyError("a bug")
