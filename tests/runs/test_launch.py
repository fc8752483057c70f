"""What a run gives to the processes that it starts."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, load

import inference
from kit.errors import RunError
from kit.runs import isolation, launch


class Manager:
    """Stands in for verl's LLMServerManager and records what it was asked for."""

    made: list[Manager]

    def __init__(self, config: Any, worker_group: Any = None, start_rank: int = 0):
        self.rollout, self.worker_group, self.start_rank = (
            config.actor_rollout_ref.rollout,
            worker_group,
            start_rank,
        )
        self.made.append(self)

    async def _initialize_llm_servers(self) -> None:
        pass


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Manager]:
    Manager.made = []
    monkeypatch.setattr(inference, "LLMServerManager", Manager)
    return Manager.made


APART = [
    "trainer.nnodes=4",
    "actor_rollout_ref.rollout.nnodes=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
]


@pytest.mark.parametrize(
    ("changes", "expected"), [(APART, 2), (APART[:1], 4)], ids=["apart", "together"]
)
def test_a_sampler_has_the_nodes_of_its_recipe(
    workspace: Path, managers: list[Manager], changes, expected
) -> None:
    config, _ = load(workspace, *changes)
    before = config.actor_rollout_ref.rollout.nnodes
    asyncio.run(inference.start_standalone_servers(config, start_rank=4))
    (made,) = managers
    assert (made.rollout.nnodes, made.rollout.load_format, made.start_rank) == (expected, "auto", 4)
    assert config.actor_rollout_ref.rollout.nnodes == before  # the recipe stays as it was


@pytest.mark.parametrize(
    ("changes", "shares_gpus"), [(APART, False), (APART[:1], True)], ids=["apart", "together"]
)
def test_servers_apart_do_not_take_the_gpus_of_the_actor(
    workspace: Path, managers: list[Manager], changes, shares_gpus
) -> None:
    config, _ = load(workspace, *changes)
    actor = SimpleNamespace(init_model=lambda: None)
    asyncio.run(inference.start_servers(config, actor))
    assert (managers[0].worker_group is actor) == shares_gpus


def test_the_pythonpath_of_the_user_reaches_every_process(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["mine", str(ROOT), "theirs"]))
    config, _ = load(workspace)
    expected = os.pathsep.join([str(ROOT), "mine", "theirs"])
    assert (
        config.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH
        == os.environ["PYTHONPATH"]
        == expected
    )


@pytest.mark.parametrize("executable", [None, "/opt/my $(touch x)/python"])
def test_a_python_with_an_odd_path_is_quoted_for_ray(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """Ray puts it into the command of a shell. executable: Python's own path; None: workers fork."""
    asked: list[dict[str, Any]] = []

    def init(**arguments: Any) -> Any:
        asked.append(arguments)
        raise RunError("as far as this test goes")

    monkeypatch.setattr(launch.ray, "init", init)
    monkeypatch.setattr(launch, "_import_all", lambda engine: None)
    monkeypatch.setattr(isolation, "make_ray_folder", lambda parent: f"{parent} made private")
    python = executable or "/tmp/a b/python"
    monkeypatch.setattr(sys, "executable", executable or sys.executable)
    config, _ = load(workspace, "ray_kwargs.ray_init._temp_dir=/tmp/mine")
    run = SimpleNamespace(config=config, guard=SimpleNamespace(monitor=None))
    with pytest.raises(RunError, match="as far as"):
        fork_from = None if executable else SimpleNamespace(python=python, set_env=print)
        launch.start_ray(run, fork_from, sample=False)
    assert shlex.split(asked[0]["runtime_env"]["py_executable"]) == [python]
    assert asked[0]["_temp_dir"] == "/tmp/mine made private"


def test_a_long_tmpdir_ends_a_run_before_anything_starts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = load(workspace)
    monkeypatch.setattr(isolation.tempfile, "tempdir", "/tmp/" + "x" * 80)
    with pytest.raises(RunError, match="Set TMPDIR to a shorter path"):
        launch.begin_imports(config)
