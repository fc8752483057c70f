"""Estimate the memory that each stage of a recipe needs on each device, before anything starts.

Layers are counted as Llama's: grouped-query attention, an MLP of three matrices, two norms. A
critic and a teacher are assumed to be as large as the policy. Not counted: biases, fragmentation of
the allocator, reward models, judges, separate pools, and tokens that verl's balancing adds beyond
the limit of a micro-batch. The trainer on a CPU computes no logits of prompts, but the estimate
includes them. A mixture of experts is not estimated.

The estimates were compared with one GPU, called "the H100" below: an NVIDIA H100 80GB HBM3, driver
580.159.04, torch 2.11.0, vLLM 0.24.0, on 2026-11-26. Two random models of 402M and 176M parameters
trained there (tests/extras/preflight/test_memory.py has the readings). Several GPUs, larger models
and flash-attn were not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from extras.preflight import gpus
from kit.config.load import ACTOR, FSDP, ROLLOUT
from kit.config.model_files import expert_count
from kit.config.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB  # if this node has no GPU
# A recipe is refused if a stage needs more than this times the GPU's memory. Below it, the error of
# the estimate may be larger than the shortage.
REFUSED_FROM = 1.15
OVERRIDE = "To start in spite of this estimate, set trainer.allow_memory_over_estimate=true. "
# Runtime overhead: Python, torch, Ray, verl and vLLM. For a CPU it is the part of the demo's memory
# that the estimate does not explain (docs/performance.md). For a GPU it is what nvidia-smi showed
# on the H100 during an update, minus what the trainer's allocator had reserved: 2.33 GiB and
# 2.27 GiB with the two models. The CUDA contexts of trainer and vLLM take 0.5 GiB each. The rest is
# libraries, kernels, NCCL of a group of one, and CUDA graphs.
OVERHEAD = {"cpu": 6 * GIB, "cuda": 2.3 * GIB}
NCCL_BUFFERS = 2 * GIB  # with several GPUs, in each process: a guess, not measured
# vLLM takes activations, graphs and libraries from its fraction of the GPU. On the H100 the KV
# cache was 0.9 and 0.7 GiB smaller than the fraction without the weights, with the two models.
VLLM_WORKSPACE = 0.8 * GIB
NEEDED_FIELDS = (  # of the Hugging Face configuration
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
MORE_GPUS = "raise trainer.n_gpus_per_node"
OFFLOAD = f"set {ACTOR}.fsdp_config.param_offload and optimizer_offload"
# {stage: the fix if it does not fit}, in the order in which they are printed. verl loads offloaded
# weights and moments for the whole update (verl 0.9.1, workers/engine/base.py), so that offloading
# does not help there.
FIXES = {
    "generate": f"Lower {ROLLOUT}.gpu_memory_utilization (on a CPU "
    f"engine_kwargs.vllm.kv_cache_memory_bytes), {MORE_GPUS}, or {OFFLOAD}",
    "log-probs": f"Lower {ROLLOUT}.log_prob_max_token_len_per_gpu, {MORE_GPUS}, or {OFFLOAD}",
    "update": f"Lower {ACTOR}.ppo_max_token_len_per_gpu, {MORE_GPUS}, or add --config lora",
    "critic": f"Lower critic.ppo_max_token_len_per_gpu, {MORE_GPUS}, or use an advantage without a "
    "critic, such as grpo",
    "sync": f"Lower {ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes, {MORE_GPUS}, or "
    f"{OFFLOAD}",
}
TEMPORARY = "AdamW's temporary"
PAGE = 'See docs/guides/gpu.md, "4. Read the memory lines".'
Bytes = dict[str, float]  # {part: bytes}


# --- sizes of a model ----------------------------------------------------------------------------


class LayerWidths(NamedTuple):
    """The widths of one layer's matrices."""

    queries: int
    keys: int
    outputs: int  # of all matrices of the layer


class ParameterCount(NamedTuple):
    """The number of parameters."""

    model: int
    layer: int


def layer_widths(text_config: PretrainedConfig) -> LayerWidths:
    """The widths of a layer. text_config: the Hugging Face configuration of a text model."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    queries = heads * head_dim
    keys = (getattr(text_config, "num_key_value_heads", None) or heads) * head_dim
    return LayerWidths(queries, keys, 2 * (queries + keys) + 3 * text_config.intermediate_size)


def count_parameters(text_config: PretrainedConfig) -> ParameterCount:
    """The parameters of a model and of one of its layers."""
    hidden = text_config.hidden_size
    layer = hidden * (layer_widths(text_config).outputs + 2)
    embeddings = 1 if getattr(text_config, "tie_word_embeddings", False) else 2
    outside = (embeddings * text_config.vocab_size + 1) * hidden  # the embeddings and the last norm
    return ParameterCount(text_config.num_hidden_layers * layer + outside, layer)


def activation_bytes(text_config: PretrainedConfig, itemsize: int) -> int:
    """Bytes that one layer keeps for its backward pass, for one token.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), applied to Llama's layer with
    flash attention. It keeps:

    - the inputs of the norms, of the projections and of the MLP's product
    - the queries, keys, values and the output of the attention
    - the inputs of the norms once more, in fp32
    """
    widths = layer_widths(text_config)
    hidden = text_config.hidden_size
    attention = 2 * (widths.queries + widths.keys)
    return itemsize * (4 * hidden + attention + 4 * text_config.intermediate_size) + 8 * hidden


def itemsize(dtype: object) -> int:
    """Bytes of a number: 4 in fp32, else 2."""
    return 4 if "32" in str(dtype) else 2


def compute_itemsize(engine: DictConfig) -> int:
    """Bytes of a number in the type that an FSDP engine computes in."""
    return itemsize((engine.get("mixed_precision") or {}).get("param_dtype"))


def count_shards(recipe: Recipe, engine: DictConfig) -> int:
    """The GPUs among which FSDP shards a model."""
    world = recipe.trainer.n_gpus_per_node * recipe.trainer.nnodes
    return int(engine.fsdp_size if 0 < engine.fsdp_size < world else world)


# --- the trainer ---------------------------------------------------------------------------------


class ModelMemory(NamedTuple):
    """The memory of a model under FSDP."""

    resident: Bytes  # stays on the device while other models work
    forward: Bytes  # of a forward pass, without activations and logits
    update: Bytes  # of a micro-batch or of the optimizer's step: these two do not overlap


def estimate_states(
    recipe: Recipe, text_config: PretrainedConfig, engine: DictConfig, model: DictConfig
) -> Bytes:
    """The weights, AdamW's two moments and the gradients on one device, sharded by FSDP.

    Weights and moments are in engine.model_dtype. An adapter is assumed to be on all linear layers.
    """
    count = count_parameters(text_config).model
    trained = count
    if model.lora_rank:
        widths = 7 * text_config.hidden_size + layer_widths(text_config).outputs
        trained = text_config.num_hidden_layers * model.lora_rank * widths
    shards = count_shards(recipe, engine)
    master = itemsize(engine.model_dtype)
    gradient_shards = 1 if engine.use_no_sync_for_gradient_accumulation else shards
    return {
        "weights": master * count / shards,
        "optimizer": 2 * master * trained / shards,
        "gradients": 4 * trained / gradient_shards,
    }


def estimate_model(
    recipe: Recipe,
    text_config: PretrainedConfig,
    section: DictConfig,
    model: DictConfig,
    token_logits: float,
) -> ModelMemory:
    """The memory of a model under FSDP. section: the actor's or the critic's.

    token_logits: bytes of the logits of one token.

    Layers are all-gathered for use, in the type of the computation (verl 0.9.1,
    workers/engine/fsdp/transformer_impl.py). The actor's update holds three tensors of logits
    [tokens, vocabulary]: before and after the division by the temperature, and the gradient (verl
    0.9.1, prepare_model_outputs, with flash-attn's cross entropy).
    """
    engine = section.get("fsdp_config") or section.fsdp
    tokens = section.ppo_max_token_len_per_gpu
    count = count_parameters(text_config)
    width = compute_itemsize(engine)
    layers = text_config.num_hidden_layers
    activations = layers * activation_bytes(text_config, width)
    if model.enable_gradient_checkpointing:
        inputs = width * text_config.hidden_size * layers
        activations = inputs + activation_bytes(text_config, width)
    gathered = count.model
    if engine.reshard_after_forward:
        gathered -= (layers - 2) * count.layer
    states: Bytes = estimate_states(recipe, text_config, engine, model)
    if engine.offload_policy and section.strategy == "fsdp2":  # FSDP2 trains from host memory
        states = {}
    resident: Bytes = {}
    is_cpu = recipe.trainer.device == "cpu"  # where offloading frees nothing
    if states and (is_cpu or not engine.param_offload):
        resident["weights"] = states["weights"]
    if states and (is_cpu or not engine.optimizer_offload):
        resident["optimizer"] = states["optimizer"]
    all_gathered = {"all-gathered": float(width * gathered)}
    micro_batch = states | all_gathered | {"activations": tokens * activations}
    if token_logits:
        micro_batch["logits"] = 3 * tokens * token_logits
    optimizer_step = dict(states)
    if states and makes_temporary(recipe, section.optim):
        optimizer_step[TEMPORARY] = states["optimizer"] / 2  # as large as one of the moments
    update = max(micro_batch, optimizer_step, key=lambda parts: sum(parts.values()))
    return ModelMemory(resident, {"weights": states.get("weights", 0)} | all_gathered, update)


def makes_temporary(recipe: Recipe, optim: DictConfig) -> bool:
    """Whether AdamW's step makes a copy as large as a moment.

    On GPUs torch updates all parameters together, unless the recipe asks for the fused kernel or a
    loop. It then takes the root of the second moments (torch.optim.adam._multi_tensor_adam).
    """
    options = optim.override_optimizer_config or {}
    is_together = not options.get("fused") and options.get("foreach") is not False
    is_torch = optim.optimizer_impl == "torch.optim"
    return bool(recipe.trainer.device != "cpu" and is_torch and is_together)


# --- the stages ----------------------------------------------------------------------------------


def estimate_stages(
    recipe: Recipe, text_config: PretrainedConfig, device_bytes: int
) -> dict[str, Bytes]:
    """{stage: bytes of each part} on one device, for the stages of FIXES.

    In `sync`, vLLM's weights are awake. Its KV cache wakes after the buckets are freed, so that it
    belongs to `generate`.
    """
    is_cpu = recipe.trainer.device == "cpu"
    overhead = OVERHEAD["cpu"] if is_cpu else OVERHEAD["cuda"]
    if recipe.all_gpus > 1 and not is_cpu:
        overhead += NCCL_BUFFERS
    always = {"runtime overhead": overhead}
    sampler = estimate_rollout_engine(recipe, text_config, device_bytes)
    if recipe.command in ("rollout", "evaluate"):
        return {"generate": sampler | always}
    width = compute_itemsize(recipe.actor.fsdp_config)
    token_logits = 0 if recipe.model.use_fused_kernels else width * text_config.vocab_size
    actor = estimate_model(recipe, text_config, recipe.actor, recipe.model, token_logits)
    if recipe.command == "sft":
        return {"update": actor.update | always}
    if is_cpu and recipe.has_reference and (recipe.teacher or not recipe.model.lora_rank):
        always["reference"] = actor.forward["weights"]  # with GPUs it is in the host's memory
    rollout = recipe.rollout
    is_separate = bool(rollout.nnodes and not is_cpu)
    beside_sampling = {} if is_separate else actor.resident
    # what the engine keeps on the trainer's device while it sleeps, and while it gets new weights
    asleep = {} if is_separate or rollout.free_cache_engine else sampler
    awake = {} if is_separate else asleep or {"engine weights": sampler["engine weights"]}
    # over NCCL, verl sends one bucket while it fills the other
    buckets = 2 if is_separate and rollout.checkpoint_engine.backend == "nccl" else 1
    bucket = buckets * rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    tokens = rollout.log_prob_max_token_len_per_gpu
    batch = {
        "activations": tokens * activation_bytes(text_config, width),
        "logits": 2 * tokens * token_logits,
    }
    stages = {
        "generate": beside_sampling | sampler,
        "log-probs": actor.resident | actor.forward | batch | asleep,
        "update": actor.update | asleep,
        "sync": actor.resident | awake | {"bucket": bucket},
    }
    if "values" in recipe.arguments and not recipe.kit.resource_pools.critic:
        section = recipe.verl.critic
        critic = estimate_model(recipe, text_config, section, section.model, 0)
        for parts in stages.values():
            parts["critic"] = sum(critic.resident.values())
        stages["critic"] = critic.update | {"actor": sum(actor.resident.values())} | asleep
    return {stage: stages[stage] | always for stage in FIXES if stage in stages}


def estimate_rollout_engine(
    recipe: Recipe, text_config: PretrainedConfig, device_bytes: int
) -> Bytes:
    """The memory of the rollout engine while it samples."""
    rollout = recipe.rollout
    weights = itemsize(rollout.dtype) * count_parameters(text_config).model
    weights /= rollout.tensor_model_parallel_size
    workspace = 0.0 if recipe.trainer.device == "cpu" else VLLM_WORKSPACE
    cache = OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes")
    if rollout.name == "hf":  # of all concurrent responses, at their full length
        tokens = rollout.max_num_seqs * rollout.max_model_len
        cache = tokens * cache_bytes_per_token(recipe, text_config)
    if not cache:
        cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights - workspace)
    return {"engine weights": weights, "vLLM's workspace": workspace, "KV cache": cache}


def cache_bytes_per_token(recipe: Recipe, text_config: PretrainedConfig) -> float:
    """Bytes of the KV cache for one token on one device: a key and a value in each layer."""
    rollout = recipe.rollout
    numbers = 2 * text_config.num_hidden_layers * layer_widths(text_config).keys
    return float(numbers * itemsize(rollout.dtype) / rollout.tensor_model_parallel_size)


def count_episodes(recipe: Recipe, text_config: PretrainedConfig, cache: float) -> int:
    """The number of episodes of full length for which a replica's KV cache has room."""
    token = cache_bytes_per_token(recipe, text_config)
    return int(cache / token / recipe.rollout.max_model_len)


# --- the report ----------------------------------------------------------------------------------


class Device(NamedTuple):
    """The memory of one device."""

    size: int  # bytes
    note: str  # empty if it was measured


def find_device(recipe: Recipe) -> Device:
    """The memory of the smallest GPU, or a rank's share of the machine's memory."""
    if recipe.trainer.device == "cpu":
        return Device(psutil.virtual_memory().total // recipe.trainer.n_gpus_per_node, "")
    # without torch, which would take GPU memory for this process
    sizes = [int(line) for line in gpus.query("memory.total") if line.isdigit()]  # MiB
    if not sizes:
        return Device(ASSUMED_GPU_BYTES, ", assumed: this node has no GPU")
    return Device(min(sizes) * 2**20, "")


def describe_device(recipe: Recipe, device: Device) -> str:
    """A device and its memory."""
    kind = "CPU" if recipe.trainer.device == "cpu" else "GPU"
    return f"a {kind} has {device.size / GIB:.1f} GiB{device.note}"


def find_obstacle(recipe: Recipe, text_config: PretrainedConfig) -> str:
    """The reason why no estimate is possible. Empty if one is possible."""
    missing = [name for name in NEEDED_FIELDS if not getattr(text_config, name, None)]
    if missing:
        return f"the model's recipe has no {', '.join(missing)}"
    if expert_count(text_config):
        return "the model is a mixture of experts"
    if recipe.verl.model_engine != FSDP:
        return f"model_engine={recipe.verl.model_engine}"
    return ""


def describe(recipe: Recipe, text_config: PretrainedConfig) -> list[str]:
    """Lines with the estimate of each stage, in GiB."""
    obstacle = find_obstacle(recipe, text_config)
    if obstacle:
        return [f"memory      not estimated: {obstacle}"]
    device = find_device(recipe)
    stages = estimate_stages(recipe, text_config, device.size)
    lines = [f"memory      estimated, in GiB; {describe_device(recipe, device)}"]
    for stage, parts in stages.items():
        sizes = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size]
        lines.append(f"  {stage:9} {sum(parts.values()) / GIB:.1f}: {', '.join(sizes)}")
    if "generate" in stages:
        token = cache_bytes_per_token(recipe, text_config)
        episodes = count_episodes(recipe, text_config, stages["generate"]["KV cache"])
        lines.append(
            f"KV cache    {token / 2**10:.0f} KiB a token: {episodes} concurrent episodes of "
            f"{recipe.rollout.max_model_len} tokens"
        )
    return lines


def find_excess(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """A problem for each stage that needs far more than the memory of this node's smallest GPU.

    If this node has no GPU, or a CPU trains, the size is less certain, and there is a warning only.
    """
    is_allowed = recipe.kit.allow_memory_over_estimate or recipe.trainer.device == "cpu"
    if not is_allowed and not find_device(recipe).note:
        yield from find_large_stages(recipe, text_config, REFUSED_FROM, OVERRIDE)


def find_shortages(recipe: Recipe, text_config: PretrainedConfig) -> list[str]:
    """A line for each stage that does not fit, and one for a small KV cache, with the fix."""
    if find_obstacle(recipe, text_config):
        return []
    shortages = list(find_large_stages(recipe, text_config, 1.0, ""))
    if recipe.command != "sft":
        shortages.extend(check_cache(recipe, text_config))
    return shortages


def find_large_stages(
    recipe: Recipe, text_config: PretrainedConfig, factor: float, override: str
) -> Iterator[str]:
    """Each stage that needs more than `factor` times the device's memory, and the keys to change.

    override: a sentence for the message.
    """
    if find_obstacle(recipe, text_config):
        return
    device = find_device(recipe)
    for stage, parts in estimate_stages(recipe, text_config, device.size).items():
        needed = sum(parts.values())
        if needed <= factor * device.size:
            continue
        fix = FIXES[stage]
        if TEMPORARY in parts:
            section = "critic" if stage == "critic" else ACTOR
            fix = f"Set {section}.optim.override_optimizer_config={{fused: true}}, or {MORE_GPUS}"
        yield (
            f"{stage} needs {needed / GIB:.1f} GiB, {describe_device(recipe, device)}. {fix}. "
            f"{override}{PAGE}"
        )


def check_cache(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """A line if the KV cache has no room for the episodes that a replica samples concurrently.

    A CPU samples so slowly that its recipe (configs/machines/cpu.yaml) chooses a small cache.
    """
    rollout = recipe.rollout
    cache = estimate_rollout_engine(recipe, text_config, find_device(recipe).size)["KV cache"]
    episodes = count_episodes(recipe, text_config, cache)
    needed = 1
    if recipe.command == "train" and recipe.trainer.device != "cpu":
        share = recipe.data.train_batch_size * rollout.n / recipe.replicas
        needed = min(rollout.max_num_seqs, math.ceil(share))
    if episodes < needed:
        yield (
            f"The KV cache has room for {episodes} episodes of {rollout.max_model_len} tokens, "
            f"and a vLLM replica samples up to {needed} concurrently, so that some wait. Raise "
            f"{ROLLOUT}.gpu_memory_utilization (on a CPU engine_kwargs.vllm."
            f"kv_cache_memory_bytes), or {ROLLOUT}.tensor_model_parallel_size. {PAGE}"
        )
