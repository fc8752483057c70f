"""Report the process of a run that died, and clean up after a driver that was killed.

Without this folder a lost process still ends the run, but often only after a timeout and without
the process's name.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from kit.features import Feature

if TYPE_CHECKING:
    from kit.extras.supervisor.process_monitor import ProcessMonitor
    from kit.runs.launch import Launch


class Supervisor(Feature):
    """The process monitor of a run."""

    def before_ray(self, launch: Launch) -> None:
        """Start the process monitor."""
        from kit.extras.supervisor.process_monitor import ProcessMonitor

        checkpoints = Path(launch.recipe.trainer.default_local_dir)
        stages = launch.run.stages
        monitor = ProcessMonitor(launch.logs, checkpoints, stages.report_lost)
        stages.monitor = launch.stack.enter_context(monitor)
        launch.on_ray.append(functools.partial(watch, monitor))


def watch(monitor: ProcessMonitor, raylet_pid: int | None) -> None:
    """Watch the raylet of a local Ray, or the processes on the nodes of a cluster."""
    if raylet_pid is not None:
        monitor.register_process("Ray's raylet", raylet_pid)
        return
    # Import it here: it imports Ray, which reaper.py does not need.
    from kit.extras.supervisor.node_monitor import NodeMonitors

    monitor.list_remote = NodeMonitors().list_processes
