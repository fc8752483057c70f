"""Read a run folder: with incomplete files, with many episodes, after an evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kit.errors import ConfigError
from lab import run_folder
from lab.report import diagnosis, report_page
from lab.run_folder import RunFolder
from tests.helpers.models import make_model
from tests.helpers.runs import write_synthetic_run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def test_unreadable_data_is_named_and_the_rest_is_shown(model, tmp_path):
    folder = write_synthetic_run(tmp_path / "run", 3, 60, model)
    rollouts = folder / "rollouts" / "step_2.jsonl"
    incomplete = rollouts.read_bytes()[:-300]
    half_of_a_surrogate_pair = b"seen \\ud800"
    rollouts.write_bytes(incomplete.replace(b"seen <b>7</b>", half_of_a_surrogate_pair))
    advantages = folder / "advantages" / "step_1.npz"
    advantages.write_bytes(advantages.read_bytes()[:-100])
    with (folder / "metrics.jsonl").open("a") as out:
        out.write('{"step": 4, "rollout/')
    run = RunFolder(folder)
    assert run.steps.index.tolist() == [0, 1, 2, 3]
    assert run.read_advantages(1) == {}
    assert "step_1.npz" in report_page.describe_run(run)["note"]
    assert (run.episodes["file"] == "step_2").sum() == 59
    assert report_page.write_page([run], tmp_path / "page.html").is_file()
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunFolder(tmp_path)


def test_of_many_files_both_evaluations_and_the_latest_steps_are_read(model, tmp_path, monkeypatch):
    folder = write_synthetic_run(tmp_path / "run", 9, 20, model)
    monkeypatch.setattr("lab.run_folder.MAX_EPISODES", 100)
    run = RunFolder(folder)
    files = {saved.file for saved in run.records}
    assert files == {"val_0", "val_9", "step_9", "step_8", "step_7"}
    assert run.skipped_files == 6


def test_an_evaluation_in_the_directory_and_a_resume_change_no_training_numbers(model, tmp_path):
    folder = write_synthetic_run(tmp_path / "run", 4, 20, model)
    before = diagnosis.summarize(RunFolder(folder))
    evaluation = {
        "step": 0,
        "time": 5e9,
        "command": "evaluate",
        "rollout/episodes": 9.0,
        "rollout/reward/mean": 0.9,
    }
    with (folder / "metrics.jsonl").open("ab") as out:
        out.write(json.dumps(evaluation).encode() + b"\n")
    # a file of a step that the resumed run has not reached
    shutil.copy(folder / "rollouts" / "step_4.jsonl", folder / "rollouts" / "step_7.jsonl")
    # a file of the user
    shutil.copy(folder / "rollouts" / "step_4.jsonl", folder / "rollouts" / "step_4_old.jsonl")
    run = RunFolder(folder)
    assert diagnosis.summarize(run) == before
    assert "step_7" not in set(run.episodes["file"])
    assert list(diagnosis.find_problems(run)) == []


def test_arrays_that_would_unpack_to_much_memory_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "MAX_ARRAY_BYTES", 10**6)
    np.savez_compressed(tmp_path / "a.npz", values=np.zeros(10**6))
    assert (tmp_path / "a.npz").stat().st_size < 10**4
    with pytest.raises(ValueError, match="its arrays have 8,"):
        run_folder.open_arrays(tmp_path / "a.npz")
