"""Tests of the commands `rollout` and `evaluate`: their episodes and numbers, and a resume."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import env
from kit.data.episode import Episode
from kit.data.fingerprint import hash_problem, name_row
from kit.data.rollout_files import to_record, write_record
from kit.engine.sampling import make_rollout_context
from kit.errors import ConfigError
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.run import collect, identity
from kit.run.console import Display
from kit.run.launch import Started
from kit.run.run import Run
from kit.run.stages import Stages
from kit.verify.python_verifiers.settings import PythonVerifiers
from tests.helpers.recipes import CPU, RECIPE, load, metrics_of, row
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
    """Run a command over the session's servers, and return the lines of its file and the run."""
    import inference

    recipe, inputs, _ = load(stack.workspace, *SESSION, *CHANGES, *changes, command=command)
    session = stack.servers
    context = make_rollout_context(recipe, session.context.client, inputs, 60.0)
    servers = inference.Servers(recipe, session.manager, None, context, session.gym, session.loop)
    monkeypatch.setattr("kit.run.launch.start", lambda *_, **__: Started(None, servers))
    with Run(recipe) as run:
        collect.run_command(recipe, run, inputs)
    name = "evaluation" if command == "evaluate" else "rollouts"
    return (run.folder / f"{name}.jsonl").read_text().splitlines(), run


@pytest.mark.soak
def test_rollouts_without_training_have_every_row_and_token(stack, monkeypatch, capsys):
    lines, _ = collect_rollouts(stack, monkeypatch)
    records = [json.loads(line) for line in lines]
    groups = {(r["_episode"]["group_id"], r["_ng_task_index"]) for r in records}
    assert len(groups) == 16  # the episodes of a row are a group
    keys = {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in records}
    assert keys == set(itertools.product(range(16), range(2))) and len(records) == 32
    for record in records:
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


def test_an_evaluation_has_its_scores_and_resumes_where_it_stopped(stack, monkeypatch, capsys):
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
    assert f"pass@4: {rates[2]:.4g}" in capsys.readouterr().out

    path = run.folder / "evaluation.jsonl"
    path.write_text("\n".join(lines[:28]) + "\n" + lines[28][:50])  # killed in the middle of a line
    again, _ = collect_rollouts(stack, monkeypatch, *changes, command="evaluate")
    assert "28 of 32 episodes are in" in capsys.readouterr().out
    assert again[:28] == lines[:28]
    keys = {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in map(json.loads, again)}
    assert keys == set(itertools.product(range(8), range(4))) and len(again) == 32


def test_without_a_terminal_lines_count_the_episodes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kit.run.console.LINE_S", 0.05)
    display = Display("rollout", 0, 0)
    display.start()
    on_done = Stages(60.0, tmp_path, display).count_episodes(3)
    for status in ("ok", "raised"):
        on_done(0, Episode("a:1", "0/0", "s", [], status=status))
    time.sleep(0.2)
    display.stop()
    assert "2/3 episodes, 1 failed, 0.0 min\n" in capsys.readouterr().out


VERIFIER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
)


def test_a_file_with_episodes_of_another_policy_or_verifier_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("a")
    (tmp_path / "ver.py").write_text(VERIFIER.format(0))
    path = tmp_path / "evaluation.jsonl"
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    inputs: Any = SimpleNamespace(
        tokenizer=tokenizer, train=[], validation=[], verifiers=PythonVerifiers({}, {})
    )

    def check(*changes, has_episodes=True):
        arguments = ["actor_rollout_ref.model.path=a", "env.verifier=ver.py:compute_score"]
        recipe = build(read_source([str(CPU), str(RECIPE)], [*arguments, *changes]))
        run = identity.make_fingerprint(recipe, inputs)
        settings = collect.describe_settings(recipe, run, True)
        collect.check_settings(path, settings, has_episodes)

    check(has_episodes=False)
    check("actor_rollout_ref.rollout.temperature=0.5")  # `evaluate` samples with val_kwargs
    check("actor_rollout_ref.model.path=b")  # a copy
    with pytest.raises(ConfigError, match=r"val_kwargs\.top_p 1\.0 -> 0\.5"):
        check("actor_rollout_ref.rollout.val_kwargs.top_p=0.5")
    check()
    (tmp_path / "a" / "model.safetensors").write_text("b")
    with pytest.raises(ConfigError, match=r"another policy: the content of .*model\.path=.*/a"):
        check()
    (tmp_path / "a" / "model.safetensors").write_text("a")
    (tmp_path / "ver.py").write_text(VERIFIER.format(1))
    verifier = "rewards of another verifier: the content of env.verifier=ver.py:compute_score"
    with pytest.raises(ConfigError, match=verifier):
        check()


def write_collected(path: Path, tasks) -> None:
    with path.open("wb") as out:
        for index, task in enumerate(tasks):
            episode = Episode(task.row_id, "0/0", "s", [5], row=task.row, reward=index / 10)
            write_record(out, to_record(episode, index, 0))


def make_tasks(*answers: str) -> list[env.Task]:
    copies: Counter[str] = Counter()
    rows = [row(answer=answer) for answer in answers]
    return [
        env.Task(f"val.jsonl:{line}", one, "s", [], [], key=name_row(hash_problem(one), copies))
        for line, one in enumerate(rows, 1)
    ]


def test_episodes_belong_to_the_content_of_their_rows(tmp_path):
    path = tmp_path / "evaluation.jsonl"
    write_collected(path, make_tasks("3", "4", "3"))
    after = make_tasks("5", "3", "3", "4")
    found = collect.read_collected(path, after)
    rewards = {index.task: item.episode.reward for index, item in found.items()}
    assert rewards == {1: 0.0, 3: 0.1, 2: 0.2}
    assert found[(3, 0)].episode.row_id == "val.jsonl:4"
    with pytest.raises(ConfigError, match=r"episodes of other rows: val\.jsonl:2 is not"):
        collect.read_collected(path, make_tasks("3", "3", "5"))
