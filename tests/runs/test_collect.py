"""Tests of the commands `rollout` and `evaluate`: their episodes and numbers, and a resume."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter

import pytest

from kit.config.load import load_config
from kit.config.recipe import freeze
from kit.errors import ConfigError
from kit.rollout.sampling import make_rollout_context
from kit.runs import collect
from kit.runs.launch import Started
from kit.runs.run import Run
from tests.helpers.recipes import CPU, RECIPE, load, metrics_of
from tests.helpers.stack import SESSION

MIX = (
    "env.train_files=[{path: tools.jsonl, server: counter},"
    "{path: train.jsonl, server: reasoning_gym}]"
)
CHANGES = [
    MIX,
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=32",
    "trainer.experiment_name=collect",
]


def collect_rollouts(stack, monkeypatch, *changes, command="rollout"):
    """Run a command over the session's servers -> (lines of its file, the run)."""
    import inference

    recipe, inputs = load(stack.workspace, *SESSION, *CHANGES, *changes, command=command)
    session = stack.servers
    context = make_rollout_context(recipe, session.context.client, inputs, 60.0)
    servers = inference.Servers(recipe, session.manager, None, context, session.gym, session.loop)
    monkeypatch.setattr("kit.runs.launch.start", lambda *_, **__: Started(None, servers))
    with Run(recipe) as run:
        collect.run_command(recipe, run, inputs)
    name = "evaluation" if command == "evaluate" else "rollouts"
    return (run.folder / f"{name}.jsonl").read_text().splitlines(), run


def test_rollouts_without_training_resume_where_they_stopped(stack, monkeypatch, capsys):
    lines, run = collect_rollouts(stack, monkeypatch)
    records = [json.loads(line) for line in lines]
    groups = {(r["_episode"]["group_id"], r["_ng_task_index"]) for r in records}
    assert len(groups) == 16  # the episodes of a row are a group
    keys = {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in records}
    assert keys == set(itertools.product(range(16), range(2))) and len(records) == 32
    for record in records:
        assert isinstance(record["reward"], float) and record["response"]["object"] == "response"
        # the record has every key of its row
        assert ("expected_count" in record) != ("question" in record)
        seen: list[int] = []
        for item in record["response"]["output"]:
            if "generation_token_ids" in item:
                assert item["prompt_token_ids"][: len(seen)] == seen
                assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
                seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert seen
    output = capsys.readouterr().out
    assert "rollout/counter/reward/mean@2" in output and "val-core" not in output
    assert len([line for line in output.splitlines() if "' -> '" in line]) >= 6
    task = run.display.bar.tasks[0]
    assert (task.completed, task.total) == (32, 32)

    path = run.folder / "rollouts.jsonl"
    path.write_text("\n".join(lines[:20]) + "\n" + lines[20][:50])  # killed in the middle of a line
    again, _ = collect_rollouts(stack, monkeypatch)
    assert "20 of 32 episodes are in" in capsys.readouterr().out
    assert again[:20] == lines[:20] and len(again) == 32
    assert {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in map(json.loads, again)} == keys

    with pytest.raises(ConfigError, match="holds episodes of other rows"):
        collect_rollouts(
            stack, monkeypatch, "env.train_files=[{path: val.jsonl, server: reasoning_gym}]"
        )
    with pytest.raises(
        ConfigError,
        match=r"another policy: actor_rollout_ref\.rollout\.temperature was 1\.0 and is now 0\.5\. "
        r"Set another trainer\.experiment_name, or delete runs/collect/rollouts\.jsonl",
    ):
        collect_rollouts(stack, monkeypatch, "actor_rollout_ref.rollout.temperature=0.5")
    old = {"responses_create_params": {}, "reward": 1.0}
    path.write_text(json.dumps(old | {"_ng_task_index": 0, "_ng_rollout_index": 0}) + "\n")
    with pytest.raises(
        ConfigError,
        match=r"rollouts\.jsonl:1 is no episode .*older format .*another trainer.experiment",
    ):
        collect_rollouts(stack, monkeypatch)


def test_an_evaluation_has_mean_and_pass_at_k_and_the_servers_metrics(stack, monkeypatch, capsys):
    changes = ["trainer.experiment_name=evaluated", "actor_rollout_ref.rollout.val_kwargs.n=4"]
    changes += ["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "env.train_files=[]"]
    changes += ["actor_rollout_ref.rollout.val_kwargs.temperature=1.0"]
    lines, run = collect_rollouts(stack, monkeypatch, *changes, command="evaluate")
    records = [json.loads(line) for line in lines]
    assert len(records) == 32
    metrics = {}
    for line in metrics_of(run.folder):
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
    output = capsys.readouterr().out
    assert f"pass@4: {rates[2]:.4g}" in output
    # the three best and the three worst responses are printed
    assert len(re.findall(r"' -> '.*reward \d\.\d\d", output)) == 6


def test_env_max_rows_limits_the_rows(stack, monkeypatch):
    lines, _ = collect_rollouts(
        stack, monkeypatch, "env.max_rows=3", "trainer.experiment_name=limited"
    )
    assert len(lines) == 6 and all(math.isfinite(json.loads(line)["reward"]) for line in lines)


def test_a_file_with_episodes_of_other_weights_is_an_error(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    path = tmp_path / "evaluation.jsonl"

    def check(*changes, has_episodes=True):
        arguments = [f"actor_rollout_ref.model.path={tmp_path / 'a'}", *changes]
        recipe = freeze(*load_config([str(CPU), str(RECIPE)], arguments))
        collect.check_settings(path, collect.describe_settings(recipe, True), has_episodes)

    check(has_episodes=False)
    check("actor_rollout_ref.rollout.temperature=0.5")  # `evaluate` samples with val_kwargs
    with pytest.raises(ConfigError, match=r"val_kwargs\.top_p was 1\.0 and is now 0\.5"):
        check("actor_rollout_ref.rollout.val_kwargs.top_p=0.5")
    with pytest.raises(ConfigError, match=r"model\.path was .*/a and is now .*/b\."):
        check(f"actor_rollout_ref.model.path={tmp_path / 'b'}")
    os.utime(tmp_path / "a" / "model.safetensors", (0, 0))  # as after another export to this folder
    with pytest.raises(ConfigError, match=r"time of the weights .* is now 1970-01-01T00:00:00Z"):
        check()
    check(has_episodes=False)
    check()
