"""Tests that a run starts its processes with the right GPUs, variables and folders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, load

import inference
from kit.cpu import preload
from kit.errors import RunError
from kit.runs import cli, isolation, launch


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
    config, _ = load(workspace, *changes)
    before = config.actor_rollout_ref.rollout.nnodes
    asyncio.run(inference.start_standalone_servers(config, start_rank=4))
    (manager,) = managers
    rollout = manager.rollout
    assert (rollout.nnodes, rollout.load_format, manager.start_rank) == (expected, "auto", 4)
    assert config.actor_rollout_ref.rollout.nnodes == before  # the recipe is not changed


@pytest.mark.parametrize(
    ("changes", "shares_gpus"),
    [(SEPARATE, False), (SEPARATE[:1], True)],
    ids=["separate", "shared"],
)
def test_separate_servers_do_not_use_the_actors_gpus(
    workspace: Path, managers: list[Manager], changes, shares_gpus
) -> None:
    config, _ = load(workspace, *changes)
    actor = SimpleNamespace(init_model=lambda: None)
    asyncio.run(inference.start_servers(config, actor))
    assert (managers[0].worker_group is actor) == shares_gpus


def test_the_pythonpath_of_the_user_reaches_every_process(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["first", str(ROOT), "second"]))
    config, _ = load(workspace)
    expected = os.pathsep.join([str(ROOT), "first", "second"])
    assert (
        config.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH
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
    config, inputs = load(workspace, "ray_kwargs.ray_init._temp_dir=/tmp/mine")
    run = SimpleNamespace(config=config, guard=SimpleNamespace(monitor=None), folder=tmp_path)
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="the end of"):
        starting = launch.Launch(run, inputs, stack, None)  # type: ignore[arg-type]
        if is_forked:
            preload.before_ray(starting)
        else:
            starting.python = python
        launch.start_ray(starting)
    assert shlex.split(settings[0]["runtime_env"]["py_executable"]) == [python]
    assert settings[0]["_temp_dir"] == "/tmp/mine made private"


def test_workers_run_with_the_python_of_the_run(workspace: Path) -> None:
    config, inputs = load(workspace)
    run = SimpleNamespace(config=config)
    with contextlib.ExitStack() as stack:
        starting = launch.Launch(run, inputs, stack, None)  # type: ignore[arg-type]
    assert starting.python == sys.executable


def test_a_long_tmpdir_is_an_error_before_anything_starts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = load(workspace)
    monkeypatch.setattr(isolation.tempfile, "tempdir", "/tmp/" + "x" * 80)
    with pytest.raises(RunError, match="Set TMPDIR to a shorter path"):
        cli.begin_imports(config)


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
