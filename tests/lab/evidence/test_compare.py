"""The command `compare` on planted runs: with an effect, without, and with mistakes."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from kit.data.episode import Episode
from kit.data.fingerprint import Fingerprint, hash_contents
from kit.data.rollout_files import to_record, write_record
from kit.errors import ConfigError, RunError
from kit.runs import identity
from lab.evidence import compare
from lab.evidence.curves import (
    find_runs,
    pick_evaluations,
    read_curve,
    read_rewards,
    read_seed,
)
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


def test_a_planted_effect_is_found(tmp_path, capsys):
    plant_both(tmp_path, 0.7, 0.4)
    output = run(tmp_path, capsys, "--json", str(tmp_path / "out.json"))
    assert "A: 5 runs, B: 5 runs, 64 held-out rows" in output
    comparisons = json.loads((tmp_path / "out.json").read_text())
    # all runs have spent the same, so the evaluations at equal tokens and seconds are no others
    assert {one["budget"] for one in comparisons} == {"steps"}
    for one in comparisons:
        low = one["difference"]["interval"]["low"]
        assert one["difference"]["p_value"] < 0.05 and 0.1 < low < 0.3
        assert one["needed_seeds"] <= 5
    assert "At equal steps (20):" in output and "A difference of this size takes" in output


def test_without_an_effect_none_is_found(tmp_path, capsys):
    plant_both(tmp_path, 0.5, 0.5)
    run(tmp_path, capsys, "--json", str(tmp_path / "out.json"))
    for one in json.loads((tmp_path / "out.json").read_text()):
        interval = one["difference"]["interval"]
        assert interval["low"] < 0 < interval["high"] and one["difference"]["p_value"] > 0.05


def test_one_run_says_nothing_about_other_seeds(tmp_path, capsys):
    plant_both(tmp_path, 0.9, 0.1, seeds=1)
    output = run(tmp_path, capsys)
    assert "One of the sets has one run." in output and "p =" not in output
    assert "intervals over rows only." in output and "1 run, B: 1 run" in output


def test_an_equal_budget_is_what_all_runs_have_spent(tmp_path):
    cheap, dear = plant(tmp_path / "a1", 0.5, 1), plant(tmp_path / "b1", 0.5, 2, tokens=200)
    curves = [read_curve(cheap), read_curve(dear)]
    amount, picked = pick_evaluations(curves, "tokens")
    assert amount == 2000 and [one.steps for one in picked] == [20, 10]
    assert pick_evaluations(curves, "steps")[0] == 20
    curves[1].evaluations.pop(1)  # nothing between the start and the end, which costs twice
    assert pick_evaluations(curves, "tokens") is None


def test_equal_steps_are_steps_that_all_runs_evaluated(tmp_path):
    curves = [read_curve(plant(tmp_path / name, 0.5, 1)) for name in ("a1", "b1")]
    curves[1].evaluations.pop()
    amount, picked = pick_evaluations(curves, "steps")
    assert amount == 10 and [one.steps for one in picked] == [10, 10]
    curves[1].evaluations.pop()
    curves[1].evaluations.append(curves[1].evaluations[0]._replace(steps=15))
    with pytest.raises(ConfigError, match=r"b1: 0, 15. Set the same trainer.test_freq"):
        pick_evaluations(curves, "steps")


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


def test_an_evaluated_export_has_the_step_of_its_weights(tmp_path, capsys):
    """`evaluate` of a replay's export, under another name, against the recorded run."""
    plant(tmp_path / "a1", 0.5, 1)
    export = score_export(plant(tmp_path / "source", 0.9, 2), tmp_path / "b1")
    output = run(tmp_path, capsys)
    assert "At equal steps (20):" in output
    assert "At equal tokens (" not in output  # what the weights have cost is not known
    (export / "step.txt").unlink()  # the model of another folder counts as untrained
    assert "At equal steps (0):" in run(tmp_path, capsys)


def test_scored_exports_have_the_seeds_of_their_runs(tmp_path, capsys):
    for seed in (1, 2, 3):
        plant(tmp_path / f"a{seed}", 0.9, seed)
        score_export(plant(tmp_path / f"source{seed}", 0.4, seed), tmp_path / f"b{seed}")
    output = run(tmp_path, capsys)
    assert "WARNING" not in output and [read_seed(tmp_path / f"b{n}") for n in (1, 2)] == [1, 2]


def test_scores_of_weights_that_were_replaced_are_refused(tmp_path):
    plant(tmp_path / "a1", 0.5, 1)
    export = score_export(plant(tmp_path / "source", 0.9, 2), tmp_path / "b1")
    (export / "model.safetensors").write_text("others")
    with pytest.raises(ConfigError, match="no longer has") as caught:
        compare.main([f"{tmp_path}/a1", "--with", f"{tmp_path}/b1"])
    assert "\n" not in str(caught.value)


def test_scores_of_another_model_in_the_folder_of_a_run_do_not_count(tmp_path):
    """`evaluate` without trainer.experiment_name writes into the folder of the recipe's run."""
    folder = plant(tmp_path / "a1", 0.5, 1)
    plant(tmp_path / "other", 0.9, 2)
    score_export(tmp_path / "other", tmp_path / "scores")
    for name in ("evaluation.jsonl", "evaluation.settings.json"):
        (tmp_path / "scores" / name).rename(folder / name)
    assert [one.path.name for one in read_curve(folder).evaluations] == [
        f"val_{step}.jsonl" for step in STEPS
    ]


def test_runs_of_one_seed_are_named(tmp_path, capsys):
    for seed in (1, 2):
        plant(tmp_path / f"a{seed}", 0.8, 1)
        plant(tmp_path / f"b{seed}", 0.3, seed)
    assert "2 runs of A have 1 value of data.seed" in run(tmp_path, capsys)


def test_a_set_of_runs_has_its_gain_since_step_0(tmp_path):
    runs = [plant(tmp_path / f"a{seed}", 0.7, seed) for seed in (1, 2, 3)]
    first, gain, *_ = compare.describe_runs(runs)
    assert re.fullmatch(r"s acc at step 20: 0\.\d+ \[.*\], 3 runs, 64 held-out rows", first)
    assert re.fullmatch(
        r" +\+0\.6\d+ \[\+0\.\d+, \+0\.\d+\] since step 0, from 0\.0\d+ \[.*\]", gain
    )
    first, gain, *_ = compare.describe_runs(runs[:1])
    assert first.endswith("1 run, so over rows only, 64 held-out rows") and "since step 0" in gain


def test_what_an_earlier_run_spent_is_not_known(tmp_path, capsys):
    """It has only the tokens that were trained on, and dynamic sampling leaves out most."""
    plant_both(tmp_path, 0.8, 0.3, seeds=2)
    path = tmp_path / "a1" / "metrics.jsonl"
    path.write_text(path.read_text().replace("rollout/tokens", "perf/total_num_tokens"))
    assert math.isnan(read_curve(tmp_path / "a1").evaluations[-1].tokens)
    output = run(tmp_path, capsys)
    assert "At equal tokens (" not in output and "not known what a run has spent" in output


def test_seconds_are_those_of_steps_without_checkpoints(tmp_path):
    folder = plant(tmp_path / "a1", 0.5, 1)
    lines = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    lines[3] |= {"timing_s/step": 9.0, "timing_s/save_checkpoint": 7.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.seconds for one in read_curve(folder).evaluations] == [0, 20, 40]


def test_test_sets_are_compared_apart(tmp_path, capsys):
    """The first half of the rows, and the second one, are of two servers."""
    for seed, name in itertools.product((1, 2), "ab"):
        folder = plant(tmp_path / f"{name}{seed}", 0.8 if name == "a" else 0.3, seed)
        for path in (folder / "rollouts").iterdir():
            lines = path.read_text().splitlines()
            half = [line.replace('"server":"s"', '"server":"t"') for line in lines[ROWS // 2 :]]
            path.write_text("\n".join([*lines[: ROWS // 2], *half]) + "\n")
    output = run(tmp_path, capsys, "--json", str(tmp_path / "out.json"))
    assert "s: 32 held-out rows; t: 32 held-out rows. Brackets" in output
    first, *_, last = json.loads((tmp_path / "out.json").read_text())
    assert (first["test_set"], last["test_set"]) == ("s", "t")
    assert first["rows"] == last["rows"] == 32


def test_rows_that_some_run_did_not_verify_are_counted(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=2)
    path = tmp_path / "a1" / "rollouts" / "val_20.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"reward": None})
    path.write_text("\n".join(lines) + "\n")
    assert "63 held-out rows of 64, which all runs have verified" in run(tmp_path, capsys)


def test_failed_episodes_do_not_count(tmp_path):
    folder = plant(tmp_path / "a1", 1.0, 1)
    path = folder / "rollouts" / "val_20.jsonl"
    episode = Episode("r:0", "0/0", "s", [5], row=row("question 0"), status="http_500")
    with path.open("ab") as out:
        write_record(out, to_record(episode, 0, 1))
    rewards = read_rewards(path)["s"]
    assert len(rewards) == ROWS and sum(map(len, rewards.values())) == ROWS


def change_records(folder: Path, change) -> None:
    """Write the last evaluation of a run again. change: of its list of records."""
    path = folder / "rollouts" / f"val_{STEPS[-1]}.jsonl"
    records = change(list(map(json.loads, path.read_text().splitlines())))
    episodes = []
    for record in records:
        fields = ("responses_create_params", "question", "answer", "metadata")
        task_row = {name: record[name] for name in fields}
        episodes.append(Episode("r:0", "0/0", "s", [5], row=task_row, reward=record["reward"]))
    with path.open("wb") as out:
        for index, episode in enumerate(episodes):
            write_record(out, to_record(episode, index, 0))


def test_rows_are_the_same_in_another_order(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    before = run(tmp_path, capsys)
    read_rewards.cache_clear()
    change_records(tmp_path / "b1", lambda records: records[::-1])
    assert run(tmp_path, capsys) == before and "64 held-out rows." in before


def test_rows_with_another_truth_are_others_and_few_common_rows_are_a_warning(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    change_records(
        tmp_path / "b1",
        lambda records: records[:9] + [record | {"answer": "8"} for record in records[9:]],
    )
    output = run(tmp_path, capsys)
    assert "WARNING     s: only 9 of 119 held-out rows are in all runs" in output


def test_copies_of_a_problem_are_one_row(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    for name in ("a1", "b1"):
        change_records(tmp_path / name, lambda records: records[:30] * 8)
    assert "A: 1 run, B: 1 run, 30 held-out rows." in run(tmp_path, capsys)


def test_rewards_that_are_not_numbers_are_named_and_left_out(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    path = tmp_path / "a1" / "rollouts" / "val_20.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"reward": math.nan})
    path.write_text("\n".join(lines) + "\n")
    metrics = tmp_path / "a1" / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text().replace('"rollout/tokens": 100', '"rollout/tokens": null')
    )
    output = run(tmp_path, capsys)
    assert "val_20.jsonl: 1 rewards are no finite numbers, and do not count" in output
    assert "a1: rollout/tokens of step 20 is not known" in output and "nan" not in output
    assert "63 held-out rows of 64" in output


def test_a_run_that_was_cut_is_named_and_does_not_set_the_step(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=5)
    (tmp_path / "b3" / "rollouts" / "val_20.jsonl").unlink()
    output = run(tmp_path, capsys)
    assert "b3 ends at step 10, others at 20. Look at the steps below." in output
    assert "A: 5 runs, B: 4 runs" in output
    first, second = re.findall(r"At equal steps .*", output)
    assert (first, second) == ("At equal steps (20):", "At equal steps (10), 5 and 5 runs:")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rollout": {"val_kwargs": {"temperature": 1.0}}}, "val_kwargs.temperature 0.5 -> 1.0"),
        ({"rollout": {"val_kwargs": {"do_sample": False}}}, "val_kwargs.do_sample True -> False"),
        ({"rollout": {"multi_turn": {"max_assistant_turns": 3}}}, "max_assistant_turns None -> 3"),
        ({"rollout": {"val_kwargs": {"n": 4}}}, ""),
        ({"actor": {"optim": {"lr": 0.1}}}, ""),
    ],
)
def test_a_key_that_decides_a_score_and_differs_is_named(tmp_path, capsys, change, line):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    base = {"rollout": {"val_kwargs": {"temperature": 0.5, "do_sample": True}}}
    for name, changes in (("a1", {}), ("b1", change)):
        config = OmegaConf.merge({"data": {"seed": 1}}, {"actor_rollout_ref": base})
        config = OmegaConf.merge(config, {"actor_rollout_ref": changes})
        OmegaConf.save(config, tmp_path / name / "config.yaml")
    output = run(tmp_path, capsys)
    assert line in output and ("not scored as" in output) == bool(line)


def test_an_edited_verifier_or_template_is_named(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=1)
    for name, digest in (("a1", "1"), ("b1", "2")):
        contents = {"env.verifier": digest, "the chat template": digest}
        path = tmp_path / name / "config.fingerprint.json"
        identity.write_fingerprint(path, Fingerprint({}, contents))
        (tmp_path / name / "config.yaml").write_text("env: {verifier: v.py:f}\ndata: {seed: 1}\n")
    output = run(tmp_path, capsys)
    assert "not scored as" in output and "the content of env.verifier=v.py:f" in output
    assert ": the chat template. That may be" in output


def test_a_run_that_is_named_twice_counts_once(tmp_path, capsys):
    plant_both(tmp_path, 0.8, 0.3, seeds=2)
    (tmp_path / "a3").symlink_to(tmp_path / "a1")
    assert "A: 2 runs" in run(tmp_path, capsys)
    (tmp_path / "a3").unlink()
    shutil.copytree(tmp_path / "a1", tmp_path / "a4")
    assert "is a copy of" in run(tmp_path, capsys)
    (tmp_path / "b3").symlink_to(tmp_path / "a1")
    with pytest.raises(ConfigError, match="b3 is in both sets"):
        run(tmp_path, capsys)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("none*", "b*"), "matches no run"),
        (("a*", "a*"), "is in both sets"),
        (("a*", "empty"), "has no evaluation of its own weights"),
        (("a*", "other"), "share 0 rows of s with a reward"),
        (("a*", "third"), "no test set in common, only s, t"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_line(tmp_path, names, message):
    plant(tmp_path / "a1", 0.5, 1)
    plant(tmp_path / "b1", 0.5, 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("{}")
    other = plant(tmp_path / "other", 0.5, 3)
    for path in (other / "rollouts").iterdir():
        path.write_text(path.read_text().replace("question", "another"))
    third = plant(tmp_path / "third", 0.5, 3)
    for path in (third / "rollouts").iterdir():
        path.write_text(path.read_text().replace('"server":"s"', '"server":"t"'))
    with pytest.raises(ConfigError, match=message) as caught:
        compare.main([f"{tmp_path}/{names[0]}", "--with", f"{tmp_path}/{names[1]}"])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        compare.compare_runs(*[find_runs([f"{tmp_path}/{name}"]) for name in names])


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


def test_numbers_that_cannot_be_written_are_one_line(tmp_path):
    plant_both(tmp_path, 0.7, 0.4, seeds=1)
    out = tmp_path / "missing" / "out.json"
    with pytest.raises(RunError, match=r"out\.json cannot be written") as caught:
        compare.main([f"{tmp_path}/a*", "--with", f"{tmp_path}/b*", "--json", str(out)])
    assert "\n" not in str(caught.value)
