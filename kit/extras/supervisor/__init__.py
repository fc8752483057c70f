"""Report the process of a run that died, and clean up after a driver that was killed.

These are hooks of kit/extras/__init__.py. Without this folder a lost process still ends the run,
but often only after a timeout and without the process's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.extras.supervisor.process_monitor import ProcessMonitor


def before_ray(launch: Any) -> None:
    """Start the process monitor. launch: kit.runs.launch.Launch."""
    checkpoints = Path(launch.recipe.trainer.default_local_dir)
    stages = launch.run.stages
    monitor = ProcessMonitor(launch.logs, checkpoints, stages.report_lost)
    stages.monitor = launch.stack.enter_context(monitor)


def after_ray(launch: Any, raylet_pid: int | None) -> None:
    """Watch the raylet of a local Ray, or the processes on the nodes of a cluster."""
    monitor = launch.run.stages.monitor
    if raylet_pid is not None:
        monitor.register_process("Ray's raylet", raylet_pid)
        return
    # Import it here: it imports Ray, which reaper.py does not need.
    from kit.extras.supervisor.node_monitor import NodeMonitors

    monitor.list_remote = NodeMonitors().list_processes
