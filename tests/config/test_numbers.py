"""Every number of a recipe has a range. -1, 0 and null have verl's meaning, or are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kit.config import checks, values
from kit.config.keys import flatten, is_kit_key, is_used, matches, to_plain
from kit.config.load import MODEL_ENGINES, base_configs, load_config
from kit.config.numbers import NUMBERS, find_rule
from kit.errors import ConfigError
from tests.helpers.recipes import CPU, RECIPE

REFUSED = object()
VALUES = (-1, 0, None, 0.5, -7, -0.5, math.nan, math.inf, -math.inf, "text", True, [], {})
# {pattern: {value: the value that the code reads}}, from the documentation of verl and of base.yaml
SENTINELS = {
    "trainer.save_freq": {-1: -1, 0: -1},
    "trainer.test_freq": {-1: -1, 0: -1},
    "trainer.max_actor_ckpt_to_keep": {-1: None, 0: None, None: None},
    "trainer.total_training_steps": {None: None},
    "trainer.resource_pools.*": {None: None},
    "trainer.ray_wait_register_center_timeout": {None: None},
    "ray_kwargs.ray_init.*": {None: None},
    "ray_kwargs.ray_init.num_gpus": {0: 0, None: None},
    "env.*max_rows": {-1: None, None: None},
    "env.keep_rollouts": {-1: None, None: None},
    "env.verifier_pool.processes": {None: None},
    "gym.policy_endpoint.port": {None: None},
    "**.top_k": {-1: -1, 0: -1},
    "**.fsdp_size": {-1: -1},
    "**.max_assistant_turns": {None: None},
    "**.max_model_len": {None: None},
    "**.limit_images": {0: 0, None: None},
    "**.cudagraph_capture_sizes": {None: None},
    "**_micro_batch_size_per_gpu": {None: None},
    "**.loss_scale_factor": {None: None},
    "**.dro_beta": {None: None},
    "**.lr_warmup_steps": {-1: -1, 0: 0, None: -1},
    "**.min_lr_ratio": {0: 0, None: None},
    "**.gdpo_reward_weights": {None: None},
    "**.rollout_rs_threshold": {None: None},
    "**.disaggregation.*_parallel_size": {None: None},
    "**.expert_tensor_parallel_size": {None: None},
    "**.virtual_pipeline_model_parallel_size": {None: None},
    "**.max_seqlen_per_dp_cp_rank": {None: None},
    "**.recompute_num_layers": {None: None},
    "**.optim.lr_*decay_steps": {None: None},
    # here they are numbers like others
    "**.entropy_coeff": {-1: -1, 0: 0},
    "**.clip_cov_*b": {-1: -1, 0: 0},
}
ZERO_IS_A_NUMBER = [
    "trainer.critic_warmup",
    "trainer.log_val_generations",
    "trainer.print_samples_every",
    "trainer.one_step_off",
    "data.seed",
    "gym.outage_budget_s",
    "gym.max_failed_frac",
    "**.temperature",
    "**.seed",
    "**.data_loader_seed",
    "**.num_workers",
    "**.rollout.nnodes",
    "**.lora_rank",
    "**.clip_ratio_low",
    "**.clip_ratio_high",
    "**.kl_loss_coef",
    "**.ppo_kl_coef",
    "**.*_cov_ratio",
    "critic.cliprange_value",
    "**.optim.lr",
    "**.weight_decay",
    "**.lr_warmup_steps_ratio",
    "algorithm.gamma",
    "algorithm.lam",
    "**.kl_coef",
    "**.max_num_gen_batches",
    "**.min_num_params",
    "**.lr_warmup_init",
    "**.min_lr",
    "**.muon_momentum",
    "**.lr_min",
    "**.lr_start",
    "**.lr_decay_ratio",
    "**.activation_offload_host_cache_limit_gb",
]


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


@pytest.fixture(scope="module")
def configs():
    return {
        engine: (base_configs(engine)[1].copy(), base_configs(engine)[1])
        for engine in MODEL_ENGINES
    }


@pytest.mark.parametrize(("key", "engine"), list_keys().items())
def test_each_number_has_a_meaning_or_is_refused_in_one_line(configs, key, engine):
    config, base = configs[engine]
    if is_kit_key(key):
        config = base.copy()
    expected: dict = dict.fromkeys((-1, 0, None), REFUSED)
    if any(matches(key, pattern) for pattern in ZERO_IS_A_NUMBER):
        expected[0] = 0
    patterns = [pattern for pattern in SENTINELS if matches(key, pattern)]
    if patterns:
        expected |= SENTINELS[max(patterns, key=len)]
    default = OmegaConf.select(base, key)
    for value in VALUES:
        OmegaConf.update(config, key, value, force_add=True, merge=False)
        if is_kit_key(key):
            problem = "".join(values.reset_invalid_keys(config, base, []))
        else:
            problem = values.check_key(config, key, value, base)
        read = REFUSED if problem else to_plain(OmegaConf.select(config, key))
        if problem:
            assert problem.startswith(f"{key}=") and "\n" not in problem
            assert problem.endswith("Change it.")
        if not isinstance(value, (list, dict, bool)) and value in expected:
            wanted = expected[value]
            assert read is wanted or (read, type(read)) == (wanted, type(wanted)), value
        elif value not in (0.5, -0.5, -7, []):
            assert read is REFUSED, value
    OmegaConf.update(config, key, default, merge=False)


def test_every_number_of_the_configuration_is_in_the_table_with_a_valid_default():
    for key, engine in list_keys().items():
        base = base_configs(engine)[1]
        if is_kit_key(key):
            continue  # kit/config/sections.py has its type
        rule = find_rule(key)
        assert rule, f"{key} is not in NUMBERS"
        if key in flatten(base):
            assert rule.is_valid(to_plain(OmegaConf.select(base, key))), key


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
    problems = list(checks.check_thresholds(config))
    assert len(problems) == bool(message)
    assert not message or message in problems[0]
