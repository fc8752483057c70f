"""The report page of runs without episodes, metrics or a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kit.runs.run import Run
from lab.report import diagnosis, report_page
from lab.report.run_data import RunData
from tests.helpers.models import make_model
from tests.helpers.runs import write_synthetic_run
from tests.helpers.verifiers import make_recipe
from tests.lab.report.test_diagnosis import STEPS, find_problems, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def test_a_run_without_episodes_has_a_page(tmp_path, model):
    """Supervised training has no episodes. A run that ended early has no metrics either."""
    folder = write_synthetic_run(tmp_path / "run", 3, 10, model)
    shutil.rmtree(folder / "rollouts")
    lines = []
    for step in (1, 2, 3):
        metrics = {"step": step, "time": step, "actor/loss": 1 / step, "val/loss": 2.0 / step}
        lines.append(json.dumps(metrics))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert report_page.write_page([folder], tmp_path / "sft.html").is_file()
    expected = "3/20 steps, 0.0 min training; held-out loss 2 -> 0.667"
    assert diagnosis.summarize(RunData(folder)) == expected
    (folder / "metrics.jsonl").unlink()
    assert report_page.write_page([folder], tmp_path / "nothing.html").is_file()
    assert diagnosis.find_problems(RunData(folder)) == []
    assert diagnosis.summarize(RunData(folder)) == "no steps yet"


def test_a_tokenizer_that_cannot_be_loaded_is_reported_on_the_page(tmp_path, model):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text("{")
    folder = write_synthetic_run(tmp_path / "run", 1, 10, broken)
    run_data = RunData(folder)
    page = report_page.render_page([run_data])
    assert "was not loaded" in run_data.unreadable[0] and page
    assert report_page.describe_run(run_data)["findings"][0]["evidence"] == run_data.unreadable


def test_the_page_of_two_runs_lists_the_keys_that_differ(tmp_path, model):
    folders = [write_synthetic_run(tmp_path / name, 2, 10, model) for name in ("one", "two")]
    text = (folders[1] / "config.yaml").read_text()
    (folders[1] / "config.yaml").write_text(text.replace("lr: 3.0e-05", "lr: 0.007"))
    runs = [RunData(folder) for folder in folders]
    key = "actor_rollout_ref.actor.optim.lr"
    assert report_page.diff_configs(runs) == [[key, "3e-05", "0.007"]]
    assert report_page.write_page(folders, tmp_path / "report.html").is_file()


def test_held_out_scores_are_drawn_with_their_intervals(tmp_path):
    columns = {
        "time": [0.0, 60.0],
        "rollout/episodes": [8.0] * 2,
        "val-core/s/acc/mean@1": [0.25, 0.75],
        "val-core/s/acc/pass@4": [0.5, 0.9],
        "val-core/s/reward/mean@1": [0.3, 0.8],  # no interval
    }
    for name, ends in (("mean@1", ([0.1, 0.6], [0.4, 0.85])), ("pass@4", ([0.4, 0.8], [0.6, 1.0]))):
        low, high = ends
        columns |= {f"val-aux/s/acc/{name}_low95": low, f"val-aux/s/acc/{name}_high95": high}
    run = write_run(tmp_path, {}, columns)
    (lines,) = [
        chart["lines"] for chart in report_page.build_charts([run]) if chart["title"] == "Held-out"
    ]
    found = {line["name"].rpartition("/")[2]: line for line in lines if "/acc/" in line["name"]}
    assert found["mean@1"]["below"] == pytest.approx([0.15, 0.15])
    assert found["mean@1"]["above"] == pytest.approx([0.15, 0.1])
    assert found["pass@4"]["above"] == pytest.approx([0.1, 0.1])
    assert "above" not in next(line for line in lines if "/reward/" in line["name"])


def test_explained_steps_are_on_the_page_and_other_files_are_not(tmp_path, model):
    folder = write_synthetic_run(tmp_path / "run", 1, 10, model)
    content: dict[str, object] = dict.fromkeys(report_page.EXPLAINED)
    content |= {"step": 3, "tokens": [{"token": "</script>"}]}
    (folder / "explain_3.json").write_text(json.dumps(content))
    (folder / "explain_4.json").write_text("[1]")
    (folder / "explain_5.json").write_text("{")
    run_data = RunData(folder)
    assert report_page.list_explanations([run_data]) == [content | {"run": run_data.name}]
    assert run_data.unreadable == ["explain_5.json is no JSON"]


def test_a_run_ends_with_its_first_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Run(make_recipe("verl"))
    run.folder.mkdir(parents=True)
    find_problems(run.folder, {"rollout/ended/length_frac": [1.0] * STEPS})  # it writes the run
    run.files.write_report()
    run.log.print_findings()
    found, next_step, report = capsys.readouterr().out.splitlines()
    assert found.startswith("Found: 100% of the responses are truncated at ")
    assert next_step.startswith("Next: raise data.max_response_length")
    assert report == "Report: runs/run/report.html"
