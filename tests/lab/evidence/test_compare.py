"""The command `compare` on planted runs: with an effect, without, and with mistakes."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from kit.data.episode import Episode
from kit.data.fingerprint import Fingerprint, hash_contents
from kit.data.rollout_files import to_record, write_record
from kit.errors import ConfigError
from kit.run import identity
from lab.evidence import compare
from lab.evidence.curves import pick_evaluations, read_seed
from lab.run_folder import RunFolder
from tests.helpers.recipes import row

ROWS = 64
STEPS = (0, 10, 20)


def plant(folder: Path, accuracy: float, seed: int, rows: int = ROWS, tokens: float = 100) -> Path:
    """Write a run whose accuracy rises to `accuracy` at the last of STEPS."""
    rng = np.random.default_rng(seed)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": {"seed": seed}}))
    lines = []
    for step in range(STEPS[-1] + 1):
        spent = {"rollout/episodes": 8, "rollout/tokens": tokens, "timing_s/step": 2.0}
        spent = spent if step else {}
        lines.append(json.dumps({"step": step, **spent}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    hardness = np.random.default_rng(0).normal(0, 0.1, rows)
    for step in STEPS:
        chances = np.clip(accuracy * step / STEPS[-1] + hardness + rng.normal(0, 0.02), 0, 1)
        with (folder / "rollouts" / f"val_{step}.jsonl").open("wb") as out:
            for index, chance in enumerate(chances):
                task_row = row(f"question {index}")
                reward = float(rng.random() < chance)
                episode = Episode(f"r:{index}", "0/0", "s", [5], row=task_row, reward=reward)
                write_record(out, to_record(episode, index, 0))
    return folder


def plant_both(tmp_path: Path, accuracy: float, other: float, seeds: int = 5) -> None:
    for seed in range(1, seeds + 1):
        plant(tmp_path / f"a{seed}", accuracy, seed)
        plant(tmp_path / f"b{seed}", other, seed + 100)


def run(tmp_path: Path, capsys, *arguments: str) -> str:
    compare.main([f"{tmp_path}/a*", "--with", f"{tmp_path}/b*", *arguments])
    return capsys.readouterr().out


def change_last(folder: Path, change) -> None:
    """Change the records of the last evaluation of a run. change: of their list."""
    path = folder / "rollouts" / f"val_{STEPS[-1]}.jsonl"
    records = change(list(map(json.loads, path.read_text().splitlines())))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("other", "is_found"), [(0.4, True), (0.7, False)])
def test_an_effect_is_found_and_where_there_is_none_none_is(tmp_path, capsys, other, is_found):
    plant_both(tmp_path, 0.7, other)
    output = run(tmp_path, capsys, "--json", str(tmp_path / "out.json"))
    assert "A: 5 runs, B: 5 runs, 64 held-out rows" in output
    comparisons = json.loads((tmp_path / "out.json").read_text())
    # all runs have spent the same, so the evaluations at equal tokens and seconds are no others
    assert {one["budget"] for one in comparisons} == {"steps"}
    for one in comparisons:
        interval = one["difference"]["interval"]
        assert (one["difference"]["p_value"] < 0.05) == is_found
        assert (interval["low"] > 0) == is_found and interval["high"] > 0
    assert "At equal steps (20):" in output and "WARNING" not in output


def test_one_run_says_nothing_about_other_seeds(tmp_path, capsys):
    plant_both(tmp_path, 0.9, 0.1, seeds=1)
    output = run(tmp_path, capsys)
    assert "One of the sets has one run." in output and "p =" not in output
    assert "intervals over rows only." in output and "1 run, B: 1 run" in output


def test_at_equal_tokens_the_dearer_runs_have_fewer_steps(tmp_path, capsys):
    """B is better at equal steps, and needs twice the tokens for it."""
    for seed in (1, 2, 3):
        plant(tmp_path / f"a{seed}", 0.6, seed)
        plant(tmp_path / f"b{seed}", 0.9, seed, tokens=200)
    output = run(tmp_path, capsys, "--json", str(tmp_path / "out.json"))
    assert "At equal tokens (2,000), the last evaluations within them: A after step 20" in output
    first, _, second, _ = json.loads((tmp_path / "out.json").read_text())
    assert first["budget"] == "steps" and first["difference"]["interval"]["high"] < 0
    assert second["budget"] == "tokens" and second["steps"] == [[20] * 3, [10] * 3]
    assert second["difference"]["interval"]["high"] > first["difference"]["interval"]["high"]
    dear = RunFolder(tmp_path / "b1")
    dear.evaluations.pop(1)  # nothing between the start and the end, which costs twice
    assert pick_evaluations([RunFolder(tmp_path / "a1"), dear], "tokens") is None


def test_a_run_that_was_cut_is_named_and_does_not_set_the_step(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=5)
    (tmp_path / "b3" / "rollouts" / "val_20.jsonl").unlink()
    output = run(tmp_path, capsys)
    assert "b3 ends at step 10, others at 20. Look at the steps below." in output
    assert "A: 5 runs, B: 4 runs" in output
    first, second = re.findall(r"At equal steps .*", output)
    assert (first, second) == ("At equal steps (20):", "At equal steps (10), 5 and 5 runs:")


# --- what a run has spent, and the weights that were scored --------------------------------------


def test_seconds_are_those_of_steps_and_unknown_tokens_are_not_compared(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    path = tmp_path / "a1" / "metrics.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    lines[3] |= {"timing_s/step": 9.0, "timing_s/save_checkpoint": 7.0, "rollout/tokens": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = RunFolder(tmp_path / "a1").evaluations
    assert [one.seconds for one in evaluations] == [0, 20, 40]
    assert math.isnan(evaluations[-1].tokens)
    output = run(tmp_path, capsys)
    assert "At equal tokens (" not in output


def score_export(source: Path, folder: Path) -> Path:
    """Write the folder of `evaluate` for the export of a run, with its own last evaluation."""
    export = source / "export"
    export.mkdir(exist_ok=True)
    (export / "step.txt").write_text(str(STEPS[-1]))
    (export / "model.safetensors").write_text("weights")
    folder.mkdir()
    (folder / "evaluate.yaml").write_text("data: {seed: 1}\n")  # the recipe's
    (source / "rollouts" / f"val_{STEPS[-1]}.jsonl").rename(folder / "evaluation.jsonl")
    key = "actor_rollout_ref.model.path"
    settings = Fingerprint({key: str(export)}, {key: hash_contents(str(export), key)})
    identity.write_fingerprint(folder / "evaluation.settings.json", settings)
    return export


def test_an_evaluated_export_has_the_step_and_the_seed_of_its_run(tmp_path, capsys):
    """`evaluate` of a replay's export, under another name, against the recorded run."""
    plant(tmp_path / "a1", 0.5, 1)
    export = score_export(plant(tmp_path / "source", 0.9, 2), tmp_path / "b1")
    assert read_seed(RunFolder(tmp_path / "b1")) == 2
    output = run(tmp_path, capsys)
    assert "At equal steps (20):" in output
    assert "At equal tokens (" not in output  # what the weights have cost is not known
    (export / "model.safetensors").write_text("others")
    with pytest.raises(ConfigError, match="no longer has"):
        run(tmp_path, capsys)
    (export / "step.txt").unlink()  # the model of another folder counts as untrained
    assert "At equal steps (0):" in run(tmp_path, capsys)


def test_scores_of_another_model_in_the_folder_of_a_run_do_not_count(tmp_path):
    """`evaluate` without trainer.experiment_name writes into the folder of the recipe's run."""
    folder = plant(tmp_path / "a1", 0.5, 1)
    score_export(plant(tmp_path / "other", 0.9, 2), tmp_path / "scores")
    for name in ("evaluation.jsonl", "evaluation.settings.json"):
        (tmp_path / "scores" / name).rename(folder / name)
    names = [one.path.name for one in RunFolder(folder).evaluations]
    assert names == [f"val_{step}.jsonl" for step in STEPS]


# --- which rows are the same ---------------------------------------------------------------------


def test_test_sets_are_compared_apart(tmp_path, capsys):
    """The first half of the rows, and the second one, are of two servers."""
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    for path in tmp_path.glob("*/rollouts/*"):
        lines = path.read_text().splitlines()
        half = [line.replace('"server":"s"', '"server":"t"') for line in lines[ROWS // 2 :]]
        path.write_text("\n".join([*lines[: ROWS // 2], *half]) + "\n")
    assert "s: 32 held-out rows; t: 32 held-out rows. Brackets" in run(tmp_path, capsys)


def test_rows_without_a_reward_are_counted_and_do_not_count(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=2)

    def fail_two(records):
        records[0]["reward"] = math.nan
        records[1]["_episode"]["status"] = "http_500"
        return records

    change_last(tmp_path / "a1", fail_two)
    output = run(tmp_path, capsys)
    assert "62 held-out rows of 64, which all runs have verified" in output and "nan" not in output


def test_rows_are_the_same_in_another_order_and_copies_are_one(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    for name in ("a1", "b1"):
        change_last(tmp_path / name, lambda records: records[:30] * 8)
    before = run(tmp_path, capsys)
    assert "A: 1 run, B: 1 run, 30 held-out rows." in before
    change_last(tmp_path / "b1", lambda records: records[::-1])
    assert run(tmp_path, capsys) == before


def test_rows_with_another_truth_are_others(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    change_last(
        tmp_path / "b1",
        lambda records: records[:9] + [record | {"answer": "8"} for record in records[9:]],
    )
    output = run(tmp_path, capsys)
    assert "9 held-out rows of 119, which all runs have verified" in output


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a*", "a*"), "is in both sets"),
        (("a*", "empty"), "has no held-out scores of the model that it trained"),
        (("a*", "other"), "share 0 rows of s with a reward"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_line(tmp_path, names, message):
    plant_both(tmp_path, 0.5, 0.5, seeds=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("{}")
    for path in (plant(tmp_path / "other", 0.5, 3) / "rollouts").iterdir():
        path.write_text(path.read_text().replace("question", "another"))
    with pytest.raises(ConfigError, match=message) as caught:
        compare.main([f"{tmp_path}/{names[0]}", "--with", f"{tmp_path}/{names[1]}"])
    assert "\n" not in str(caught.value)


# --- warnings, and the report --------------------------------------------------------------------


def test_runs_of_one_seed_are_named_and_a_link_is_no_other_run(tmp_path, capsys):
    for seed in (1, 2):
        plant(tmp_path / f"a{seed}", 0.8, 1)
        plant(tmp_path / f"b{seed}", 0.3, seed)
    (tmp_path / "a3").symlink_to(tmp_path / "a1")
    output = run(tmp_path, capsys)
    assert "2 runs of A have 1 value of data.seed" in output and "A: 2 runs" in output


@pytest.mark.parametrize(
    ("key", "digest", "line"),
    [
        ("temperature", "1", "val_kwargs.temperature 0.5 -> 4"),
        ("n", "1", ""),
        ("n", "2", "the content of env.verifier=v.py:f"),
    ],
)
def test_what_decides_a_score_and_differs_is_named(tmp_path, capsys, key, digest, line):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    for name, change, content in (("a1", {}, "1"), ("b1", {key: 4}, digest)):
        rollout = {"val_kwargs": {"temperature": 0.5, "n": 1, "do_sample": True} | change}
        config = {"env": {"verifier": "v.py:f"}, "actor_rollout_ref": {"rollout": rollout}}
        OmegaConf.save(config, tmp_path / name / "config.yaml")
        fingerprint = Fingerprint({}, {"env.verifier": content})
        path = tmp_path / name / "config.fingerprint.json"
        identity.write_fingerprint(path, fingerprint)
    output = run(tmp_path, capsys)
    assert line in output and ("not scored as" in output) == bool(line)


def test_the_report_has_the_comparison_and_a_band_for_each_set(tmp_path, capsys):
    plant_both(tmp_path, 0.7, 0.4, seeds=2)
    page = tmp_path / "report.html"
    output = run(tmp_path, capsys, "--report", str(page))
    packed = re.search('id="data">([^<]*)<', page.read_text()).group(1)
    comparison = json.loads(gzip.decompress(base64.b64decode(packed)))["comparison"]
    assert comparison["lines"] == output.splitlines()[:-1]
    bands = comparison["charts"][0]["bands"]
    assert [band["name"] for band in bands] == ["A", "B"]
    for band in bands:
        assert band["x"] == list(STEPS)
        assert (np.array(band["low"]) <= band["y"]).all()
        assert (np.array(band["y"]) <= band["high"]).all()
