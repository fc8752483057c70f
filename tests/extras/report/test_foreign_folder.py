"""The page of a folder that somebody else made: none of its code runs, and a huge episode stays small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import gym_client
from kit.data.episodes import Episode, append, as_record, open_records, write
from kit.extras.report import report_page
from kit.extras.report.run_data import Folder


def folder_of(path: Path, model: Path, text: str = "seven", tokens: int = 3) -> Folder:
    """A run's folder with one step of one episode."""
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text(
        json.dumps({"actor_rollout_ref": {"model": {"path": str(model)}}})
    )
    (path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "rollout/reward/mean": 0.5}\n')
    e = Episode(
        "rows.jsonl:1",
        "1/0",
        "s",
        [5],
        row={"responses_create_params": {"input": "?"}},
        ended="stop",
    )
    e.output.append(gym_client.message(text))
    append(e, [6] * tokens, [-1.0] * tokens)
    e.reward = 1.0
    with open_records(path / "rollouts" / "step_1.jsonl", "w") as out:
        write(out, as_record(e, 0, 0))
    return Folder(path)


def test_a_tokenizer_with_code_in_its_folder_is_not_run(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "builtins.input", lambda *_: pytest.fail("asked whether to run a stranger's code")
    )
    model = shutil.copytree(workspace / "tied", tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    auto = {"auto_map": {"AutoTokenizer": ["trap.Trap", None]}, "tokenizer_class": "Trap"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings | auto))
    (model / "trap.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\nclass Trap(PreTrainedTokenizerFast): pass\n"
    )
    run = folder_of(tmp_path / "run", model)
    assert report_page.write([tmp_path / "run"], tmp_path / "page.html").is_file()
    report_page.load_tokenizer(run)
    assert not (tmp_path / "sprung").exists()


def test_of_a_huge_episode_the_page_has_the_beginning_and_a_note(workspace, tmp_path):
    run = folder_of(tmp_path / "run", workspace / "tied", text="x" * 10_000_000, tokens=60_000)
    ((_, _, record),) = run.records
    opened = report_page.detail(record, None, True)
    assert len(json.dumps(opened)) < 300_000
    said = opened["items"][-1]
    assert (
        said["text"].startswith("x" * 1000)
        and "9900000 more characters are not in this page" in said["text"]
    )
    assert "ids" not in said
    page = report_page.write([tmp_path / "run"], tmp_path / "page.html")
    assert page.is_file()
    short = folder_of(tmp_path / "short", workspace / "tied")
    assert report_page.detail(short.records[0][2], None, True)["items"][-1]["ids"] == [6, 6, 6]


def test_tokens_are_shown_of_the_best_and_worst_of_the_latest_steps_first(monkeypatch):
    """An episode that is neither has its tokens in the page only if there is room after those."""
    rewards = [0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0]
    frame = pd.DataFrame(
        {"status": "ok", "tokens": 10, "reward": rewards * 2, "file": ["a"] * 7 + ["b"] * 7}
    )
    by_file = frame.groupby("file")["reward"]
    frame["best"] = by_file.rank(ascending=False, method="first")
    frame["worst"] = by_file.rank(method="first")
    records = [("step", 1 + i // 7, {"place": i}) for i in range(14)]
    monkeypatch.setattr(report_page, "MOST_TOKENS", 130)
    chosen = report_page.with_tokens([SimpleNamespace(episodes=frame, records=records)])
    assert report_page.ranks(frame)[:7] == ["worst", "worst", "worst", "", "best", "best", "best"]
    places = [record["place"] for _, record in chosen]
    assert places == [7, 8, 9, 11, 12, 13, 0, 1, 2, 4, 5, 6, 10]
