"""Estimate the memory that each stage of a recipe needs on each device, before anything starts.

Layers are counted as Llama's: grouped-query attention, an MLP of three matrices, two norms. A
critic is assumed to be as large as the policy. Not counted: biases, fragmentation of the allocator,
copies in the optimizer's step, reward models, teachers, judges, separate pools. A mixture of
experts is not estimated.

The estimates were compared with one GPU, called "the H100" below: an NVIDIA H100 80GB HBM3, driver
580.159.04, torch 2.11.0, vLLM 0.24.0, on 2026-11-26. Two random models of 402M and 176M parameters
trained there (tests/extras/test_preflight.py has the readings). Several GPUs, larger models
and flash-attn were not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import psutil

from extras.preflight import gpus
from kit.recipe.fused_head import BLOCK_SIZE
from kit.recipe.keys import ACTOR, ROLLOUT
from kit.recipe.model_files import expert_count
from kit.recipe.recipe import Recipe
from kit.recipe.schema import FsdpEngine, ModelSection, TrainedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB  # if this node has no GPU
# Runtime overhead: Python, torch, Ray, verl and vLLM. For a CPU it is the part of the demo's memory
# that the estimate does not explain (docs/performance.md). For a GPU it is what nvidia-smi showed
# on the H100 during an update, minus what the trainer's allocator had reserved.
OVERHEAD = {"cpu": 6 * GIB, "cuda": 2.3 * GIB}
NCCL_BUFFERS = 2 * GIB  # with several GPUs, in each process: a guess, not measured
# vLLM takes activations, graphs and libraries from its fraction of the GPU (0.7 and 0.9 GiB there).
VLLM_WORKSPACE = 0.8 * GIB
# of the Hugging Face configuration
NEEDED_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# {stage: the key to lower if it does not fit}
KEYS = {
    "generate": f"{ROLLOUT}.gpu_memory_utilization (on a CPU "
    "engine_kwargs.vllm.kv_cache_memory_bytes)",
    "update": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
}
PAGE = 'See docs/guides/gpu.md, "4. Read the memory lines".'
Bytes = dict[str, float]  # {part: bytes}


# --- sizes of a model ----------------------------------------------------------------------------


def head_widths(text_config: PretrainedConfig) -> tuple[int, int]:
    """Return the widths of queries and keys."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return heads * head_dim, key_heads * head_dim


def layer_outputs(text_config: PretrainedConfig) -> int:
    """Return the number of outputs of all matrices of a layer."""
    return 2 * sum(head_widths(text_config)) + 3 * text_config.intermediate_size


def count_layer(text_config: PretrainedConfig) -> int:
    """Return the number of parameters of one layer."""
    return int(text_config.hidden_size * (layer_outputs(text_config) + 2))


def count_parameters(text_config: PretrainedConfig) -> int:
    """Return the number of parameters of a model."""
    embeddings = 1 if getattr(text_config, "tie_word_embeddings", False) else 2
    # the embeddings and the last norm
    outside = (embeddings * text_config.vocab_size + 1) * text_config.hidden_size
    return int(text_config.num_hidden_layers * count_layer(text_config) + outside)


def activation_bytes(text_config: PretrainedConfig, itemsize: int) -> int:
    """Return the bytes that one layer keeps for its backward pass, for one token.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), applied to Llama's layer with
    flash attention. It keeps the inputs of the norms, again in fp32, and those of the projections
    and of the MLP's product; the queries, keys, values and the output of the attention.
    """
    hidden = text_config.hidden_size
    attention = 2 * sum(head_widths(text_config))
    return itemsize * (4 * hidden + attention + 4 * text_config.intermediate_size) + 8 * hidden


def itemsize(dtype: object) -> int:
    """Return the bytes of a number: 4 in fp32, else 2."""
    return 4 if "32" in str(dtype) else 2


def count_shards(recipe: Recipe, engine: FsdpEngine) -> int:
    """Return the number of GPUs among which FSDP shards a model."""
    world = recipe.trainer.n_gpus_per_node * recipe.trainer.nnodes
    return int(engine.fsdp_size if 0 < engine.fsdp_size < world else world)


# --- the trainer and the rollout engine ----------------------------------------------------------


def estimate_states(
    recipe: Recipe, text_config: PretrainedConfig, engine: FsdpEngine, model: ModelSection
) -> Bytes:
    """Return the weights, AdamW's two moments and the gradients on one device, sharded by FSDP.

    Weights and moments are in engine.model_dtype. An adapter is assumed to be on all linear layers.
    """
    count = count_parameters(text_config)
    trained = count
    if model.lora_rank:
        widths = 7 * text_config.hidden_size + layer_outputs(text_config)
        trained = text_config.num_hidden_layers * model.lora_rank * widths
    shards = count_shards(recipe, engine)
    master = itemsize(engine.model_dtype)
    gradient_shards = 1 if engine.use_no_sync_for_gradient_accumulation else shards
    return {
        "weights": master * count / shards,
        "optimizer": 2 * master * trained / shards,
        "gradients": 4 * trained / gradient_shards,
    }


def list_resident(recipe: Recipe, engine: FsdpEngine, states: Bytes) -> Bytes:
    """Return the states that stay on the device while other models work."""
    is_cpu = recipe.trainer.device == "cpu"  # where offloading frees nothing
    is_offloaded = {"weights": engine.param_offload, "optimizer": engine.optimizer_offload}
    kept = [name for name in states if is_cpu or not is_offloaded.get(name, True)]
    return {name: states[name] for name in kept}


def estimate_pass(
    recipe: Recipe,
    text_config: PretrainedConfig,
    section: TrainedModel,
    engine: FsdpEngine,
    model: ModelSection,
) -> Bytes:
    """Return the memory of an update's micro-batch. section: the actor's or the critic's.

    Layers are all-gathered for use, in the type of the computation (verl 0.9.1,
    workers/engine/fsdp/transformer_impl.py).
    """
    tokens = section.ppo_max_token_len_per_gpu
    precision = engine.mixed_precision
    width = itemsize(precision.param_dtype if precision else None)
    layers = text_config.num_hidden_layers
    activations = layers * activation_bytes(text_config, width)
    if model.enable_gradient_checkpointing:
        inputs = width * text_config.hidden_size * layers
        activations = inputs + activation_bytes(text_config, width)
    gathered = count_parameters(text_config)
    if engine.reshard_after_forward:
        gathered -= (layers - 2) * count_layer(text_config)
    parts = {"all-gathered": float(width * gathered), "activations": float(tokens * activations)}
    if section is recipe.actor:
        parts["logits"] = estimate_logits(recipe, text_config, tokens, width)
    return parts


def estimate_logits(
    recipe: Recipe, text_config: PretrainedConfig, tokens: int, width: int
) -> float:
    """Return the memory of head and loss, without the head's weights. width: bytes of a number.

    A whole micro-batch has three tensors of logits [tokens, vocabulary]: before and after the
    division by the temperature, and the gradient (verl 0.9.1, prepare_model_outputs, with
    flash-attn's cross entropy). In blocks of the head (kit/engine/head_in_blocks.py) there are two
    fp32 tensors of a block, and one in `width`. The hidden states of the tokens with a gradient are
    a copy, and their gradient is a sum in fp32, a part of it and a result. The head's own gradient
    is whole.
    """
    vocab_size = text_config.vocab_size
    if not recipe.model.use_fused_kernels:
        return 3 * tokens * width * vocab_size
    blocks = min(tokens * vocab_size, BLOCK_SIZE) * (8 + width)
    hidden_states = tokens * text_config.hidden_size * (4 + 3 * width)
    gradient = 0 if recipe.model.lora_rank else width * vocab_size * text_config.hidden_size
    return blocks + hidden_states + gradient


def estimate_rollout_engine(
    recipe: Recipe, text_config: PretrainedConfig, device_bytes: int
) -> Bytes:
    """Return the memory of the rollout engine while it samples."""
    rollout = recipe.rollout
    size = itemsize(rollout.dtype) * count_parameters(text_config)
    weights = size / rollout.tensor_model_parallel_size
    workspace = 0.0 if recipe.trainer.device == "cpu" else VLLM_WORKSPACE
    cache: float = (rollout.engine_kwargs.get("vllm") or {}).get("kv_cache_memory_bytes") or 0.0
    if rollout.name == "hf":  # of all concurrent responses, at their full length
        tokens = rollout.max_num_seqs * (rollout.max_model_len or 0)
        cache = tokens * cache_bytes_per_token(recipe, text_config)
    if not cache:
        cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights - workspace)
    return {"engine weights": weights, "vLLM's workspace": workspace, "KV cache": cache}


def cache_bytes_per_token(recipe: Recipe, text_config: PretrainedConfig) -> float:
    """Return the bytes of a token in the KV cache of a device: a key and a value in each layer."""
    rollout = recipe.rollout
    numbers = 2 * text_config.num_hidden_layers * head_widths(text_config)[1]
    return float(numbers * itemsize(rollout.dtype) / rollout.tensor_model_parallel_size)


def count_cached_episodes(recipe: Recipe, text_config: PretrainedConfig) -> int:
    """Return the number of episodes of full length for which the KV cache has room."""
    engine = estimate_rollout_engine(recipe, text_config, find_device(recipe).size)
    length = recipe.rollout.max_model_len or recipe.max_episode_length
    return int(engine["KV cache"] / cache_bytes_per_token(recipe, text_config) / length)


# --- the stages ----------------------------------------------------------------------------------


def estimate_stages(
    recipe: Recipe, text_config: PretrainedConfig, device_bytes: int
) -> dict[str, Bytes]:
    """Return {stage: bytes of each part} on one device, for the stages of KEYS.

    Usually log-probs need less than the update, and a weight sync less than `generate`.
    """
    is_cpu = recipe.trainer.device == "cpu"
    overhead = OVERHEAD["cpu"] if is_cpu else OVERHEAD["cuda"]
    if recipe.all_gpus > 1 and not is_cpu:
        overhead += NCCL_BUFFERS
    stages = {"generate": estimate_rollout_engine(recipe, text_config, device_bytes)}
    if recipe.trains:
        stages = estimate_training(recipe, text_config, stages["generate"])
    return {stage: parts | {"runtime overhead": overhead} for stage, parts in stages.items()}


def estimate_training(
    recipe: Recipe, text_config: PretrainedConfig, sampler: Bytes
) -> dict[str, Bytes]:
    """Return the same for a command that trains. sampler: the bytes of the rollout engine."""
    engine = recipe.actor.fsdp_config
    assert engine  # FSDP trains (find_obstacle)
    states = estimate_states(recipe, text_config, engine, recipe.model)
    resident = list_resident(recipe, engine, states)
    micro_batch = estimate_pass(recipe, text_config, recipe.actor, engine, recipe.model)
    if recipe.command == "sft":
        return {"update": states | micro_batch}
    rollout = recipe.rollout
    is_separate = bool(rollout.nnodes and recipe.trainer.device != "cpu")
    # what the engine keeps on the trainer's device while it sleeps
    asleep = {} if is_separate or rollout.free_cache_engine else sampler
    stages = {
        "generate": ({} if is_separate else resident) | sampler,
        "update": states | micro_batch | asleep,
    }
    if "values" in recipe.arguments and not recipe.trainer.resource_pools.critic:
        critic = recipe.critic
        assert critic.fsdp
        critic_states = estimate_states(recipe, text_config, critic.fsdp, critic.model)
        for parts in stages.values():
            parts["critic"] = sum(list_resident(recipe, critic.fsdp, critic_states).values())
        micro_batch = estimate_pass(recipe, text_config, critic, critic.fsdp, critic.model)
        actor = {"actor": sum(resident.values())}
        stages["critic"] = critic_states | micro_batch | actor | asleep
    return stages


# --- the report ----------------------------------------------------------------------------------


class Device(NamedTuple):
    """The memory of one device."""

    size: int  # bytes
    note: str  # empty if it was measured
    kind: str = "GPU"

    def __str__(self) -> str:
        return f"a {self.kind} has {self.size / GIB:.1f} GiB{self.note}"


def find_device(recipe: Recipe) -> Device:
    """Return the memory of the smallest GPU, or a rank's share of the machine's memory."""
    if recipe.trainer.device == "cpu":
        return Device(psutil.virtual_memory().total // recipe.trainer.n_gpus_per_node, "", "CPU")
    # without torch, which would take GPU memory for this process
    sizes = [gpu.mib for gpu in gpus.list_gpus() if gpu.mib]
    if not sizes:
        return Device(ASSUMED_GPU_BYTES, ", assumed: this node has no GPU")
    return Device(min(sizes) * 2**20, "")


def find_obstacle(recipe: Recipe, text_config: PretrainedConfig) -> str:
    """Return the reason why no estimate is possible, empty if one is."""
    missing = [name for name in NEEDED_FIELDS if not getattr(text_config, name, None)]
    if missing:
        return f"the model's configuration has no {', '.join(missing)}"
    if expert_count(text_config):
        return "the model is a mixture of experts"
    if not recipe.engine.is_fsdp or not recipe.actor.fsdp_config:
        return f"model_engine={recipe.model_engine}"
    if recipe.actor.fsdp_config.offload_policy:
        return f"{ACTOR}.fsdp_config.offload_policy"
    return ""


def describe(recipe: Recipe, text_config: PretrainedConfig) -> list[str]:
    """Return lines with the estimate of each stage, in GiB."""
    obstacle = find_obstacle(recipe, text_config)
    if obstacle:
        return [f"memory      not estimated: {obstacle}"]
    device = find_device(recipe)
    stages = estimate_stages(recipe, text_config, device.size)
    lines = [f"memory      estimated, in GiB; {device}"]
    for stage, parts in stages.items():
        sizes = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size]
        lines.append(f"  {stage:9} {sum(parts.values()) / GIB:.1f}: {', '.join(sizes)}")
    if "generate" in stages:
        token = cache_bytes_per_token(recipe, text_config)
        lines.append(
            f"KV cache    {token / 2**10:.0f} KiB a token: "
            f"{count_cached_episodes(recipe, text_config)} concurrent episodes of "
            f"{recipe.rollout.max_model_len} tokens"
        )
    return lines


def check_cache(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """Yield a line if the KV cache has no room for the episodes that a replica samples together.

    A CPU samples so slowly that its recipe (configs/machines/cpu.yaml) chooses a small cache.
    """
    if recipe.command == "sft" or find_obstacle(recipe, text_config):
        return
    rollout = recipe.rollout
    episodes = count_cached_episodes(recipe, text_config)
    needed = 1
    if recipe.command == "train" and recipe.trainer.device != "cpu":
        share = recipe.data.train_batch_size * rollout.n / recipe.replicas
        needed = min(rollout.max_num_seqs, math.ceil(share))
    if episodes < needed:
        yield (
            f"The KV cache has room for {episodes} episodes of {rollout.max_model_len} tokens, "
            f"and a replica samples up to {needed} concurrently, so that some wait. Raise "
            f"{KEYS['generate']}, or {ROLLOUT}.tensor_model_parallel_size. {PAGE}"
        )
