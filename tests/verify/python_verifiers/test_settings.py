"""Errors in the Python verifiers of a recipe are reported before anything starts."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from env import Task
from kit.errors import ConfigError, UserFunctionError
from kit.recipe.load import read_source
from kit.recipe.schema import EnvSection
from kit.run import prepare, summary, verifier_trial
from kit.verify.python_verifiers.settings import find_replaced_servers, read_verifiers
from tests.helpers.recipes import CPU, ROOT, load, row, tiny
from tests.helpers.verifiers import EXAMPLE_SOURCE, make_recipe


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("my.py:absent", "has no function or class absent"),
        ("broken.py:f", r"failed at \S+/broken.py:1: ModuleNotFoundError: .*nothing_at_all"),
        ("my.py:read_missing_key", r"my.py:LINE: KeyError: .* \(tried on row r:1 with"),
        ("my.py:PairStep", r"step returned \('only', 1.0\); it must return \(observation, reward"),
        ("verl", "the row has data_source=None, by which verl scores it"),
    ],
)
def test_a_verifier_that_cannot_work_is_an_error_of_one_line(
    tmp_path, monkeypatch, verifier, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    (tmp_path / "broken.py").write_text("import nothing_at_all\n")
    lines = EXAMPLE_SOURCE.splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "[solution_str]" in line)
    recipe = make_recipe(verifier)
    specs = read_verifiers(recipe.env, recipe.gym.servers).specs
    task = Task("r:1", row(), next(iter(specs)), [], [])
    with pytest.raises(UserFunctionError) as error:
        verifier_trial.check_verifiers(specs, [task], recipe)
    text = str(error.value)
    assert text.startswith("env.verifier=") and "\n" not in text
    assert re.search(message.replace("LINE", str(number)), text), text


@pytest.mark.parametrize(
    ("verifier", "file", "problem"),
    [
        ("absent.py:f", {}, "no file absent.py"),
        ("compute_score", {}, "is not a Python verifier"),
        ({"function": "verl", "raw_text": 1}, {}, "raw_text=1"),
        ("templates/reward.py:mcqa", {}, "has an entry mcqa, too"),
        ("verl", {"verifier": {"function": "verl", "other": 1}}, "two verifiers"),
        ("verl", {"server": "a", "verifier": "verl"}, "has a server and a verifier"),
    ],
)
def test_invalid_settings_are_errors_before_anything_is_loaded(verifier, file, problem):
    values = make_recipe("verl").env.model_dump()
    values |= {"verifier": verifier, "val_files": [{"path": "x", **file}]}
    with pytest.raises(ValueError, match=problem):
        read_verifiers(EnvSection.model_validate(values), ["mcqa"])


def test_only_a_server_that_a_file_names_is_used_next_to_a_verifier_of_all_rows():
    values = make_recipe("verl").env.model_dump()
    values["val_files"] = ["x", {"path": "y", "server": "a"}]
    section = EnvSection.model_validate(values)
    assert find_replaced_servers(section, ["a", "b"]) == ["b"]
    assert find_replaced_servers(section.model_copy(update={"shadow_verifier": "b"}), ["b"]) == []
    assert find_replaced_servers(section.model_copy(update={"verifier": None}), ["b"]) == []


def test_a_recipe_with_a_verifier_needs_no_server(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    recipe = OmegaConf.load(ROOT / "tests" / "tiny.yaml")
    del recipe["gym"]
    OmegaConf.save(recipe, tmp_path / "alone.yaml")
    changes = [change for change in tiny(workspace) if not change.startswith("gym.")]
    source = read_source([str(tmp_path / "alone.yaml"), str(CPU)], changes)
    with pytest.raises(ConfigError, match="names no verifier"):
        prepare.prepare(source)
    source = source.override([f"env.verifier={tmp_path}/my.py:compute_score"])
    recipe, inputs, _ = prepare.prepare(source)
    assert {task.server for task in [*inputs.train, *inputs.validation]} == {"compute_score"}
    text = summary.summarize(recipe, inputs)
    assert "servers     compute_score (16 rows)" in text
    assert f"verifier    {tmp_path}/my.py:compute_score: " in text
    assert "reward 1 for 'So the answer is 7.', 1 for the ground truth '7'" in text


def test_files_may_have_different_verifiers(workspace, tmp_path, monkeypatch):
    """env.verifier is the verifier of all files that name neither a server nor a verifier."""
    monkeypatch.chdir(workspace)
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    files = [
        f"{{path: train.jsonl, verifier: '{tmp_path}/my.py:Game', weight: 1}}",
        "{path: tools.jsonl, server: reasoning_gym, weight: 1}",
        "{path: val.jsonl, weight: 2}",
    ]
    changes = [
        f"env.verifier={tmp_path}/my.py:compute_score",
        f"env.train_files=[{', '.join(files)}]",
        "env.val_files=[]",
    ]
    data = load(workspace, *changes, "data.max_prompt_length=64").inputs
    rows = [(task.server, task.weight) for task in data.train[::8]]
    assert rows == [("Game", 1), ("reasoning_gym", 1), ("compute_score", 2)]
    data = load(workspace, *changes, "env.only_servers=[Game]").inputs
    assert {task.server for task in data.train} == {"Game"} and len(data.train) == 8
