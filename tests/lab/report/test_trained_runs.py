"""The report of a training run. test_diagnosis.py has the rules."""

from __future__ import annotations

import pytest

from lab.report import diagnosis
from lab.run_folder import RunFolder


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
