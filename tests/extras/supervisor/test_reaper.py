"""The reaper reports which process died if the driver cannot, and cleans up after the run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.recipes import CLEAN_ENV, ROOT

DRIVER = """
import os, subprocess, sys
from pathlib import Path
from extras.supervisor.process_monitor import ProcessMonitor
from kit.runs import isolation

monitor = ProcessMonitor(Path("."), Path("checkpoints"), print)
with isolation.use_own_tmpdir() as folder, monitor:
    monitor.register_folder(folder)
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    if not os.fork():  # it has the driver's end of the pipe
        os.execv("/bin/sleep", ["sleep", "60"])
    print(folder, worker.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("victim", ["driver", "nobody"])
def test_the_death_of_the_driver_is_reported_and_everything_is_cleaned_up(tmp_path, victim):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=CLEAN_ENV | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder, worker = driver.stdout.readline().split()
    assert Path(folder).is_dir()
    if victim == "nobody":
        driver.stdin.write("end\n")
    else:
        driver.kill()
    _, errors = driver.communicate()  # the reaper has the same stderr, so this waits for both
    checkpoint = (
        "Last checkpoint: checkpoints/global_step_7. Rerun the same command to resume from it"
    )
    if victim == "nobody":
        assert errors == ""
    else:
        text = f"the driver (pid {driver.pid}) died, so the run ended. {checkpoint}"
        assert errors == f'error: {text}. See docs/troubleshooting.md, "Resume".\n'
    assert not psutil.pid_exists(int(worker))
    assert not Path(folder).exists()
    assert driver.returncode == {"driver": -signal.SIGKILL, "nobody": 0}[victim]
