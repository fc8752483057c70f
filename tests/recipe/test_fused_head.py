"""Which recipes compute log-probs from blocks of the head, and what the summary shows of others."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, Qwen2_5_VLConfig

from kit.run.summary import describe_logits
from tests.helpers.nodes import make_recipe

KEY = "actor_rollout_ref.model.use_fused_kernels"
TEACHER = "distillation.teacher_models.teacher_model.model_path"


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["actor_rollout_ref.model.lora_rank=16"],
        ["algorithm.adv_estimator=gae"],
        ["actor_rollout_ref.actor.entropy_coeff=0.01"],
    ],
)
def test_the_head_is_computed_in_blocks_by_default(changes):
    recipe = make_recipe("0.5B", *changes)
    assert recipe.model.use_fused_kernels
    assert not recipe.critic.model.use_fused_kernels
    assert recipe.for_verl(f"{KEY.rpartition('.')[0]}.fused_kernel_options").impl_backend == "torch"
    assert not describe_logits(recipe)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        (Gemma2Config(), [], "for the model type gemma2"),
        (Gemma3TextConfig(final_logit_softcapping=30.0), [], "a soft cap of 30 on logits"),
        (Qwen2_5_VLConfig(), [], "for the model type qwen2_5_vl"),
        (
            "0.5B",
            ["algorithm.adv_estimator=optimal_token_baseline"],
            "optimal_token_baseline reads sum_pi_squared",
        ),
        ("0.5B", ["actor_rollout_ref.model.use_remove_padding=false"], "use_remove_padding=false"),
        ("0.5B", ["distillation.enabled=true", f"{TEACHER}=a"], "distillation.enabled=true"),
        ("0.5B", ["trainer.device=cpu"], "trainer.device=cpu"),
        ("0.5B", ["model_engine=megatron"], "model_engine=megatron"),
    ],
)
def test_other_recipes_keep_all_logits_and_the_summary_says_why(model, changes, reason):
    recipe = make_recipe(model, *changes)
    assert not recipe.model.use_fused_kernels
    (line,) = describe_logits(recipe)
    assert line.startswith("logits      all of a micro-batch are in memory: ") and reason in line


def test_a_recipe_that_chooses_all_logits_needs_no_line():
    recipe = make_recipe(Gemma2Config(), f"{KEY}=false")
    assert not recipe.model.use_fused_kernels and not describe_logits(recipe)
