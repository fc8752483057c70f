"""The output in a terminal: the command `show`, and the steps of a run."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from kit.run import console
from kit.run.run import Run
from lab.report import report_page, show
from lab.run_folder import RunFolder
from tests.helpers.models import make_model
from tests.helpers.recipes import ROOT, load, run
from tests.helpers.runs import write_synthetic_run


def test_show_prints_steps_and_the_best_and_worst_episodes(tmp_path, capsys):
    model = make_model(tmp_path / "model", tied=True)
    folder = write_synthetic_run(tmp_path / "runs" / "large", 18, 100, model)
    report_page.write_page([RunFolder(folder)], folder / "report.html")
    show.main([str(folder), "--worst", "5"])
    out = " ".join(capsys.readouterr().out.split())  # without line breaks
    assert "18/20 steps" in out and "reward" in out and "best episodes of step_18" in out
    assert out.count("what is") == 8 and "report.html" in out
    assert "No problems detected" in out
    done = run([sys.executable, str(ROOT / "algorithm.py"), "show", str(tmp_path)], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "is not a run directory" in done.stderr


@pytest.mark.parametrize("interactive", [True, False])
def test_steps_are_lines_with_a_progress_bar_at_a_terminal(
    interactive, monkeypatch, tmp_path, workspace
):
    """The bar shows the time left, computed from the mean time of the completed steps."""
    monkeypatch.chdir(workspace)
    file = io.StringIO()
    terminal = Console(
        file=file, force_terminal=interactive, force_interactive=interactive, width=120
    )
    monkeypatch.setattr(console, "console", terminal)
    name = f"trainer.experiment_name=shown{interactive}"
    recipe = load(workspace, name, "trainer.total_training_steps=40").recipe
    with Run(recipe) as training:
        now = 0.0
        bar = training.display.bar
        monkeypatch.setattr(bar, "get_time", lambda: now)
        bar.reset(training.display.task, total=40)
        for step in range(1, 11):
            now += 60
            training.stages.begin_step(step)
            training.stages.timing["gen"] = 2.0
            metrics = {"reward": f"0.{step}", "loss": "0.1"}
            training.display.print_step(step, metrics, training.stages.timing)
        seconds_left = bar.tasks[0].time_remaining
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "step 1/40  reward 0.1  loss 0.1  2.0s (gen 2.0)" in text
    assert ("left" in text) is interactive
    if interactive:
        assert seconds_left == pytest.approx(30 * 60, rel=0.02)
