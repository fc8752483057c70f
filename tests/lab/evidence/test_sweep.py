"""The command `sweep`, with a stand-in for algorithm.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.data.fingerprint import Fingerprint
from kit.errors import ConfigError
from kit.recipe.keys import ROOT, flatten, merge_nested
from kit.recipe.recipe_text import parse_argument
from kit.recipe.redaction import write_yaml
from kit.run import identity
from lab.evidence import sweep
from tests.lab.evidence import test_compare

# It writes what a finished run leaves. A run whose folder has `fail` next to it fails.
STAND_IN = """
import pathlib, sys
words = sys.argv[1:]
name = words[-1].partition("=")[2]
folder = pathlib.Path("runs") / name
(pathlib.Path("runs") / "calls.txt").open("a").write(" ".join(words) + "\\n")
if (pathlib.Path("runs") / "fail").exists() and "seed2" in name:
    sys.exit("error: planted")
(folder / "export").mkdir(parents=True)
(folder / "export" / "step.txt").write_text("12")
"""
RECIPE = ["--config", "math_cpu", "--config", "cpu", "trainer.total_training_steps=12"]


def make_plan(files, words, is_dry_run=True) -> Any:
    """Make the plan of a run with these words."""
    values: dict[str, Any] = {"trainer": {"experiment_name": "sums"}}
    for word in words:
        values = merge_nested(values, parse_argument(word, {}))
    trainer = SimpleNamespace(**values["trainer"])
    recipe = SimpleNamespace(trainer=trainer, last_step=12, redacted=lambda: values)
    fingerprint = Fingerprint(flatten(values), {"env.reward": "1"}, {"k": ["r"]})
    rows = SimpleNamespace(validation=["a row"])
    return SimpleNamespace(recipe=recipe, inputs=rows, fingerprint=fingerprint)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the stand-in, as the current folder."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(sweep, "ALGORITHM", tmp_path / "stand_in.py")
    monkeypatch.setattr(sweep.cli, "plan", make_plan)
    monkeypatch.setattr(sweep, "compare_variants", lambda folder, runs: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_calls(place: Path) -> list[str]:
    path = place / "runs" / "calls.txt"
    return path.read_text().splitlines() if path.is_file() else []


def test_runs_have_the_values_of_their_variant_and_seed(place, capsys):
    sweep.main([*RECIPE, "--seeds", "2", "--vary", "actor.optim.lr=1e-5,3e-5"])
    calls = read_calls(place)
    assert len(calls) == 4
    last = calls[-1].split()
    assert last[:5] == ["--quiet", "--config", "math_cpu", "--config", "cpu"]
    assert "actor_rollout_ref.actor.optim.lr=3e-5" in last
    assert "data.seed=2" in last and "actor_rollout_ref.rollout.seed=2" in last
    assert last[-1] == "trainer.experiment_name=sums/lr=3e-5-seed2"
    assert "4 runs in runs/sums, 0 of them finished" in capsys.readouterr().out


def test_a_repeated_sweep_runs_what_is_missing(place, capsys):
    (place / "runs").mkdir()
    (place / "runs" / "fail").touch()
    with pytest.raises(ConfigError, match=r"1 of 2 runs failed: sums/base-seed2\. Read"):
        sweep.main([*RECIPE, "--seeds", "2"])
    assert "error: planted" in (place / "runs" / "sums" / "base-seed2.log").read_text()
    (place / "runs" / "fail").unlink()
    sweep.main([*RECIPE, "--seeds", "3"])
    seeds = [call.rpartition("-seed")[2] for call in read_calls(place)]
    assert seeds == ["1", "2", "2", "3"]
    assert "3 runs in runs/sums, 1 of them finished" in capsys.readouterr().out


def test_a_run_of_another_recipe_function_or_rows_is_refused(place):
    folder = place / "runs" / "sums" / "base-seed1"
    folder.mkdir(parents=True)
    words = [RECIPE[-1], *(f"{key}=1" for key in sweep.SEED_KEYS)]
    words.append("trainer.experiment_name=sums/base-seed1")
    for change, contents, rows, problem in (
        ([], {"env.reward": "1"}, {"k": ["r"]}, ""),
        (["critic.optim.lr=1"], {"env.reward": "1"}, {"k": ["r"]}, "critic.optim.lr 1 -> None"),
        ([], {"env.reward": "2"}, {"k": ["r"]}, "another recipe: env.reward. Set"),
        ([], {"env.reward": "1"}, {"k": ["s"]}, r"k has other rows: 1 added, 1 removed"),
    ):
        recipe = make_plan((), [*words, *change]).recipe
        (folder / "config.yaml").write_text(write_yaml(recipe.redacted()))
        fingerprint = Fingerprint({}, contents, rows)
        identity.write_fingerprint(folder / "config.fingerprint.json", fingerprint)
        with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
            sweep.main([*RECIPE, "--seeds", "1", "--dry-run"])
    assert not read_calls(place)


@pytest.mark.parametrize("words", [["--vary", "rollout.n"], ["--vary", "data.seed=1,2"]])
def test_bad_arguments_are_one_line(place, words):
    with pytest.raises(ConfigError) as caught:
        sweep.main([*RECIPE, *words])
    assert "\n" not in str(caught.value) and not read_calls(place)


def test_several_vary_give_all_combinations_and_a_dry_run_starts_nothing(place, capsys):
    vary = ["--vary", "config=base,dapo", "--vary", "rollout.n=4,8"]
    sweep.main([*RECIPE, "--seeds", "7,9", *vary, "--dry-run"])
    assert not read_calls(place) and not (place / "runs").exists()
    names = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    variants = ("base-n=4", "base-n=8", "dapo-n=4", "dapo-n=8")
    assert names == [f"sums/{name}-seed{seed}" for seed in (7, 9) for name in variants]


def test_commas_in_brackets_and_quotes_do_not_separate_values():
    values = ["1e-5", "[a,b]", "{x: 1, y: 2}", "'a,b'", "null"]
    assert sweep.split_values(",".join(values)) == values


def test_each_variant_is_compared_with_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = []
    for seed in (1, 2):
        for name, accuracy in (("a", 0.3), ("b", 0.6), ("b2", 0.9)):
            test_compare.plant(Path(f"runs/s/{name}-seed{seed}"), accuracy, seed)
            runs.append(sweep.SweepRun(f"s/{name}-seed{seed}", name, (), ()))
    sweep.compare_variants(Path("runs/s"), runs)
    output = capsys.readouterr().out
    assert output.count("A: 2 runs, B: 2 runs, 64 held-out rows") == 2
    assert "A = b, B = a" in output and "A = b2, B = a" in output
    assert (tmp_path / "runs" / "s" / "sweep.html").is_file()
    sweep.compare_variants(Path("runs/s"), [run for run in runs if run.variant == "a"])
    output = capsys.readouterr().out
    assert "s acc at step 20: 0." in output and "since step 0, from 0.0" in output


# A run that needs a second to save after a signal.
SAVES = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
pathlib.Path("started").touch()
time.sleep(60)
"""
SWEEP_OF_ONE = """
import pathlib, signal, sys
from lab.evidence import sweep

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as `algorithm.py` does
sweep.ALGORITHM = pathlib.Path("saves.py")
sweep.start(sweep.SweepRun("r", "base", (), ()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_saves_before_a_stopped_sweep_ends(tmp_path, number):
    (tmp_path / "saves.py").write_text(SAVES)
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP_OF_ONE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:  # a terminal sends it to the sweep and to the run
        os.killpg(process.pid, number)
    else:
        process.terminate()
    assert process.wait(30) != 0
    assert (tmp_path / "saved").exists()
