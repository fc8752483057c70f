"""Tests the numbers of `explain` without workers, and the errors of the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ConfigError
from kit.run import checkpoints
from lab.explain import command
from lab.explain.command import list_bad_numbers, measure_signal
from tests.helpers.workers import make_episode


@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_the_noise_is_that_of_the_groups_covariance(n, seed):
    """From the norms only. The direct computation uses the vectors."""
    gradients = np.random.default_rng(seed).normal(0.3, 1.0, (n, 6))  # of the groups
    total = gradients.sum(axis=0)
    norms = np.linalg.norm(gradients, axis=1).tolist()
    trace = np.cov(n * gradients.T).trace()
    expected = np.linalg.norm(total) / np.sqrt(trace / n)
    assert measure_signal(norms, np.linalg.norm(total)) == pytest.approx(expected, rel=1e-6)


def test_what_is_not_finite_is_named():
    episode = make_episode([5], [1, 2])
    finite = torch.tensor([-1.0, -1.0])
    for reward, recorded, reasons in (
        (1.0, finite, []),
        (math.inf, finite, ["its reward is inf"]),
        (1.0, finite * math.nan, ["2 of its recorded log-probs are NaN or infinite"]),
    ):
        episode.reward = reward
        values = {"recorded log-probs": recorded, "log-probs": finite}
        assert list_bad_numbers(episode, values) == reasons


# --- the command ---------------------------------------------------------------------------------


def make_run(folder: Path, steps=(1, 2, 3), saved=(2,)) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("trainer: {default_local_dir: null}\n")
    lines = [json.dumps({"step": step}) + "\n" for step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step in steps:
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("")
    for step in saved:
        checkpoint = folder / "checkpoints" / f"global_step_{step}"
        checkpoint.mkdir(parents=True)
        checkpoints.write_manifest(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("step", "words", "message"),
    [
        (9, ["--config=math"], "no episodes of step 9"),
        (3, [], "or --config is missing"),
        (2, ["--config=math"], r"no complete checkpoint of it. Choose step 1"),
    ],
)
def test_a_step_that_cannot_be_explained_is_an_error_of_one_line(tmp_path, step, words, message):
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=message) as caught:
        command.main([str(tmp_path / "run"), str(step), *words])
    assert "\n" not in str(caught.value)


def test_a_step_starts_from_the_checkpoint_before_it(tmp_path):
    folder = make_run(tmp_path / "run")
    path = f"{folder}/checkpoints/global_step_2"
    assert command.find_start(folder, 3)[1] == f"trainer.resume_from_path={path}"
    assert command.find_start(folder, 1) == ["trainer.resume_mode=auto"]
