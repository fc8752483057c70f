"""Every number of a recipe has a range. -1, 0 and null have verl's meaning, or are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kit.config import checks
from kit.config.keys import flatten, is_kit_key, is_used, matches, to_plain
from kit.config.load import MODEL_ENGINES, base_configs, load_config
from kit.config.numbers import NUMBERS, find_rule
from kit.errors import ConfigError
from tests.helpers.recipes import CPU, RECIPE

KIT_KEYS_WITHOUT_A_NUMBER = (  # by default
    "env.max_rows",
    "env.val_max_rows",
    "env.keep_rollouts",
    "env.verifier_pool.processes",
    "gym.concurrency.a",
    "gym.policy_endpoint.port",
    "trainer.resource_pools.critic",
    "trainer.resource_pools.ref",
    "trainer.resource_pools.reward_model",
)


def list_keys() -> dict[str, str]:
    """{key that has a number: a model_engine that has the key}."""
    keys = dict.fromkeys(KIT_KEYS_WITHOUT_A_NUMBER, "dp")
    for engine in MODEL_ENGINES:
        base = base_configs(engine)[1]
        for key in flatten(base):
            value = to_plain(OmegaConf.select(base, key))
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_used(key) and (is_number or find_rule(key)):
                keys.setdefault(key, engine)
    for pattern in NUMBERS:  # keys of dataclasses, and names that the user chooses
        if not any(matches(key, pattern) for key in keys):
            keys[pattern.replace("**", "a.b").replace("*", "a")] = "dp"
    return keys


def test_every_number_of_the_configuration_is_in_the_table_with_a_valid_default():
    for key, engine in list_keys().items():
        base = base_configs(engine)[1]
        if is_kit_key(key):
            continue  # kit/config/sections.py has its type
        rule = find_rule(key)
        assert rule, f"{key} is not in NUMBERS"
        if key in flatten(base):
            assert rule.is_valid(to_plain(OmegaConf.select(base, key))), key


@example(value="0")
@given(value=st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans()))
def test_any_value_is_refused_or_stays_valid_once_it_is_normalized(value):
    for rule in set(map(id, NUMBERS.values())):
        rule = next(entry for entry in NUMBERS.values() if id(entry) == rule)
        if rule.is_valid(value):
            normalized = rule.normalize(value)
            assert rule.is_valid(normalized)
            assert not isinstance(normalized, float) or math.isfinite(normalized)
            assert not rule.is_whole or not isinstance(normalized, float)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("trainer.total_training_steps=1e3", 1000),
        ("actor_rollout_ref.actor.optim.lr=1e-6", 1e-6),
        ("algorithm.rollout_correction.rollout_is_threshold=0.8_2", "0.8_2"),  # YAML: 0.82
        ("algorithm.rollout_correction.rollout_is_threshold=3", 3.0),
        ("env.max_rows=-1", None),
        ("critic.optim.lr_warmup_steps=null", -1),
        ("gym.concurrency={a: 3, default: auto}", {"a": 3, "default": "auto"}),
        ("data.train_batch_size=${actor_rollout_ref.rollout.n}", 8),
        ("actor_rollout_ref.actor.optim.betas=[0.9, 0.95]", [0.9, 0.95]),
    ],
)
def test_a_number_of_the_command_line_is_read(change, read):
    config, _ = load_config([str(CPU), str(RECIPE)], [change])
    value = to_plain(OmegaConf.select(config, change.partition("=")[0]))
    assert (type(value), value) == (type(read), read)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "trainer.save_freq=0.5",
            "trainer.save_freq=0.5 must be a whole number of at least 1, or -1 (only after the "
            "last step). Change it.",
        ),
        (
            "actor_rollout_ref.actor.ppo_epochs=0",
            "actor_rollout_ref.actor.ppo_epochs=0 must be a whole number of at least 1. Change it.",
        ),
        (
            "trainer.stage_timeout_s=-1",
            "trainer.stage_timeout_s=-1 must be a number above 0 and at most 1000000000. Change "
            "it.",
        ),
        (
            "trainer.max_critic_ckpt_to_keep=2",
            "trainer.max_critic_ckpt_to_keep is a verl option that this trainer does not use. Set "
            "trainer.max_actor_ckpt_to_keep instead.",
        ),
    ],
)
def test_an_invalid_number_is_an_error_with_key_value_and_fix(change, message):
    with pytest.raises(ConfigError) as error:
        load_config([str(CPU), str(RECIPE)], [change])
    assert str(error.value) == message


def test_a_reset_number_is_the_only_error_of_the_keys_that_refer_to_it():
    """num_gpus, for example, is computed from n_gpus_per_node."""
    with pytest.raises(ConfigError) as error:
        load_config([str(CPU), str(RECIPE)], ["trainer.n_gpus_per_node=many"])
    assert str(error.value).startswith("trainer.n_gpus_per_node=many must be")


def test_no_warm_up_steps_and_a_ratio_are_an_error():
    """verl would warm up by the ratio."""
    config, _ = load_config(
        [str(CPU), str(RECIPE)],
        ["critic.optim.lr_warmup_steps=0", "critic.optim.lr_warmup_steps_ratio=0.1"],
    )
    (problem,) = checks.check_warmup(config)
    assert problem.startswith("critic.optim.lr_warmup_steps=0: verl then uses")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, "must be <= upper bound"),
        (
            {"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": "0.5_2,0.5_2,1_2"},
            "expects either one threshold",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2"}, ""),
    ],
)
def test_thresholds_are_those_that_verl_can_read(changes, message):
    key = "algorithm.rollout_correction"
    arguments = [f"{key}.{name}={value}" for name, value in changes.items()]
    config, _ = load_config([str(CPU), str(RECIPE)], arguments)
    problems = list(checks.check_correction_values(config))
    assert len(problems) == bool(message)
    assert not message or message in problems[0]
