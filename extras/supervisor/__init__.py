"""Report the process of a run that died, and clean up after a driver that was killed.

Without this folder a lost process still ends the run, but often only after a timeout and without
the process's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kit.features import Feature

if TYPE_CHECKING:
    from kit.runs.launch import Launch


class Supervisor(Feature):
    """The process monitor of a run."""

    def before_ray(self, launch: Launch) -> None:
        """Start the process monitor."""
        from extras.supervisor.process_monitor import ProcessMonitor

        checkpoints = Path(launch.recipe.trainer.default_local_dir)
        stages = launch.run.stages
        monitor = ProcessMonitor(launch.logs, checkpoints, stages.report_lost)
        stages.monitor = launch.stack.enter_context(monitor)

        def register_raylet(pid: int | None) -> None:
            """Ray ends the driver if its raylet dies. pid: None if the run joined a cluster."""
            monitor.is_on_cluster = pid is None
            if pid is not None:
                monitor.register_process("Ray's raylet", pid)

        launch.on_ray.append(register_raylet)
