"""The files and the report of short training runs: one that learns, and two with a problem.

test_diagnosis.py has the rules of the report.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

import gym_client
from lab.report import diagnosis
from lab.report.metric_docs import FILES
from lab.report.run_data import RunData
from tests.helpers.http import JsonHandler, served
from tests.helpers.recipes import WORDS, row, write_rows

STEPS = 9


def find_first_problem(folder: Path) -> diagnosis.Finding:
    """Return the first finding, and check that the run has written its page."""
    findings = diagnosis.find_problems(RunData(folder))
    assert findings, "no problem was found"
    assert (folder / "report.html").is_file()
    return findings[0]


def train(stack, name: str, *changes: str, before=lambda trainer: None, **others) -> Path:
    """Train for STEPS steps and return the run directory. `before` is called before each step."""
    changes = ("trainer.total_training_steps=40", "gym.max_failed_frac=1", *changes)
    with stack.trainer(name, *changes, **others) as trainer:
        for _ in range(STEPS):
            before(trainer)
            trainer.step_or_skip()
    return trainer.run.folder


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
    run = RunData(trainer.run.folder)
    problems = [finding.problem for finding in diagnosis.find_problems(run)]
    # The policy started random and has not learned yet to end each response.
    assert [text for text in problems if "are truncated at" not in text] == []
    summary = diagnosis.summarize(run)
    reward = run.steps["rollout/reward/mean"].dropna()
    assert "24/24 steps" in summary, summary
    assert reward.iloc[-3:].mean() > 3 * reward.iloc[:3].mean(), summary


# --- runs that are broken ------------------------------------------------------------------------


class VerifierWithOutage(JsonHandler):
    """Rewards a 7, and answers 500 while `is_down` is set."""

    is_down = False

    def do_GET(self):  # noqa: N802  (a name of the base class)
        self.answer(200, {"paths": {"/seed_session": {"post": {}}, "/verify": {"post": {}}}})

    def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/seed_session":
            self.answer(200, {})
        else:
            self.verify(body["response"]["output"][-1]["content"][0]["text"])

    def verify(self, text):
        if self.is_down:
            self.answer(500, "the sandbox is gone")
        else:
            self.answer(200, {"reward": float("7" in text) / max(1, len(text))})


@contextlib.contextmanager
def gym_with_verifier(stack, handler):
    """Yield a Gym client whose entry reasoning_gym is a server with this handler."""
    loop = stack.servers.loop
    with served(handler) as address:
        gym = gym_client.Gym({"reasoning_gym": address})
        loop.run(gym.__aenter__())
        try:
            yield gym
        finally:
            loop.run(gym.__aexit__(None, None, None))


@pytest.mark.soak
def test_an_outage_of_the_verifier_for_a_third_of_the_steps_is_found(stack):
    def set_outage(trainer):
        VerifierWithOutage.is_down = trainer.state.step in (3, 4, 5)

    with gym_with_verifier(stack, VerifierWithOutage) as gym:
        folder = train(stack, "down", gym=gym, before=set_outage)
    finding = find_first_problem(folder)
    expected = (
        "33% of the episodes failed (192 http_500), all on server reasoning_gym, in steps 4 to 6"
    )
    assert expected in finding.problem
    assert "failures.jsonl" in finding.evidence
    assert "rollout/failed/http_500" in finding.evidence
    assert "logs/gym_" in finding.next_step


@pytest.mark.soak
def test_a_task_that_is_too_hard_is_found(stack):
    rows = [row(f"{word} it", "q9x8z7k6") for word in WORDS]
    path = write_rows(stack.workspace / "hard.jsonl", rows)
    changes = (
        f"env.train_files=[{{path: {path}, server: reasoning_gym}}]",
        "env.val_files=[]",
        "data.max_response_length=24",  # two thirds of the responses end before that
    )
    finding = find_first_problem(train(stack, "hard", *changes))
    assert "all responses earn the same reward, mostly 0" in finding.problem
    assert "too hard" in finding.problem
    assert "rollout/zero_variance_groups" in finding.evidence
    assert "easier rows" in finding.next_step
