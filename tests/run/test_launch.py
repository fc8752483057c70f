"""Tests that a run starts its processes with the right GPUs, variables and folders."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import RunError
from kit.run import fork_server, isolation, launch
from tests.helpers.recipes import ROOT, load


def test_the_pythonpath_of_the_user_reaches_every_process(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["first", str(ROOT), "second"]))
    recipe = load(workspace).recipe
    expected = os.pathsep.join([str(ROOT), "first", "second"])
    assert (
        recipe.ray_kwargs.ray_init["runtime_env"]["env_vars"]["PYTHONPATH"]
        == os.environ["PYTHONPATH"]
        == expected
    )


def test_a_python_with_an_odd_path_is_quoted_for_ray(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray inserts the path, which is that of the fork server, into a shell command."""
    settings: list[dict[str, Any]] = []
    python = "/tmp/a b/$(touch x)/python"

    def record_and_stop(**arguments: Any) -> Any:
        settings.append(arguments)
        raise RunError("the end of this test")

    monkeypatch.setattr(launch.ray, "init", record_and_stop)
    monkeypatch.setattr(launch, "import_engine", lambda launch: None)
    monkeypatch.setattr(isolation, "make_ray_folder", lambda parent: f"{parent} made private")
    server = fork_server.ForkServer("/tmp/a b/$(touch x)", None)  # type: ignore[arg-type]
    monkeypatch.setattr(fork_server.Preload, "_server", server)
    monkeypatch.setattr(fork_server.ForkServer, "stop", lambda _: None)
    monkeypatch.setattr("shutil.copy", lambda *_: None)
    recipe, inputs, _ = load(workspace, "ray_kwargs.ray_init._temp_dir=/tmp/mine")
    run = SimpleNamespace(recipe=recipe, stages=SimpleNamespace(monitor=None), folder=tmp_path)
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="the end of"):
        starting = launch.Launch(run, inputs, stack, None)  # type: ignore[arg-type]
        fork_server.Preload(recipe).before_ray(starting)
        launch.start_ray(starting)
    assert shlex.split(settings[0]["runtime_env"]["py_executable"]) == [python]
    assert settings[0]["_temp_dir"] == "/tmp/mine made private"


@pytest.mark.parametrize(
    ("gpus", "cpus", "pool", "has_servers", "command", "expected"),
    [
        (
            0.0,
            64.0,
            "null",
            False,
            "train",
            "The recipe needs 2 GPUs, and Ray found none. .*--config cpu",
        ),
        (1.0, 64.0, "null", False, "train", "The recipe needs 2 GPUs .*, and Ray has 1. Lower"),
        (2.0, 1.0, "null", False, "train", "Ray has 1 CPUs, .*num_cpus=2"),
        (4.0, 4.0, "null", True, "train", "Ray has 4 CPUs, .*num_cpus=6"),
        (4.0, 6.0, "null", True, "train", "$"),
        (2.0, 4.0, "1", True, "evaluate", "$"),
    ],
)
def test_missing_resources_are_an_error(
    workspace, gpus, cpus, pool, has_servers, command, expected
):
    """Actor, critic and reward model share a process on each of two GPUs."""
    changes = [
        "algorithm.adv_estimator=gae",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={workspace / 'scored'}",
        "trainer.n_gpus_per_node=2",
        f"trainer.resource_pools.critic={pool}",
        *(["actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"] if has_servers else []),
    ]
    overlays = ["separate"] if has_servers else []
    recipe = load(workspace, *changes, overlays=overlays).recipe.model_copy(
        update={"command": command}
    )
    problem = launch.find_missing_resources(recipe, {"GPU": gpus, "CPU": cpus})
    assert re.match(expected, problem), problem
