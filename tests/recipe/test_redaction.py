"""Tests that a recipe contains no secrets when it is written or printed."""

import base64
import gzip

import pytest
import yaml

from kit.recipe.keys import select_nested
from kit.recipe.load import read_source, resolve
from kit.recipe.recipe import build
from kit.recipe.redaction import HIDDEN, without_settings, write_yaml
from kit.run import cli
from kit.run.run import Run
from tests.helpers.recipes import CPU, RECIPE, load, tiny


def write_changed(*changes) -> str:
    return write_yaml(build(read_source([str(CPU), str(RECIPE)], changes)).redacted())


def test_values_of_environment_variables_are_written_as_interpolations(workspace, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-planted-judge")
    monkeypatch.setenv("SECRET_HOST", "planted.example")
    # the name does not suggest a secret, but the recipe reads the variable
    monkeypatch.setenv("JUDGE_ADDRESS", "planted.elsewhere")
    changes = [
        "gym.servers.judge.start.config.judge={key: '${oc.env:JUDGE_API_KEY}', "
        "url: 'http://planted.example/v1', address: '${oc.env:JUDGE_ADDRESS}'}"
    ]
    changes.append("gym.servers.judge.start.config.model=sk-planted-judge-by-hand")
    written = write_changed(*tiny(workspace, *changes))
    assert "planted" not in written
    assert (
        "key: ${oc.env:JUDGE_API_KEY}" in written and "http://${oc.env:SECRET_HOST}/v1" in written
    )
    # the written recipe can still be loaded
    judge = select_nested(resolve(yaml.safe_load(written)), "gym.servers.judge.start.config.judge")
    assert judge["key"] == "sk-planted-judge"


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_credential"])
def test_the_value_of_a_variable_with_a_secret_name_is_never_written(
    workspace, tmp_path, monkeypatch, name
):
    from lab.report import report_page
    from lab.run_folder import RunFolder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "planted8")  # the shortest value that counts as a secret
    change = "gym.servers.reasoning_gym.start.config.url=http://planted8.example/v1"
    recipe = load(workspace, change).recipe
    for command in ("train", "evaluate"):
        with Run(recipe.model_copy(update={"command": command})) as run:
            pass
    written = [path.read_text() for path in tmp_path.rglob("*.yaml")]
    assert len(written) == 2 and "planted8" not in "".join(written)
    assert all(f"${{oc.env:{name}}}.example" in text for text in written)
    page = report_page.write_page([RunFolder(run.folder)], tmp_path / "page.html").read_text()
    packed = page.partition('id="data">')[2].partition("<")[0]
    assert "planted8" not in gzip.decompress(base64.b64decode(packed)).decode()


def test_a_dry_run_shows_no_secret(workspace, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted8")
    extra = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    prepared = load(workspace, f"{extra}.hf_token=planted8", f"{extra}.api_key=sk-planted")
    text = cli.describe_plan(
        cli.Plan(prepared.recipe, prepared.inputs, None, None, []), is_dry_run=True
    )
    assert f"{extra}.hf_token: ${{oc.env:HF_TOKEN}}" in text and f"{extra}.api_key: " in text
    assert "planted8" not in text and "sk-planted" not in text


LITERALS = [
    ("openai_api_key", "sk-planted"),
    ("judge_key", "planted"),
    ("SERVICE_KEY", "planted-8"),
    ("credentials", "{user: me, pass: planted}"),
    ("key", "'${oc.env:NO_SUCH_VARIABLE,planted}'"),
    ("base_url", "https://me:pl@nted-planted@host/v1"),
    ("base_url", "'https://host/v1?n=1&api_key=planted'"),
]


@pytest.mark.parametrize(("name", "value"), LITERALS)
def test_a_literal_secret_is_hidden(name, value):
    written = write_changed(f"gym.servers.judge.start.config={{{name}: {value}, model: kept}}")
    assert "planted" not in written and "model: kept" in written, written
    assert name in written


def test_a_report_shows_no_settings_of_servers_and_judges():
    server = {"kind": "verify", "start": {"config": {"pat": "planted", "headers": ["planted"]}}}
    judge = {"model": "m", "parameters": {"jwt": "planted"}}
    gym = {"servers": {"s": server}, "judges": {"j": judge}, "timeout_s": 3}
    shown = without_settings({"gym": gym})["gym"]
    assert "planted" not in str(shown) and [*shown["servers"], shown["timeout_s"]] == ["s", 3]


def test_values_that_are_not_secret_are_written():
    """They have `key` or `token` in their name, but are no secrets."""
    settings = "{eos_token: <end>, api_key_env: JUDGE_KEY, token: null}"
    written = write_changed(
        "data.prompt_key=question", f"gym.servers.judge.start.config={settings}"
    )
    config = select_nested(yaml.safe_load(written), "gym.servers.judge.start.config")
    assert config == {"eos_token": "<end>", "api_key_env": "JUDGE_KEY", "token": None}
    assert HIDDEN not in written
