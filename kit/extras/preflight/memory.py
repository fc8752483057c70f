"""Estimate the memory that each stage of a recipe needs on each device, before anything starts.

Layers are counted as Llama's: grouped-query attention, an MLP of three matrices (or experts of that
form), two norms. A critic and a teacher are assumed to be as large as the policy. Not counted:
biases, fragmentation of the allocator, reward models, judges, separate pools, and tokens that
verl's balancing adds beyond the limit of a micro-batch. The trainer on a CPU computes no logits of
prompts, but the estimate includes them.

The estimates were compared with one GPU, called "the H100" below: an NVIDIA H100 80GB HBM3, driver
580.159.04, torch 2.11.0, vLLM 0.24.0, on 2026-11-26. Two random models of 402M and 176M parameters
trained there (tests/extras/preflight/test_memory.py has the readings). Several GPUs, larger models
and flash-attn were not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from kit.config.load import ACTOR, FSDP, ROLLOUT
from kit.config.model_files import expert_count
from kit.config.recipe import Recipe
from kit.extras.preflight import gpus

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
# vLLM's libraries and kernels, which it takes from its fraction of the GPU. On the H100 the KV
# cache was 0.3 GiB smaller than weights, activations and graphs explain, with both models.
VLLM_LIBRARIES = 0.3 * GIB
GRAPH_BYTES = 6 * 2**20  # a CUDA graph of vLLM: 18 graphs took 0.11 GiB on the H100
DEFAULT_GRAPH_SIZES = 51  # batch sizes that vLLM 0.24.0 captures if the recipe names none
# Bytes for each logit of the rows that vLLM samples together: one tensor in bf16 and four in fp32
# (logits, log-probs, probabilities, noise), and model runner V2's table of counts.
# Source: vllm/v1/sample/sampler.py, vllm/v1/worker/gpu/sample/penalties.py.
SAMPLER_BYTES = 2 + 4 * 4
COUNT_BYTES = 4
NEEDED_FIELDS = (  # of the Hugging Face configuration
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
KEYS_TO_LOWER = {  # of each stage, in the order in which they are printed
    "generate": f"{ROLLOUT}.gpu_memory_utilization (on a CPU "
    "engine_kwargs.vllm.kv_cache_memory_bytes)",
    "log-probs": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "update": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
    "sync": f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
}
MORE_GPUS = "raise trainer.n_gpus_per_node"
OFFLOAD = f"set {ACTOR}.fsdp_config.param_offload and optimizer_offload"
# Other fixes. verl loads offloaded weights and moments for the whole update (verl 0.9.1,
# workers/engine/base.py), so that offloading does not help there.
OTHER_FIXES = {
    "generate": f"{MORE_GPUS}, or {OFFLOAD}",
    "log-probs": f"{MORE_GPUS}, or set {ACTOR}.fsdp_config.optimizer_offload",
    "update": f"{MORE_GPUS}, or add --config lora",
    "critic": f"{MORE_GPUS}, or use an advantage without a critic, such as grpo",
    "sync": f"{MORE_GPUS}, or {OFFLOAD}",
}
TEMPORARY = "AdamW's temporary"
PAGE = 'See docs/guides/gpu.md, "4. Read the memory lines".'
Bytes = dict[str, float]  # {part: bytes}


# --- sizes of a model ----------------------------------------------------------------------------


class LayerWidths(NamedTuple):
    """The widths of one layer."""

    queries: int
    keys: int
    mlp: int  # of all experts
    active_mlp: int  # that one token goes through


class ParameterCount(NamedTuple):
    """The number of parameters."""

    model: int
    layer: int


def layer_widths(text_config: Any) -> LayerWidths:
    """The widths of a layer. text_config: the Hugging Face configuration of a text model."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    queries = heads * head_dim
    keys = key_heads * head_dim
    experts = expert_count(text_config)
    if not experts:
        mlp = text_config.intermediate_size
        return LayerWidths(queries, keys, mlp, mlp)
    mlp = getattr(text_config, "moe_intermediate_size", text_config.intermediate_size)
    return LayerWidths(queries, keys, mlp * experts, mlp * text_config.num_experts_per_tok)


def count_parameters(text_config: Any) -> ParameterCount:
    """The parameters of a model and of one of its layers."""
    widths = layer_widths(text_config)
    hidden = text_config.hidden_size
    layer = hidden * (2 * widths.queries + 2 * widths.keys + 3 * widths.mlp + 2)
    is_tied = getattr(text_config, "tie_word_embeddings", False)
    embeddings = 1 if is_tied else 2
    outside = (embeddings * text_config.vocab_size + 1) * hidden  # the embeddings and the last norm
    return ParameterCount(text_config.num_hidden_layers * layer + outside, layer)


def kv_bytes_per_token(text_config: Any, itemsize: int) -> int:
    """Bytes of the KV cache for one token: a key and a value in each layer."""
    return 2 * text_config.num_hidden_layers * layer_widths(text_config).keys * itemsize


def activation_bytes(text_config: Any, itemsize: int) -> int:
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
    return itemsize * (4 * hidden + attention + 4 * widths.active_mlp) + 8 * hidden


def itemsize(dtype: Any) -> int:
    """Bytes of a number: 4 in fp32, else 2."""
    return 4 if "32" in str(dtype) else 2


def compute_itemsize(engine: DictConfig) -> int:
    """Bytes of a number in the type that an FSDP engine computes in."""
    return itemsize((engine.get("mixed_precision") or {}).get("param_dtype"))


def count_shards(recipe: Recipe, engine: DictConfig) -> int:
    """The GPUs among which FSDP shards a model."""
    world = int(recipe.trainer.n_gpus_per_node * recipe.trainer.nnodes)
    return int(engine.fsdp_size) if 0 < engine.fsdp_size < world else world


# --- the trainer ---------------------------------------------------------------------------------


class TrainerMemory(NamedTuple):
    """The memory of a model under FSDP."""

    resident: Bytes  # stays on the device while other models work
    forward: Bytes  # of a forward pass, without activations and logits
    micro_batch: Bytes  # of a forward and backward pass, without logits
    optimizer_step: Bytes

    def largest_update(self) -> Bytes:
        """The memory of an update: a micro-batch and the optimizer's step do not overlap."""
        return max(self.micro_batch, self.optimizer_step, key=lambda parts: sum(parts.values()))


def estimate_states(
    recipe: Recipe, text_config: Any, engine: DictConfig, model: DictConfig
) -> Bytes:
    """The weights, AdamW's two moments and the gradients on one device, sharded by FSDP.

    Weights and moments are in engine.model_dtype.
    """
    count = count_parameters(text_config)
    trained = count_adapter(text_config, model.lora_rank) or count.model
    shards = count_shards(recipe, engine)
    master = itemsize(engine.model_dtype)
    gradient_shards = 1 if engine.use_no_sync_for_gradient_accumulation else shards
    return {
        "weights": master * count.model / shards,
        "optimizer": 2 * master * trained / shards,
        "gradients": 4 * trained / gradient_shards,
    }


def estimate_trainer(
    recipe: Recipe, text_config: Any, tokens: int, section: DictConfig, model: DictConfig
) -> TrainerMemory:
    """The memory of a model under FSDP. tokens: of the largest micro-batch.

    Layers are all-gathered for use, in the type of the computation (verl 0.9.1,
    workers/engine/fsdp/transformer_impl.py). section: the actor's or the critic's.
    """
    engine = section.get("fsdp_config") or section.fsdp
    count = count_parameters(text_config)
    width = compute_itemsize(engine)
    layers = text_config.num_hidden_layers
    layer_activations = activation_bytes(text_config, width)
    activations = layer_activations * layers
    if model.enable_gradient_checkpointing:
        activations = width * text_config.hidden_size * layers + layer_activations
    gathered = count.model
    if engine.reshard_after_forward:
        gathered -= (layers - 2) * count.layer
    states = estimate_states(recipe, text_config, engine, model)
    temporary = 0.0
    if makes_temporary(recipe, section.optim):
        temporary = states["optimizer"] / 2  # as large as one of the two moments
    is_offloaded = {"weights": engine.param_offload, "optimizer": engine.optimizer_offload}
    if recipe.trainer.device == "cpu":  # offloading frees nothing
        is_offloaded = dict.fromkeys(is_offloaded, False)
    resident = {name: states[name] for name, offloaded in is_offloaded.items() if not offloaded}
    if engine.offload_policy and section.strategy == "fsdp2":  # FSDP2 trains from host memory
        states = {}
        resident = {}
        temporary = 0.0
    forward: Bytes = {"weights": states.get("weights", 0), "all-gathered": width * gathered}
    micro_batch = states | {
        "all-gathered": forward["all-gathered"],
        "activations": tokens * activations,
    }
    return TrainerMemory(resident, forward, micro_batch, states | {TEMPORARY: temporary})


def makes_temporary(recipe: Recipe, optim: DictConfig) -> bool:
    """Whether AdamW's step makes a copy as large as a moment.

    On GPUs torch updates all parameters together, unless the recipe asks for the fused kernel or a
    loop. It then takes the root of the second moments (torch.optim.adam._multi_tensor_adam).
    """
    options = optim.override_optimizer_config or {}
    is_together = not options.get("fused") and options.get("foreach") is not False
    return bool(
        recipe.trainer.device != "cpu" and optim.optimizer_impl == "torch.optim" and is_together
    )


def count_adapter(text_config: Any, rank: int) -> int:
    """The parameters of a LoRA adapter on all linear layers."""
    widths = layer_widths(text_config)
    outputs = 2 * widths.queries + 2 * widths.keys + 3 * widths.mlp
    return int(text_config.num_hidden_layers * rank * (7 * text_config.hidden_size + outputs))


# --- the stages ----------------------------------------------------------------------------------


def estimate_stages(recipe: Recipe, text_config: Any, device_bytes: int) -> dict[str, Bytes]:
    """{stage: bytes of each part} on one device, for the stages of KEYS_TO_LOWER.

    A forward pass holds two tensors of logits [tokens, vocabulary]: before and after the division
    by the temperature. An update holds a third one, their gradient (verl 0.9.1,
    prepare_model_outputs, with flash-attn's cross entropy). In `sync`, vLLM's weights are awake.
    Its KV cache wakes after the buckets are freed, so that it belongs to `generate`.
    """
    always: Bytes = {"runtime overhead": runtime_overhead(recipe)}
    engine_memory = estimate_rollout_engine(recipe, text_config, device_bytes)
    if recipe.command in ("rollout", "evaluate"):
        return {"generate": engine_memory | always}
    actor = recipe.actor
    tokens = actor.ppo_max_token_len_per_gpu
    model = recipe.model
    trainer = estimate_trainer(recipe, text_config, tokens, actor, model)
    trainer.micro_batch["logits"] = 3 * tokens * logit_bytes(recipe, text_config)
    if recipe.command == "sft":
        return {"update": trainer.largest_update() | always}
    if keeps_reference(recipe):
        always["reference"] = trainer.forward["weights"]
    stages = estimate_training_stages(recipe, text_config, engine_memory, trainer)
    if "values" in recipe.arguments and not recipe.kit.resource_pools.critic:
        add_critic(recipe, text_config, stages, trainer.resident, engine_memory)
    return {stage: stages[stage] | always for stage in KEYS_TO_LOWER if stage in stages}


def runtime_overhead(recipe: Recipe) -> float:
    """Bytes that the processes of one device need besides the parts of a stage."""
    if recipe.trainer.device == "cpu":
        return OVERHEAD["cpu"]
    has_several = recipe.all_gpus > 1
    return OVERHEAD["cuda"] + (NCCL_BUFFERS if has_several else 0)


def estimate_rollout_engine(recipe: Recipe, text_config: Any, device_bytes: int) -> Bytes:
    """The memory of the rollout engine while it samples."""
    rollout = recipe.rollout
    width = itemsize(rollout.dtype)
    weights = width * count_parameters(text_config).model / rollout.tensor_model_parallel_size
    cache = OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes")
    if rollout.name == "hf":  # of all concurrent responses, at their full length
        tokens = rollout.max_num_seqs * rollout.max_model_len
        cache = tokens * kv_bytes_per_token(text_config, width)
    workspace = estimate_workspace(recipe, text_config)
    if not cache:
        cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights - workspace)
    return {"engine weights": weights, "vLLM's workspace": workspace, "KV cache": cache}


def estimate_workspace(recipe: Recipe, text_config: Any) -> float:
    """Bytes that vLLM on a GPU needs to compute: activations, logits, graphs and libraries.

    vLLM subtracts them from its fraction of the GPU. The rest is the KV cache.
    """
    rollout = recipe.rollout
    if recipe.trainer.device == "cpu" or rollout.name != "vllm":
        return 0
    tokens = rollout.max_num_batched_tokens
    mlp = layer_widths(text_config).active_mlp / rollout.tensor_model_parallel_size
    layer = itemsize(rollout.dtype) * tokens * (3 * mlp + 2 * text_config.hidden_size)
    logits = min(rollout.max_num_seqs, tokens) * text_config.vocab_size
    counts = rollout.max_num_seqs * text_config.vocab_size * COUNT_BYTES
    sizes = len(rollout.cudagraph_capture_sizes or range(DEFAULT_GRAPH_SIZES))
    graphs = 0 if rollout.enforce_eager else 2 * sizes * GRAPH_BYTES  # of decoding, and of the rest
    return max(layer, logits * SAMPLER_BYTES) + counts + graphs + VLLM_LIBRARIES


def logit_bytes(recipe: Recipe, text_config: Any) -> float:
    """Bytes of one token's logits; 0 with fused kernels."""
    if recipe.model.use_fused_kernels:
        return 0
    return compute_itemsize(recipe.actor.fsdp_config) * text_config.vocab_size


def keeps_reference(recipe: Recipe) -> bool:
    """Whether an idle reference stays on the device. With GPUs it is in the host's memory."""
    is_adapterless = recipe.model.lora_rank and not recipe.teacher
    is_separate = recipe.kit.resource_pools.ref
    is_cpu = recipe.trainer.device == "cpu"
    return bool(is_cpu and recipe.has_reference and not (is_adapterless or is_separate))


def estimate_training_stages(
    recipe: Recipe, text_config: Any, engine_memory: Bytes, trainer: TrainerMemory
) -> dict[str, Bytes]:
    """The stages of a training step, without critic."""
    rollout = recipe.rollout
    is_cpu = recipe.trainer.device == "cpu"
    tokens = rollout.log_prob_max_token_len_per_gpu
    width = compute_itemsize(recipe.actor.fsdp_config)
    forward = trainer.forward | {
        "activations": tokens * activation_bytes(text_config, width),
        "logits": 2 * tokens * logit_bytes(recipe, text_config),
    }
    sent = {"engine weights": engine_memory["engine weights"]}
    if is_cpu:
        engine_memory.update(share_of_cpu(recipe, engine_memory))
    is_separate = bool(rollout.nnodes and not is_cpu)
    beside_sampling = {} if is_separate else trainer.resident
    asleep: Bytes = {}  # memory of the engine while it sleeps
    if not is_separate and not rollout.free_cache_engine:
        asleep = engine_memory
    sync = rollout.checkpoint_engine
    buckets = 2 if is_separate and sync.backend == "nccl" else 1  # verl's engine sends one of two
    bucket = {"bucket": buckets * sync.update_weights_bucket_megabytes * 2**20}
    while_sending = asleep
    if not asleep and not is_separate:
        while_sending = sent
    return {
        "generate": beside_sampling | engine_memory,
        "log-probs": trainer.resident | forward | asleep,
        "update": trainer.largest_update() | asleep,
        "sync": trainer.resident | while_sending | bucket,
    }


def share_of_cpu(recipe: Recipe, engine_memory: Bytes) -> Bytes:
    """The engines' memory per rank on a CPU, where all of them use the memory of one machine."""
    tensor_parallel = recipe.rollout.tensor_model_parallel_size
    ranks = recipe.trainer.n_gpus_per_node * recipe.trainer.nnodes * tensor_parallel
    factor = max(1, recipe.rollout_gpus / ranks)
    return {name: size * factor for name, size in engine_memory.items()}


def add_critic(
    recipe: Recipe,
    text_config: Any,
    stages: dict[str, Bytes],
    resident: Bytes,
    engine_memory: Bytes,
) -> None:
    """Add a critic on the actor's GPUs to the memory of every stage, and a stage for its update."""
    critic = recipe.verl.critic
    tokens = critic.ppo_max_token_len_per_gpu
    trainer = estimate_trainer(recipe, text_config, tokens, critic, critic.model)
    for parts in stages.values():
        parts["critic"] = sum(trainer.resident.values())
    rollout = recipe.rollout
    is_separate = rollout.nnodes and recipe.trainer.device != "cpu"
    asleep: Bytes = {}
    if not is_separate and not rollout.free_cache_engine:
        asleep = engine_memory
    actor = {"actor": sum(resident.values())}
    stages["critic"] = trainer.largest_update() | actor | asleep


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


def find_obstacle(recipe: Recipe, text_config: Any) -> str:
    """The reason why no estimate is possible. Empty if one is possible."""
    missing = [name for name in NEEDED_FIELDS if not getattr(text_config, name, None)]
    if missing:
        return f"the model's recipe has no {', '.join(missing)}"
    if recipe.verl.model_engine != FSDP:
        return f"model_engine={recipe.verl.model_engine}"
    return ""


def describe(recipe: Recipe, text_config: Any) -> list[str]:
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
        rollout = recipe.rollout
        token = cache_bytes_per_token(recipe, text_config)
        episodes = count_episodes(recipe, text_config, stages["generate"]["KV cache"])
        lines.append(
            f"KV cache    {token / 2**10:.0f} KiB a token: {episodes} concurrent episodes of "
            f"{rollout.max_model_len} tokens"
        )
    return lines


def count_episodes(recipe: Recipe, text_config: Any, cache: float) -> int:
    """The number of episodes of full length for which a replica's KV cache has room."""
    length = recipe.rollout.max_model_len
    return int(cache / cache_bytes_per_token(recipe, text_config) / length)


def cache_bytes_per_token(recipe: Recipe, text_config: Any) -> float:
    """Bytes of the KV cache for one token on one device."""
    rollout = recipe.rollout
    size = kv_bytes_per_token(text_config, itemsize(rollout.dtype))
    return size / rollout.tensor_model_parallel_size


def find_excess(recipe: Recipe, text_config: Any) -> Iterator[str]:
    """A problem for each stage that needs far more than the memory of this node's smallest GPU.

    If this node has no GPU, or a CPU trains, the size is less certain, and there is a warning only.
    """
    is_allowed = recipe.kit.allow_memory_over_estimate or recipe.trainer.device == "cpu"
    if is_allowed or find_obstacle(recipe, text_config):
        return
    device = find_device(recipe)
    if device.note:
        return
    stages = estimate_stages(recipe, text_config, device.size)
    for stage, parts in stages.items():
        if sum(parts.values()) > REFUSED_FROM * device.size:
            yield describe_shortage(recipe, device, stage, parts, OVERRIDE)


def find_shortages(recipe: Recipe, text_config: Any) -> list[str]:
    """A line for each stage that does not fit, and one for a small KV cache, with the fix."""
    if find_obstacle(recipe, text_config):
        return []
    device = find_device(recipe)
    stages = estimate_stages(recipe, text_config, device.size)
    shortages = [
        describe_shortage(recipe, device, stage, parts)
        for stage, parts in stages.items()
        if sum(parts.values()) > device.size
    ]
    if "generate" in stages:
        cache = stages["generate"]["KV cache"]
        episodes = count_episodes(recipe, text_config, cache)
        shortages.extend(check_cache(recipe, episodes))
    return shortages


def describe_shortage(
    recipe: Recipe, device: Device, stage: str, parts: Bytes, override: str = ""
) -> str:
    """A stage, the memory that it needs and has, and the keys to change."""
    fix = f"Lower {KEYS_TO_LOWER[stage]}"
    if parts.get(TEMPORARY):
        section = "critic" if stage == "critic" else ACTOR
        fix = f"Set {section}.optim.override_optimizer_config={{fused: true}}"
    other = "use a smaller model" if recipe.trainer.device == "cpu" else OTHER_FIXES[stage]
    needed = sum(parts.values()) / GIB
    return (
        f"{stage} needs {needed:.1f} GiB, {describe_device(recipe, device)}. {fix}, or {other}. "
        f"{override}{PAGE}"
    )


def check_cache(recipe: Recipe, episodes: int) -> Iterator[str]:
    """A line if the KV cache is too small. episodes: the number that fits.

    A CPU samples so slowly that its recipe (configs/machines/cpu.yaml) chooses a small cache.
    """
    rollout = recipe.rollout
    needed = 1
    if recipe.command == "train" and recipe.trainer.device != "cpu":
        share = recipe.data.train_batch_size * rollout.n / recipe.replicas
        needed = min(rollout.max_num_seqs, math.ceil(share))
    if episodes >= needed:
        return
    text = f"The KV cache holds no episode of {rollout.max_model_len} tokens"
    if episodes:
        text = (
            f"The KV cache has room for {episodes} episodes of {rollout.max_model_len} tokens, and "
            f"a vLLM replica samples up to {needed} concurrently, so that some wait"
        )
    yield (
        f"{text}. Raise {KEYS_TO_LOWER['generate']}, or {ROLLOUT}.tensor_model_parallel_size. "
        f"{PAGE}"
    )
