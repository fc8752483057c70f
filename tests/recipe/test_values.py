"""The values of a recipe: texts stay as typed, numbers have a range, references are resolved."""

from __future__ import annotations

import os

import pytest

from kit.recipe.keys import MODEL_ENGINES, select_nested
from kit.recipe.load import read_defaults, read_source
from kit.recipe.schema import find_problems
from kit.recipe.settings import make_settings
from tests.helpers.recipes import CPU, RECIPE

FILES = [str(CPU), str(RECIPE)]
NAME = "trainer.experiment_name"
MODEL = "actor_rollout_ref.model"


def read(key: str, *arguments: str, files=()):
    """The value of a key of the tiny recipe."""
    return select_nested(read_source([*FILES, *map(str, files)], arguments).resolved, key)


@pytest.mark.parametrize("key", [NAME, "env.verifier", f"{MODEL}.path"])
@pytest.mark.parametrize("text", ["2026_11_26", "007", "yes", "a #b"])
def test_a_text_of_the_command_line_stays_as_typed(key, text):
    assert read(key, f"{key}={text}") == text


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("actor_rollout_ref.actor.optim.betas=[0.9, 0.95]", [0.9, 0.95]),
        ("algorithm.rollout_correction.rollout_is_threshold=0.8_2", "0.8_2"),  # YAML: 0.82
        ("data.train_batch_size=${actor_rollout_ref.rollout.n}", 8),
        ("env.train_files=[2026_11_26, {path: ~/b, weight: 0.5}]", None),
        (f"{MODEL}.target_modules=[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("gym.concurrency={a: 3, default: auto}", {"a": 3, "default": "auto"}),
        ("gym.servers=null", {}),
        (rf"{NAME}=a\${{b}}", "a${b}"),
        (f"{MODEL}.path=~/a/b", os.path.expanduser("~/a/b")),
    ],
)
def test_a_value_of_the_command_line_is_read(change, value):
    key = change.partition("=")[0]
    if key == "env.train_files":
        value = ["2026_11_26", {"path": os.path.expanduser("~/b"), "weight": 0.5}]
    found = read(key, change)
    assert (type(found), found) == (type(value), value)


def test_a_date_and_a_range_in_a_file_are_texts(tmp_path):
    key = "algorithm.rollout_correction.rollout_is_threshold"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"trainer: {{experiment_name: 2026_11_26}}\n{key.replace('.', ': {')}: 0.5_2}}}}"
    )
    assert (read(NAME, files=[path]), read(key, files=[path])) == ("2026_11_26", "0.5_2")


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_every_default_has_the_type_of_its_key(engine):
    assert not list(find_problems(read_defaults(engine).base.resolved))


def test_the_kits_sections_are_read_as_the_code_uses_them(monkeypatch):
    monkeypatch.setenv("SOME_PORT", "8123")
    port = "${oc.decode:${oc.env:SOME_PORT}}"
    changes = [
        "env.val_max_rows=${data.train_batch_size}",
        "gym.timeout_s=7",
        "gym.concurrency=3",
        f"gym.policy_endpoint.port={port}",
        f"gym.servers.s.start={{config: null, port: '{port}'}}",
        "trainer.resource_pools.ref=2",
        "trainer.logger=wandb",  # as in verl
    ]
    settings = make_settings(read_source(FILES, changes), "train")
    gym, env = settings.gym, settings.env
    assert (env.max_rows, env.val_max_rows, gym.timeout_s) == (None, 8, 7.0)
    assert gym.concurrency == {"default": 3} and gym.policy_endpoint.port == 8123
    start = gym.servers["s"].start
    assert start and (start.config, start.port, start.env) == (None, 8123, None)
    assert settings.trainer.resource_pools.sizes() == {"ref": 2}
    assert settings.trainer.logger == ["wandb"]
