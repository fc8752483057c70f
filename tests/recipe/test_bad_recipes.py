"""A recipe with a mistake is an error before anything starts. It names the key, and is one line."""

from __future__ import annotations

import re
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import env
from kit.errors import ConfigError, UserFunctionError
from kit.recipe import checks, user_functions
from kit.recipe.keys import TEACHER, flatten, is_used
from kit.recipe.load import read_defaults, read_source
from kit.recipe.settings import make_settings
from kit.recipe.user_functions import ADVANTAGE, LOSS_MODE
from kit.run import prepare
from kit.verify import network
from tests.helpers.recipes import CPU, RECIPE, load, make_counter_row, tiny, write_rows

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # outside the repository
FILES = [str(CPU), str(RECIPE)]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
START = "gym.servers.s.start"


# --- keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (f"{ROLLOUT}.temprature=1", f"Did you mean {ROLLOUT}.temperature?"),
        (f"{START}.pythn=x", "Did you mean python?"),
        ("trainer.learning_rate=1e-5", f"Did you mean {ACTOR}.optim.lr?"),  # a name of TRL
        ("reward_funcs=[my.py:f]", "Set env.verifier="),
        ("env.show_every=5", "It is now trainer.print_samples_every."),
        ("trainer.experiment_name.x=1", "trainer.experiment_name={x: 1} is invalid"),
        ("data.train_files=x", "Set env.train_files instead."),  # unused keys of verl
        ("algorithm.pf_ppo.weight_pow=1", "this trainer does not use. Remove it."),
    ],
)
def test_an_unknown_or_unused_key_is_an_error_with_the_key_to_set(change, hint):
    with pytest.raises(ConfigError) as error:
        read_source(FILES, [change])
    assert hint in str(error.value)


VALUES = [
    # numbers
    "trainer.nnodes=0",
    "trainer.total_training_steps=1e3",
    "data.train_batch_size=null",
    f"{ACTOR}.kl_loss_coef=-1",
    # texts and switches
    "trainer.experiment_name=",
    "trainer.val_before_train=maybe",
    # sections and lists
    "trainer=null",
    "gym.servers=3",
    # references
    "trainer.save_freq=${nope}",
    "ray_kwargs.ray_init.address=${oc.env:NO_SUCH_NAME}",
    # the kit's sections
    f"{START}.agent_config={{a: 1}}",
    f"{START}.install=maybe",
    "gym.concurrency.x=0",
    "gym.head_server=localhost:11000",
    "env.reward={limit: 1}",
    "trainer.one_step_off=2",
    # not key=value, and not YAML
    "a..b=1",
    "a.b.c",
    "env.train_files=[train.jsonl",
]


@pytest.mark.parametrize("change", VALUES)
def test_an_invalid_value_is_an_error_with_its_key(change):
    with pytest.raises(ConfigError) as error:
        read_source(FILES, [change])
    text = str(error.value)
    assert change.partition("=")[0] in text and "\n" not in text and text.endswith(".")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is a YAML mapping"),
        (b"a: b\nc: [\n", "not valid YAML in line 3"),
        (b"trainer: {}\ntrainer: {}\n", "in line 2: found duplicate key trainer"),
        (b"trainer: 3\n", "trainer=3: trainer is a section"),
        (b"trainer: {experiment_name: 007}", "experiment_name=7 is a number"),
        (b"trainer.save_freq: 1\n", "unknown key trainer.save_freq. In a file keys are nested"),
        (None, "no such file"),
    ],
)
def test_a_recipe_file_with_an_error_is_one_line_with_its_name(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        read_source([*FILES, str(path)], [])
    assert "\n" not in str(error.value)


KEYS_OF_RECIPES = sorted(filter(is_used, flatten(read_defaults().base.values))) + [
    "env",
    "trainer",
    "gym",
]
ANY_KEY = st.one_of(st.sampled_from(KEYS_OF_RECIPES), st.text("ab.[]=+~ ", max_size=8))
ANY_TEXT = st.one_of(
    st.text("ab01.-_:#'\"[]{}&*!%@$\\, \n\t?~|>=", max_size=12),
    st.text(max_size=6),
    st.sampled_from(["1_0", "${a}", "${", "???", "!!binary x", "!!timestamp 1", "<<: 1"]),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(key=ANY_KEY, text=ANY_TEXT)
@example(key="gym.servers", text="{? [a] : b}")
def test_any_argument_is_merged_or_an_error_of_the_kit(key, text, monkeypatch):
    monkeypatch.setattr("kit.recipe.load.list_environment", lambda _values: {})
    try:
        read_source(FILES, [f"{key}={text}"])
    except ConfigError as error:
        assert str(error)


# --- parts that do not fit together --------------------------------------------------------------

# (changes, a part of the message)
COMBINATIONS = [
    (["trainer.experiment_name=../a"], "is outside of runs/"),
    (["trainer.logger=[swanlab]"], "needs the package swanlab"),
    # sizes
    ([f"{ACTOR}.ppo_mini_batch_size=3"], f"set {ACTOR}.ppo_mini_batch_size=8"),
    (["trainer.n_gpus_per_node=3"], "must be a multiple of 3 GPUs"),
    ([f"{ACTOR}.use_dynamic_bsz=false"], "ppo_micro_batch_size_per_gpu and"),
    (["data.max_response_length=5000"], "Set data.max_response_length=2016"),
    (["data.max_prompt_length=5000"], "Set data.max_prompt_length=1024"),
    ([f"{ROLLOUT}.max_model_len=5000"], "the model's 2048 positions"),
    (["critic.optim.lr_warmup_steps=0", "critic.optim.lr_warmup_steps_ratio=0.1"], "verl then"),
    ([f"{ROLLOUT}.n=1"], "at least two responses"),
    # names
    (["algorithm.adv_estimator=grppo"], "grppo is not in verl"),
    (["algorithm.kl_penalty=k5"], "one of: kl, "),
    ([f"{ACTOR}.strategy=megatron"], "one of: fsdp, fsdp2"),
    ([f"{ACTOR}.optim.lr_scheduler_type=linear"], "actor: verl does not accept it"),
    # the algorithm
    (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
    ([f"{LOSS_MODE}=dro"], "policy_loss.dro_beta"),
    ([f"{CORRECTION}.bypass_mode=true", f"{LOSS_MODE}=gspo"], "has its own loss"),
    (
        [f"{CORRECTION}.bypass_mode=true"]
        + ["env.filters=[{function: templates/filters.py:with_answer, field: answer}]"],
        "with_answer",
    ),
    ([f"{CORRECTION}.rollout_rs=token_k1"], "rollout_rs_threshold"),
    (
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2_0.5"],
        "must be <= upper bound",
    ),
    (["algorithm.filter_groups.enable=true"], "max_num_gen_batches"),
    ([f"{MODEL}.lora_rank=8"], "load_format"),
    # models, and GPUs for them
    (["trainer.resource_pools.critic=1"], "this recipe has no critic"),
    (["reward.reward_model={enable: true, model_path: tied}"], "has no scalar head"),
    (["distillation.enabled=true", f"{TEACHER}=tied"], "nothing uses this model"),
    ([f"{MODEL}.path=./nowhere"], "no such model folder"),
    ([f"{MODEL}.external_lib=no_such_module"], "no_such_module"),
    ([f"{ROLLOUT}.name=tgi"], "one of vllm, hf, sglang"),
    ([f"{ROLLOUT}.nnodes=1"], f"{ROLLOUT}.checkpoint_engine.backend"),
    (
        [f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.checkpoint_engine.backend=gloo"]
        + [f"{MODEL}.lora_rank=4"],
        f"Set {MODEL}.lora.merge=true",
    ),
    (["trainer.one_step_off=1", f"{ROLLOUT}.full_determinism=true"], "cannot repeat"),
    # files and servers
    (["env.train_files=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
    (["data.max_prompt_length=3"], "Set data.max_prompt_length=13"),
    (["env.max_rows=1"], "have 1 usable rows"),
    (["gym.servers.reasoning_gym.url=http://127.0.0.1:1"], "must have either url"),
    (["gym.servers.reasoning_gym.start.python=nowhere"], "no interpreter at nowhere"),
    ([f"{ROLLOUT}.multi_turn.format=no", "env.train_files=[tools.jsonl]"], "no such tool parser"),
]


@pytest.mark.parametrize(("changes", "message"), COMBINATIONS)
def test_parts_that_do_not_fit_are_an_error_before_a_run_starts(
    workspace, monkeypatch, changes, message
):
    monkeypatch.chdir(workspace)
    with pytest.raises(
        (ConfigError, UserFunctionError, env.DataError, network.GymStartError),
        match=re.escape(message),
    ):
        load(workspace, *changes)


def check_messages(error, parts):
    """Check that a message lists one problem with each part of a text."""
    first, *lines = str(error).split("\n")
    assert first == f"{len(parts)} problems with this recipe:"
    for number, part in enumerate(parts, 1):
        assert lines[number - 1].startswith(f"  {number}. ")
        assert sum(part in line for line in lines) == 1, part


def test_all_problems_with_keys_are_in_one_message():
    mistakes = {
        "trainr.save_freq=3": "unknown key trainr",
        f"{ROLLOUT}.trace.backend=mlflow": "trace.backend is a verl option",
        "data.train_batch_size=many": "data.train_batch_size=many must be",
        "gym.timeout_s=0": "gym.timeout_s=0 must be",
        "data=3": "data is a section of keys",
    }
    with pytest.raises(ConfigError) as raised:
        read_source(FILES, [*mistakes])
    check_messages(raised.value, mistakes.values())


def test_all_problems_with_sizes_and_files_are_in_one_message(workspace, monkeypatch):
    """Without the network: the name of a hub model is no problem."""
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained",
        lambda *_, **__: pytest.fail("a request to the hub"),
    )
    mistakes = {
        f"{ACTOR}.ppo_mini_batch_size=3": "cannot be divided into optimizer steps of 3",
        "env.train_files=[nowhere.jsonl]": "nowhere.jsonl: no such file",
        "gym.servers.reasoning_gym.start.python=gone": "no interpreter at gone",
        f"{ROLLOUT}.temperature=0": "decode greedily",
    }
    changes = [*tiny(workspace), f"{MODEL}.path=a-name/of-the-hub", *mistakes]
    with pytest.raises(ConfigError) as raised:
        prepare.check(read_source(FILES, changes), "train")
    check_messages(raised.value, mistakes.values())


SAMPLED = ["val_kwargs.n=4", "val_kwargs.do_sample=true", "val_kwargs.temperature=1"]


@pytest.mark.parametrize(
    ("command", "changes", "is_greedy"),
    [
        ("train", ["temperature=0"], True),
        ("train", ["top_k=1"], True),
        ("rollout", ["temperature=0"], True),
        ("rollout", ["temperature=0", "n=1"], False),
        ("evaluate", [*SAMPLED, "val_kwargs.top_k=1"], True),
        ("evaluate", ["val_kwargs.n=4"], True),
        ("rollout", ["val_kwargs.n=4"], False),  # this command has no evaluation
    ],
)
def test_greedy_decoding_of_several_responses_is_an_error(command, changes, is_greedy):
    changes = ["env.val_files=[x]", *(f"{ROLLOUT}.{change}" for change in changes)]
    settings = make_settings(read_source(FILES, changes), command)
    assert len(list(checks.check_sampling(settings))) == is_greedy


def test_a_teacher_with_another_vocabulary_is_an_error(workspace, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workspace / "tied")
    tokenizer.add_tokens(["stranger"])
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(workspace / "tied" / "config.json", tmp_path)
    changes = [f"{ADVANTAGE}=templates/advantages.py:distill", "distillation.enabled=true"]
    with pytest.raises(ConfigError, match="its vocabulary differs from the"):
        load(workspace, *changes, f"{TEACHER}={tmp_path}")


def test_a_tool_that_gyms_schema_rejects_is_an_error(workspace):
    row = make_counter_row()
    del row["responses_create_params"]["tools"][0]["strict"]
    rows = write_rows(workspace / "lax.jsonl", [row] * 8)
    with pytest.raises(ConfigError, match=r"lax\.jsonl:1: a tool has no strict"):
        load(workspace, f"env.train_files=[{{path: {rows}, server: reasoning_gym}}]")


def test_all_estimators_and_losses_of_verl_are_accepted_and_some_need_groups(workspace):
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

    source = read_source(FILES, tiny(workspace))

    def with_changes(*changes):
        return make_settings(source.override(changes), "train")

    estimators = [f"{ADVANTAGE}={estimator.value}" for estimator in AdvantageEstimator]
    names = [n for n in POLICY_LOSS_REGISTRY if not user_functions.is_user_function(n)]
    losses = [f"{LOSS_MODE}={name}" for name in names]
    assert len(estimators) >= 13 and len(losses) >= 12
    for change in estimators + losses:
        changed = with_changes(change)
        problems = [*checks.check_names(changed), *checks.check_roles(changed)]
        assert not problems, change
    without_group = set()
    for change in estimators:
        if not list(checks.check_roles(with_changes(change, f"{ROLLOUT}.n=1"))):
            without_group.add(change.partition("=")[2])
    assert without_group == {"gae", "reinforce_plus_plus", "remax"}
