"""Recipes: strict keys with the nearest name, impossible sizes, missing files and models; each in one line."""

import pytest
from conftest import CPU, GYM_PYTHON, RECIPE, ROOT, load, tiny

import config as recipes
import env
import gym_servers
from config import ConfigError


def merged(*changes, files=(str(RECIPE), str(CPU))):
    return recipes.load_config(files, changes)[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("actor_rollout_ref.rollout.temprature=1", "did you mean actor_rollout_ref.rollout.temperature"),
        ("gym.timeout=3", "unknown key gym.timeout; did you mean gym.timeout_s"),
        ("trainr.save_freq=3", "unknown key trainr"),
        ("critic.optim.lr=1", "this loop does not read it"),
        ("data.train_files=x", "data.train_files is verl's, but this loop does not read it"),
        ("algorithm.rollout_correction.rollout_is=token", "does not read it"),
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
        ("algorithm.adv_estimator=gae", ConfigError, "needs a critic"),
        ("actor_rollout_ref.model.path=./nowhere", ConfigError, "model.path=./nowhere: no such folder"),
        ("actor_rollout_ref.model.external_lib=no_such_module", ConfigError, "No module named 'no_such_module'"),
        ("env.train_files=[nowhere.jsonl]", env.DataError, r"nowhere\.jsonl: no such file"),
        ("env.train_files=[]", ConfigError, "env.train_files is not set"),
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
    assert "8 prompts x 8 answers = 64 episodes" in recipes.summary(config, data, "train")
    overlap = load(workspace, f"env.val_files=[{workspace / 'train.jsonl'}]")
    assert "WARNING     8 of the held-out prompts" in recipes.summary(*overlap, "train")


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
