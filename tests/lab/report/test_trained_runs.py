"""The files and the report of short training runs. test_diagnosis.py has the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.report import diagnosis
from lab.report.metric_docs import FILES
from lab.run_folder import RunFolder

STEPS = 9


def test_every_file_of_a_run_is_described(stack):
    """Other commands write more files."""
    with stack.trainer("described", "trainer.total_training_steps=2") as trainer:
        trainer.evaluate()
        for _ in range(2):
            trainer.step_or_skip()
    folder = trainer.run.folder
    described = {name.replace("_N", "_*") for name in FILES}
    folders = {name.partition("/")[0] for name in described}
    paths = [path.relative_to(folder) for path in folder.rglob("*") if "ray" not in path.parts]
    expected = {"report.html", "metrics.jsonl", "advantages/step_2.npz", "rollouts/val_0.jsonl"}
    assert expected <= {str(path) for path in paths}

    def is_described(path: Path) -> bool:
        parents = [str(parent) for parent in path.parents]
        is_folder = str(path) in folders or "global_step" in str(path)
        return is_folder or any(path.match(name) or name in parents for name in described)

    assert [path for path in paths if not is_described(path)] == []


@pytest.mark.soak
def test_a_run_that_learns_has_no_problem(stack):
    changes = ("trainer.total_training_steps=24", "data.max_response_length=16")
    with stack.trainer("healthy", *changes) as trainer:
        for _ in range(24):
            trainer.step_or_skip()
    run = RunFolder(trainer.run.folder)
    problems = [finding.problem for finding in diagnosis.find_problems(run)]
    # The policy started random and has not learned yet to end each response.
    assert [text for text in problems if "are truncated at" not in text] == []
    summary = diagnosis.summarize(run)
    reward = run.steps["rollout/reward/mean"].dropna()
    assert "24/24 steps" in summary, summary
    assert reward.iloc[-3:].mean() > 3 * reward.iloc[:3].mean(), summary
