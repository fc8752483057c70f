"""Fork Ray's workers from a process that has imported their modules (PRELOAD_MODULES of a recipe).

configs/machines/cpu.yaml sets the variable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from kit.cpu import fork_server
from kit.features import Feature
from kit.runs import isolation

if TYPE_CHECKING:
    from kit.runs.launch import Launch

VARIABLE = "PRELOAD_MODULES"
SECRETS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")  # Ray sets them after the process was started


class Preload(Feature):
    """Workers that are forks of one process."""

    def __init__(self, config: DictConfig, command: str):
        super().__init__(config, command)
        self.modules = os.environ[VARIABLE]

    def begin_imports(self, config: DictConfig) -> None:
        """Start the process, so that it imports the modules while the recipe is checked."""
        with isolation.show_logical_gpus(config):
            fork_server.start(self.modules)

    def before_ray(self, launch: Launch) -> None:
        """Make Ray start its workers through the process."""
        running = fork_server.running(self.modules, launch.logs / "fork.log")
        with isolation.show_logical_gpus(launch.recipe.verl):  # it may start only now
            server = launch.stack.enter_context(running)
        if launch.run.stages.monitor:
            launch.run.stages.monitor.register_folder(os.path.dirname(server.python))
        launch.python = server.python

        def set_variables(raylet_pid: int | None) -> None:
            """Give the process the variables that Ray gives to its workers."""
            import ray

            job = ray.get_runtime_context().get_job_id()
            secrets = {name: os.environ[name] for name in SECRETS}
            server.set_env(RAY_JOB_ID=job, RAY_RAYLET_PID=str(raylet_pid), **secrets)

        launch.on_ray.append(set_variables)
