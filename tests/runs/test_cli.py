"""Tests of `python algorithm.py` and of the loop from Python: files, resumes and errors."""

from __future__ import annotations

import itertools
import json
import logging.config
import os
import re
import sys
import uuid

import nbclient
import nbformat
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from kit.errors import ConfigError
from kit.runs import checkpoints, cli
from tests.helpers.pages import GUIDES, call_command, find_python_block
from tests.helpers.recipes import (
    CLEAN_ENV,
    CPU,
    GYM_PYTHON,
    RECIPE,
    ROOT,
    command,
    metrics_of,
    run,
    tiny,
    write_chats,
)
from tests.helpers.runs import wait_for_marked_processes

VERIFIER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("7" in solution_str)
"""


def write_loop(name: str, settings: list[str]) -> str:
    """The loop of the guide, with the tiny recipe and these settings, for a run with this name."""
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
    again = run(arguments, workspace, timeout=120)
    assert again.returncode == 1 and "Nothing is left to train" in again.stderr.splitlines()[-1]


def run_notebook(workspace, loop: str, monkeypatch) -> str:
    """Run the loop in a Jupyter kernel -> its output. Assert that it leaves no process."""
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


THREAD = """
import threading

thread = threading.Thread(target=train_model)
thread.start()
thread.join()
"""


@pytest.mark.soak
def test_the_loop_of_the_guide_runs_in_a_thread_without_an_event_loop(workspace):
    loop = write_loop("threaded", tiny(workspace, "trainer.total_training_steps=1"))
    code = "\n    ".join(["def train_model():", *loop.splitlines()]) + "\n" + THREAD
    mark = uuid.uuid4().hex
    done = run([sys.executable, "-c", code], workspace, PYTHONPATH=str(ROOT), KIT_MARK=mark)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert (workspace / "runs" / "threaded" / "export" / "model.safetensors").is_file()
    assert wait_for_marked_processes(mark) == []


def check_exported_weights(folder):
    """The export has the checkpoint's weights, in the dtype in which the run sampled."""
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


STEP_METRICS = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "perf/throughput",
    "rollout/failed_frac",
    "rollout/groups_dropped",
    "reward/reasoning_gym/mean",
    "verify/latency_s/p50",
    "verify/latency_s/p95",
    "training/rollout_probs_diff_mean",
)


def check_outputs(folder, stdout):
    """Assert that a finished run wrote all its files and printed its steps."""
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = OmegaConf.load(folder / "config.yaml")
    assert recipe.actor_rollout_ref.actor.optim.lr == 0.003
    # nothing wrote to the recipe from the start of the run to its last checkpoint
    assert recipe == OmegaConf.load(folder / "checkpoints" / "global_step_3" / "config.yaml")
    lines = (folder / "rollouts" / "step_3.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    fields = [e["_episode"] for e in episodes]
    assert len(episodes) == 64 and len({e["group_id"] for e in fields}) == 8
    assert all(e["status"] == "ok" and e["prompt"].endswith("7") for e in fields)
    assert all(e["reward"] >= 0 for e in fields)
    indices = {(e["_ng_task_index"], e["_ng_rollout_index"]) for e in episodes}
    assert indices == set(itertools.product(range(8), range(8)))
    assert (folder / "rollouts" / "val_3.jsonl").is_file()
    assert (folder / "failures.jsonl").read_text() == ""
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("events*"))
    assert b"val/generations" in events and b"Sample 2" in events and b"Sample 3" not in events
    assert (folder / "tracking.jsonl").is_file()
    step = [m for m in metrics_of(folder) if "rollout/failed_frac" in m][-1]
    assert not [name for name in STEP_METRICS if name not in step]
    assert "perf/mfu/actor" not in step
    # this model has tied embeddings; test_stack.py has untied ones
    assert step["training/rollout_probs_diff_max"] < 1e-3
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    for n in (2, 3):
        checkpoint = checkpoints / f"global_step_{n}"
        assert (checkpoint / "actor" / "model_world_size_1_rank_0.pt").is_file()
        assert (checkpoint / "data.pt").is_file()
    samples = re.findall(r"' -> '.*reward \d\.\d\d", stdout)
    assert re.search(r"step 3/3 +reward [01]", stdout) and len(samples) == 2
    assert "device_mesh" not in stdout and "Writing model shards" not in stdout

    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    chat = [{"role": "user", "content": "say 7"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert len(answer)


def test_invalid_input_is_a_one_line_error_and_exit_status_1(workspace, monkeypatch, capsys):
    """In a new process. Other kinds of input are tested in this one: verl's import takes 10 s."""
    wrong_key = "actor_rollout_ref.rollout.temprature=1"
    message = "Did you mean actor_rollout_ref.rollout.temperature"
    arguments = [*tiny(workspace, wrong_key), "--dry-run"]
    result = run(command(workspace, *arguments), workspace, timeout=120)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.stderr

    no_server = ["gym.servers.reasoning_gym.start=null"]
    no_server.append("gym.servers.reasoning_gym.url=http://127.0.0.1:9")
    for changes, message in (
        (["env.train_files=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
        (no_server, "python -m kit.gym.servers reasoning_gym --port 9"),
    ):
        words = command(workspace, *tiny(workspace, *changes), "--dry-run")[2:]
        with pytest.raises(SystemExit) as ended:
            call_command(words, workspace, monkeypatch)
        last = str(ended.value.code).strip().splitlines()[-1]
        assert last.startswith("error: ") and message in last


@pytest.mark.soak  # tests/extras/test_sft.py trains the shared actor
def test_sft_learns_and_resumes(workspace):
    changes = [*write_chats(workspace), "trainer.experiment_name=sft", "trainer.save_freq=10"]
    changes.append("actor_rollout_ref.actor.optim.lr=0.003")
    arguments = [*command(workspace), "--config", "sft", "sft", *tiny(workspace, *changes)]
    for total in (20, 21):
        result = run([*arguments, f"trainer.total_training_steps={total}"], workspace)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        assert "path=runs/sft/export" in result.stdout
    lines = [m for m in metrics_of(workspace / "runs" / "sft") if "actor/loss" in m]
    assert [m["step"] for m in lines] == list(range(1, 22))
    assert lines[0]["actor/loss"] > 3 and lines[-1]["actor/loss"] < 0.3


@pytest.mark.soak  # test_collect.py checks the numbers over the shared servers
def test_the_command_evaluates(workspace):
    changes = ["trainer.experiment_name=evaluated", "env.train_files=[]"]
    result = run(command(workspace, "evaluate", *tiny(workspace, *changes)), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = (workspace / "runs" / "evaluated" / "evaluation.jsonl").read_text().splitlines()
    assert len(lines) == 8 and "val-core/reasoning_gym/reward/mean@1" in result.stdout


def test_dry_run_checks_everything_and_starts_nothing(workspace, monkeypatch, capsys):
    words = command(workspace, *tiny(workspace, "trainer.experiment_name=dry"), "--dry-run")[2:]
    call_command(words, workspace, monkeypatch)
    printed = capsys.readouterr().out
    assert "say 7" in printed
    order = [
        "rows",
        "step",
        "training",
        "servers",
        "verifier",
        "first",
        "model",
        "devices",
        "memory",
        "stop",
        "further",
        "dry",
    ]
    places = [re.search(rf"^{word}\b", printed, re.MULTILINE).start() for word in order]
    assert places == sorted(places), printed  # what a person reads, then settings
    assert printed.endswith("nothing was started\n")
    changed_keys = re.findall(r"^    ([\w.]+): .* \(was .*\)$", printed, re.MULTILINE)
    assert "actor_rollout_ref.rollout.max_model_len" in changed_keys  # it follows from others
    # values of configs/base.yaml, the recipe's file, an argument, and the recipe for CPUs
    written = ["algorithm.adv_estimator", "rollout.n", "trainer.experiment_name", "trainer.device"]
    assert not [key for key in changed_keys if key.endswith(tuple(written))]
    # verl sets it to rollout.n, and GRPO has no critic
    assert "actor_rollout_ref.actor.rollout_n" not in changed_keys
    assert not any(key.startswith("critic.") for key in changed_keys)
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
    message = "error: No module named 'omegaconf'. Run `source .venv/bin/activate` first.\n"
    assert done.stderr == message


def test_a_library_that_is_imported_later_stays_silent(monkeypatch):
    """vLLM calls dictConfig when it is imported. That resets all loggers below `vllm`."""
    monkeypatch.setattr(cli, "QUIET", {"loud.parsers": logging.CRITICAL})
    cli.silence_libraries()
    loggers = {"loud": {"level": "INFO"}}
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": loggers})
    assert logging.getLogger("loud.other").isEnabledFor(logging.INFO)
    assert not logging.getLogger("loud.parsers.hermes").isEnabledFor(logging.ERROR)


def test_the_gpu_recipe_passes_its_dry_run_with_a_tiny_model(workspace, monkeypatch, capsys):
    """It is configs/math.yaml, with rows in the format of GSM8K."""
    entry = {"question": "one and one", "answer": "It is two.\n#### 2"}
    source = workspace / "gsm8k"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text((json.dumps(entry) + "\n") * 1024)
    env_py = [sys.executable, str(ROOT / "env.py"), "gsm8k"]
    env_py += ["--source", str(source), "--out", "data"]
    assert run(env_py, workspace).returncode == 0
    words = ["--config", str(ROOT / "configs" / "math.yaml"), "--dry-run"]
    words += [f"actor_rollout_ref.model.path={workspace / 'tied'}"]
    words += [f"gym.servers.math_with_judge.start.python={GYM_PYTHON}"]
    call_command(words, workspace, monkeypatch)
    printed = capsys.readouterr().out
    assert "256 prompts x 8 responses = 2048 episodes" in printed
    assert "8 cuda, 8 vLLM replicas" in printed
