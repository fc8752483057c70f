"""The command `sweep`, with a stand-in for algorithm.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from kit.config.keys import ROOT, flatten
from kit.config.redaction import redacted
from kit.data.fingerprint import Fingerprint
from kit.errors import ConfigError
from kit.runs import identity
from lab.evidence import sweep

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


FOLDER = "runs/${trainer.experiment_name}/checkpoints"


def make_plan(files, words, is_dry_run=True, **values) -> Any:
    """The plan of a run with these words. values: other keys of its recipe."""
    trainer = {"experiment_name": "sums", "total_training_steps": 12, "default_local_dir": FOLDER}
    verl = OmegaConf.merge({"trainer": trainer}, values, OmegaConf.from_dotlist(list(words)))
    recipe = SimpleNamespace(trainer=verl.trainer, verl=verl)
    assert isinstance(verl, DictConfig)
    fingerprint = Fingerprint(flatten(redacted(verl)), {"env.reward": "1"}, {"k": ["r"]})
    rows = SimpleNamespace(validation=["a row"])
    return SimpleNamespace(recipe=recipe, inputs=rows, fingerprint=fingerprint)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with rows, a model and the stand-in, as the current folder."""
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
    with pytest.raises(ConfigError, match=r"1 of 2 runs failed: sums/base-seed2\. Read") as caught:
        sweep.main([*RECIPE, "--seeds", "2"])
    assert "\n" not in str(caught.value)
    assert "error: planted" in (place / "runs" / "sums" / "base-seed2.log").read_text()
    (place / "runs" / "fail").unlink()
    sweep.main([*RECIPE, "--seeds", "3"])
    assert [call.rpartition("-")[2] for call in read_calls(place)] == [
        "seed1",
        "seed2",
        "seed2",
        "seed3",
    ]
    assert "3 runs in runs/sums, 1 of them finished" in capsys.readouterr().out


def plant(name: str, **values) -> Path:
    """Write the recipe of a run of this sweep."""
    folder = Path("runs") / "sums" / name
    folder.mkdir(parents=True)
    words = [word for word in RECIPE if "=" in word]
    words += ["data.seed=1", "actor_rollout_ref.rollout.seed=1"]
    words.append(f"trainer.experiment_name=sums/{name}")
    OmegaConf.save(make_plan((), words, **values).recipe.verl, folder / "config.yaml")
    return folder


def test_a_run_of_another_recipe_is_refused(place):
    """Two keys with the same last part have the same folders, as lr of actor and critic."""
    plant("lr=1e-5-seed1", critic={"optim": {"lr": 1e-5}})
    message = (
        r"lr=1e-5-seed1 is a run of another recipe: .*critic.optim.lr 1e-05 -> None.* Set another "
        "trainer.experiment_name"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        sweep.main([*RECIPE, "--seeds", "1", "--vary", "actor.optim.lr=1e-5"])
    assert "\n" not in str(caught.value) and not read_calls(place)


def test_a_run_with_an_edited_function_or_other_rows_is_refused(place):
    run = plant("base-seed1")
    for contents, rows, problem in (
        ({"env.reward": "1"}, {"k": ["r"]}, ""),
        ({"env.reward": "2"}, {"k": ["r"]}, "another recipe: env.reward, 1 changes in all. Set"),
        ({"env.reward": "1"}, {"k": ["s"]}, r"k has other rows: 1 added, 1 removed"),
    ):
        fingerprint = Fingerprint({}, contents, rows)
        identity.write_fingerprint(run / "config.fingerprint.json", fingerprint)
        expected = pytest.raises(ConfigError, match=problem) if problem else nullcontext()
        with expected:
            sweep.main([*RECIPE, "--seeds", "1", "--dry-run"])


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("ck", ["trainer.default_local_dir=ck/sums/base-seed1"]),
        ("ck/${trainer.experiment_name}", []),
    ],
)
def test_each_run_has_its_own_folder_of_checkpoints(place, monkeypatch, folder, words):
    planned = partial(make_plan, trainer={"default_local_dir": folder})
    monkeypatch.setattr(sweep.cli, "plan", planned)
    sweep.main([*RECIPE, "--seeds", "1"])
    [call] = read_calls(place)
    assert [word for word in call.split() if "default_local_dir" in word] == words


def test_a_dry_run_starts_nothing(place, capsys):
    sweep.main([*RECIPE, "--seeds", "7,9", "--vary", "config=base,ppo", "--dry-run"])
    output = capsys.readouterr().out
    assert not read_calls(place) and not (place / "runs").exists()
    assert [line.strip() for line in output.splitlines()[1:]] == [
        "sums/base-seed7",
        "sums/ppo-seed7",
        "sums/base-seed9",
        "sums/ppo-seed9",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds 0 is no number of seeds"),
        (["--seeds", "x"], "--seeds x is no number of seeds"),
        (["--vary", "actor.optim.lr"], "is not KEY=A,B"),
        (["--vary", "=1,2"], "is not KEY=A,B"),
        (["--vary", "rollout.n=,"], "is not KEY=A,B"),
        (["--vary", "rollout.n=1,1"], "Two variants would have the folder n=1"),
        (["--vary", "data.seed=1,2"], "data.seed=1,2: a sweep sets this key for each run"),
        (["--vary", "rollout.seed=1,2"], "rollout.seed=1,2: a sweep sets this key for each run"),
        (["+data.seed=7"], "Use --seeds"),
        (["--vary", "config=a/x.yaml,b/x.yaml"], "Two variants would have the folder x"),
        (["--vary", "model.path=a/b,a:b"], "Two variants would have the folder path=a_b"),
    ],
)
def test_bad_arguments_are_one_line(place, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sweep.main([*RECIPE, *arguments])
    assert "\n" not in str(caught.value) and not read_calls(place)


def test_a_run_that_is_invalid_is_named(place, monkeypatch):
    def plan(files, words, is_dry_run):
        if "actor_rollout_ref.actor.optim.lr=fast" in words:
            raise ConfigError("lr=fast is no number. Change it.")
        planned = make_plan(files, words)
        planned.inputs.validation = [] if "env.val_files=[]" in words else ["a row"]
        return planned

    monkeypatch.setattr(sweep.cli, "plan", plan)
    with pytest.raises(ConfigError, match="sums/lr=fast-seed1: lr=fast is no number"):
        sweep.main([*RECIPE, "--vary", "actor.optim.lr=1e-5,fast"])
    with pytest.raises(ConfigError, match="sums/base-seed1 has no held-out rows to compare"):
        sweep.main([*RECIPE, "env.val_files=[]"])


def test_several_vary_give_all_combinations():
    variants = sweep.list_variants(["config=base,dapo", "rollout.n=4,8"], ["math"], ["x=1"])
    assert [one.name for one in variants] == ["base-n=4", "base-n=8", "dapo-n=4", "dapo-n=8"]
    assert variants[2].configs == ("math", "dapo")
    assert variants[2].words == ("x=1", "actor_rollout_ref.rollout.n=4")
    versions = sweep.list_variants(["config=v1.5,v1.6.yaml"], [], [])
    assert [one.name for one in versions] == ["v1.5", "v1.6"]


@given(st.lists(st.sampled_from(["1e-5", "[a,b]", "{x: 1, y: 2}", "'a,b'", "null"]), min_size=1))
def test_commas_in_brackets_and_quotes_do_not_separate_values(values):
    assert sweep.split_values(",".join(values)) == values


@given(st.text(min_size=1).filter(lambda text: "," not in text))
def test_the_name_of_a_variant_is_the_name_of_a_folder(value):
    name = sweep.name_value("actor.optim.lr", value)
    assert "/" not in name and not name.startswith(".") and Path(name).name == name


def test_each_variant_is_compared_with_the_first(tmp_path, monkeypatch, capsys):
    from tests.lab.evidence.test_compare import plant

    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        for name, accuracy in (("a", 0.3), ("b", 0.6), ("b2", 0.9)):
            plant(tmp_path / "runs" / "s" / f"{name}-seed{seed}", accuracy, seed)
    # an unfinished run of an earlier command, with more seeds, is no part of the comparison
    (tmp_path / "runs" / "s" / "a-seed3").mkdir()
    runs = [
        sweep.SweepRun(f"s/{name}-seed{seed}", name, (), ())
        for seed in (1, 2)
        for name in ("a", "b", "b2")
    ]
    sweep.compare_variants(Path("runs/s"), runs)
    output = capsys.readouterr().out
    assert output.count("A: 2 runs, B: 2 runs, 64 held-out rows") == 2
    assert "A = b, B = a" in output and "A = b2, B = a" in output
    assert (tmp_path / "runs" / "s" / "sweep.html").is_file()
    sweep.compare_variants(Path("runs/s"), [run for run in runs if run.variant == "a"])
    assert "acc at step 20: 0." in capsys.readouterr().out


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
