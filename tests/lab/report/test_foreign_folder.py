"""The report of another person's run directory: its code does not run, long texts are shortened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import to_record, write_record
from lab.report import episode_view, report_page
from lab.report.run_data import RunData


def write_run(path: Path, model: Path, text: str = "seven", tokens: int = 3) -> RunData:
    """Write a run directory with one step of one episode."""
    (path / "rollouts").mkdir(parents=True)
    config = {"actor_rollout_ref": {"model": {"path": str(model)}}}
    (path / "config.yaml").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "rollout/reward/mean": 0.5}\n')
    row = {"responses_create_params": {"input": "?"}}
    episode = Episode("rows.jsonl:1", "1/0", "s", [5], row=row, ended="stop")
    episode.output.append(gym_client.message(text))
    append_tokens(episode, [6] * tokens, [-1.0] * tokens)
    episode.reward = 1.0
    with (path / "rollouts" / "step_1.jsonl").open("wb") as out:
        write_record(out, to_record(episode, 0, 0))
    return RunData(path)


def test_code_in_the_folder_of_a_tokenizer_does_not_run(workspace, tmp_path, monkeypatch):
    def fail(*_):
        pytest.fail("the user was asked whether to run the code of the tokenizer")

    monkeypatch.setattr("builtins.input", fail)
    model = shutil.copytree(workspace / "tied", tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["custom_code.CustomTokenizer", None]}
    settings |= {"auto_map": auto_map, "tokenizer_class": "CustomTokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    evidence = tmp_path / "the_code_ran"
    (model / "custom_code.py").write_text(
        f"open({str(evidence)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class CustomTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    run = write_run(tmp_path / "run", model)
    assert report_page.write_page([tmp_path / "run"], tmp_path / "page.html").is_file()
    report_page.load_tokenizer(run)
    assert not evidence.exists()


def test_a_huge_episode_is_shortened_with_a_note(workspace, tmp_path):
    run = write_run(tmp_path / "run", workspace / "tied", text="x" * 10_000_000, tokens=60_000)
    (saved,) = run.records
    view = episode_view.build_episode_view(saved.record, None, with_tokens=True)
    assert len(json.dumps(view)) < 300_000
    item = view["items"][-1]
    assert item["text"].startswith("x" * 1000)
    assert "9900000 more characters are not on this page" in item["text"]
    assert "ids" not in item
    page = report_page.write_page([tmp_path / "run"], tmp_path / "page.html")
    assert page.is_file()
    short = write_run(tmp_path / "short", workspace / "tied")
    view = episode_view.build_episode_view(short.records[0].record, None, with_tokens=True)
    assert view["items"][-1]["ids"] == [6, 6, 6]
