"""Tests that the loop from Python runs in a notebook, in a running event loop and in a thread.

Each test runs the code of docs/guides/python.md, with the tiny recipe. The training rows belong to
a Gym server, and a Python function verifies the validation rows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.helpers.pages import GUIDES, find_python_block
from tests.helpers.recipes import CLEAN_ENV, CPU, RECIPE, ROOT, metrics_of, tiny
from tests.helpers.runs import wait_for_marked_processes

VERIFIER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("7" in solution_str)
"""
# The guide's code in a function, which runs in an event loop, or in a thread without one.
CALLERS = {
    "event loop": """
import asyncio

async def cell():
    train_model()

asyncio.run(cell())
""",
    "thread": """
import threading

thread = threading.Thread(target=train_model)
thread.start()
thread.join()
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(VERIFIER)
    return tmp_path


def write_cell(workspace: Path, *changes: str) -> str:
    """Return the guide's code with the tiny recipe, for one step."""
    settings = tiny(
        workspace,
        f"env.val_files=[{{path: {workspace}/val.jsonl, verifier: reward.py:compute_score}}]",
        "trainer.total_training_steps=1",
        *changes,
    )
    block = find_python_block(GUIDES / "python.md", "with train(plan(")
    block = block.replace('["math_cpu", "cpu"]', repr([str(CPU), str(RECIPE)]))
    changed, count = re.subn(
        r"\[\"trainer\.experiment_name=annealed\"\]",
        lambda match: repr([match[0][2:-2], *settings]),
        block,
    )
    assert count == 1 and repr(str(RECIPE)) in changed
    return changed


def check_run(folder: Path) -> None:
    """Assert that the run trained, evaluated, and exported the model."""
    metrics = metrics_of(folder / "runs" / "annealed")
    assert any("reward/reasoning_gym/mean" in line for line in metrics)
    assert any("val-core/compute_score/reward/mean@1" in line for line in metrics), metrics[-1]
    assert (folder / "runs" / "annealed" / "export" / "model.safetensors").is_file()
    assert wait_for_marked_processes(folder.name) == []


def test_the_guide_runs_in_a_jupyter_kernel(
    workspace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sets MPLBACKEND to a backend that Gym's interpreter does not have."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KIT_MARK", folder.name)
    for name in set(os.environ) - set(CLEAN_ENV) - {"PYTHONPATH", "KIT_MARK"}:
        monkeypatch.delenv(name)
    code = ["import os; print(os.environ['MPLBACKEND'])", write_cell(workspace), "print(metrics)"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in code],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    client = nbclient.NotebookClient(
        notebook, timeout=400, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    first, *_, last = notebook.cells
    assert first.outputs[0].text.startswith("module://")
    assert "actor/entropy_loss" in last.outputs[0].text
    check_run(folder)


@pytest.mark.parametrize("caller", CALLERS)
def test_the_guide_runs_in_another_caller(workspace: Path, folder: Path, caller: str) -> None:
    lines = ["def train_model():", *write_cell(workspace).splitlines()]
    code = "\n    ".join(lines) + "\n" + CALLERS[caller]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=CLEAN_ENV | {"PYTHONPATH": str(ROOT), "KIT_MARK": folder.name},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    check_run(folder)
