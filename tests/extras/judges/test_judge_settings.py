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
    describe_judges,
    find_problems,
)
from kit.config.load import load_config
from kit.config.redaction import redacted
from kit.gym import servers as gym_servers
from kit.runs import prepare
from tests.helpers.recipes import GYM_PYTHON


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "set base_url and model, or start"),
        ({"base_url": "https://x/v1", "model": "m", "start": {"model": "a/b"}}, "or start"),
        ("me", "Input should be a valid"),
        ({"base_url": "https://x/v1"}, "set base_url and model"),
        ({"base_url": "x/v1", "model": "m"}, "base_url: "),
        ({"base_url": "https://x/v1", "model": "m", "api_key": "sk-1"}, "api_key: "),
        ({"base_url": "https://x/v1", "model": "m", "api_key_env": "NO"}, "NO is not set"),
        ({"base_url": "https://x/v1", "model": "m", "timeout_s": 60}, "below gym.timeout_s=60"),
        ({"base_url": "https://x/v1", "model": "m", "attempts": 0}, "attempts: "),
        ({"base_url": "https://x/v1", "model": "m", "server": "local_vllm_model"}, "server: "),
        ({"start": {"model": "./none"}}, "start.model: "),
        ({"start": {"model": "a/b", "gpu": 1}}, "start.gpu: "),
        ({"start": {"model": "a/b", "gpus": 1}}, "start.gpus: "),
    ],
    ids=str,
)
def test_an_invalid_value_of_a_judge_is_one_error_that_names_its_key(spec, problem):
    (message,) = find_problems({"judge_model": spec}, 60.0)
    assert message.startswith("gym.judges.judge_model")
    assert problem in message and "sk-1" not in message


def test_the_name_of_a_judge_must_be_valid():
    assert len(list(find_problems({"a b": "policy"}, 60.0))) == 1


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


def test_only_an_endpoint_on_this_machine_is_local():
    assert Judge("j", "http://[::1]:8000/v1", "m").is_local
    assert not Judge("j", "https://localhost-judge.corp/v1", "m").is_local


def test_the_gpus_of_a_judge_are_hidden_from_the_run(monkeypatch):
    spec = {
        "judge_model": {"start": {"model": "a/b", "gpus": [2, 3], "args": {"max_model_len": 64}}}
    }
    without_gpus = {"j": {"start": {"model": "a/b"}}}
    assert len(list(find_problems(without_gpus, 60.0, "cuda"))) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    judge = build_judges(spec, 60.0)["judge_model"]
    with reserve_gpus({"judge_model": judge}):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    process = vllm_process_spec(judge)
    assert process.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    arguments = {"--tensor-parallel-size", "2", "--max-model-len", "64"}
    assert arguments <= set(process.command)


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
    assert judges.find_models({**settings, "use_judge": None}) == models
    assert judges.find_models({**settings, "use_judge": False}) == {}
