"""Experiment trackers that verl supports (trainer.logger) record the metrics of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from kit.errors import RunError
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.run.run import Run


def test_a_tracker_that_refuses_to_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example for a wrong key, or if its server does not answer."""
    from verl.utils import tracking

    def refuse(*_: object) -> None:
        raise OSError("no answer\nfrom the server")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "Tracking", refuse)
    changes = ["trainer.logger=[wandb]", "trainer.experiment_name=tracked"]
    recipe = build(read_source([], changes))
    message = r"trainer\.logger=\['wandb'\]: a tracker did not start: no answer from the server"
    with pytest.raises(RunError, match=message), Run(recipe):
        pass


def test_each_command_has_its_own_id_and_a_resumed_run_appends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("verl.utils.tracking.Tracking", mock.Mock())
    changes = ["trainer.logger=[wandb,file]", "trainer.experiment_name=tracked"]
    changes.append("trainer.total_training_steps=9")
    folder = Path("runs/tracked")
    ids = []
    for command, step in (("train", 0), ("evaluate", 0), ("train", 3)):
        recipe = build(read_source([], changes), command)
        checkpoint = folder / f"checkpoints/global_step_{step}" if step else None
        run = Run(recipe, checkpoint)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.open()
        ids.append(os.environ["WANDB_RUN_ID"])
        run.log.write(step, {"x": 1.0})
        run.files.close()  # unsets the variables
    assert ids[0] == ids[2] != ids[1]
    lines = [json.loads(line) for line in (folder / "tracking.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "data": {"x": 1.0}} for step in (0, 3)]
    assert len((folder / "tracking_evaluate.jsonl").read_text().splitlines()) == 1
