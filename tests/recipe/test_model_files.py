"""Tests of the files of a model: its stop ids, and that a run downloads it from the hub once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kit.errors import ConfigError, RunError
from kit.recipe import model_files
from kit.recipe.recipe import Recipe
from tests.helpers.recipes import load, make_partial

KEY = "actor_rollout_ref.model.path"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Record the downloads."""
    calls: list[tuple[str, list[str]]] = []

    def download(name: str, ignore_patterns: list[str]) -> str:
        calls.append((name, ignore_patterns))
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_chat_template_may_be_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "{{ messages[0].content }}"
    Path("my.jinja").write_text(text)
    Path("empty.jinja").write_text("nothing")

    def take(value):
        sections = {"actor_rollout_ref": {"model": {"custom_chat_template": value}}}
        return model_files.read_chat_template(make_partial(sections))

    assert take(None) is None
    assert take("my.jinja") == take(str(tmp_path / "my.jinja")) == take(text) == text
    for value in ("your.jinja", "chatml", "empty.jinja"):
        with pytest.raises(ConfigError, match=r"is neither a file in the current .* has no \{"):
            take(value)


@pytest.fixture(scope="module")
def recipe(workspace: Path) -> Recipe:
    """The tiny recipe with the name of a hub model. The model is not loaded."""
    return load(workspace).recipe.change(f"{KEY}=org/policy")


def test_a_model_is_downloaded_once_and_then_the_workers_are_offline(recipe, downloads):
    recipe = recipe.change("algorithm.adv_estimator=gae")  # the critic starts from the same model
    assert recipe.has_critic
    messages: list[str] = []
    variables = model_files.download_models(recipe, messages.append)
    ((name, ignored),) = downloads
    assert name == "org/policy" and {"*.pth", "original/*"} <= set(ignored)
    assert messages == ["Downloading org/policy from the hub, if it is not here"]
    assert variables == {"HF_HUB_OFFLINE": "1"}
    # the other nodes of a cluster have not downloaded it
    cluster = recipe.change("ray_kwargs.ray_init.address=auto")
    assert not model_files.download_models(cluster, messages.append)


def test_every_model_of_a_recipe_is_downloaded_unless_it_is_a_folder(workspace, recipe, downloads):
    recipe = recipe.change("reward.reward_model={enable: true, model_path: org/reward}")
    assert model_files.list_hub_models(recipe) == ["org/policy", "org/reward"]
    evaluation = recipe.model_copy(update={"command": "evaluate"})
    assert model_files.list_hub_models(evaluation) == ["org/policy"]
    local = evaluation.change(f"{KEY}={workspace / 'tied'}")
    assert model_files.download_models(local, lambda _: None) == {"HF_HUB_OFFLINE": "1"}
    assert not downloads


def test_a_model_that_cannot_be_downloaded_is_a_one_line_error(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(RunError, match="org/x could not be downloaded from the hub: no connection"):
        model_files.download_model("org/x")


def test_stop_ids_come_from_tokenizer_and_generation_config():
    tokenizer = SimpleNamespace(eos_token_id=1)
    assert model_files.stop_token_ids(tokenizer, None) == {1}
    assert model_files.stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[2, 3])) == {1, 2, 3}
    assert model_files.stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=4)) == {1, 4}
