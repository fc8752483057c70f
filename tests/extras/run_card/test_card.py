"""The run card of an export: what it claims is in the files of the run, and no secret is in it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from kit.config.load import load_config
from kit.config.recipe import Recipe, freeze
from kit.data.episode import Episode
from kit.data.metrics import compute_score_interval
from kit.data.rollout_files import to_record, write_record
from kit.extras.evidence.intervals import compute_mean_interval
from kit.extras.run_card import card, scores
from kit.extras.run_card.privacy import Cleaner, hide_named
from tests.helpers.recipes import CPU, RECIPE, row, tiny, write_task

SECRET = "sk-planted-123456789"
PASSWORD = "hunter2hunter2"
REWARDS = {0: [0, 0, 0, 1.0, 0.5, 0, 0, 0], 5: [1.0, 1.0, 0, 1.0, 1.0, 0.5, 1.0, 1.0]}
COMMAND = ["/data/kit/algorithm.py", "--config", "/data/ann/my_recipe.yaml", "data.seed=4"]
VERIFIER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
)


def plant(folder: Path, *changes: str, command: str = "train") -> Recipe:
    """Write the files of a run with 5 steps -> its recipe."""
    for name in ("export", "rollouts"):
        (folder / "runs" / "tiny" / name).mkdir(parents=True)
    write_task(folder)
    config, defaults = load_config([str(CPU), str(RECIPE)], tiny(folder, *changes))
    run = folder / "runs" / "tiny"
    lines = []
    for step in range(6):
        line = {"step": step, "time": 1.7e9 + 60 * step}
        if step:
            line |= {"rollout/episodes": 64, "rollout/failed/timeout": step % 2}
            line |= {"timing_s/step": 60.0}
        if step in REWARDS:
            rewards = REWARDS[step]
            for name, values in (("acc", [r >= 1 for r in rewards]), ("reward", rewards)):
                metric = f"reasoning_gym/{name}/mean@1"
                line[f"val-core/{metric}"] = float(np.mean(values))
                interval = compute_score_interval([[float(value)] for value in values])
                line |= {f"val-aux/{metric}{end}": limit for end, limit in interval.items()}
            line |= {"val-aux/failed_frac": 0.125, "timing_s/testing": 15.0}
            write_evaluation(run / "rollouts" / f"val_{step}.jsonl", REWARDS[step])
        lines.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "export" / "step.txt").write_text("5\n")
    return freeze(config, defaults, command)


def write_evaluation(path: Path, rewards: list[float]) -> None:
    with path.open("wb") as out:
        for index, reward in enumerate(rewards):
            task_row = row(f"question {index}")
            episode = Episode(f"r:{index}", "0/0", "reasoning_gym", [5], row=task_row)
            episode.reward = reward
            write_record(out, to_record(episode, index, 0))


def compose(folder: Path, *changes: str, monkeypatch, arguments=COMMAND, command="train") -> str:
    monkeypatch.chdir(folder)
    recipe = plant(folder, *changes, command=command)
    return card.compose(recipe, Path("runs/tiny"), arguments)


def read_cells(text: str) -> dict[str, list[str]]:
    """{first cell: the others} of all tables."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_front_matter_is_that_of_a_model_card(tmp_path, monkeypatch):
    text = compose(tmp_path, monkeypatch=monkeypatch)
    data = card.read_front_matter(write(tmp_path / "card.md", text))
    assert data["library_name"] == "transformers" and data["base_model"] == "tied"
    assert {"quintet", "reinforcement-learning", "grpo"} <= set(data["tags"])
    assert "license" not in data


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_claim_is_in_the_files_of_the_run(tmp_path, monkeypatch):
    verifier = write(tmp_path / "my_reward.py", VERIFIER)
    text = compose(
        tmp_path, "env.verifier=my_reward.py:compute_score", "data.seed=7", monkeypatch=monkeypatch
    )
    assert "5 of 40 planned steps, each with 8 prompts with 8 responses each" in text
    for step, rewards in REWARDS.items():
        for name, values in (("acc", [r >= 1 for r in rewards]), ("reward", rewards)):
            interval = compute_mean_interval(np.array([values], float))
            value = f"{np.mean(values):.3f} ({interval.low:.3f} to {interval.high:.3f})"
            assert f"| {step} | reasoning\\_gym | {name}/mean@1 | {value} | 8 |" in text
    assert "3 of 320 training episodes failed (0.9%): 3 timeout." in text
    assert "In the last evaluation, 12.5% failed." in text
    for path in (tmp_path / "train.jsonl", tmp_path / "val.jsonl", verifier):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    cells = read_cells(text)
    assert cells["seed"] == ["7"] and cells["finished"] == ["2023-11-14 22:18 UTC"]
    assert cells["duration"] == ["5.5 min of steps and evaluations"]
    assert "nemo-gym 0.7.0" in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert recipe["data.train_batch_size"] == 8
    assert recipe["env.verifier"] == "my_reward.py:compute_score"
    assert not [key for key in recipe if key.startswith(("critic.", "ray_kwargs."))]


@pytest.mark.parametrize(
    "words", [["--replay", "old/step_*.jsonl"], ["--replay=~/old/step_*.jsonl"]]
)
def test_the_card_of_a_replay_has_its_recording_and_no_verifier(tmp_path, monkeypatch, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "old").mkdir()
    recording = write(tmp_path / "old" / "step_1.jsonl", "{}")
    recipe = plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    with open("runs/tiny/metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 5, "time": 1.7e9, "replay/ess": 0.9}) + "\n")
    text = card.compose(recipe, Path("runs/tiny"), [*COMMAND, *words])
    assert "It was trained on recorded episodes, without sampling." in text
    assert (
        f"| recording | old/step\\_1.jsonl | `{hashlib.sha256(recording.read_bytes()).hexdigest()}`"
        in text
    )
    assert "- verifier" not in text
    (tmp_path / "sampled").mkdir()
    assert "- verifier" in compose(tmp_path / "sampled", monkeypatch=monkeypatch)


def test_a_file_that_changed_after_the_start_is_marked(tmp_path, monkeypatch):
    text = compose(tmp_path, monkeypatch=monkeypatch)
    assert text.count("(changed after the run started)") == 2  # the metrics are of 2023
    recipe = plant(tmp_path / "other")
    (tmp_path / "other" / "train.jsonl").unlink()
    assert "it was no longer there" in card.compose(recipe, Path("runs/tiny"), COMMAND)


def test_no_secret_and_no_path_of_the_machine_is_in_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET + "-env")
    changes = [
        f"gym.servers.reasoning_gym.start.config={{api_key: {SECRET}, token: short}}",
        f"gym.head_server=http://ann:{PASSWORD}@host:1/x",
        f"trainer.project_name={SECRET}-env",
    ]
    overridden = "gym.judges={j: {api_key: replaced, model: m}}"
    arguments = [*COMMAND, *changes, overridden, f"data.prompt_key={SECRET}-env"]
    text = compose(tmp_path, *changes, monkeypatch=monkeypatch, arguments=arguments)
    for secret in (SECRET, PASSWORD, "replaced", "short"):
        assert secret not in text
    assert "model: m" in text and "data.seed=4" in text and "my_recipe.yaml" in text
    for path in (str(tmp_path), "/data/ann", "/data/kit"):
        assert path not in text


def test_texts_of_the_user_are_not_markdown(tmp_path, monkeypatch):
    name = "a|b <img src=x> [c](d)"
    text = compose(tmp_path, monkeypatch=monkeypatch)
    recipe = plant(tmp_path / "other")
    config = OmegaConf.create(OmegaConf.to_container(recipe.verl))
    config.trainer.experiment_name = name
    config.env.sampler = "```\n# heading"
    other = card.compose(recipe.with_config(config), Path("runs/tiny"), COMMAND)
    assert r"# a\|b &lt;img src=x> \[c\](d)" in other
    assert "````yaml" in other and "````yaml" not in text


def test_the_card_of_sft_has_the_held_out_loss(tmp_path, monkeypatch):
    recipe = plant(tmp_path, command="sft")
    monkeypatch.chdir(tmp_path)
    lines = [{"step": n, "time": 1.7e9, "val/loss": 2 - n / 4} for n in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "runs/tiny/metrics.jsonl").write_text(text)
    text = card.compose(recipe, Path("runs/tiny"), COMMAND)
    assert "supervised fine-tuning: 5 of 40 planned steps, each with 8 conversations" in text
    assert "| 0 | 2.0000 |" in text and "| 2 | 1.5000 |" in text and "episodes failed" not in text


def test_an_export_of_an_export_names_the_first_model_and_its_license(tmp_path, monkeypatch):
    base = tmp_path / "runs" / "before" / "export"
    base.mkdir(parents=True)
    (base / "step.txt").write_text("3")
    front = {"base_model": "someone/small", "license": "apache-2.0", "tags": ["quintet"]}
    (base / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n# x\n")
    model = f"actor_rollout_ref.model.path={base}"
    text = compose(tmp_path, model, monkeypatch=monkeypatch)
    data = card.read_front_matter(write(tmp_path / "card.md", text))
    assert (data["base_model"], data["license"]) == ("someone/small", "apache-2.0")
    assert r"The run started from runs/before/export." in text


def test_an_error_of_the_card_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    from kit.runs.run import Run

    recipe = plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tiny/logs").mkdir()
    run = Run(recipe)
    (tmp_path / "runs/tiny/metrics.jsonl").write_text("")
    run.files.complete_export()
    assert "The export is complete, but has no card" in capsys.readouterr().out
    assert "Traceback" in (tmp_path / "runs/tiny/logs/export.log").read_text()


def test_the_run_writes_the_card_into_its_export(tmp_path, monkeypatch):
    from kit.runs.run import Run

    recipe = plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    Run(recipe).files.complete_export()
    assert (tmp_path / "runs/tiny/export/README.md").read_text().startswith("---\nbase_model: tied")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read /data/rows/train.jsonl now", "read train.jsonl now"),
        ("see https://example.com/a/b and runs/x/y, critic/score", None),
        ("~/models/x and ${oc.env:HOME}/y", None),
    ],
)
def test_only_absolute_paths_are_shortened(text, expected):
    assert Cleaner(OmegaConf.create({})).clean(text) == (expected or text)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a.b.api_key=abc", "a.b.api_key=<hidden>"),
        ("x={OPENAI_KEY: 'abcdefgh', n: 1}", "x={OPENAI_KEY: '<hidden>', n: 1}"),
        ("data.prompt_key=question", "data.prompt_key=question"),
    ],
)
def test_values_with_the_name_of_a_secret_are_hidden(word, expected):
    assert hide_named(word) == expected


@pytest.mark.parametrize("count", [1, 2, 12, 13, 100])
def test_long_curves_keep_their_first_and_last_evaluation(count):
    steps = list(range(0, 5 * count, 5))
    picked = scores.pick_steps(steps)
    assert len(picked) == min(count, scores.MAX_EVALUATIONS)
    assert (picked[0], picked[-1]) == (steps[0], steps[-1]) and picked == sorted(set(picked))
