"""Report an engine of a run that died, and clean up after a driver that was killed.

Without this folder a lost engine may end the run only after a timeout, and the processes of a
killed driver stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.run.features import RunPart

if TYPE_CHECKING:
    from kit.run.launch import Launch


class Supervisor(RunPart):
    """The process monitor of a run."""

    def before_ray(self, launch: Launch) -> None:
        """Start the process monitor."""
        from extras.supervisor.process_monitor import ProcessMonitor

        stages = launch.run.stages
        monitor = ProcessMonitor(launch.logs, stages.report_lost)
        stages.monitor = launch.stack.enter_context(monitor)
