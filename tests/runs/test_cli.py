"""Tests of `python algorithm.py` in new processes: commands, files, resumes and errors."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from kit.errors import ConfigError
from kit.runs import checkpoints, cli
from kit.runs.run_dir import repeat_command
from tests.helpers.pages import GUIDES, find_python_block
from tests.helpers.recipes import CLEAN_ENV, GYM_PYTHON, ROOT, command, metrics_of, run, tiny


def test_the_command_resumes_a_run_of_the_python_loop(workspace):
    """The loop is that of the guide, with the tiny recipe. The command writes all files."""
    name = "annealed"
    files = ["cpu", str(ROOT / "tests" / "tiny.yaml")]
    settings = tiny(workspace, "trainer.total_training_steps=2")
    block = find_python_block(GUIDES / "python.md", "with train(plan(")
    block = block.replace('["math_cpu", "cpu"]', repr(files))
    block = re.sub(
        r"\[\"trainer\.experiment_name=(\w+)\"\]", lambda m: repr([m[0][2:-2], *settings]), block
    )
    assert repr(files) in block and f"experiment_name={name}" in block and "entropy_coeff" in block
    block += "\nprint(sorted(metrics), trainer.config.actor_rollout_ref.actor.entropy_coeff)\n"
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=workspace, env=CLEAN_ENV | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "actor/entropy_loss" in done.stdout and "Finished in" in done.stdout
    folder = workspace / "runs" / name
    assert (folder / "export" / "step.txt").read_text() == "2\n"
    check_exported_weights(folder)

    more = [
        "trainer.total_training_steps=3",
        "trainer.logger=[tensorboard,file]",
        "trainer.print_samples_every=3",
    ]
    more += ["trainer.log_val_generations=2"]
    arguments = command(workspace, *settings, f"trainer.experiment_name={name}", *more)
    result = run(arguments, workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "resume      from" in result.stdout
    assert re.search(r"mean@1: \S+ -> \S+ \(step 2 -> 3\)", result.stdout)
    check_outputs(folder, result.stdout)
    again = run(arguments, workspace, timeout=120)
    assert again.returncode == 1 and "Nothing is left to train" in again.stderr.splitlines()[-1]


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

    assert OmegaConf.load(folder / "config.yaml").actor_rollout_ref.actor.optim.lr == 0.003
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["actor_rollout_ref.rollout.temprature=1"],
            "Did you mean actor_rollout_ref.rollout.temperature",
        ),
        (["env.train_files=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
        (
            [
                "gym.servers.reasoning_gym.start=null",
                "gym.servers.reasoning_gym.url=http://127.0.0.1:9",
            ],
            "python -m kit.gym.servers reasoning_gym --port 9",
        ),
    ],
    ids=["key", "file", "url"],
)
def test_invalid_input_is_a_one_line_error_and_exit_status_1(workspace, arguments, message):
    result = run(
        command(workspace, *tiny(workspace, *arguments), "--dry-run"), workspace, timeout=120
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.stderr


def test_sft_learns_saves_and_resumes(workspace):
    lines = []
    for word in ("say", "give") * 4:
        question = {"role": "user", "content": f"{word} 7"}
        answer = {"role": "assistant", "content": "7"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    (workspace / "chats.jsonl").write_text("".join(lines))
    files = [f"env.{name}=[{workspace / 'chats.jsonl'}]" for name in ("train_files", "val_files")]
    changes = [
        *files,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "trainer.save_freq=10",
    ]
    steps, folder, output = run_sft(workspace, *changes, "trainer.total_training_steps=20")
    losses = [m["actor/loss"] for m in steps if "actor/loss" in m]
    assert len(losses) == 20 and losses[0] > 3 and losses[-1] < 0.3, losses
    validation_losses = [m["val/loss"] for m in metrics_of(folder) if "val/loss" in m]
    # before the first step, both losses are of the same rows and weights
    assert validation_losses[0] == pytest.approx(losses[0], rel=1e-4)
    assert (folder / "export" / "model.safetensors").is_file() and "path=runs/sft/export" in output
    steps, _, _ = run_sft(workspace, *changes, "trainer.total_training_steps=21")
    assert steps[-1]["step"] == 21 and steps[-1]["actor/loss"] < 0.3


def run_sft(workspace, *changes):
    """Run `sft` to its end -> (metrics of its steps, folder, output)."""
    untied = f"actor_rollout_ref.model.path={workspace / 'untied'}"
    arguments = [*command(workspace), "--config", "sft", "sft", *tiny(workspace, untied), *changes]
    result = run([*arguments, "trainer.experiment_name=sft"], workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = workspace / "runs" / "sft"
    return [m for m in metrics_of(folder) if "actor/loss" in m], folder, result.stdout


def test_an_evaluation_has_mean_and_pass_at_k_and_the_servers_metrics(workspace):
    changes = ["trainer.experiment_name=evaluated", "actor_rollout_ref.rollout.val_kwargs.n=4"]
    changes += ["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "env.train_files=[]"]
    changes += ["actor_rollout_ref.rollout.val_kwargs.temperature=1.0"]
    result = run(command(workspace, "evaluate", *tiny(workspace, *changes)), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = workspace / "runs" / "evaluated"
    records = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert len(records) == 32
    metrics = {}
    for line in metrics_of(folder):
        metrics |= line
    mean = sum(r["reward"] for r in records) / 32
    assert metrics["val-core/reasoning_gym/reward/mean@4"] == pytest.approx(mean)
    # the server computes this one in /aggregate_metrics
    assert metrics["val-gym/reasoning_gym/mean/reward"] == pytest.approx(mean)
    right = Counter(r["_ng_task_index"] for r in records if r["reward"] == 1.0)
    rates = [metrics[f"val-core/reasoning_gym/acc/pass@{k}"] for k in (1, 2, 4)]
    for k, rate in zip((1, 2, 4), rates, strict=True):  # Chen et al. 2021, equation 1
        chances = [1 - math.comb(4 - right[index], k) / math.comb(4, k) for index in range(8)]
        assert rate == pytest.approx(sum(chances) / 8)
    assert f"pass@4: {rates[2]:.4g}" in result.stdout
    # the three best and the three worst responses are printed
    assert len(re.findall(r"' -> '.*reward \d\.\d\d", result.stdout)) == 6


def test_dry_run_checks_everything_and_starts_nothing(workspace):
    arguments = command(workspace, *tiny(workspace, "trainer.experiment_name=dry"), "--dry-run")
    result = run(arguments, workspace, timeout=120)
    assert result.returncode == 0, result.stderr
    for text in (
        "8 prompts x 8 responses",
        "actor_rollout_ref.actor.optim.lr: 0.003 (was 1e-06)",
        "say 7",
        "nothing was started",
    ):
        assert text in result.stdout, text
    changes, _, rest = result.stdout.partition("8 prompts x 8 responses")
    assert "changes to verl's defaults" in changes and "first prompt" in rest
    changed_keys = re.findall(r"^    ([\w.]+): .* \(was .*\)$", result.stdout, re.MULTILINE)
    assert "actor_rollout_ref.rollout.n" in changed_keys
    # verl sets it to rollout.n, and GRPO has no critic
    assert "actor_rollout_ref.actor.rollout_n" not in changed_keys
    assert not any(key.startswith("critic.") for key in changed_keys)
    assert "${" not in result.stdout
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


def test_the_next_command_repeats_this_one_with_another_value(monkeypatch):
    monkeypatch.setattr(sys, "executable", os.path.abspath(".venv/bin/python"))
    arguments = ["algorithm.py", "--config", "math_cpu", "a.b=[1, 2]", "trainer.steps=20"]
    monkeypatch.setattr(sys, "argv", arguments)
    expected = ".venv/bin/python algorithm.py --config math_cpu 'a.b=[1, 2]' trainer.steps=40"
    assert repeat_command("trainer.steps=40") == expected
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    assert repeat_command("trainer.steps=40") == "the same code with trainer.steps=40"


def test_the_gpu_recipe_passes_its_dry_run_with_a_tiny_model(workspace):
    """It is configs/math.yaml, with rows in the format of GSM8K."""
    entry = {"question": "one and one", "answer": "It is two.\n#### 2"}
    source = workspace / "gsm8k"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text((json.dumps(entry) + "\n") * 1024)
    python = command(workspace)[0]
    env_py = [python, str(ROOT / "env.py"), "gsm8k"]
    env_py += ["--source", str(source), "--out", "data"]
    assert run(env_py, workspace).returncode == 0
    recipe = str(ROOT / "configs" / "math.yaml")
    arguments = [python, str(ROOT / "algorithm.py"), "--config", recipe]
    arguments += [f"actor_rollout_ref.model.path={workspace / 'tied'}", "--dry-run"]
    arguments += [f"gym.servers.math_with_judge.start.python={GYM_PYTHON}"]
    result = run(arguments, workspace, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (
        "256 prompts x 8 responses = 2048 episodes" in result.stdout
        and "8 cuda, 8 vLLM replicas" in result.stdout
    )
