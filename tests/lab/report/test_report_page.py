"""The report page: of runs without some parts, of others' folders, and the episodes on it."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import to_record
from kit.run.features import make_features
from kit.run.run import Run
from lab.report import diagnosis, episode_view, report_page
from lab.run_folder import RunFolder
from tests.helpers.models import make_model
from tests.helpers.recipes import row
from tests.helpers.runs import SCRIPT, write_synthetic_run
from tests.helpers.verifiers import make_recipe
from tests.lab.report.test_diagnosis import STEPS, find_problems, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def read_data(page: Path) -> dict:
    packed = page.read_text().partition('id="data">')[2].partition("<")[0]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_a_run_without_episodes_has_a_page(tmp_path, model):
    """Supervised training has no episodes. A run that ended early has no metrics either."""
    folder = write_synthetic_run(tmp_path / "run", 3, 10, model)
    shutil.rmtree(folder / "rollouts")
    lines = []
    for step in (1, 2, 3):
        metrics = {"step": step, "time": step, "actor/loss": 1 / step, "val/loss": 2.0 / step}
        lines.append(json.dumps(metrics))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    page = tmp_path / "page.html"
    assert report_page.write_page([RunFolder(folder)], page).is_file()
    expected = "3/20 steps, 0.0 min training; held-out loss 2 -> 0.667"
    assert diagnosis.summarize(RunFolder(folder)) == expected
    (folder / "metrics.jsonl").unlink()
    assert report_page.write_page([RunFolder(folder)], page).is_file()
    assert diagnosis.find_problems(RunFolder(folder)) == []
    assert diagnosis.summarize(RunFolder(folder)) == "no steps yet"


def test_the_page_of_two_runs_lists_the_keys_that_differ(tmp_path, model):
    folders = [write_synthetic_run(tmp_path / name, 2, 10, model) for name in ("one", "two")]
    text = (folders[1] / "config.yaml").read_text()
    (folders[1] / "config.yaml").write_text(text.replace("lr: 3.0e-05", "lr: 0.007"))
    page = report_page.write_page(list(map(RunFolder, folders)), tmp_path / "report.html")
    key = "actor_rollout_ref.actor.optim.lr"
    assert read_data(page)["config_diff"] == [[key, "3e-05", "0.007"]]


def test_a_run_ends_with_its_first_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe("verl")
    run = Run(recipe, features=make_features(recipe))
    run.folder.mkdir(parents=True)
    find_problems(run.folder, {"rollout/ended/length_frac": [1.0] * STEPS})  # it writes the run
    run.files.write_report()
    run.log.print_findings()
    found, next_step, report = capsys.readouterr().out.splitlines()
    assert found.startswith("Found: 100% of the responses are truncated at ")
    assert next_step.startswith("Next: raise data.max_response_length")
    assert report == "Report: runs/tiny/report.html"


# --- episodes ------------------------------------------------------------------------------------


def test_each_turn_has_the_advantages_of_its_tokens():
    episode = Episode("x:1", "1/0", "s", [5], row=row(), reward=1.0, ended="stop")
    episode.output.append(gym_client.make_message("one"))
    append_tokens(episode, [6, 7], [-1.0, -2.0])
    episode.output.append(gym_client.function_call_output("c", "seen"))
    append_tokens(episode, [8, 8, 8])
    episode.output.append(gym_client.make_message("two"))
    append_tokens(episode, [9], [-3.0])
    record = to_record(episode, 0, 0)

    advantages = np.array([0.25, 0.5, -0.75])
    items = episode_view.build_episode_view(record, advantages, with_tokens=True)["items"]
    turns = [(item["ids"], item["advantages"]) for item in items if "ids" in item]
    assert turns == [([6, 7], [0.25, 0.5]), ([9], [-0.75])]

    one_for_all = np.array([0.5])  # the same advantage for all tokens
    items = episode_view.build_episode_view(record, one_for_all, with_tokens=True)["items"]
    assert [item["advantages"] for item in items if "ids" in item] == [[0.5], [0.5]]


# --- folders of others ---------------------------------------------------------------------------


def write_foreign_run(path: Path, model: Path, text: str, tokens: int = 3) -> RunFolder:
    """Write a run directory with one episode, and its evaluation."""
    path.mkdir()
    episode = Episode("rows.jsonl:1", "1/0", "s", [5], row=row(), ended="stop", reward=1.0)
    episode.output.append(gym_client.make_message(text))
    append_tokens(episode, [6] * tokens, [-1.0] * tokens)
    recipe = {"actor_rollout_ref": {"model": {"path": str(model)}}}
    return write_run(path, recipe, {"rollout/reward/mean": [0.5]}, [episode])


def test_texts_and_names_of_a_run_are_no_markup_of_the_page(tmp_path, model):
    name = "<img src=x onerror=alert(1)>"
    run = write_foreign_run(tmp_path / name, model, SCRIPT)
    page = report_page.write_page([run], tmp_path / "page.html")
    assert SCRIPT not in page.read_text() and name not in page.read_text()


def test_code_in_the_folder_of_a_tokenizer_does_not_run(model, tmp_path, monkeypatch):
    def fail(*_):
        pytest.fail("the user was asked whether to run the code of the tokenizer")

    monkeypatch.setattr("builtins.input", fail)
    foreign = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((foreign / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["custom_code.CustomTokenizer", None]}
    settings |= {"auto_map": auto_map, "tokenizer_class": "CustomTokenizer"}
    (foreign / "tokenizer_config.json").write_text(json.dumps(settings))
    evidence = tmp_path / "the_code_ran"
    (foreign / "custom_code.py").write_text(
        f"open({str(evidence)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class CustomTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    run = write_foreign_run(tmp_path / "run", foreign, "seven")
    assert report_page.write_page([run], tmp_path / "page.html").is_file()
    assert not evidence.exists()
    (foreign / "tokenizer_config.json").write_text("{")
    page = report_page.write_page([RunFolder(run.path)], tmp_path / "page.html")
    assert "was not loaded" in read_data(page)["runs"][0]["note"]


def test_a_huge_episode_is_shortened_with_a_note(model, tmp_path):
    run = write_foreign_run(tmp_path / "run", model, "x" * 10_000_000, tokens=60_000)
    saved = run.records[0]
    view = episode_view.build_episode_view(saved.record, None, with_tokens=True)
    assert len(json.dumps(view)) < 300_000
    item = view["items"][-1]
    assert item["text"].startswith("x" * 1000)
    assert "9900000 more characters are not on this page" in item["text"]
    assert "ids" not in item
