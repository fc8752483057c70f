"""The run card of an export: what it claims is in the files of the run, and no secret is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from kit.data.metrics import HIGH, LOW
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe, build
from kit.recipe.redaction import write_yaml
from lab import run_card
from lab.run_folder import RunFolder
from tests.helpers.recipes import CPU, RECIPE, tiny, write_task

SECRET = "sk-planted-123456789"
PASSWORD = "hunter2hunter2"
SCORE = "val-core/reasoning_gym/acc/mean@1"
SCORES = {0: (0.125, 0.02, 0.47), 5: (0.75, 0.41, 0.93)}  # with the ends of the interval
VERIFIER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def plant(folder: Path, *changes: str, command: str = "train") -> Recipe:
    """Write the files of a run with 5 steps, and return its recipe."""
    (folder / "runs" / "tiny" / "export").mkdir(parents=True)
    write_task(folder)
    source = read_source([str(CPU), str(RECIPE)], tiny(folder, *changes))
    recipe = build(source, command)
    run = folder / "runs" / "tiny"
    lines = []
    for step in range(6):
        line = {"step": step, "time": 1.7e9 + 60 * step}
        if step:
            line |= {"rollout/episodes": 64, "rollout/failed_frac": step % 2 / 64}
            line |= {"timing_s/step": 60.0}
        if step in SCORES:
            aux = SCORE.replace("core", "aux")
            names = (SCORE, f"{aux}{LOW}", f"{aux}{HIGH}")
            line |= dict(zip(names, SCORES[step], strict=True))
        lines.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "export" / "step.txt").write_text("5\n")
    (run / "config.yaml").write_text(write_yaml(recipe.redacted()))
    return recipe


def compose(folder: Path, *changes: str) -> str:
    return run_card.compose(plant(folder, *changes), RunFolder(folder / "runs/tiny"))


def read_recipe(text: str) -> dict:
    return yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])


def test_each_claim_is_in_the_files_of_the_run(tmp_path):
    (tmp_path / "my_reward.py").write_text(VERIFIER)
    changes = ["env.verifier=my_reward.py:compute_score", "data.seed=7"]
    text = compose(tmp_path, *changes)
    data = ModelCard(text).data
    assert (data.library_name, data.base_model, data.license) == ("transformers", "tied", None)
    assert data.tags == ["quintet", "verl", "reinforcement-learning"]
    assert "after reinforcement learning: 5 of 40 planned steps.\n" in text
    assert "| 0 | reasoning\\_gym/acc/mean@1 | 0.125 [0.020, 0.470] |" in text
    assert "| 5 | reasoning\\_gym/acc/mean@1 | 0.750 [0.410, 0.930] |" in text
    assert "3 of 320 training episodes failed." in text
    assert "| seed | 7 |" in text and "| finished | 2023-11-14 22:18 UTC |" in text
    assert "| duration of the steps | 5.0 min |" in text
    assert r"reasoning\_gym, nemo\_gym-0.7.0" in text
    recipe = read_recipe(text)
    assert recipe["data.train_batch_size"] == 8
    assert recipe["env.verifier"] == "my_reward.py:compute_score"
    assert not [key for key in recipe if key.startswith(("critic.", "ray_kwargs."))]


def test_the_card_of_a_replay_says_so_and_has_no_verifier(tmp_path):
    recipe = plant(tmp_path)
    assert "| verifier " in run_card.compose(recipe, RunFolder(tmp_path / "runs/tiny"))
    with open("runs/tiny/metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 5, "time": 1.7e9, "replay/ess": 0.9}) + "\n")
    text = run_card.compose(recipe, RunFolder(tmp_path / "runs/tiny"))
    assert "It was trained on recorded episodes, without sampling." in text
    assert "| verifier " not in text


def test_no_secret_and_no_path_of_the_machine_is_in_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET + "-env")
    (tmp_path / "my_reward.py").write_text(VERIFIER)
    verifier = f"function: {tmp_path}/my_reward.py:compute_score, password: {PASSWORD}"
    text = compose(
        tmp_path,
        f"gym.servers.reasoning_gym.start.config={{api_key: {SECRET}, a: {SECRET}2, token: short}}",
        f"gym.head_server=http://ann:{PASSWORD}@host:1/x",
        f"gym.judges={{j: {{api_key: {SECRET}-judge, model: m}}}}",
        f"data.prompt_key={SECRET}-env",
        f"env.verifier={{{verifier}, place: '${{gym.judges.j.api_key}}'}}",
    )
    for secret in (SECRET, PASSWORD, "short"):
        assert secret not in text
    assert str(tmp_path) not in text
    recipe = read_recipe(text)
    assert recipe["env.verifier.function"] == "my_reward.py:compute_score"
    assert recipe["env.verifier.place"] == recipe["env.verifier.password"] == "<hidden>"
    allowed = tuple(f"{name}." for name in run_card.SHOWN)
    assert all(f"{key}.".startswith(allowed) for key in recipe)
    assert not [key for key in recipe if key.startswith(("gym.servers", "gym.judges", "gym.head"))]


def test_texts_of_the_user_are_not_markdown(tmp_path):
    text = compose(tmp_path)
    recipe = plant(tmp_path / "other")
    changes = ["trainer.experiment_name=a|b <img src=x> [c](d)", "data.prompt_key=```\n# heading"]
    other = run_card.compose(recipe.change(*changes), RunFolder(tmp_path / "runs/tiny"))
    assert r"# a\|b &lt;img src=x> \[c\](d)" in other
    assert "````yaml" in other and "````yaml" not in text


def test_an_export_of_an_export_names_the_first_model_and_its_license(tmp_path):
    base = tmp_path / "runs" / "before" / "export"
    base.mkdir(parents=True)
    (base / "step.txt").write_text("3")
    front = {"base_model": "someone/small", "license": "apache-2.0", "tags": ["quintet"]}
    (base / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n# x\n")
    text = compose(tmp_path, f"actor_rollout_ref.model.path={base}")
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ("someone/small", "apache-2.0")
    assert read_recipe(text)["actor_rollout_ref.model.path"] == "export"


def test_the_run_writes_the_card_into_its_export_and_an_error_does_not_end_it(
    tmp_path, capsys, monkeypatch
):
    from kit.run.features import make_features
    from kit.run.run import Run

    recipe = plant(tmp_path)
    (tmp_path / "runs/tiny/logs").mkdir()
    files = Run(recipe, features=make_features(recipe)).files
    files.checkpoint = tmp_path / "runs/tiny/checkpoints/global_step_1"
    monkeypatch.setattr("kit.run.export.export", lambda *_: None)
    files.export()
    assert (tmp_path / "runs/tiny/export/README.md").read_text().startswith("---\nbase_model: tied")
    (tmp_path / "runs/tiny/metrics.jsonl").write_text("")
    files.export()
    assert "The export is complete, but has no card" in capsys.readouterr().out
    assert "Traceback" in (tmp_path / "runs/tiny/logs/export.log").read_text()
