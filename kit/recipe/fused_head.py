"""Whether log-probs are computed from blocks of the head, without all logits of a micro-batch.

configs/base.yaml turns verl's key use_fused_kernels on. verl then replaces the forward pass of the
model's class by one that reads `model` and `lm_head.weight`, and computes what
kit/engine/head_in_blocks.py does. `derive` turns the key off for recipes that need the logits.

Protects: log-probs, from models whose logits are more than a product with the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK_SIZE = 2**25  # logits that are computed together: 128 MiB in fp32
# Model types of transformers whose logits are `lm_head(model(ids))`, unless the configuration has a
# soft cap. tests/engine/test_head_in_blocks.py computes each in both ways.
PLAIN_HEADS = (
    *("gemma", "gemma3_text", "llama", "mistral", "mixtral", "olmo2", "olmo3", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
)


def find_head_obstacle(hf_config: PretrainedConfig) -> str:
    """Return why the log-probs of a model need all logits. Empty if they do not."""
    kind = hf_config.model_type
    if kind not in PLAIN_HEADS or not type(hf_config).__module__.startswith("transformers."):
        return f"blocks of the head are not tested for the model type {kind}"
    if cap := getattr(hf_config, "final_logit_softcapping", None):
        return f"the model has a soft cap of {cap:g} on logits"
    return ""


def find_obstacle(settings: Settings, head_obstacle: str) -> str:
    """Return why the log-probs of a recipe need all logits. Empty if they do not.

    head_obstacle: that of the model.
    """
    reasons = {
        f"model_engine={settings.model_engine}": not settings.engine.is_fsdp,
        f"trainer.device={settings.trainer.device}": settings.trainer.device == "cpu",
        "use_remove_padding=false": not settings.model.use_remove_padding,
        "distillation.enabled=true": bool(settings.teacher),  # the teacher may have another head
        f"{settings.algorithm.adv_estimator} reads sum_pi_squared": reads_squares(settings),
        head_obstacle: bool(head_obstacle),
    }
    return next((reason for reason, is_there in reasons.items() if is_there), "")


def reads_squares(settings: Settings) -> bool:
    """Return whether the advantage reads the sum of the squared probabilities."""
    return settings.command == "train" and "sum_pi_squared" in settings.arguments
