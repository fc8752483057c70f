"""Recipes: strict keys with the nearest name, impossible sizes, missing files and models; each in one line."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from conftest import CPU, GYM_PYTHON, RECIPE, ROOT, load, row, tiny, write_rows

import config as recipes
import env
import gym_servers
from config import ConfigError
from summary import summary


def merged(*changes, files=(str(RECIPE), str(CPU))):
    return recipes.load_config(files, changes)[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("actor_rollout_ref.rollout.temprature=1", "did you mean actor_rollout_ref.rollout.temperature"),
        ("gym.timeout=3", "unknown key gym.timeout; did you mean gym.timeout_s"),
        ("trainr.save_freq=3", "unknown key trainr"),
        ("algorithm.pf_ppo.weight_pow=1", "this loop does not read it"),
        (
            "data.train_files=x",
            r"data\.train_files is verl's, but this loop does not read it, .*; set env\.train_files",
        ),
        ("rollout.temperature=1", r"unknown key rollout; did you mean actor_rollout_ref\.rollout\.temperature"),
        ("actor_rollout_ref.actor.clip_ratio=0.1", "set clip_ratio_low and clip_ratio_high"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", r"set gym\.servers"),
        ("trainer.total_training_steps=ten", "total_training_steps=ten: wants a value like 100"),
        ("reward.num_workers=2", "does not read it"),
        ("just_a_word", "'just_a_word' is not key=value"),
    ],
)
def test_a_key_that_nothing_reads_is_an_error(change, named):
    with pytest.raises(ConfigError, match=named):
        merged(change)


def test_what_verl_knows_beyond_its_yaml_is_taken():
    config = merged("+actor_rollout_ref.model.override_config.attn_implementation=eager", "data.seed=7")
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"
    config = merged("actor_rollout_ref.rollout.enable_sleep_mode=false")  # a field of verl's RolloutConfig only
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is False


@pytest.mark.parametrize(
    ("text", "named"), [("a: [", "not valid YAML"), ("- 1\n", "is a YAML mapping"), (None, "no such file")]
)
def test_bad_recipe_files_are_named(tmp_path, text, named):
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"recipe\.yaml: .*{named}"):
        merged(files=[str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", ConfigError, "train_batch_size=8 does not divide"),
        ("trainer.n_gpus_per_node=3", ConfigError, "do not divide among 3 GPUs"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", ConfigError, "1 GPUs do not divide"),
        ("actor_rollout_ref.rollout.n=1", ConfigError, "at least two answers"),
        ("actor_rollout_ref.model.path=./nowhere", ConfigError, "model.path=./nowhere: no such folder"),
        ("actor_rollout_ref.model.external_lib=no_such_module", ConfigError, "No module named 'no_such_module'"),
        ("env.train_files=[nowhere.jsonl]", env.DataError, r"nowhere\.jsonl: no such file"),
        ("env.train_files=[]", ConfigError, "env.train_files is not set"),
        ("env.train_files=x.jsonl", ConfigError, r"wants a list, 'env\.train_files=\[x\.jsonl\]'"),
        ("data.max_prompt_length=3", ConfigError, "hold 0 usable rows"),
        ("gym.servers.reasoning_gym.url=http://127.0.0.1:1", ConfigError, "takes either url"),
        ("gym.servers.reasoning_gym.start.python=nowhere", gym_servers.GymStartError, "`make gym`"),
    ],
)
def test_what_cannot_run_is_an_error_before_anything_starts(workspace, change, error, named):
    with pytest.raises(error, match=named):
        load(workspace, change)


def test_derived_sizes(workspace):
    config, data = load(workspace, "env.val_max_rows=3")
    rollout = config.actor_rollout_ref.rollout
    assert rollout.max_model_len == 32 + 12
    assert config.actor_rollout_ref.actor.optim.total_training_steps == 40
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == 64  # the floor: the model is tiny
    assert data.stop_ids == {1} and len(data.validation) == 3
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2048  # as configs/cpu.yaml says
    longer, _ = load(workspace, "data.max_prompt_length=3000")  # a whole episode must fit a micro-batch
    sizes = [recipes.OmegaConf.select(longer, key) for key in recipes.MICRO_BATCH_TOKENS]
    assert sizes == [3012] * 4
    assert "8 prompts x 8 answers = 64 episodes" in summary(config, data, "train")
    overlap = load(workspace, f"env.val_files=[{workspace / 'train.jsonl'}]")
    assert "WARNING     8 of the held-out prompts" in summary(*overlap, "train")


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "configs").glob("math*.yaml")))
def test_shipped_recipes_merge_on_either_device(recipe):
    path = ROOT / "configs" / recipe
    assert len(path.read_text().splitlines()) <= 120
    for files in ([str(path)], [str(path), str(CPU)]):
        config, defaults = recipes.load_config(files, [])
        assert recipes.changed(config, defaults)
        assert config.trainer.device == ("cpu" if len(files) == 2 else "cuda")


def test_overrides_of_the_tests_are_the_last_word(workspace):
    config, _ = load(workspace, *tiny(workspace), f"gym.servers.reasoning_gym.start.python={GYM_PYTHON}", "data.seed=9")
    assert config.data.seed == 9


class Head(BaseHTTPRequestHandler):
    """A head server and, at the same address, the resources server that it knows."""

    def do_GET(self):
        here = {"host": "127.0.0.1", "port": self.server.server_port}
        known = {
            "puzzles": {"resources_servers": {"reasoning_gym": here}},
            "unused": {"resources_servers": {"mcqa": {**here, "port": 1}}},
            "odd_agent": {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "puzzles"}}}},
        }
        routes = {"paths": {"/verify": {"post": {}}}}
        data = json.dumps(routes if self.path == "/openapi.json" else yaml.safe_dump(known)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_head_server_fills_in_what_the_recipe_does_not_name(workspace):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Head)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [row(f"say {i}", agent_ref={"name": "odd_agent" if i % 2 else "reasoning_gym_agent"}) for i in range(8)]
    files = f"env.train_files=[{write_rows(workspace / 'odd.jsonl', rows)}]"
    head = f"http://127.0.0.1:{server.server_port}"
    config, data = load(workspace, files, "env.val_files=[]", f"gym.head={head}")
    assert [task.server for task in data.train] == ["reasoning_gym", "puzzles"] * 4
    assert config.gym.servers.puzzles.url == head  # and `unused`, where nobody listens, is not asked for
    assert set(config.gym.servers) == {"reasoning_gym", "puzzles"}
    with pytest.raises(env.DataError, match="agent_ref 'odd_agent' matches none"):
        load(workspace, files, "env.val_files=[]")
    with pytest.raises(gym_servers.GymStartError, match=r"gym\.head: http://127.0.0.1:9 is no head server of Gym's"):
        load(workspace, files, "gym.head=http://127.0.0.1:9")


def test_the_door_for_others_wants_a_key(workspace, monkeypatch):
    monkeypatch.delenv("POLICY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="POLICY_API_KEY must hold the door's key"):
        load(workspace, "gym.door.port=12345")


def test_an_unknown_format_of_tool_calls_is_named(workspace):
    files = f"env.train_files=[{workspace / 'tools.jsonl'}]"
    with pytest.raises(ConfigError, match=r"multi_turn\.format=hermess: vLLM has no such tool parser; it has .*hermes"):
        load(workspace, files, "actor_rollout_ref.rollout.multi_turn.format=hermess")


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "configs").glob("*.yaml")))
def test_every_recipe_is_short_and_merges(recipe):
    path = ROOT / "configs" / recipe
    assert len(path.read_text().splitlines()) <= 120
    recipes.load_config([str(path)], [])
