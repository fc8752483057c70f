"""Recipes are merged, checked against what they name, and completed with sizes."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification, Qwen2Config, Qwen2ForCausalLM
from verl.utils.model import update_model_config

from kit.errors import ConfigError
from kit.recipe import checks
from kit.recipe.derive import MICRO_BATCH_TOKENS
from kit.recipe.keys import TEACHER, diff
from kit.recipe.load import read_source
from kit.recipe.schema import KL_TYPES
from kit.recipe.settings import make_settings
from kit.run import prepare, summary, trial
from tests.helpers.http import ScriptedServer
from tests.helpers.recipes import CPU, RECIPE, ROOT, load, row, tiny, write_chats, write_rows

ROLLOUT = "actor_rollout_ref.rollout"


def load_tiny(*changes, files=(str(CPU), str(RECIPE))):
    """The tiny recipe with changes, before its files are read."""
    return make_settings(read_source(files, changes), "train")


def test_a_recipe_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_tiny(files=["math_cpu", "dapo", "cpu"])
    assert (config.trainer.device, config.actor_rollout_ref.actor.clip_ratio_high) == ("cpu", 0.28)
    (tmp_path / "dapo").write_text("trainer: {save_freq: 3}")  # a local file comes first
    assert load_tiny(files=["dapo"]).trainer.save_freq == 3


def test_the_accepted_kl_penalties_are_those_of_verl():
    from verl.trainer.ppo import core_algos

    ones = torch.ones(2, 2)
    for kind in KL_TYPES:
        assert core_algos.kl_penalty(ones, ones, kind).shape == (2, 2)


# --- derived values ------------------------------------------------------------------------------


def test_derived_sizes(workspace):
    recipe, inputs, _ = load(workspace, "env.val_max_rows=3")
    rollout = recipe.rollout
    assert rollout.max_model_len == 32 + 12
    assert recipe.actor.optim.total_training_steps == 40
    # the minimum, because the model is tiny
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == 64
    assert inputs.stop_ids == {1} and len(inputs.validation) == 3
    # the value in configs/machines/cpu.yaml
    assert recipe.actor.ppo_max_token_len_per_gpu == 1024
    small = [f"{key}=100" for key in MICRO_BATCH_TOKENS]
    # a micro-batch must be large enough for a whole episode
    longer = load(workspace, "data.max_prompt_length=1000", *small).recipe
    assert [longer.get(key) for key in MICRO_BATCH_TOKENS] == [1012] * 4
    assert "8 prompts x 8 responses = 64 episodes" in summary.summarize(recipe, inputs)
    overlap = load(workspace, f"env.val_files=[{workspace / 'train.jsonl'}]")
    assert "WARNING     8 of the held-out prompts" in summary.summarize(
        overlap.recipe, overlap.inputs
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_merges(path):
    source = read_source([str(path)], [])
    assert diff(source.values, source.defaults)
    assert source.resolved["trainer"]["device"] == ("cpu" if path == CPU else "cuda")


def test_a_new_value_head_predicts_0(tmp_path):
    """Of the critic that verl makes from the recipe's model. The model's own 0.02 gives noise."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    policy.save_pretrained(tmp_path)
    hf_config = AutoConfig.from_pretrained(tmp_path, num_labels=1)
    critic_model = load_tiny(files=[str(CPU)]).critic.model
    update_model_config(hf_config, critic_model.override_config)
    hf_config._attn_implementation = "sdpa"  # the recipe's is of kit/cpu, which is not imported
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path, config=hf_config)
    assert critic.score.weight.abs().max() < 1e-5
    assert torch.equal(critic.model.embed_tokens.weight, policy.model.embed_tokens.weight)


def test_a_head_server_provides_servers_that_the_recipe_lacks(workspace):
    server = ScriptedServer(seed_session=[(200, {})], verify=[(200, {"reward": 0.25})])
    address = {"host": "127.0.0.1", "port": server.server.server_port}
    agent = {"resources_server": {"name": "puzzles"}}
    head = ScriptedServer()
    head.openapi = json.dumps(
        {
            "puzzles": {"resources_servers": {"reasoning_gym": address}},
            "unused": {"resources_servers": {"mcqa": {**address, "port": 1}}},
            "odd_agent": {"responses_api_agents": {"simple_agent": agent}},
        }
    )
    rows = [
        row(f"say {i}", agent_ref={"name": "odd_agent" if i % 2 else "reasoning_gym_agent"})
        for i in range(8)
    ]
    files = f"env.train_files=[{write_rows(workspace / 'odd.jsonl', rows)}]"
    recipe, inputs, _ = load(workspace, files, "env.val_files=[]", f"gym.head_server={head.url}")
    assert [task.server for task in inputs.train] == ["reasoning_gym", "puzzles"] * 4
    # no row uses the server `unused`, so it is not contacted
    assert set(recipe.gym.servers) == {"reasoning_gym", "puzzles"}
    assert recipe.gym.servers["puzzles"].url == server.url


def load_with_server(workspace, server, kind):
    files = f"env.train_files=[{{path: {workspace}/train.jsonl, server: s}}]"
    address = f"gym.servers.s={{url: '{server.url}', kind: {kind}}}"
    return load(workspace, files, "env.val_files=[]", "gym.servers.reasoning_gym=null", address)


@pytest.mark.parametrize(
    ("kind", "path", "answer", "message"),
    [
        ("step", "reset", {"observation": {"board": [1]}}, r"\['observation'\]: .*valid string"),
        ("verify", "verify", {"reward": 100}, "gym.max_reward=10. Let the verifier scale it"),
        ("agent", "run", {}, r"gym\.servers\.s runs episodes .* Set gym\.policy_endpoint\.port"),
    ],
)
def test_a_running_server_is_tried(workspace, kind, path, answer, message):
    routes = {"step": [(200, {})]} if kind == "step" else {"seed_session": [(200, {})]}
    server = ScriptedServer(**{**routes, path: [(200, answer)]})
    with pytest.raises(ConfigError, match=message):
        load_with_server(workspace, server, kind)


@pytest.mark.parametrize("has_description", [True, False])
def test_a_server_needs_two_routes_and_no_description(workspace, has_description):
    server = ScriptedServer(seed_session=[(200, {})], verify=[(200, {"reward": 0.25})])
    server.openapi = server.openapi if has_description else None
    recipe, inputs, _ = load_with_server(workspace, server, "null")
    assert (recipe.gym.servers["s"].url, recipe.gym.servers["s"].kind) == (server.url, "verify")
    assert any("reward 0.25 for" in trial.result for trial in inputs.trials)


def test_a_public_policy_endpoint_needs_a_key(workspace, monkeypatch):
    monkeypatch.delenv("POLICY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable POLICY_API_KEY"):
        load(workspace, "gym.policy_endpoint.port=12345")


def test_another_reward_does_not_inherit_settings(workspace):
    """The reward function of dapo has the setting `limit`.

    A later env.reward replaces the function with its settings. A later env.reward.penalty only
    changes one setting.
    """
    folder = ROOT / "configs" / "algorithms"
    dapo = str(folder / "dapo.yaml")

    def reward(*changes):
        return load_tiny(*changes[1:], files=[str(RECIPE), dapo, *changes[:1]]).env.reward

    other = reward(str(folder / "reward_model.yaml"))
    assert set(other) == {"function", "weights"}
    assert reward(dapo, "env.reward=x.py:f") == "x.py:f"
    replaced = reward(dapo, "env.reward={function: x.py:f, per_token: 1}")
    assert replaced == {"function": "x.py:f", "per_token": 1}
    changed = reward(dapo, "env.reward.penalty=0.5")
    assert (changed["limit"], changed["penalty"]) == (12, 0.5)


def choose_prepare(name):
    if name == "sft":
        from extras import sft

        return sft.prepare
    return prepare.prepare


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "algorithms").glob("*.yaml")), ids=lambda path: path.stem
)
def test_an_overlay_is_short_and_works_with_both_math_recipes(workspace, path):
    assert len(path.read_text().splitlines()) <= 15
    for base in ("math.yaml", "math_cpu.yaml"):
        settings = load_tiny(files=[str(ROOT / "configs" / base), str(path)])
        assert not [*checks.check_algorithm(settings), *checks.check_names(settings)]
        assert not list(checks.check_roles(settings))
    changes = tiny(workspace)
    if path.stem == "reward_model":
        changes.append(f"reward.reward_model.model_path={workspace / 'scored'}")
    if path.stem == "distill":
        changes.append(f"{TEACHER}={workspace / 'tied'}")
    if path.stem == "sft":
        changes += write_chats(workspace)
    merged = read_source([str(CPU), str(RECIPE), str(path)], [*changes, "data.train_batch_size=8"])
    recipe, inputs, _ = choose_prepare(path.stem)(merged)
    trial.check_functions(recipe, inputs)
