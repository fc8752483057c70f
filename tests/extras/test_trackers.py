"""Experiment trackers that verl supports (trainer.logger) record the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kit.config import trackers
from kit.config.load import load_config
from kit.config.recipe import freeze
from kit.errors import RunError
from kit.runs.run import Run


def find_problems(logger: object) -> list[str]:
    return list(trackers.find_problems(OmegaConf.create({"trainer": {"logger": logger}})))


def test_every_tracker_of_verl_is_known() -> None:
    from verl.utils.tracking import Tracking

    assert set(trackers.MODULES) == {*Tracking.supported_backend, "tracking"}


@pytest.mark.parametrize("logger", ["clearml", ["console", "clearml"]])
def test_a_tracker_without_its_package_is_one_line(logger: object) -> None:
    [message] = find_problems(logger)
    assert "clearml needs the package clearml, which is not installed" in message


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
