"""Fork Ray's workers from a process that has imported their modules (PRELOAD_MODULES of a recipe).

Hooks of kit/extras/__init__.py. configs/machines/cpu.yaml sets the variable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from kit.cpu import fork_server
from kit.runs import isolation

if TYPE_CHECKING:
    from kit.runs.launch import Launch

VARIABLE = "PRELOAD_MODULES"
SECRETS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")  # Ray sets them after the process was started


def begin_imports(config: DictConfig) -> None:
    """Start the process, so that it imports the modules while the recipe is checked."""
    with isolation.show_logical_gpus(config):
        fork_server.start(os.environ[VARIABLE])


def before_ray(launch: Launch) -> None:
    """Make Ray start its workers through the process."""
    running = fork_server.running(os.environ[VARIABLE], launch.logs / "fork.log")
    with isolation.show_logical_gpus(launch.recipe.verl):  # it may start only now
        server = launch.stack.enter_context(running)
    if launch.run.stages.monitor:
        launch.run.stages.monitor.register_folder(os.path.dirname(server.python))
    launch.python = server.python
    launch.state["fork_server"] = server


def after_ray(launch: Launch, raylet_pid: int | None) -> None:
    """Give the process the variables that Ray gives to its workers."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    secrets = {name: os.environ[name] for name in SECRETS}
    server = launch.state["fork_server"]
    server.set_env(RAY_JOB_ID=job, RAY_RAYLET_PID=str(raylet_pid), **secrets)
