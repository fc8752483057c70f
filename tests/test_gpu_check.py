"""Tests that benchmarks/gpu_check.py reports each failed check of the GPU environment."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from tests.helpers.recipes import ROOT


@pytest.fixture
def check(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_check")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_check_parts")


def test_a_symbol_with_another_signature_is_a_failure_unless_it_is_known(check, monkeypatch):
    symbols = {
        check.GPU: {"vllm.a": "x, y", "vllm.b": "x", "vllm.c": "missing: no module"},
        check.CPU: {"vllm.a": "x, y", "vllm.b": "x, z=1", "vllm.c": "x"},
    }
    monkeypatch.setattr(check, "run_part", lambda python, *_, **__: symbols[python])
    monkeypatch.setattr(check, "KNOWN_DIFFERENCES", {})
    failures = check.check_symbols().failures
    assert failures == [
        "vllm.b: GPU (x), CPU (x, z=1)",
        "vllm.c: GPU (missing: no module), CPU (x)",
    ]
    monkeypatch.setattr(check, "KNOWN_DIFFERENCES", {"vllm.b": "harmless"})
    assert [text.partition(":")[0] for text in check.check_symbols().failures] == ["vllm.c"]


def test_a_part_that_ends_without_a_result_is_a_failure(check, monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="first\nImportError: no libcuda\n")
    monkeypatch.setattr(check, "run", lambda *_, **__: done)
    outcome = check.check_imports()
    assert outcome.failures == ["imports: ImportError: no libcuda"]
    assert outcome.summary.startswith("0 of 1")


@pytest.mark.parametrize("status", [0, 1])
def test_a_failed_test_is_named(check, monkeypatch, status):
    line = "FAILED tests/data/test_x.py::test_y\n" if status else ""
    output = f"..F\n{line}1 failed, 2 passed in 3.00s\n"
    done = SimpleNamespace(returncode=status, stdout=output)
    monkeypatch.setattr(check, "run", lambda *_, **__: done)
    outcome = check.run_tests("tests_data", "data/test_*.py")
    assert outcome.failures == [line.strip()] * status
    assert "1 failed, 2 passed" in outcome.summary


def test_every_recipe_is_checked(parts):
    recipes = parts.list_recipes()
    files = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/algorithms/*.yaml")]
    assert {path.stem for path in files} - {"base"} <= set(recipes)
    assert recipes["mcqa"] == ["mcqa"] and recipes["ppo"] == ["math", "ppo"]


def test_every_import_of_vllm_and_verl_is_a_symbol(parts):
    symbols = set(parts.list_symbols())
    assert ("verl.workers.engine_workers", "TrainingWorker") in symbols
    assert all(module.partition(".")[0] in ("vllm", "verl") for module, _ in symbols)
    assert parts.signature(lambda a, b=2, *, c: None) == "a, b=2, *, c"
