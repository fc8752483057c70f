"""The estimate of a run's price, on planted metrics with known answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.data.metrics import ALL_TOKENS
from kit.errors import ConfigError
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.recipe.redaction import write_yaml
from lab import price
from lab.run_folder import RunFolder

START = {"step": 0, "timing_s/start": 24.0}
GPU = ["trainer.device=cuda", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"]


def step(number: int, seconds: float, **others: float) -> dict[str, float]:
    """Make the metrics of a step: 32 episodes, of which 4 failed and 8 were filtered."""
    named = {name.replace("__", "/"): value for name, value in others.items()}
    episodes = {"rollout/episodes": 32, "rollout/kept": 20, "rollout/failed_frac": 0.125}
    episodes |= {ALL_TOKENS: 1000.0, "rollout/zero_variance_groups": 2}
    return {"step": number, "timing_s/step": seconds, **episodes, **named}


def plant(folder: Path, lines: list[dict[str, float]], *changes: str) -> Path:
    """Write a run with these lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    source = read_source(["math_cpu", "cpu"], ["trainer.total_training_steps=20", *changes])
    (folder / "config.yaml").write_text(write_yaml(build(source).redacted()))
    text = "".join(json.dumps({"time": 1.7e9, **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def measure(folder: Path) -> price.Costs:
    return price.measure(RunFolder(folder))


def test_the_estimate_adds_steps_evaluations_and_checkpoints(tmp_path, capsys):
    """Left: 15 steps. An evaluation of 5 s and a checkpoint of 4 s are 1.8 s of each of 5 steps."""
    lines = [START, {"step": 0, "timing_s/testing": 30.0}, step(1, 90)]
    lines += [step(n, 10) for n in (2, 3)]
    lines += [step(4, 14, timing_s__save_checkpoint=4.0), step(5, 10, timing_s__testing=5.0)]
    folder = plant(tmp_path / "r", lines, *GPU)
    price.main([str(folder), "--rate", "3600"])
    output = capsys.readouterr().out
    assert "r: step 5 of 20\nstep        10 s, the mean of 4" in output
    assert "so far      2.82 min, 0.376 device-hours on 8 GPUs, money 1352.00" in output
    assert "to the end  2.95 min, 0.393 device-hours on 8 GPUs, money 1416.00" in output
    shares = "of the episodes, 12.5% failed, 25.0% were filtered, and 50.0% had a group"
    assert "tokens      1,000 a step" in output and shares in output
    price.main([str(folder), "--steps", "105"])
    assert "step 5 of 105" in capsys.readouterr().out


def test_a_resumed_run_counts_each_step_once_and_no_start(tmp_path):
    """It stopped after step 4, and trained steps 3 and 4 again. Both first steps are slow."""
    lines = [START, step(1, 50), *[step(n, 10) for n in (2, 3, 4)]]
    lines += [{"step": 2, "timing_s/start": 26.0}, step(3, 40), *[step(n, 12) for n in (4, 5, 6)]]
    costs = measure(plant(tmp_path / "r", lines))
    assert (costs.done, costs.counted, costs.step) == (6, 4, (10 + 3 * 12) / 4)
    assert costs.spent == 50 + 10 + 40 + 3 * 12


def test_sft_has_its_time_in_the_update(tmp_path):
    lines = [{"step": n, "timing_s/update_actor": 5.0} for n in range(1, 5)]
    lines[1] |= {"timing_s/save_checkpoint": 3.0, "timing_s/testing": 2.0}
    folder = plant(tmp_path / "r", lines)
    costs = measure(folder)
    assert (costs.step, costs.spent) == (5, 4 * 5 + 3 + 2)
    output = "\n".join(price.describe(RunFolder(folder)))
    assert "unused" not in output and "tokens" not in output


def test_a_run_with_few_steps_is_an_error(tmp_path):
    folder = plant(tmp_path / "r", [step(1, 1)])
    with pytest.raises(ConfigError, match="r has 1 training steps, and an estimate needs 3"):
        price.main([str(folder)])
