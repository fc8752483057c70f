"""The section `gym.judges` of a recipe: checks, API keys, GPUs and endpoints of judges."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest

from extras import judges
from extras.judges.judge_processes import reserve_gpus, vllm_process_spec
from extras.judges.judge_proxy import JudgeProxy
from extras.judges.judge_settings import (
    Judge,
    build_judges,
    check_endpoint,
    describe_judges,
    find_problems,
)
from kit.config.load import load_config
from kit.config.redaction import redacted
from kit.errors import ConfigError
from kit.gym import servers as gym_servers
from kit.runs import prepare
from tests.helpers.http import StubJudge
from tests.helpers.recipes import GYM_PYTHON


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "exactly one source.*base_url: .* or `start"),
        (
            {"base_url": "https://x/v1", "start": {"model": "."}},
            "exactly one source.*base_url: .* or `start",
        ),
        ("me", "or set the whole entry to `policy`"),
        ({"base_url": "x/v1", "model": "m"}, "base_url=x/v1` is not an HTTP address"),
        ({"base_url": "https://x/v1"}, "model` is not set"),
        (
            {"base_url": "https://x/v1", "model": "m", "api_key": "sk-1"},
            "a recipe must not contain a key",
        ),
        (
            {"base_url": "https://x/v1", "model": "m", "api_key_env": "NO_SUCH"},
            "api_key_env=NO_SUCH`: this environment variable is not set",
        ),
        ({"base_url": "https://x/v1", "model": "m", "timeout": 3}, "unknown key 'timeout'"),
        (
            {"base_url": "https://x/v1", "model": "m", "timeout_s": 60},
            "must be less than `gym.timeout_s=60`",
        ),
        ({"base_url": "https://x/v1", "model": "m", "attempts": 0}, "an integer above 0"),
        (
            {"base_url": "https://x/v1", "model": "m", "server": "local_vllm_model"},
            "not one of vllm_model",
        ),
        ({"start": {"model": "./none"}}, "not an existing folder"),
        ({"start": {"model": "runs/none/export"}}, "not an existing folder"),
        ({"start": {"model": "a/b", "gpu": 1}}, "unknown key 'gpu'"),
        ({"start": {"model": "a/b", "gpus": 1}}, "gpus=1` is not a list"),
    ],
    ids=str,
)
def test_an_invalid_value_of_a_judge_is_one_error_that_names_its_key(spec, problem):
    (message,) = find_problems({"judge_model": spec}, 60.0)
    assert re.search(rf"gym\.judges\.judge_model.*{problem}", message)
    assert "sk-1" not in message


@pytest.mark.parametrize("name", ["a b", ".a", "", "x" * 101])
def test_the_name_of_a_judge_must_be_valid(name):
    (message,) = find_problems({name: "policy"}, 60.0)
    assert f"{name!r} is not a valid name" in message


def check_judges(config) -> list[str]:
    """The problems that the features of judges find in a recipe."""
    features = (judges.ServerJudges(config, "train"), judges.Judges(config, "train"))
    return [*features[0].check_recipe(config), *features[1].check_recipe(config)]


@pytest.mark.parametrize(
    ("gym", "problems"),
    [
        (
            {"judges": {"judge_modle": "policy"}},
            ["the model judge_model", r"gym\.judges\.judge_modle: no server .* they"],
        ),
        ({"judges": {"judge_model": "policy"}}, []),
        (
            {
                "judges": {
                    "judge_model": {"base_url": "https://x/v1", "model": "m", "api_key_env": "NO"}
                }
            },
            ["api_key_env=NO`: this environment variable is not set"],
        ),
    ],
    ids=str,
)
def test_a_recipe_with_judges_is_checked_before_anything_starts(gym, problems):
    servers = {"physics_judge": {"start": {"python": str(GYM_PYTHON)}}}
    settings = {"servers": servers, **gym}
    overrides = [f"gym.{key}={json.dumps(value)}" for key, value in settings.items()]
    config, _ = load_config([], overrides)
    errors = [str(error) for error in prepare.check_servers(config)]
    errors += check_judges(config)
    assert len(errors) == len(problems), errors
    for problem, error in zip(problems, errors, strict=True):
        assert re.search(problem, error), errors


def test_the_key_of_a_judge_is_not_shown_to_a_server(monkeypatch):
    # names that do not look like names of secrets
    monkeypatch.setenv("JUDGE_WORD", "hidden")
    monkeypatch.setenv("OTHER_WORD", "shown")
    judge = {"base_url": "https://x/v1", "model": "m", "api_key_env": "JUDGE_WORD"}

    def find_problems_of(*names):
        start = {"python": str(GYM_PYTHON), "env": list(names)}
        settings = {
            "judges": {"judge_model": judge},
            "servers": {"physics_judge": {"start": start}},
        }
        overrides = [f"gym.{key}={json.dumps(value)}" for key, value in settings.items()]
        config, _ = load_config([], overrides)
        return check_judges(config)

    assert find_problems_of("OTHER_WORD") == []
    (problem,) = find_problems_of("OTHER_WORD", "JUDGE_WORD")
    expected = r"physics_judge\.start\.env shows JUDGE_WORD, the key of gym\.judges\.judge_model"
    assert re.search(expected, problem) and "hidden" not in problem


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1/v1", True),
        ("http://[::1]:8000/v1", True),
        ("https://localhost-judge.corp/v1", False),
        ("https://host/v1?next=//localhost", False),
    ],
)
def test_only_an_endpoint_on_this_machine_is_local(url, is_local):
    assert Judge("j", url, "m").is_local == is_local


def test_the_gpus_of_a_judge_are_hidden_from_the_run(monkeypatch):
    spec = {
        "judge_model": {"start": {"model": "a/b", "gpus": [2, 3], "args": {"max_model_len": 64}}}
    }
    without_gpus = {"j": {"start": {"model": "a/b"}}}
    assert "gpus` is not set" in next(find_problems(without_gpus, 60.0, "cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    judge = build_judges(spec, 60.0)["judge_model"]
    with reserve_gpus(spec):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2, 3")
    with reserve_gpus(spec):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    process = vllm_process_spec(judge)
    assert process.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    arguments = {"--tensor-parallel-size", "2", "--max-model-len", "64"}
    assert arguments <= set(process.command)
    with (
        pytest.raises(ConfigError, match="contains 9, but the visible GPUs are 0, 1, 2, 3"),
        reserve_gpus({"j": {"start": {"gpus": [9]}}}),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"model": "stab"},
            r"gym\.judges\.j\.model=stab`: .*404: .*one of its 1 models; the nearest are stub",
        ),
        (
            {"key": "wrong", "key_name": "THE_KEY"},
            r"gym\.judges\.j`: .*401.* Correct the key in THE_KEY",
        ),
        (
            {"url": "http://127.0.0.1:9/v1"},
            r"gym\.judges\.j\.base_url=http://127.0.0.1:9/v1` does not answer.*"
            r'See docs/guides/judges\.md, "Configure judges"\.$',
        ),
    ],
    ids=["model", "key", "address"],
)
def test_an_endpoint_is_checked_before_anything_starts(changes, problem):
    stub = StubJudge((404, {"error": {"message": "The model stab does not exist."}}))
    check_endpoint(Judge("j", stub.url, "stub"))
    settings = {"name": "j", "url": stub.url, "model": "stub", **changes}
    with pytest.raises(ConfigError, match=problem):
        check_endpoint(Judge(**settings))


def test_a_key_is_neither_written_nor_given_to_servers(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    spec = {"base_url": "https://x/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    built = build_judges({"judge_model": spec}, 60.0)
    assert built["judge_model"].key == "sk-very-secret"
    assert "sk-very-secret" not in repr(built)
    (process,) = JudgeProxy(built).process_specs(tmp_path)
    assert "sk-very-secret" not in repr(process)
    assert "sk-very-secret" not in "".join(describe_judges(built))
    config, _ = load_config([], [f"gym.judges={{judge_model: {json.dumps(spec)}}}"])
    environment = {}

    def record_environment(command, env, **_):
        environment.update(env)

    monkeypatch.setattr(gym_servers, "Popen", record_environment)
    process = dataclasses.replace(process, log=str(tmp_path / "log"), python="python")
    gym_servers.start_server(process, [process])
    assert environment
    assert "JUDGE_KEY" not in environment
    assert "sk-very-secret" not in repr(environment)
    assert config.gym.judges.judge_model.api_key_env == "JUDGE_KEY"
    assert "sk-very-secret" not in str(redacted(config))


# --- the judges that a server's settings name ----------------------------------------------------


@pytest.mark.parametrize("key", ["should_use_judge", "use_judge", "enable_llm_judge"])
def test_a_server_whose_settings_switch_its_judge_off_has_no_judge(key):
    settings = {"judge_model_server": {"type": "responses_api_models", "name": "j"}}
    assert judges.find_models({**settings, key: False}) == {}
    for value in (True, None, 0, "no"):  # Gym also switches a judge off only for `false`
        assert judges.find_models({**settings, key: value}) == {"judge_model_server": "j"}


def test_the_judges_of_a_server_are_the_models_in_its_settings():
    settings = {
        "one": {"type": "responses_api_models", "name": "j"},
        "two": {"type": "responses_api_models", "name": "k"},
        "other": {"type": "resources_servers", "name": "x"},
        "unnamed": {"type": "responses_api_models"},
        "judge_server_name": "v",
    }
    models = {"one": "j", "two": "k", "judge_server_name": "v"}
    assert judges.find_models(settings) == models
