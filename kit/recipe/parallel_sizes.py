"""GPUs that share rows, weights or a model: their number divides the machine and the model.

verl, vLLM and torch refuse other numbers too, but in their processes, minutes after the start.

Protects: a number of GPUs that cannot work ends the run before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kit.recipe.keys import MODEL, ROLLOUT
from kit.recipe.settings import Settings
from kit.recipe.training_engine import FSDP_SECTIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_gpus(settings: Settings) -> Iterator[str]:
    """Check that the GPUs divide into rollout replicas and into groups of the trainer."""
    yield from check_rollout_gpus(settings)
    if settings.trains:
        yield from dict.fromkeys(check_training_gpus(settings))


def check_rollout_gpus(settings: Settings) -> Iterator[str]:
    """Check that the GPUs divide into whole rollout replicas."""
    # verl's actor has the same requirement if the replicas have separate GPUs
    actor_gpus = settings.trainer.n_gpus_per_node * settings.trainer.nnodes
    for count in sorted({settings.rollout_gpus, actor_gpus}):
        if count % settings.replica_gpus:
            yield (
                f"{count} GPUs must be a multiple of {ROLLOUT}.tensor_model_parallel_size * "
                f"data_parallel_size = {settings.replica_gpus}. Lower these, or raise "
                "trainer.n_gpus_per_node."
            )


def check_training_gpus(settings: Settings) -> Iterator[str]:
    """Check that each role's GPUs divide into groups that share rows or weights."""
    engine = settings.engine
    for role, section in FSDP_SECTIONS.items():
        world = settings.world_size(role)
        if world % engine.model_gpus:
            yield (
                f"{world} GPUs must be a multiple of {engine.size_key}={engine.model_gpus}. "
                "Lower it."
            )
        size = settings.get(f"{section}.fsdp_size") or world  # Megatron has no such key
        if world % size and size < world:  # verl takes a larger one as all GPUs
            yield (
                f"{world} GPUs must be a multiple of {section}.fsdp_size={size}. Change it, or set "
                "-1 for all GPUs."
            )


def check_models(settings: Settings, models: Mapping[str, PretrainedConfig]) -> Iterator[str]:
    """Check that the GPUs that share a model divide its attention heads.

    models: {name: configuration} of the policy and of the other models that the recipe names.
    """
    engine = settings.engine
    if settings.trains and engine.is_fsdp:
        key = engine.size_key
        if engine.sequence_gpus > 1 and not settings.model.use_remove_padding:
            needed = f"{MODEL}.use_remove_padding=true"
            yield f"{key}={engine.sequence_gpus} needs {needed}. Set that too."
        for name, model in models.items():
            yield from check_heads(key, engine.sequence_gpus, settings.world_size(), name, model)
    if settings.has_episodes and settings.rollout.name != "hf":
        gpus = settings.rollout.tensor_model_parallel_size
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        yield from check_heads(key, gpus, settings.rollout_gpus, "policy", models["policy"])


def check_heads(
    key: str, gpus: int, world: int, name: str, model: PretrainedConfig
) -> Iterator[str]:
    """`gpus` of `world` GPUs can share the attention heads of a model equally. name: of it."""
    if not can_share(model, gpus):
        config = model.get_text_config()
        heads = f"{config.num_attention_heads} attention heads"
        keys = getattr(config, "num_key_value_heads", None)
        heads += f" ({keys} key-value heads)" if keys else ""
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        fitting = ", ".join(str(n) for n in divisors if can_share(model, n))
        yield (
            f"{key}={gpus}: {gpus} GPUs cannot share the {heads} of the {name} equally. Use one "
            f"of: {fitting}."
        )


def can_share(model: PretrainedConfig, gpus: int) -> bool:
    """Return whether `gpus` GPUs get as many heads each, maybe copies of a key-value head."""
    config = model.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(keys, int):  # a model of another kind
        return True
    return heads % gpus == 0 and (keys % gpus == 0 or gpus % keys == 0)
