"""The reaper reports which process died if the driver cannot, and cleans up after the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.recipes import CLEAN_ENV, ROOT

DRIVER = """
import os, select, subprocess, sys, time
from pathlib import Path
from extras.supervisor.process_monitor import ProcessMonitor
from kit.runs import isolation

monitor = ProcessMonitor(Path("."), Path("checkpoints"), print)
with isolation.use_own_tmpdir() as folder, monitor:
    monitor.register_folder(folder)
    sleep = ["sleep", "60"]
    worker = subprocess.Popen(sleep, start_new_session=True)
    raylet = subprocess.Popen(sleep)
    monitor.register_process("Ray's raylet", raylet.pid)
    print(folder, worker.pid, raylet.pid, flush=True)
    while raylet.poll() is None:
        if select.select([sys.stdin], [], [], 0.05)[0] and sys.stdin.readline():
            raise SystemExit(0)
    # Ray ends its driver some time after the raylet. Without this pause, the reaper of a busy
    # machine may see both deaths in one poll.
    time.sleep(1)
    os._exit(1)
"""


@pytest.mark.parametrize("victim", ["raylet", "driver", "nobody"])
def test_the_process_that_died_first_is_reported_and_everything_is_cleaned_up(tmp_path, victim):
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
    folder, worker, raylet = driver.stdout.readline().split()
    assert Path(folder).is_dir()
    if victim == "nobody":
        driver.stdin.write("end\n")
    else:
        os.kill(driver.pid if victim == "driver" else int(raylet), signal.SIGKILL)
    _, errors = driver.communicate()  # the reaper has the same stderr, so this waits for both
    names = {"raylet": f"Ray's raylet (pid {raylet})", "driver": f"the driver (pid {driver.pid})"}
    checkpoint = (
        "Last checkpoint: checkpoints/global_step_7. Rerun the same command to resume from it"
    )
    if victim == "nobody":
        assert errors == ""
    else:
        text = f"{names[victim]} died, so the run ended. {checkpoint}"
        assert errors == f'error: {text}. See docs/troubleshooting.md, "Resume".\n'
    assert not psutil.pid_exists(int(worker)) and not psutil.pid_exists(int(raylet))
    assert not Path(folder).exists()
    status = {"raylet": 1, "driver": -signal.SIGKILL, "nobody": 0}
    assert driver.returncode == status[victim]
