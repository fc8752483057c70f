"""Experiment trackers that verl supports (trainer.logger) record the metrics of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from wandb.sdk import wandb_setup

from kit.config import trackers
from kit.config.load import load_config
from kit.config.recipe import freeze
from kit.errors import RunError
from kit.runs.run import Run

# --- before a run --------------------------------------------------------------------------------

PACKAGE = "{0} needs the package {1}, which is not installed"
# For each tracker: the variables with which it starts, and its problem without them, if its
# package is installed.
NEEDS = {
    "console": ({}, ""),
    "file": ({}, ""),
    "tensorboard": ({}, ""),
    "mlflow": ({}, ""),
    "trackio": ({}, ""),
    "wandb": ({"WANDB_API_KEY": "0" * 40}, "no key for it. Run `wandb login`"),
    "tracking": ({"WANDB_MODE": "offline"}, "no key for it. Run `wandb login`"),
    "swanlab": ({"SWANLAB_MODE": "offline"}, "no key for it. Run `swanlab login`"),
    "clearml": ({"CLEARML_OFFLINE_MODE": "1"}, "no key for it. Run `clearml-init`"),
    "vemlp_wandb": (
        {"VOLC_ACCESS_KEY_ID": "a", "VOLC_SECRET_ACCESS_KEY": "b", "MLP_TRACKING_REGION": "c"},
        "the environment variable VOLC_ACCESS_KEY_ID is not set",
    ),
    "rl_insight": ({"VERL_RL_INSIGHT_ENABLE": "1"}, "only if VERL_RL_INSIGHT_ENABLE=1"),
}


@pytest.fixture
def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment and a home folder without the key of any tracker."""
    for name in list(os.environ):
        if name.startswith(("WANDB", "SWANLAB", "CLEARML", "VOLC", "MLP", "MLFLOW", "VERL_RL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb_setup.teardown()  # it keeps the settings of the first call


def find_problems(logger: object) -> list[str]:
    return list(trackers.find_problems(OmegaConf.create({"trainer": {"logger": logger}})))


def test_every_tracker_of_verl_is_known() -> None:
    from verl.utils.tracking import Tracking

    assert set(trackers.TRACKERS) == set(NEEDS) == {*Tracking.supported_backend, "tracking"}


@pytest.mark.parametrize("name", NEEDS)
def test_a_tracker_without_its_package_or_key_is_one_line(
    name: str, without_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, problem = NEEDS[name]
    tracker = trackers.TRACKERS[name]
    monkeypatch.setattr(trackers, "is_installed", lambda module: False)
    messages = find_problems([name])
    if tracker.module:
        assert PACKAGE.format(name, tracker.package) in messages[0]
    else:
        assert not messages
    monkeypatch.setattr(trackers, "is_installed", lambda module: True)
    messages = find_problems(name)  # as verl, it accepts one name
    assert len(messages) == bool(problem) and problem in "".join(messages)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    wandb_setup.teardown()
    assert find_problems([name]) == []


def test_a_key_in_netrc_is_enough_for_its_own_server(without_keys: None, tmp_path: Path) -> None:
    netrc = tmp_path / ".netrc"
    host = wandb_setup.singleton().settings.base_url.removeprefix("https://")
    netrc.write_text(f"machine other.example.org\n  login user\n  password {'0' * 40}\n")
    assert len(find_problems(["wandb"])) == 1
    netrc.write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    assert find_problems(["wandb"]) == []


@pytest.mark.parametrize("name", ["foo", "comet", "Wandb", "wandb,console", "", "1"])
def test_an_unknown_tracker_is_one_line(name: str) -> None:
    [message] = find_problems([name])
    assert f"verl has no tracker {name!r}. Use one of: console" in message


@pytest.mark.parametrize("logger", [None, [], ["console", "file"], "console"])
def test_a_recipe_without_problems_has_no_message(logger: object) -> None:
    assert find_problems(logger) == []


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
    recipe = freeze(*load_config([], changes))
    message = r"trainer\.logger=\['wandb'\]: a tracker did not start: no answer from the server"
    with pytest.raises(RunError, match=message), Run(recipe):
        pass


def test_each_command_has_its_own_id_and_a_resumed_run_appends(
    without_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("verl.utils.tracking.Tracking", lambda *_: SimpleNamespace(log=print))
    changes = ["trainer.logger=[wandb,file]", "trainer.experiment_name=tracked"]
    changes.append("trainer.total_training_steps=9")
    folder = Path("runs/tracked")
    ids = []
    for command, step in (("train", 0), ("evaluate", 0), ("train", 3)):
        recipe = freeze(*load_config([], changes), command)
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


def test_the_check_of_wandb_leaves_its_folder_to_the_run(tmp_path, monkeypatch):
    """W&B keeps the variables of its first use, and a run sets WANDB_DIR after the check."""
    from wandb.sdk import wandb_setup

    wandb_setup.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert trackers.find_wandb_problem() == ""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    try:
        assert wandb_setup.singleton().settings.wandb_dir.startswith(str(tmp_path))
    finally:
        wandb_setup.teardown()
