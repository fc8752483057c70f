"""Tests benchmarks/gpu_acceptance.py: its slices resume, and a failure does not end the others."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture
def acceptance(tmp_path, monkeypatch):
    """The module, with its results in a temporary folder. The test sets the slices."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(
        "gpu_acceptance", ROOT / "benchmarks" / "gpu_acceptance.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_acceptance", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "acceptance")
    monkeypatch.setattr(module, "gpus", lambda *_: ["H100"])
    return module


def run(acceptance, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    return int(ended.value.code)


def test_every_slice_fits_in_nine_minutes(acceptance):
    for piece in acceptance.SLICES.values():
        assert piece.seconds + acceptance.RESERVE_S < acceptance.SESSION_S == 540.0


def test_a_failed_slice_is_in_the_report_and_the_others_run(acceptance, monkeypatch, capsys):
    runs: list[str] = []

    def fail(context):
        runs.append("bad")
        sys.exit("algorithm.py ended with 1: CUDA out of memory")

    def hold(context):
        runs.append("good")
        return acceptance.Part(["| a table |"], {"it holds": True})

    slices = {
        "bad": acceptance.Slice(1, fail),
        "good one": acceptance.Slice(1, hold),
        "wide": acceptance.Slice(1, fail, gpus=2),
    }
    monkeypatch.setattr(acceptance, "SLICES", slices)
    assert run(acceptance, monkeypatch) == 1 and runs == ["bad", "good"]
    printed = capsys.readouterr().out
    report = (acceptance.FOLDER / "report.md").read_text()
    for text in (printed, report):
        assert "CUDA out of memory" in text and "- DOES NOT HOLD: the slice runs to its end" in text
        assert "| a table |" in text and "- holds: it holds" in text
    assert run(acceptance, monkeypatch) == 1 and runs == ["bad", "good"]  # no slice is left to run
    monkeypatch.setattr(acceptance, "SLICES", slices | {"bad": acceptance.Slice(1, hold)})
    assert run(acceptance, monkeypatch, "--again", "bad") == 0 and runs == ["bad", "good", "good"]


def test_a_slice_that_does_not_fit_in_the_time_left_runs_in_the_next_command(
    acceptance, monkeypatch, capsys
):
    def hold(context):
        return acceptance.Part([], {"it holds": True})

    slices = {"short": acceptance.Slice(1, hold), "long": acceptance.Slice(500, hold)}
    monkeypatch.setattr(acceptance, "SLICES", slices)
    monkeypatch.setattr(acceptance, "SESSION_S", 100.0)
    assert run(acceptance, monkeypatch) == 3
    assert "Left: long. Repeat the same command." in capsys.readouterr().out
    monkeypatch.setattr(acceptance, "SESSION_S", 540.0)
    assert run(acceptance, monkeypatch) == 0
    assert "short" not in capsys.readouterr().out


def test_a_slice_that_takes_too_long_is_ended(acceptance):
    memory = acceptance.MemoryLog(deadline=0.0)
    with pytest.raises(TimeoutError, match="took too long"):
        memory([])


def test_a_step_in_which_sampler_and_trainer_disagree_fails_its_check(acceptance):
    lines = [{"training/rollout_probs_diff_mean": 0.01, "actor/grad_norm": 1.0}] * 2
    assert all(acceptance.check_steps(lines, 2).values())
    assert not all(acceptance.check_steps(lines, 3).values())
    apart = [*lines[:1], {**lines[1], "training/rollout_probs_diff_mean": 0.03}]
    assert list(acceptance.check_steps(apart, 2).values()) == [True, False]
    infinite = [*lines[:1], {**lines[1], "actor/grad_norm": float("inf")}]
    assert list(acceptance.check_steps(infinite, 2).values()) == [False, True]


def test_memory_is_reported_for_the_stage_in_which_it_was_measured(acceptance, monkeypatch):
    memory = acceptance.MemoryLog(deadline=float("inf"))
    readings = [(91.0, 60.0), (98.0, 20.0)]
    memory.readings = [acceptance.MemoryReading(*reading) for reading in readings]
    line = {"time": 100.0, "timing_s/gen": 7.0, "timing_s/update_actor": 5.0}
    table = acceptance.stage_table([{**line, "perf/throughput": 1000.0}], memory)
    assert table[2:4] == ["| gen | 7.00 | 60.0 | 60.0 |", "| update_actor | 5.00 | 20.0 | 20.0 |"]


def test_only_the_slice_that_resumes_starts_from_a_checkpoint(acceptance, monkeypatch):
    """With a checkpoint of the last step, a repeated slice would have nothing left to train."""
    commands = []

    def record(command, *_):
        commands.append(command)
        (acceptance.FOLDER / "train").mkdir(parents=True, exist_ok=True)
        (acceptance.FOLDER / "train" / "metrics.jsonl").write_text("")

    monkeypatch.setattr(acceptance, "run", record)
    context = acceptance.Context(["math"], [], 1, acceptance.MemoryLog(deadline=0.0))
    acceptance.train("train", context, [])
    acceptance.check_resume(context)
    assert ["trainer.resume_mode=disable" in command for command in commands] == [True, False]


def test_the_lowest_times_on_a_gpu_are_reported(acceptance, monkeypatch):
    limits = {"gen": {"step_2": [3.0]}, "packed": {"step_2": [2.0]}, "copy": [0.1]}
    monkeypatch.setattr(acceptance, "measure_limits", lambda *_: limits)
    context = acceptance.Context([], [], 1, acceptance.MemoryLog(deadline=0.0))
    assert acceptance.measure_best(context).lines == [
        "Lowest times: sampling 3.00 s, update 2.00 s, copy of the weights 0.10 s."
    ]


def test_the_files_for_a_node_without_network_are_listed_by_size(tmp_path):
    import subprocess

    for name in ("model", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    (tmp_path / "rows" / "train.jsonl").write_text("{}\n" * 500_000)
    out = tmp_path / "out"
    arguments = ["--model", tmp_path / "model", "--gsm8k", tmp_path / "rows", "--without-packages"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_carry.py", out, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [line.split()[-1] for line in done.stdout.splitlines()[:-1]]
    assert sorted(names) == ["gsm8k", "model", "quintet.tar", "run.sh"]
    assert "1.5 MB  gsm8k" in done.stdout and (Path(out) / "model" / "config.json").is_file()
