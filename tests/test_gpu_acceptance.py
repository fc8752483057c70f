"""Tests benchmarks/gpu_acceptance.py: a failure does not end the others, and checks can fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from tests.helpers import nodes
from tests.helpers.recipes import ROOT


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
    monkeypatch.setattr(module, "gpus", lambda *_: ["40000"])
    return module


def run(acceptance, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    return int(ended.value.code)


def simple_slices(acceptance, runs: list[str], **seconds: float) -> dict:
    """A slice for each name, which holds and records its name. Names that begin with bad fail."""

    def make(name: str):
        def measure(context):
            runs.append(name)
            if name.startswith("bad"):
                sys.exit("algorithm.py ended with 1: CUDA out of memory")
            return acceptance.Part(["| a table |"], {"it holds": True})

        return acceptance.Slice(seconds[name], measure=measure)

    return {name: make(name) for name in seconds}


def test_a_failed_slice_is_in_the_report_and_the_others_run(acceptance, monkeypatch, capsys):
    runs: list[str] = []
    slices = simple_slices(acceptance, runs, bad=1, good=1, wide=1)
    slices["wide"] = slices["wide"]._replace(gpus=2)
    monkeypatch.setattr(acceptance, "SLICES", slices)
    assert run(acceptance, monkeypatch) == 1 and runs == ["bad", "good"]
    printed = capsys.readouterr().out
    report = (acceptance.FOLDER / "report.md").read_text()
    for text in (printed, report):
        assert "CUDA out of memory" in text and "- DOES NOT HOLD: the slice runs to its end" in text
        assert "| a table |" in text and "- holds: it holds" in text
        assert "it needs 2 GPUs" in text
    assert run(acceptance, monkeypatch) == 1 and runs == ["bad", "good"]  # no slice is left to run
    monkeypatch.setattr(acceptance, "SLICES", slices | {"bad": slices["good"]})
    assert run(acceptance, monkeypatch, "--only", "bad") == 0 and runs == ["bad", "good", "good"]


def test_only_the_slices_that_fit_into_the_budget_run(acceptance, monkeypatch, capsys):
    runs: list[str] = []
    slices = simple_slices(acceptance, runs, first=1, long=500, last=9)
    monkeypatch.setattr(acceptance, "SLICES", slices)
    assert run(acceptance, monkeypatch, "--budget", "100") == 3 and runs == ["first", "last"]
    assert "long: not run, because it takes 500 s, and 10 s are left" in capsys.readouterr().out
    assert run(acceptance, monkeypatch) == 0 and runs == ["first", "last", "long"]


def test_an_unknown_slice_is_refused(acceptance, monkeypatch, capsys):
    assert run(acceptance, monkeypatch, "--only", "training,nothing") == 2
    assert "nothing is none of environment, training" in capsys.readouterr().err


def test_a_slice_that_takes_too_long_is_ended(acceptance):
    memory = acceptance.MemoryLog(deadline=0.0)
    with pytest.raises(TimeoutError, match="took too long"):
        memory([])


def test_a_slice_without_flash_attention_is_left_out_only_on_a_gpu(acceptance, monkeypatch):
    monkeypatch.setattr(acceptance, "has_flash_attention", lambda: False)
    assert acceptance.find_obstacle("deterministic", 1) == "it needs flash-attn"
    assert acceptance.find_obstacle("deterministic", 0) == ""
    assert acceptance.find_obstacle("training", 1) == ""


LINE = {  # the metrics of a healthy step
    "step": 2,
    "time": 100.0,
    "timing_s/step": 13.0,
    "timing_s/gen": 7.0,
    "timing_s/update_actor": 5.0,
    "actor/grad_norm": 1.0,
    "actor/kl_loss": 0.045,
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "perf/throughput": 1000.0,
    "rollout/failed_frac": 0.0,
    "rollout/staleness/max": 1.0,
    "rollout_corr/k3_kl": 0.003,
    "training/rollout_actor_probs_pearson_corr": 0.9997,
    "training/rollout_probs_diff_mean": 0.002,
}


def make_training(acceptance, *lines: dict, readings: tuple = (), folder=None):
    memory = acceptance.MemoryLog(deadline=float("inf"))
    memory.readings = [acceptance.MemoryReading(*reading) for reading in readings]
    return acceptance.Training([LINE | line for line in lines], memory, folder)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("check_steps", {"actor/grad_norm": float("inf")}),
        ("check_steps", {"actor/grad_norm": 0.0}),
        ("check_steps", {"critic/advantages/min": 1.0}),
        ("check_steps", {"rollout/failed_frac": 0.1}),
        ("check_agreement", {"training/rollout_probs_diff_mean": 0.03}),
        ("check_agreement", {"training/rollout_probs_diff_mean": float("nan")}),
        ("check_agreement", {"training/rollout_actor_probs_pearson_corr": 0.9}),
        ("check_sync", {"rollout_corr/k3_kl": 0.045}),
        ("check_ahead", {"rollout/staleness/max": 0.0}),
    ],
)
def test_each_check_of_a_run_can_fail(acceptance, check, change):
    arguments = (2,) if check == "check_steps" else ()
    function = getattr(acceptance, check)
    assert all(function(make_training(acceptance, {}, {}), *arguments).values())
    holds = function(make_training(acceptance, change, change), *arguments)
    assert list(holds.values()).count(False) == 1


def test_a_run_with_a_missing_step_fails(acceptance):
    assert not all(acceptance.check_steps(make_training(acceptance, {}), 2).values())


def test_a_resumed_run_that_starts_again_fails(acceptance):
    steps = [{"step": number, "actor/kl_loss": number * 0.02} for number in (1, 2, 3)]
    assert all(acceptance.check_resume(make_training(acceptance, *steps)).values())
    restarted = [*steps[:2], {"step": 3, "actor/kl_loss": 0.0}]
    assert not all(acceptance.check_resume(make_training(acceptance, *restarted)).values())


def test_memory_is_reported_for_the_stage_in_which_it_was_measured(acceptance):
    training = make_training(acceptance, {}, readings=((91.0, 60.0), (98.0, 20.0)))
    table = acceptance.stage_table(training, {"generate": "49.3"})
    assert table[2:4] == [
        "| gen | 7.00 | 60.0 | 60.0 | 49.3 |",
        "| update_actor | 5.00 | 20.0 | 20.0 |  |",
    ]
    assert list(acceptance.check_sleep(training).values()) == [True]
    asleep = make_training(acceptance, {}, readings=((91.0, 20.0), (98.0, 20.0)))
    assert list(acceptance.check_sleep(asleep).values()) == [False]
    unread = make_training(acceptance, {}, readings=((91.0, 60.0),))  # a short update
    assert acceptance.check_sleep(unread) == {}


def finish_run(acceptance, name: str):
    """A replacement for measure.run, which writes the files of a run."""

    def write(command, log, memory, every):
        folder = acceptance.FOLDER / name
        (folder / "checkpoints" / "global_step_2").mkdir(parents=True, exist_ok=True)
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export" / "config.json").write_text("{}")
        steps = [LINE | {"step": number, "actor/pg_loss": 0.1} for number in (1, 2)]
        lines = [{"timing_s/start": 1.0, "step": 0}, *steps]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    return write


@pytest.mark.parametrize("name", ["training", "lora"])
def test_only_training_keeps_its_weights(acceptance, monkeypatch, name):
    """The slice `resume` needs them. A model of 4B parameters takes 48 GB per slice."""
    monkeypatch.setattr(acceptance, "run", finish_run(acceptance, name))
    monkeypatch.setattr(acceptance, "gpus", lambda *_: [])
    context = acceptance.Context(["math"], [], 1, float("inf"))
    result = acceptance.run_slice(name, context)
    assert all(result["holds"].values()), result["holds"]
    for weights in ("checkpoints", "export"):
        assert (acceptance.FOLDER / name / weights).is_dir() == (name == "training")


def test_only_the_slice_that_resumes_starts_from_a_checkpoint(acceptance):
    """With a checkpoint of the last step, a repeated slice would have nothing left to train."""
    context = acceptance.Context(["math"], ["a=b"], 4, float("inf"))
    for name, piece in acceptance.SLICES.items():
        if piece.plan:
            command = acceptance.build_command(name, context)
            resumes = "trainer.resume_mode=auto" in command
            assert resumes == (name == "resume") and command[-1] == "a=b"
            count = 2 if name == "separate" else 4
            assert f"trainer.n_gpus_per_node={count}" in command
    first, second = (
        acceptance.build_command(name, context) for name in ("deterministic", "deterministic_again")
    )
    changed = [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1 and "experiment_name" in changed[0][0]


def test_the_rewards_of_the_verifier_differ(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    score = importlib.import_module("hash_verifier").score
    rewards = [score("", text, "0") for text in ("a", "b", "a b", "", "a")]
    assert rewards[0] == rewards[4] and len(set(rewards)) == 4
    assert all(0 <= reward <= 1 for reward in rewards)


def test_the_recipes_are_valid_on_a_node_with_two_gpus(
    acceptance, monkeypatch, tmp_path, workspace, capsys
):
    """The dry run of the slice whose settings differ most from those of the recipe."""
    for name, value in nodes.write_nvidia_smi(tmp_path, gpus=2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(acceptance, "gpus", lambda *_: ["H100", "H100"])
    model = f"actor_rollout_ref.model.path={workspace / 'tied'}"
    assert run(acceptance, monkeypatch, "--dry-run", "--only", "separate", model) == 0
    assert "separate: valid; GiB {'generate': '" in capsys.readouterr().out
    assert acceptance.read_estimates("separate").keys() >= {"generate", "log-probs", "update"}


def test_a_recipe_that_is_not_valid_is_printed_with_its_errors(acceptance, monkeypatch, capsys):
    done = SimpleNamespace(returncode=1, stdout="", stderr="error: no.such_key does not exist\n")
    monkeypatch.setattr(acceptance.subprocess, "run", lambda *_, **__: done)
    assert run(acceptance, monkeypatch, "--dry-run", "--only", "training") == 1
    assert "training: NOT VALID; GiB {}\n  error: no.such_key" in capsys.readouterr().out
