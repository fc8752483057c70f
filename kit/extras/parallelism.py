"""What differs between verl's training engines (`model_engine`: dp, which is FSDP, megatron or veomni); of the last two
no line has run (docs/backends.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from kit.config.load import ACTOR, MODEL

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MOE_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
STRATEGIES = {"dp": ["fsdp", "fsdp2"], "megatron": ["megatron"], "veomni": ["veomni"]}
# of verl's save_contents: how FSDP's files begin
SHARDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


def sizes(config: DictConfig, section: str = ACTOR) -> dict[str, int]:
    """By how many GPUs a model is cut, in each way, of the actor or the critic."""
    node = OmegaConf.select(config, section)
    if config.model_engine == "megatron":
        return {name: int(node.megatron[name] or 1) for name in (*SIZES, *MOE_SIZES)}
    if config.model_engine == "veomni":
        return {
            name: int(node.veomni[name] or 1)
            for name in ("ulysses_parallel_size", "expert_parallel_size")
        }
    return {
        "ulysses_sequence_parallel_size": int(
            config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        )
    }


def same_rows(config: DictConfig) -> int:
    """GPUs that work on the same rows of a batch; all of them over this is the data-parallel size."""
    found = sizes(config)
    return (
        math.prod(found[name] for name in SIZES)
        if config.model_engine == "megatron"
        else next(iter(found.values()))
    )


def row_parts(config: DictConfig) -> int:
    """GPUs among which the tokens of a row are cut."""
    return (
        sizes(config)["context_parallel_size"]
        if config.model_engine == "megatron"
        else same_rows(config)
    )


def of_sizes() -> list[str]:
    """Keys that a checkpoint's layout follows from, of every engine."""
    veomni = ("ulysses_parallel_size", "expert_parallel_size", "fsdp_size")
    of = {"megatron": (*SIZES, *MOE_SIZES), "veomni": veomni}
    return [
        f"{place}.{engine}.{name}"
        for engine, names in of.items()
        for name in names
        for place in (ACTOR, "critic")
    ]


def problems(config: DictConfig, critic: bool) -> Iterator[str]:
    """What an engine does not go together with. critic: whether the recipe has one."""
    engine, policy = config.model_engine, config.actor_rollout_ref
    for place in [ACTOR, *["critic"] * critic]:
        if (value := OmegaConf.select(config, f"{place}.strategy")) not in STRATEGIES[engine]:
            yield f"{place}.strategy={value}: wants one of {', '.join(STRATEGIES[engine])} with model_engine={engine}"
    if engine == "dp":
        return
    if policy.model.lora_rank:
        yield f"{MODEL}.lora_rank with model_engine={engine}: verl reads it with FSDP alone; leave one of the two out"
    if config.reward.reward_model.enable:
        yield f"reward.reward_model with model_engine={engine}: its head may not be loaded; take an env.reward"
    if (mode := policy.actor[engine].router_replay.mode) != "disabled":
        why = "this loop's batches hold no router's choices to replay"
        yield f"{ACTOR}.{engine}.router_replay.mode={mode}: {why}; leave it out"
    if critic and sizes(config) != (theirs := sizes(config, "critic")):
        yield f"critic.{engine} has {theirs}, the actor {sizes(config)}: one process has both; set them the same"
    if engine == "veomni":
        return
    if (
        policy.actor.megatron.dynamic_context_parallel
        or policy.actor.megatron.use_dist_checkpointing
    ):
        yield f"{ACTOR}.megatron: dynamic_context_parallel and use_dist_checkpointing are not taken; leave them out"
    if "model" not in (contents := policy.actor.checkpoint.save_contents):
        yield f"{ACTOR}.checkpoint.save_contents={contents}: the export is of Megatron's `model`; add it"
    if list(policy.actor.optim.betas) != [0.9, 0.999]:
        yield f"{ACTOR}.optim.betas: Megatron does not read it; set {ACTOR}.optim.override_optimizer_config"


def written(engine: str, saved: Sequence[str], ranks: int) -> list[str]:
    """Names, in an actor's or critic's folder, of what so many ranks must have written of these contents."""
    if engine == "megatron":
        names = {
            "model": "model/huggingface/config.json",
            "optimizer": "optimizer/dist_ckpt/.metadata",
        }
        return ["ckpt_contents.json", *(name for kind, name in names.items() if kind in saved)]
    prefixes = [prefix for kind, prefix in SHARDS.items() if kind in saved]
    return [
        f"{prefix}_world_size_{ranks}_rank_{rank}.pt"
        for prefix in prefixes
        for rank in range(ranks)
    ]
