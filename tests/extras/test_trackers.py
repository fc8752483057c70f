"""Experiment trackers that verl supports (trainer.logger) record the metrics of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import CLEAN_ENV, ROOT


class Tracker(NamedTuple):
    """A tracker that works offline."""

    package: str
    variables: dict[str, str]  # its environment variables
    files: str  # a glob pattern of the files that it writes


TRACKERS = {
    "mlflow": Tracker(
        "mlflow-skinny",
        {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
        "mlruns/**/loss",
    ),
    "swanlab": Tracker(
        "swanlab",
        {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": "swanlog"},
        "swanlog/run-*",
    ),
    "trackio": Tracker("trackio", {"TRACKIO_DIR": "trackio"}, "trackio/*.db"),
}
TRACKED_RUN = """
import sys
sys.path.append("packages")
from kit.config.load import load_config
from kit.runs.run_dir import Run
from kit.data.episode import Episode
keys = ["logger=[%s]", "experiment_name=tracked", "log_val_generations=1"]
config, _ = load_config([], ["trainer." + key for key in keys])
row = {"responses_create_params": {"input": "2 + 2?"}}
with Run(config) as run:
    run.log(1, {"loss": 0.5})
    run.log_evaluation(1, {}, [Episode("x:1", "1/0", "s", [1], reward=1.0, row=row)])
"""


@pytest.mark.soak
@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_start_offline(name, tmp_path):
    """The test installs each tracker into a folder outside the environment."""
    tracker = TRACKERS[name]
    uv = Path(sys.executable).with_name("uv")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", tmp_path / "packages", tracker.package], check=True)
    done = subprocess.run(
        [sys.executable, "-c", TRACKED_RUN % name],
        cwd=tmp_path,
        env={**CLEAN_ENV, **tracker.variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    written = [str(p) for p in tmp_path.rglob("*") if "packages" not in p.parts]
    assert [*tmp_path.glob(tracker.files)], written
