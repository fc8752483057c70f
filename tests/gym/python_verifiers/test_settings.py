"""Errors in the Python verifiers of a recipe are reported before anything starts."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from env import Task
from kit.config.load import load_config
from kit.errors import ConfigError, UserFunctionError
from kit.gym.python_verifiers.settings import read_verifiers
from kit.runs import prepare, summary, verifier_trial
from tests.helpers.recipes import CPU, ROOT, WORDS, load, row, tiny, write_rows
from tests.helpers.verifiers import EXAMPLE_SOURCE, make_recipe


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (
            "my.py:take_two_arguments",
            r"take_two_arguments of \S+/my.py cannot be called with the keyword arguments "
            r"data_source, solution_str, ground_truth, extra_info and its settings",
        ),
        ("my.py:absent", r"my.py has no function or class absent. It has .*compute_score"),
        (
            "my.py:NoStep",
            r"the class NoStep of \S+/my.py has no step. Add it: an environment has step\(text\)",
        ),
        (
            "my.py:Unpicklable",
            r"an instance of Unpicklable cannot be pickled \(TypeError: cannot pickle 'generator'",
        ),
        (
            "my.py:Delegating",
            r"an instance of Delegating cannot be unpickled \(RecursionError: .*\), but its next "
            "step may run in another process. .* keep the actions, and play them again",
        ),
        (
            "my.py:PairStep",
            r"my.py:PairStep step returned \('only', 1.0\); it must return "
            r"\(observation, reward, done\)",
        ),
        ("my.py:Large", r"my.py:Large: the answer to reset is over the limit of 67108864 bytes"),
        (
            "my.py:return_invalid",
            r"my.py:return_invalid failed at \S+/my.py:LINE: KeyError: .* \(tried on row r:1 with "
            "the response 'So the answer",
        ),
        (
            {"function": "my.py:compute_score", "strict": 1},
            r"cannot be called with .* unexpected keyword argument 'strict'",
        ),
        (
            "broken.py:f",
            r"broken.py cannot be imported: failed at \S+/broken.py:1: ModuleNotFoundError: "
            ".*nothing_at_all",
        ),
        ("none.py:f", r"none.py:f returned None; it must return a finite number"),
        ("verl", r"the row has data_source=None, by which verl chooses the scorer. Set it"),
    ],
)
def test_a_verifier_that_cannot_work_is_an_error_of_one_line(
    tmp_path, monkeypatch, verifier, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    (tmp_path / "broken.py").write_text("import nothing_at_all\n")
    (tmp_path / "none.py").write_text("def f(**_):\n    pass\n")
    line = EXAMPLE_SOURCE.splitlines().index("    return INVALID[solution_str]") + 1
    recipe = make_recipe(verifier)
    specs = read_verifiers(recipe.verl).specs
    task = Task("r:1", row(), next(iter(specs)), [], [])
    with pytest.raises(UserFunctionError) as error:
        verifier_trial.try_verifiers(specs, [task], recipe)
    text = str(error.value)
    assert text.startswith("env.verifier=") and "\n" not in text
    assert re.search(message.replace("LINE", str(line)), text), text


INVALID_SETTINGS = [
    ("env.verifier=absent.py:f", "env.verifier=absent.py:f: no file absent.py"),
    ("env.verifier=my.py:a/b", "env.verifier=my.py:a/b is not a Python verifier. Name path.py:"),
    ("env.verifier=compute_score", "Name path.py:function, path.py:Class or verl"),
    (
        "gym.servers.verl={url: http://127.0.0.1:9} env.train_files=[{path: val.jsonl, "
        "server: verl}]",
        "gym.servers has an entry verl, too",
    ),
    (
        "env.val_files=[{path: val.jsonl, verifier: {function: verl, other: 1}}]",
        "two verifiers have the name verl",
    ),
]


@pytest.mark.parametrize(("change", "message"), INVALID_SETTINGS)
def test_invalid_settings_are_errors_before_anything_is_loaded(
    workspace, monkeypatch, change, message
):
    monkeypatch.chdir(workspace)
    changes = tiny(workspace, "env.verifier=verl", *re.split(" (?=env)", change))
    merged = load_config([str(ROOT / "tests" / "tiny.yaml")], changes)
    with pytest.raises((ConfigError, UserFunctionError), match=re.escape(message)):
        prepare.prepare(*merged)


def test_a_recipe_with_a_verifier_needs_no_server(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    recipe = OmegaConf.load(ROOT / "tests" / "tiny.yaml")
    del recipe["gym"]
    OmegaConf.save(recipe, tmp_path / "alone.yaml")
    changes = [change for change in tiny(workspace) if not change.startswith("gym.")]
    merged = load_config([str(tmp_path / "alone.yaml"), str(CPU)], changes)
    with pytest.raises(
        ConfigError, match=r"gym.servers is not set.* or env.verifier to a function"
    ):
        prepare.prepare(*merged)
    config, defaults = merged
    config.env.verifier = f"{tmp_path}/my.py:compute_score"
    recipe, inputs = prepare.prepare(config, defaults)
    assert {task.server for task in [*inputs.train, *inputs.validation]} == {"compute_score"}
    assert len(inputs.train) == 8
    text = summary.summarize(recipe, inputs)
    assert "servers     compute_score (16 rows)" in text
    assert f"verifier    {tmp_path}/my.py:compute_score: " in text
    expected = "reward 1 for 'So the answer is 7.', 1 for the ground truth '7'"
    assert f"            tried on row {inputs.train[0].row_id}: {expected}\n" in text
    source = EXAMPLE_SOURCE.replace("float(ground_truth in solution_str)", "0.0")
    (tmp_path / "my.py").write_text(source)
    text = summary.summarize(*prepare.prepare(config, defaults))
    assert "0 for the ground truth '7'. The ground truth earns nothing." in text
    rows = [{**row(f"{word} 7"), "answer": None} for word in WORDS]
    config.env.train_files = [str(write_rows(tmp_path / "without_answer.jsonl", rows))]
    text = summary.summarize(*prepare.prepare(config, defaults))
    assert "reward 0 for 'So the answer is 7.'. The row has no ground truth that" in text
    source = EXAMPLE_SOURCE.replace("float(ground_truth in solution_str)", "None")
    (tmp_path / "my.py").write_text(source)
    with pytest.raises(
        UserFunctionError, match=r"my.py:compute_score returned None; it must return"
    ):
        prepare.prepare(config, defaults)


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
    _, data = load(workspace, *changes, "data.max_prompt_length=64")
    rows = [(task.server, task.weight) for task in data.train[::8]]
    assert rows == [("Game", 1), ("reasoning_gym", 1), ("compute_score", 2)]
    _, data = load(workspace, *changes, "env.only_servers=[Game]")
    assert {task.server for task in data.train} == {"Game"} and len(data.train) == 8
