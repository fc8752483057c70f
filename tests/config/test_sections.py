"""The types of the kit's keys: an invalid value is an error with its key, its value and a fix."""

from __future__ import annotations

import pytest

from kit.config.load import load_config
from kit.config.sections import read_sections
from kit.errors import ConfigError
from tests.helpers.recipes import CPU, RECIPE

FILES = [str(CPU), str(RECIPE)]
START = "gym.servers.s.start"


def load(*changes: str):
    """The kit's sections of the tiny recipe with changes."""
    return read_sections(load_config(FILES, changes)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"{START}.pythn=x", f"unknown key {START}.pythn. Did you mean python?"),
        (f"{START}.foo=x", f"unknown key {START}.foo. Remove it."),
        (f"{START}.config=[a]", f"{START}.config=[a] is a section of keys. Set its keys."),
        (
            f"{START}.agent_config={{a: 1}}",
            f"{START}.agent_config={{a: 1}} is set without an agent. Add agent: simple_agent.",
        ),
        (
            f"{START}.environment=single_agent_turn",
            f"{START}.environment=single_agent_turn is set without an agent. Add agent",
        ),
        (f"{START}.env=HF_TOKEN", f"{START}.env=HF_TOKEN must be a list. Write [...]."),
        (f"{START}.env={{A: b}}", f"{START}.env={{A: b}} must be a list. Write [...]."),
        (f"{START}.port=0", f"{START}.port=0 must be a whole number from 1 to 65535, or null"),
        (f"{START}.install=maybe", f"{START}.install=maybe must be true or false. Change it."),
        ("gym.servers.s={}", "gym.servers.s={} must have either url: http://host:port or start:"),
        ("env.only_servers=[[a]]", "env.only_servers=[a] must be a text. Give one."),
        ("gym.policy_endpoint.host=", "gym.policy_endpoint.host= is empty. Give a text."),
        ("env.reward={limit: 1}", "env.reward={limit: 1} is not a function. Write path.py:func"),
        ("env.filters=[{limit: 1}]", "env.filters={limit: 1} is not a function. Write path.py:"),
        ("env.train_files=[[a]]", "env.train_files=[a] is no file. Write a path, or {path:"),
        ("env.max_rows={a: 1}", "env.max_rows={a: 1} must be a whole number of at least 1, or"),
    ],
)
def test_an_invalid_value_is_an_error_with_key_value_and_fix(change, message):
    with pytest.raises(ConfigError) as error:
        load(change)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_all_invalid_values_are_in_one_message():
    with pytest.raises(ConfigError) as error:
        load("gym.timeout_s=0", "env.only_servers=x", "trainer.save_freq=x", f"{START}.port=0")
    first, *lines = str(error.value).splitlines()
    assert first == "4 problems with this recipe:"
    for key in ("gym.timeout_s=0", "env.only_servers=x", "trainer.save_freq=x", f"{START}.port=0"):
        assert sum(f". {key} " in line for line in lines) == 1


def test_values_are_read_as_the_code_uses_them(monkeypatch):
    monkeypatch.setenv("SOME_PORT", "8123")
    sections = load(
        "env.max_rows=-1",
        "env.val_max_rows=${data.train_batch_size}",
        "gym.timeout_s=7",
        "gym.concurrency=3",
        "gym.policy_endpoint.port=${oc.env:SOME_PORT}",
        f"{START}={{config: null, port: '${{oc.env:SOME_PORT}}'}}",
        "trainer.resource_pools.ref=2",
        "trainer.one_step_off=1",
    )
    gym, env, kit = sections.gym, sections.env, sections.kit
    assert (env.max_rows, env.val_max_rows, gym.timeout_s) == (None, 8, 7.0)
    assert gym.concurrency == {"default": 3} and gym.policy_endpoint.port == 8123
    start = gym.servers["s"].start
    assert start and (start.config, start.port, start.env) == (None, 8123, None)
    assert (kit.resource_pools.sizes(), kit.one_step_off) == ({"ref": 2}, 1)


def test_the_default_recipe_is_valid():
    sections = read_sections(load_config([], [])[0])
    assert sections.gym.concurrency == {"default": "auto"} and sections.env.max_rows is None


def test_a_reference_to_an_invalid_number_is_no_second_error():
    with pytest.raises(ConfigError) as error:
        load("gym.attempts=${data.train_batch_size}", "data.train_batch_size=many")
    assert str(error.value).startswith("data.train_batch_size=many must be a whole number")
