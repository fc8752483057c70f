"""Names and paths stay as they are typed, and each error of a recipe's text is one line."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from omegaconf import OmegaConf

import env
from kit.config import checks
from kit.config.keys import KEYS, flatten, is_used, matches_any, to_plain
from kit.config.load import base_configs, load_config, value_kinds
from kit.config.recipe_text import parse_argument, parse_yaml
from kit.errors import ConfigError
from kit.runs import cli
from lab.report import report_page, show
from tests.helpers.recipes import CPU, RECIPE

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # outside the repository
FILES = [str(CPU), str(RECIPE)]
# texts that YAML reads as something else, or not at all
TYPED = ["2026_11_26", "12:30", "007", "1e3", "yes", "on", "1.10", "1_000", "0x1f", ".5", "True"]
TYPED += ["a #b", "tmpl #3", "@x", "%a", "`a", "a: b", "- a", "!x", "*x", "&x", "[a", "{a", "'a"]
TYPED += ["null", "~", "a=b", " a", "é ü", "1 2", "-1", ".nan", "[a]", "{a: b}"]
NAMES = ["trainer.experiment_name", "trainer.project_name", "data.prompt_key"]
PATHS = [
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.rollout.prometheus.file",
    "actor_rollout_ref.rollout.quantization_config_file",
    "critic.model.path",
    "distillation.teacher_models.teacher_model.model_path",
    "env.reward",
    "env.sampler",
    "env.verifier",
    "gym.judges.j.start.model",
    "gym.servers.s.start.path",
    "gym.servers.s.start.python",
    "reward.reward_model.model_path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
]
OTHER_TEXTS = [
    "actor_rollout_ref.model.custom_chat_template",
    "actor_rollout_ref.model.external_lib",
    "gym.head_server",
    "gym.servers.s.url",
    "ray_kwargs.ray_init.runtime_env.env_vars.SOME_NAME",
]


def read(key: str, *arguments: str, files=()):
    config, _ = load_config([*FILES, *map(str, files)], arguments)
    return to_plain(OmegaConf.select(config, key))


def parse(key: str, text: str):
    """The value of a key on the command line."""
    value = parse_argument(f"{key}={text}", value_kinds())
    for name in key.split("."):
        value = value[name]
    return value


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


# --- texts stay as they are typed ----------------------------------------------------------------


@pytest.mark.parametrize("key", NAMES + PATHS + OTHER_TEXTS)
def test_a_name_or_a_path_of_the_command_line_stays_as_typed(key):
    default = value_kinds().defaults.get(key)
    for text in TYPED:
        if matches_any(key, KEYS.mixed) and text.startswith(("[", "{")):
            continue
        typed = None if text == "null" and default is None else text
        assert parse(key, text) == typed, text


def test_a_key_whose_default_is_a_text_is_one():
    """Among them are all names and paths of base.yaml."""
    kinds = value_kinds()
    defaults = kinds.defaults
    texts = [key for key in defaults if kinds.is_text(key) and is_used(key)]
    assert len(texts) > 60
    for key in texts:
        if not kinds.is_mixed(key):
            assert parse(key, "2026_11_26 #1") == "2026_11_26 #1"
    for name in ("path", "file", "dir", "name", "template"):
        for key in filter(is_used, defaults):
            if key.endswith(f"_{name}") and "chunk" not in key:
                assert kinds.is_text(key), key


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("trainer.save_freq", "3", 3),
        ("trainer.total_training_steps", "null", None),
        ("actor_rollout_ref.actor.optim.lr", "1e-6", 1e-6),
        ("env.only_servers", "[a, 007]", ["a", "007"]),
        ("env.train_files", "[2026_11_26, {path: 1e3, weight: 0.5}]", None),
        ("env.reward", "{function: 007, penalty: 007}", {"function": "007", "penalty": 7}),
        ("env.verifier", "null", None),
        ("env.verifier", "", None),
        ("trainer.val_before_train", "false", False),
        ("actor_rollout_ref.model.target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("gym.concurrency", "8", 8),
        ("gym.servers.s.start.config", "{port: 007}", {"port": 7}),
        ("trainer.logger", "[wandb]", ["wandb"]),
    ],
)
def test_other_values_are_yaml(key, text, value):
    if key == "env.train_files":
        value = ["2026_11_26", {"path": "1e3", "weight": 0.5}]
    parsed = parse(key, text)
    assert (type(parsed), parsed) == (type(value), value)


def test_a_name_in_a_file_stays_as_typed(tmp_path):
    for text in ("2026_11_26", "12:30", "007", "1e3", "yes", "1.10", "0x1f"):
        content = f"trainer: {{experiment_name: {text}, save_freq: 1_0}}\nenv:\n  train_files:\n"
        content += f"  - {text}\n  - path: {text}\n    weight: 1.10\n"
        parsed = parse_yaml(content, "", value_kinds().is_text)
        assert parsed["trainer"] == {"experiment_name": text, "save_freq": 10}
        assert parsed["env"]["train_files"] == [text, {"path": text, "weight": 1.1}]
    recipe = write(tmp_path, "trainer: {experiment_name: 2026_11_26}")
    assert read("trainer.experiment_name", files=[recipe]) == "2026_11_26"


def test_references_in_texts_work():
    name = "trainer.experiment_name=${trainer.project_name}_1"
    assert read("trainer.default_local_dir", name) == "runs/quintet_1/checkpoints"
    assert read("trainer.experiment_name", r"trainer.experiment_name=a\${b}") == "a${b}"


@pytest.mark.parametrize("name", [".", "..", "../a", "a/../..", "./"])
def test_the_name_of_a_run_is_a_folder_in_runs(name):
    config, _ = load_config(FILES, [f"trainer.experiment_name={name}"])
    (problem,) = checks.check_run_name(config)
    assert problem == f"trainer.experiment_name={name} is no folder in runs/. Give another name."


# --- ~ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PATHS)
def test_the_home_folder_in_a_path_is_replaced(key, tmp_path):
    for argument in (f"{key}=~/a/b", f"{key}=~"):
        typed = argument.partition("=")[2]
        assert read(key, argument) == os.path.expanduser(typed)
    *parents, name = key.split(".")
    text = f"{name}: ~/a/b"
    for parent in reversed(parents):
        text = f"{parent}: {{{text}}}"
    assert read(key, files=[write(tmp_path, text)]) == os.path.expanduser("~/a/b")


def test_the_home_folder_in_lists_and_functions_is_replaced():
    home = os.path.expanduser("~")
    assert read("env.train_files", "env.train_files=[~/a.jsonl, {path: ~/b, weight: 1}]") == [
        f"{home}/a.jsonl",
        {"path": f"{home}/b", "weight": 1},
    ]
    assert read("env.filters", "env.filters=[~/f.py:f, {function: ~/f.py:g, x: ~}]") == [
        f"{home}/f.py:f",
        {"function": f"{home}/f.py:g", "x": None},
    ]
    assert read("trainer.experiment_name", "trainer.experiment_name=~") == "~"


def test_each_key_that_names_a_path_is_a_path():
    """By its name, or because its value is path.py:function."""
    kinds = value_kinds()
    for key in filter(is_used, kinds.defaults):
        if key.rpartition(".")[2].endswith(("path", "_dir", "_file", "_folder")):
            assert matches_any(key, KEYS.paths), key
    for key in PATHS:
        assert matches_any(key, KEYS.paths) and kinds.is_text(key), key


def test_a_recipe_of_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "trainer: {save_freq: 3}")
    assert read("trainer.save_freq", files=["~/recipe.yaml"]) == 3


def test_the_home_folder_in_an_option_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/run")):
        show.main(["~/run"])
    with pytest.raises(SystemExit, match=re.escape(f"{tmp_path}/run")):
        report_page.main(["~/run"])
    with pytest.raises(ConfigError, match=re.escape(f"--replay {tmp_path}/step_1.jsonl")):
        cli.plan(FILES, replay="~/step_1.jsonl")
    (tmp_path / "a.csv").write_text("prompt,ground_truth\n2?,2")
    (tmp_path / "m.py").write_text("def f(row): return row")
    convert_rows = ["from", "--data", "~/a.csv", "--map", "~/m.py:f"]
    for arguments in (["arithmetic"], convert_rows):
        monkeypatch.setattr("sys.argv", ["env.py", *arguments, "--out", "~/data"])
        env.main()
    written = {path.name for path in (tmp_path / "data").iterdir()}
    assert {"arithmetic_train.jsonl", "a.jsonl"} <= written


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("env.train_files=[train.jsonl", "expected ',' or ']', .* Close the bracket, and quote"),
        ("env.only_servers=[%a]", "found character '%' .* Close the bracket, and quote texts"),
        ("env.only_servers=%a", r"must be a list\. Write \"env\.only_servers=\['%a'\]\"\.$"),
        ("trainer.save_freq=@x", "found character '@' that cannot .* Quote the value, or"),
        ("trainer.save_freq=!!int x", "not valid YAML: invalid literal"),
        ("a={b: ", "a={b: : not valid YAML: .* Close the bracket"),
        ("env=null", r"env=null: env is a section of keys\. Set its keys, such as env\.\w+"),
        ("trainer=null", r"trainer is a section .* such as trainer\.\w+"),
        ("actor_rollout_ref.rollout=3", r"rollout=3: .* section .* such as actor_rollout_ref\.r"),
        ("gym=[]", r"gym=\[\]: gym is a section of keys"),
        ("gym.servers=3", r"Write 'gym\.servers=\{name: value\}'"),
        ("gym.servers.s=3", r"gym\.servers\.s=3 is a section of keys\. Set its keys"),
        ("gym.servers.s.start=python", r"s\.start=python is a section of keys\. Set its keys"),
        ("trainer.save_freq.x=1", r"save_freq=\{x: 1\}: trainer\.save_freq has no keys below it"),
        ("trainer.experiment_name.x=1", "experiment_name has no keys below it"),
        ("trainer.experiment_name=", r"experiment_name is empty\. Give a value like run"),
        ("trainer.val_before_train=maybe", "val_before_train=maybe must be true or false"),
        ("env.filters=a", r"env\.filters=a must be a list\. Write 'env\.filters=\[a\]'"),
        ("env.image_hosts=2026_11", r"image_hosts=2026_11 must be a list\. Write"),
        (
            "env.filters[0]=a",
            r"env\.filters\[0\]=a: a list has no keys .* 'env\.filters=\[\.\.\.\]",
        ),
        ("env.train_files={a: 1}", "env.train_files=.* must be a list"),
        ("=x", "^=x: '' is not a key. Write section.key=value"),
        ("a..b=1", r"^a\.\.b=1: 'a\.\.b' is not a key"),
        (".a=1", "'.a' is not a key"),
        ("a.b.c", "'a.b.c' is not key=value"),
        (
            "trainer.save_freq=${nope}",
            r"freq=\$\{nope\}: Interpolation key 'nope' not found\. Corr",
        ),
        (
            "gym.servers.s=${nope}",
            r"servers\.s=\$\{nope\}: Interpolation key 'nope' not found\. Corr",
        ),
        ("trainer.experiment_name=a${b", r"a\$\{b: no viable alternative .* write \\\$\{ for"),
        ("trainer.experiment_name=???", r"\?\?\? is OmegaConf's missing value\. Set another"),
        ("ray_kwargs.ray_init.address=${oc.env:NO_SUCH_NAME}", "'NO_SUCH_NAME' not found.*Correct"),
    ],
)
def test_an_argument_with_an_error_is_one_line_with_key_and_fix(argument, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(FILES, [argument])
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"recipe\.yaml: the file has no keys\. Add keys, or remove it"),
        ("# nothing\n", "the file has no keys"),
        ("- 1\n", "is a YAML mapping. Write it as key: value"),
        ("text\n", "is a YAML mapping"),
        ("7", "is a YAML mapping"),
        ("a: b\nc: [\n", r"recipe\.yaml: not valid YAML in line 3: .* Correct it"),
        ("trainer:\n\tsave_freq: 1\n", r"in line 2: found character '\\t'"),
        ("trainer:\n  experiment_name: @x\n", r"in line 2: .*Correct it, or quote the text"),
        ("trainer: {}\ntrainer: {}\n", "in line 2: found duplicate key trainer"),
        ("a: b\n---\nc: d\n", "in line 2: .*another document"),
        ("\x00", "not valid YAML: .*special characters are not allowed"),
        ("? [a]\n: b\n", "unhashable key"),
        ("~: 3\n", "Incompatible key type"),
        (b"\xff\xfe\x00\x01", r"is not UTF-8 \(byte 0: .*Save it as UTF-8"),
        ("env: null\n", r"recipe\.yaml: env=null: env is a section"),
        ("trainer: 3\n", r"recipe\.yaml: trainer=3: trainer is a section"),
        ("trainer: {experiment_name: null}", "experiment_name=null must be a text. Give one like"),
        ("trainer: {experiment_name: [a]}", r"experiment_name=\[a\] must be a text"),
        ("trainer:\n  save_freq: ???\n", r"save_freq=\?\?\? is OmegaConf's missing value. Set it"),
        (
            "trainer.save_freq: 1\n",
            r"recipe\.yaml: unknown key trainer\.save_freq\. In a file keys are nested: write "
            r"`trainer: \{save_freq: 1\}`\.$",
        ),
        (
            "actor_rollout_ref:\n  rollout.val_kwargs.n: 4\n",
            r"unknown key actor_rollout_ref\.rollout\.val_kwargs\.n\. .* write "
            r"`rollout: \{val_kwargs: \{n: 4\}\}`\.$",
        ),
    ],
)
def test_a_recipe_file_with_an_error_is_one_line_with_file_and_fix(tmp_path, content, message):
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "recipe.yaml").write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as error:
        load_config([*FILES, str(tmp_path / "recipe.yaml")], [])
    assert "\n" not in str(error.value)


def test_a_recipe_that_cannot_be_read_is_one_line(tmp_path):
    for file, reason in ((str(tmp_path), "Is a directory"), ("a" * 300, "File name too long")):
        with pytest.raises(ConfigError, match=rf"{file} cannot be read: {reason}\. Give a"):
            load_config([file], [])


def test_null_is_an_empty_section_or_list_where_that_is_the_default(tmp_path):
    recipe = write(tmp_path, "gym: {servers: null}\nenv: {val_files: null}\n")
    config, _ = load_config([*FILES, str(recipe)], ["trainer.logger=null"])
    assert (config.gym.servers, config.env.val_files, config.trainer.logger) == ({}, [], [])
    assert read("trainer.logger", "trainer.logger=console") == ["console"]  # as in verl


# --- any text ------------------------------------------------------------------------------------

KEYS_OF_RECIPES = sorted(filter(is_used, flatten(base_configs()[1]))) + ["env", "trainer", "gym"]
ANY_KEY = st.one_of(st.sampled_from(KEYS_OF_RECIPES), st.text("ab.[]=+~ ", max_size=8))
ANY_TEXT = st.one_of(
    st.text("ab01.-_:#'\"[]{}&*!%@$\\, \n\t?~|>=", max_size=12),
    st.text(max_size=6),
    st.sampled_from([*TYPED, "${a}", "${", "???", "!!binary x", "!!timestamp 2001-01-01", "<<: 1"]),
)


@settings(max_examples=300, deadline=None)
@given(key=ANY_KEY, text=ANY_TEXT)
@example(key="a", text="!!set {x}")
@example(key="gym.servers", text="{? [a] : b}")
def test_any_argument_is_parsed_or_an_error_of_the_kit(key, text):
    try:
        parse_argument(f"{key}={text}", value_kinds())
    except ConfigError as error:
        assert str(error)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(key=ANY_KEY, text=ANY_TEXT)
def test_any_argument_is_merged_or_an_error_of_the_kit(key, text, monkeypatch):
    monkeypatch.setattr("kit.config.load.apply_environment", lambda _config: None)
    try:
        load_config(FILES, [f"{key}={text}"])
    except ConfigError as error:
        assert str(error)
