"""Tests of `python algorithm.py` and of the loop from Python: files, resumes and errors."""

from __future__ import annotations

import json
import os
import re
import sys
import uuid

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from kit.errors import ConfigError
from kit.run import checkpoints, cli
from tests.helpers.pages import GUIDES, call_command, find_python_block
from tests.helpers.recipes import (
    CLEAN_ENV,
    CPU,
    RECIPE,
    ROOT,
    command,
    metrics_of,
    run,
    tiny,
)
from tests.helpers.runs import wait_for_marked_processes

VERIFIER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("7" in solution_str)
"""


def write_loop(name: str, settings: list[str]) -> str:
    """Return the loop of the guide, with the tiny recipe and these settings."""
    block = find_python_block(GUIDES / "python.md", "with train(plan(")
    assert "entropy_coeff" in block
    block = block.replace('["math_cpu", "cpu"]', repr([str(CPU), str(RECIPE)]))
    arguments = repr([f"trainer.experiment_name={name}", *settings])
    changed = block.replace('["trainer.experiment_name=annealed"]', arguments)
    assert repr(str(RECIPE)) in changed and arguments in changed
    return changed


def test_a_notebook_trains_and_the_command_resumes_its_run(workspace, monkeypatch):
    """The loop is that of the guide. A Gym server verifies the training rows, a function others.

    The kernel has a running event loop, and sets MPLBACKEND to a backend that Gym's interpreter
    does not have. The command writes all files.
    """
    name = "annealed"
    (workspace / "reward.py").write_text(VERIFIER)
    settings = tiny(
        workspace,
        f"env.val_files=[{{path: {workspace}/val.jsonl, verifier: reward.py:compute_score}}]",
        "trainer.total_training_steps=2",
    )
    text = run_notebook(workspace, write_loop(name, settings), monkeypatch)
    assert "actor/entropy_loss" in text and "Finished in" in text
    folder = workspace / "runs" / name
    metrics = metrics_of(folder)
    assert any("reward/reasoning_gym/mean" in line for line in metrics)
    assert any("val-core/compute_score/reward/mean@1" in line for line in metrics), metrics[-1]
    assert (folder / "export" / "step.txt").read_text() == "2\n"
    check_exported_weights(folder)

    more = [
        "trainer.total_training_steps=3",
        "trainer.logger=[tensorboard,file]",
        "trainer.print_samples_every=3",
        "trainer.log_val_generations=2",
    ]
    arguments = command(workspace, *settings, f"trainer.experiment_name={name}", *more)
    result = run(arguments, workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "resume      from" in result.stdout
    assert re.search(r"mean@1: \S+ \[.*\] -> \S+ \[.*\] \(step 2 -> 3\)", result.stdout)
    check_outputs(folder, result.stdout)


def run_notebook(workspace, loop: str, monkeypatch) -> str:
    """Run the loop in a Jupyter kernel, and return its output. Assert that no process stays."""
    import nbclient  # .venv-gpu does not have these two
    import nbformat

    mark = uuid.uuid4().hex
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("KIT_MARK", mark)
        for variable in set(os.environ) - set(CLEAN_ENV) - {"PYTHONPATH", "KIT_MARK"}:
            patch.delenv(variable)
        code = ["import os; print(os.environ['MPLBACKEND'])", loop, "print(metrics)"]
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in code],
            metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
        )
        resources = {"metadata": {"path": str(workspace)}}
        nbclient.NotebookClient(notebook, timeout=400, resources=resources).execute()
    texts = []
    for cell in notebook.cells:
        for output in cell.outputs:  # a stream of text, or a text that rich displays
            texts.append(output["text"] if "text" in output else output["data"]["text/plain"])
    assert texts[0].startswith("module://")
    assert wait_for_marked_processes(mark) == []
    return "".join(texts)


def check_exported_weights(folder):
    """Assert that the export has the weights, in the dtype in which the run sampled."""
    dtype = OmegaConf.load(folder / "config.yaml").actor_rollout_ref.rollout.dtype
    assert json.loads((folder / "export" / "config.json").read_text())["dtype"] == dtype
    [path] = folder.glob("checkpoints/global_step_2/actor/model_*.pt")
    shards = torch.load(path, weights_only=False)
    exported = load_file(folder / "export" / "model.safetensors")
    assert len(exported) > 10
    for name, weight in exported.items():
        shard = getattr(shards[name], "_local_tensor", shards[name])
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, shard.to(weight.dtype))


def check_outputs(folder, stdout):
    """Assert that a finished run wrote all its files and printed its steps."""
    recipe = OmegaConf.load(folder / "config.yaml")
    # nothing wrote to the recipe from the start of the run to its last checkpoint
    assert recipe == OmegaConf.load(folder / "checkpoints" / "global_step_3" / "config.yaml")
    lines = (folder / "rollouts" / "step_3.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    fields = [e["_episode"] for e in episodes]
    assert len(episodes) == 64 and len({e["group_id"] for e in fields}) == 8
    assert all(e["status"] == "ok" and e["prompt"].endswith("7") for e in fields)
    assert (folder / "rollouts" / "val_3.jsonl").is_file()
    assert (folder / "failures.jsonl").read_text() == ""
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("events*"))
    assert b"val/generations" in events and b"Sample 2" in events and b"Sample 3" not in events
    assert (folder / "tracking.jsonl").is_file()
    step = [m for m in metrics_of(folder) if "rollout/failed_frac" in m][-1]
    # this model has tied embeddings; test_stack.py has untied ones
    assert step["training/rollout_probs_diff_max"] < 1e-3
    assert (folder / "checkpoints" / checkpoints.POINTER).read_text() == "3"
    samples = re.findall(r"' -> '.*reward \d\.\d\d", stdout)
    assert re.search(r"step 3/3 +reward [01]", stdout) and len(samples) == 2
    assert "device_mesh" not in stdout and "Writing model shards" not in stdout


def test_invalid_input_is_a_one_line_error_and_exit_status_1(workspace):
    wrong_key = "actor_rollout_ref.rollout.temprature=1"
    message = "Did you mean actor_rollout_ref.rollout.temperature"
    arguments = [*tiny(workspace, wrong_key), "--dry-run"]
    result = run(command(workspace, *arguments), workspace, timeout=120)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.stderr


def test_a_command_that_must_come_first_gets_its_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["algorithm.py", "--config", "math", "probe", "a.b=1 2"])
    message = r"python algorithm\.py probe --config math 'a\.b=1 2'$"
    with pytest.raises(ConfigError, match=message):
        cli.read_plan()


def test_dry_run_checks_everything_and_starts_nothing(workspace, monkeypatch, capsys):
    words = command(workspace, *tiny(workspace, "trainer.experiment_name=dry"), "--dry-run")[2:]
    call_command(words, workspace, monkeypatch)
    printed = capsys.readouterr().out
    assert "say 7" in printed
    assert printed.endswith("no run was started\n")
    changed_keys = re.findall(r"^    ([\w.]+): .* \(verl: .*\)$", printed, re.MULTILINE)
    assert "actor_rollout_ref.rollout.max_model_len" in changed_keys  # it follows from others
    # values of configs/base.yaml, the recipe's file, an argument, and the recipe for CPUs
    written = ["algorithm.adv_estimator", "rollout.n", "trainer.experiment_name", "trainer.device"]
    assert not [key for key in changed_keys if key.endswith(tuple(written))]
    assert not any(key.startswith("critic.") for key in changed_keys)  # GRPO has none
    assert "${" not in printed
    assert not (workspace / "runs" / "dry").exists()


def test_a_finished_run_is_an_error_and_a_warning_in_a_dry_run(workspace, monkeypatch):
    """The commands of the pages are dry runs of the demo's recipe, whose run may be finished."""

    def raise_nothing_left(_):
        raise checkpoints.NothingLeftError("Nothing is left to train: x is the last.")

    monkeypatch.chdir(workspace)
    monkeypatch.setattr(checkpoints, "find_resume_point", raise_nothing_left)
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    files = [str(ROOT / "tests" / "tiny.yaml"), "cpu"]
    planned = cli.plan(files, tiny(workspace), is_dry_run=True)
    assert planned.notes == ["WARNING     Nothing is left to train: x is the last."]
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        cli.plan(files, tiny(workspace))


def test_the_wrong_python_gets_a_one_line_error(tmp_path):
    """With -S, Python has no site-packages, like the Python of the system."""
    done = run([sys.executable, "-S", str(ROOT / "algorithm.py"), "--help"], tmp_path)
    assert done.returncode == 1
    problem = f"error: No module named 'omegaconf' in {sys.executable}, which is not Quintet's "
    assert done.stderr == f"{problem}environment. Run: make setup (GPUs: make gpu)\n"
    (tmp_path / ".venv-gpu" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-gpu" / "bin" / "python").touch()
    done = run([sys.executable, "-S", str(ROOT / "algorithm.py"), "--help"], tmp_path)
    assert done.stderr == f"{problem}environment. Run: source .venv-gpu/bin/activate\n"
