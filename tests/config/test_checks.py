"""Tests which settings of a recipe can be combined, and which combinations are errors."""

from __future__ import annotations

import shutil

import pytest
from omegaconf import OmegaConf

from extras import sft
from kit.config import checks, user_functions
from kit.config.load import base_configs, load_config
from kit.config.recipe import freeze
from kit.config.user_functions import ADVANTAGE, LOSS_MODE, TEACHER
from kit.config.values import describe_invalid
from kit.errors import ConfigError
from kit.runs import prepare, summary, trial
from tests.helpers.recipes import (
    CPU,
    RECIPE,
    ROOT,
    load,
    make_counter_row,
    make_partial,
    tiny,
    write_rows,
)


@pytest.fixture(scope="module")
def tiny_recipe(workspace):
    return load_config([str(CPU), str(RECIPE)], tiny(workspace))[0]


def with_changes(config, *changes):
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes)))


def test_all_estimators_and_losses_of_verl_are_accepted_and_some_need_groups(tiny_recipe):
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

    estimators = [f"{ADVANTAGE}={estimator.value}" for estimator in AdvantageEstimator]
    names = [n for n in POLICY_LOSS_REGISTRY if not user_functions.is_user_function(n)]
    losses = [f"{LOSS_MODE}={name}" for name in names]
    assert len(estimators) >= 13 and len(losses) >= 12
    for change in estimators + losses:
        config = with_changes(tiny_recipe, change)
        problems = [*checks.check_names(config), *checks.check_models(freeze(config, config))]
        assert not problems, change
    without_group = set()
    for change in estimators:
        config = with_changes(tiny_recipe, change, "actor_rollout_ref.rollout.n=1")
        if not list(checks.check_models(freeze(config, config))):
            without_group.add(change)
    names = ("gae", "reinforce_plus_plus", "remax")
    assert without_group == {f"{ADVANTAGE}={name}" for name in names}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["algorithm.adv_estimator=grppo"],
            r"not in verl, which has gae, .*\. Did you mean grpo\?",
        ),
        ([f"{LOSS_MODE}=gsp"], r"Did you mean gspo\?"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        ([f"{LOSS_MODE}=dro"], "needs actor_rollout_ref.actor.policy_loss.dro_beta"),
        (
            [f"{LOSS_MODE}=bypass_mode"],
            "follows from algorithm.rollout_correction.bypass_mode=true",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true", f"{LOSS_MODE}=gspo"],
            "has its own loss",
        ),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "env.filters=[{function: templates/filters.py:with_answer, field: answer}]",
            ],
            "with_answer adds responses that the rollout engine did not sample",
        ),
        (["algorithm.filter_groups.enable=true"], "needs max_num_gen_batches"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"]
            + ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=remax"],
            r"rollout\.n=1: drop_uniform drops every group of one",
        ),
        (
            ["trainer.resource_pools.critic=1"],
            "resource_pools.critic=1: this recipe has no critic. Remove it",
        ),
        (
            ["trainer.one_step_off=1", "actor_rollout_ref.rollout.full_determinism=true"],
            "cannot repeat at which token new weights arrive",
        ),
        (
            ["trainer.one_step_off=1", "actor_rollout_ref.rollout.free_cache_engine=true"],
            "makes the rollout engine sleep",
        ),
        (
            ["actor_rollout_ref.rollout.nnodes=1"],
            r"rollout.nnodes=1 needs .*\.backend to be gloo",
        ),
        (
            ["actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"],
            "for rollout engines on separate GPUs. Set .*nnodes",
        ),
        (
            ["actor_rollout_ref.rollout.n_gpus_per_node=2"],
            "n_gpus_per_node is for rollout engines on separate GPUs. Set",
        ),
        (
            [
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
            ]
            + ["actor_rollout_ref.model.lora_rank=4"],
            "verl sends no adapter to separate GPUs. Set actor_rollout_ref.model.lora.merge=true",
        ),
        (["algorithm.rollout_correction.rollout_is=tokens"], "one of: null, token, sequence"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "needs rollout_rs_threshold"),
        (
            [
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.rollout_correction.bypass_mode=true",
            ],
            "optimal_token_baseline needs the forward pass",
        ),
        (["algorithm.kl_ctrl.type=adaptve"], "one of: fixed, adaptive"),
        (["algorithm.adv_estimator=vtrace"], "give a custom function as path.py:function"),
        (
            [
                "algorithm.rollout_correction.rollout_rs=foo",
                "algorithm.rollout_correction.rollout_rs_threshold=2.0",
            ],
            r"rollout_rs=foo is not supported. Use one or several of: .*token_k1",
        ),
        (["actor_rollout_ref.actor.loss_agg_mode=token_mean"], "Invalid loss_agg_mode: token_mean"),
        (["algorithm.kl_penalty=k5"], "one of: kl, "),
        (
            ["actor_rollout_ref.actor.optim.lr_scheduler_type=linear"],
            r"actor: verl does not accept it: assert self\.lr_scheduler_type in .*cosine",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a]",
                "algorithm.gdpo_reward_weights=[1,2]",
            ],
            "gdpo_reward_weights has 2 values for 1 keys. Give one weight for each key",
        ),
        (["actor_rollout_ref.model.lora_rank=8"], r"configs/algorithms/lora\.yaml"),
        (["reward.reward_model.enable=true"], "needs reward.reward_model.model_path"),
        (
            ["reward.reward_model.enable=true", "reward.reward_model.model_path=./no"],
            "no such model folder",
        ),
        (
            ["reward.reward_model.enable=true", "reward.reward_model.model_path=tied"],
            "has no scalar head",
        ),
        (["distillation.enabled=true"], f"needs {TEACHER}"),
        (["distillation.enabled=true", f"{TEACHER}=./no"], "no such model folder"),
        (
            ["distillation.enabled=true", f"{TEACHER}=tied"],
            "nothing uses this model.*=templates/advantages.py:distill",
        ),
        ([f"{TEACHER}=tied"], r"needs distillation\.enabled=true"),
        (
            ["algorithm.adv_estimator={function: templates/advantages.py:turn_grpo}"],
            "must be a name of verl, or path.py:function",
        ),
        (
            [
                "actor_rollout_ref.rollout.n=1",
                "algorithm.adv_estimator=templates/advantages.py:turn_grpo",
            ],
            "at least two responses",
        ),
    ],
)
def test_an_invalid_combination_is_an_error(tiny_recipe, workspace, monkeypatch, changes, message):
    monkeypatch.chdir(workspace)
    with pytest.raises(ConfigError, match=message):
        prepare.check_recipe(with_changes(tiny_recipe, *changes), base_configs()[0], "train")


def test_a_teacher_with_another_vocabulary_is_an_error(tiny_recipe, workspace, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workspace / "tied")
    tokenizer.add_tokens(["stranger"])
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(workspace / "tied" / "config.json", tmp_path)
    estimator = f"{ADVANTAGE}=templates/advantages.py:distill"
    config = with_changes(
        tiny_recipe, estimator, "distillation.enabled=true", f"{TEACHER}={tmp_path}"
    )
    with pytest.raises(
        ConfigError,
        match=rf"{TEACHER}={tmp_path}: its vocabulary differs from the policy's.*'stranger'",
    ):
        prepare.check_recipe(config, base_configs()[0], "train")


def test_the_summary_warns_of_a_truncated_sampling_distribution(workspace):
    for change, has_warning in (
        ("top_p=0.9", True),
        ("top_k=20", True),
        ("temperature=0.9", False),
    ):
        text = summary.summarize(*load(workspace, f"actor_rollout_ref.rollout.{change}"))
        assert ("rollout_correction is biased" in text) == has_warning


def test_the_summary_warns_of_verl_rows_for_a_gym_server(workspace):
    verl_row = {"prompt": "say 7", "data_source": "mine", "reward_model": {"ground_truth": "7"}}
    rows = write_rows(workspace / "verls.jsonl", [verl_row] * 8)
    warning = "WARNING     Rows in verl's format go to the server reasoning_gym"
    verifier = ", verifier: templates/reward.py:compute_score"
    for settings, has_warning in (("", True), (verifier, False)):
        files = f"env.train_files=[{{path: {rows}{settings}}}]"
        text = summary.summarize(*load(workspace, files))
        assert (warning in text) == has_warning


def test_a_tool_that_gyms_schema_rejects_is_an_error_before_anything_starts(workspace):
    row = make_counter_row()
    del row["responses_create_params"]["tools"][0]["strict"]
    rows = write_rows(workspace / "lax.jsonl", [row] * 8)
    with pytest.raises(
        ConfigError, match=r"lax\.jsonl:1: a tool has no strict, .*\"strict\": true"
    ):
        load(workspace, f"env.train_files=[{{path: {rows}, server: reasoning_gym}}]")


def test_another_reward_does_not_inherit_settings(workspace):
    """The reward function of dapo has the setting `limit`.

    A later env.reward replaces the function with its settings. A later env.reward.penalty only
    changes one setting.
    """
    folder = ROOT / "configs" / "algorithms"
    dapo = str(folder / "dapo.yaml")

    def reward(*changes):
        return load_config([str(RECIPE), dapo, *changes[:1]], changes[1:])[0].env.reward

    assert reward(str(folder / "reward_model.yaml")) == {
        "function": "templates/rewards.py:weighted",
        "weights": {"reward_model": 0.2},
    }
    assert reward(dapo, "env.reward=x.py:f") == "x.py:f"
    assert reward(dapo, "env.reward={function: x.py:f, per_token: 1}") == {
        "function": "x.py:f",
        "per_token": 1,
    }
    assert reward(dapo, "env.reward.penalty=0.5") == {
        "function": "templates/rewards.py:overlong",
        "limit": 12,
        "penalty": 0.5,
    }


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "algorithms").glob("*.yaml")), ids=lambda path: path.stem
)
def test_an_overlay_is_short_and_works_with_both_math_recipes(workspace, path):
    assert len(path.read_text().splitlines()) <= 15
    for base in ("math.yaml", "math_cpu.yaml"):
        config, _ = load_config([str(ROOT / "configs" / base), str(path)], [])
        assert not [*checks.check_algorithm(config), *checks.check_names(config)]
        assert not list(checks.check_models(freeze(config, config)))
    changes = tiny(workspace)
    if path.stem == "reward_model":
        changes.append(f"reward.reward_model.model_path={workspace / 'scored'}")
    if path.stem == "distill":
        changes.append(f"{TEACHER}={workspace / 'tied'}")
    if path.stem == "sft":
        changes = [c for c in changes if not c.startswith("env.")]
        messages = [
            {"role": "user", "content": "say 7"},
            {"role": "assistant", "content": "7"},
        ]
        rows = write_rows(workspace / "eight.jsonl", [{"messages": messages}] * 8)
        changes.append(f"env.train_files=[{rows}]")
    merged = load_config([str(CPU), str(RECIPE), str(path)], [*changes, "data.train_batch_size=8"])
    recipe, inputs = (sft if path.stem == "sft" else prepare).prepare(*merged)
    trial.try_functions(recipe, inputs)


def test_the_advantage_decides_whether_there_is_a_critic(workspace):
    with pytest.raises(ConfigError, match="decides whether there is a critic"):
        load(workspace, "critic.enable=true")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"override_optimizer_config": {"eps": 1e-6}}, ""),
        (
            {"override_optimizer_config": {"epsilon": 1e-6}},
            "epsilon: torch.optim.AdamW has no",
        ),
        ({"optimizer": "AdamX"}, "optimizer=AdamX is not in torch.optim"),
        ({"optimizer_impl": "no_such"}, "optimizer_impl=no_such cannot be imported"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_an_error(changes, problem):
    optim = {"optimizer_impl": "torch.optim", "optimizer": "AdamW", **changes}
    optim.setdefault("override_optimizer_config", None)
    recipe = make_partial({"actor_rollout_ref": {"actor": {"optim": optim}}})
    problems = list(checks.check_optimizers(recipe))
    assert len(problems) == bool(problem) and problem in "".join(problems)


def test_a_number_in_quotes_is_named_as_a_text():
    problem = describe_invalid("data.train_batch_size", "8", 1)
    assert problem == "data.train_batch_size='8' is a text, not a number. Remove the quotes."
