"""Estimate the memory that each stage of a recipe needs on each device, before anything starts.

Layers are counted as Llama's: grouped-query attention, an MLP of three matrices (or experts of that
form), two norms. A critic and a teacher are assumed to be as large as the policy. Not counted:
biases, workspace, fragmentation of the allocator, reward models, judges, separate pools, and tokens
that verl's balancing adds beyond the limit of a micro-batch. The trainer on a CPU computes no
logits of prompts, but the estimate includes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from kit.config.load import ACTOR, FSDP, ROLLOUT
from kit.config.model_files import expert_count
from kit.config.resources import rollout_gpus
from kit.config.user_functions import needs, needs_reference, teacher_model
from kit.extras.preflight import gpus

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB  # if this node has no GPU
# Runtime overhead: Python, torch, Ray, verl and vLLM. For a CPU it is the part of the demo's memory
# that the estimate does not explain (docs/performance.md). For a GPU it is a guess, not
# measured here: 4 to 6 GiB for the CUDA contexts and libraries of trainer and vLLM, NCCL's buffers
# and CUDA graphs.
OVERHEAD = {"cpu": 6 * GIB, "cuda": 5 * GIB}
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
SHARD_HINT = (
    f"raise trainer.n_gpus_per_node, or set {ACTOR}.fsdp_config.param_offload and optimizer_offload"
)
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


def count_shards(config: DictConfig, engine: DictConfig) -> int:
    """The GPUs among which FSDP shards a model."""
    world = int(config.trainer.n_gpus_per_node * config.trainer.nnodes)
    return int(engine.fsdp_size) if 0 < engine.fsdp_size < world else world


# --- the trainer ---------------------------------------------------------------------------------


class TrainerMemory(NamedTuple):
    """The memory of a model under FSDP."""

    resident: Bytes  # stays on the device while other models work
    update: Bytes  # of an update, without logits


def estimate_trainer(
    config: DictConfig, text_config: Any, tokens: int, engine: DictConfig, model: DictConfig
) -> TrainerMemory:
    """The memory of a model under FSDP. tokens: of the largest micro-batch.

    Weights and AdamW's two moments are sharded, in engine.model_dtype. Layers are all-gathered for
    use, in the type of the computation (verl 0.9.1, workers/engine/fsdp/transformer_impl.py).
    """
    count = count_parameters(text_config)
    trained = count_adapter(text_config, model.lora_rank) or count.model
    shards = count_shards(config, engine)
    width = compute_itemsize(engine)
    master = itemsize(engine.model_dtype)
    layers = text_config.num_hidden_layers
    layer_activations = activation_bytes(text_config, width)
    activations = layer_activations * layers
    if model.enable_gradient_checkpointing:
        activations = width * text_config.hidden_size * layers + layer_activations
    gathered = count.model
    if engine.reshard_after_forward:
        gathered -= (layers - 2) * count.layer
    gradient_shards = 1 if engine.use_no_sync_for_gradient_accumulation else shards
    update: Bytes = {
        "weights": master * count.model / shards,
        "optimizer": 2 * master * trained / shards,
        "gradients": 4 * trained / gradient_shards,
        "all-gathered": width * gathered,
        "activations": tokens * activations,
    }
    is_offloaded = {"weights": engine.param_offload, "optimizer": engine.optimizer_offload}
    if config.trainer.device == "cpu":  # offloading frees nothing
        is_offloaded = dict.fromkeys(is_offloaded, False)
    resident = {name: update[name] for name, offloaded in is_offloaded.items() if not offloaded}
    return TrainerMemory(resident, update)


def count_adapter(text_config: Any, rank: int) -> int:
    """The parameters of a LoRA adapter on all linear layers."""
    widths = layer_widths(text_config)
    outputs = 2 * widths.queries + 2 * widths.keys + 3 * widths.mlp
    return int(text_config.num_hidden_layers * rank * (7 * text_config.hidden_size + outputs))


# --- the stages ----------------------------------------------------------------------------------


def estimate_stages(
    config: DictConfig, text_config: Any, device_bytes: int, command: str
) -> dict[str, Bytes]:
    """{stage: bytes of each part} on one device, for the stages of KEYS_TO_LOWER.

    A forward pass holds two tensors of logits [tokens, vocabulary]: before and after the division
    by the temperature. An update holds a third one, their gradient (verl 0.9.1,
    prepare_model_outputs, with flash-attn's cross entropy).
    """
    device = "cpu" if config.trainer.device == "cpu" else "cuda"
    always: Bytes = {"runtime overhead": OVERHEAD[device]}
    engine_memory = estimate_rollout_engine(config, text_config, device_bytes)
    if command in ("rollout", "evaluate"):
        return {"generate": engine_memory | always}
    actor = config.actor_rollout_ref.actor
    tokens = actor.ppo_max_token_len_per_gpu
    model = config.actor_rollout_ref.model
    resident, update = estimate_trainer(config, text_config, tokens, actor.fsdp_config, model)
    update["logits"] = 3 * tokens * logit_bytes(config, text_config)
    if command == "sft":
        return {"update": update | always}
    if keeps_reference(config):
        always["reference"] = update["weights"]
    stages = estimate_training_stages(config, text_config, engine_memory, resident, update)
    if needs(config, "values") and not config.trainer.resource_pools.critic:
        add_critic(config, text_config, stages, resident, engine_memory)
    return {stage: stages[stage] | always for stage in KEYS_TO_LOWER if stage in stages}


def estimate_rollout_engine(config: DictConfig, text_config: Any, device_bytes: int) -> Bytes:
    """The memory of the rollout engine while it samples."""
    rollout = config.actor_rollout_ref.rollout
    width = itemsize(rollout.dtype)
    weights = width * count_parameters(text_config).model / rollout.tensor_model_parallel_size
    cache = OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes")
    if rollout.name == "hf":  # of all concurrent responses, at their full length
        tokens = rollout.max_num_seqs * rollout.max_model_len
        cache = tokens * kv_bytes_per_token(text_config, width)
    if not cache:
        cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights)
    return {"engine weights": weights, "KV cache": cache}


def logit_bytes(config: DictConfig, text_config: Any) -> float:
    """Bytes of one token's logits; 0 with fused kernels."""
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    return compute_itemsize(config.actor_rollout_ref.actor.fsdp_config) * text_config.vocab_size


def keeps_reference(config: DictConfig) -> bool:
    """Whether an idle reference stays on the device. With GPUs it is in the host's memory."""
    is_adapterless = config.actor_rollout_ref.model.lora_rank and not teacher_model(config)
    is_separate = config.trainer.resource_pools.ref
    is_cpu = config.trainer.device == "cpu"
    return bool(is_cpu and needs_reference(config) and not (is_adapterless or is_separate))


def estimate_training_stages(
    config: DictConfig, text_config: Any, engine_memory: Bytes, resident: Bytes, update: Bytes
) -> dict[str, Bytes]:
    """The stages of a training step, without critic."""
    rollout = config.actor_rollout_ref.rollout
    is_cpu = config.trainer.device == "cpu"
    tokens = rollout.log_prob_max_token_len_per_gpu
    width = compute_itemsize(config.actor_rollout_ref.actor.fsdp_config)
    forward = {name: update[name] for name in ("weights", "all-gathered")}
    forward["activations"] = tokens * activation_bytes(text_config, width)
    forward["logits"] = 2 * tokens * logit_bytes(config, text_config)
    sent = {"engine weights": engine_memory["engine weights"]}
    if is_cpu:
        engine_memory.update(share_of_cpu(config, engine_memory))
    is_separate = bool(rollout.nnodes and not is_cpu)
    beside_sampling = {} if is_separate else resident
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
        "log-probs": resident | forward | asleep,
        "update": update | asleep,
        "sync": resident | while_sending | bucket,
    }


def share_of_cpu(config: DictConfig, engine_memory: Bytes) -> Bytes:
    """The engines' memory per rank on a CPU, where all of them use the memory of one machine."""
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes * tensor_parallel
    factor = max(1, rollout_gpus(config) / ranks)
    return {name: size * factor for name, size in engine_memory.items()}


def add_critic(
    config: DictConfig,
    text_config: Any,
    stages: dict[str, Bytes],
    resident: Bytes,
    engine_memory: Bytes,
) -> None:
    """Add a critic on the actor's GPUs to the memory of every stage, and a stage for its update."""
    critic = config.critic
    tokens = critic.ppo_max_token_len_per_gpu
    critic_resident, critic_update = estimate_trainer(
        config, text_config, tokens, critic.fsdp, critic.model
    )
    for parts in stages.values():
        parts["critic"] = sum(critic_resident.values())
    rollout = config.actor_rollout_ref.rollout
    is_separate = rollout.nnodes and config.trainer.device != "cpu"
    asleep: Bytes = {}
    if not is_separate and not rollout.free_cache_engine:
        asleep = engine_memory
    stages["critic"] = {**critic_update, "actor": sum(resident.values()), **asleep}


# --- the report ----------------------------------------------------------------------------------


class Device(NamedTuple):
    """The memory of one device."""

    size: int  # bytes
    note: str  # empty if it was measured


def find_device(config: DictConfig) -> Device:
    """The memory of the smallest GPU, or a rank's share of the machine's memory."""
    if config.trainer.device == "cpu":
        return Device(psutil.virtual_memory().total // config.trainer.n_gpus_per_node, "")
    # without torch, which would take GPU memory for this process
    sizes = [int(line) for line in gpus.query("memory.total") if line.isdigit()]  # MiB
    if not sizes:
        return Device(ASSUMED_GPU_BYTES, ", assumed: this node has no GPU")
    return Device(min(sizes) * 2**20, "")


def describe_device(config: DictConfig, device: Device) -> str:
    """A device and its memory."""
    kind = "CPU" if config.trainer.device == "cpu" else "GPU"
    return f"a {kind} has {device.size / GIB:.1f} GiB{device.note}"


def find_obstacle(config: DictConfig, text_config: Any) -> str:
    """The reason why no estimate is possible. Empty if one is possible."""
    missing = [name for name in NEEDED_FIELDS if not getattr(text_config, name, None)]
    if missing:
        return f"the model's config has no {', '.join(missing)}"
    if config.model_engine != FSDP:
        return f"model_engine={config.model_engine}"
    return ""


def describe(config: DictConfig, text_config: Any, command: str) -> list[str]:
    """Lines with the estimate of each stage, in GiB."""
    obstacle = find_obstacle(config, text_config)
    if obstacle:
        return [f"memory      not estimated: {obstacle}"]
    device = find_device(config)
    stages = estimate_stages(config, text_config, device.size, command)
    lines = [f"memory      estimated, in GiB; {describe_device(config, device)}"]
    for stage, parts in stages.items():
        sizes = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size]
        lines.append(f"  {stage:9} {sum(parts.values()) / GIB:.1f}: {', '.join(sizes)}")
    if "generate" in stages:
        rollout = config.actor_rollout_ref.rollout
        token = cache_bytes_per_token(config, text_config)
        episodes = int(stages["generate"]["KV cache"] / token / rollout.max_model_len)
        lines.append(
            f"KV cache    {token / 2**10:.0f} KiB a token: {episodes} concurrent episodes of "
            f"{rollout.max_model_len} tokens"
        )
    return lines


def cache_bytes_per_token(config: DictConfig, text_config: Any) -> float:
    """Bytes of the KV cache for one token on one device."""
    rollout = config.actor_rollout_ref.rollout
    size = kv_bytes_per_token(text_config, itemsize(rollout.dtype))
    return size / rollout.tensor_model_parallel_size


def find_shortages(config: DictConfig, text_config: Any, command: str) -> list[str]:
    """A line for each stage that does not fit, with the key to lower."""
    if find_obstacle(config, text_config):
        return []
    device = find_device(config)
    stages = estimate_stages(config, text_config, device.size, command)
    shortages = []
    for stage, parts in stages.items():
        needed = sum(parts.values())
        if needed > device.size:
            hint = "use a smaller model" if config.trainer.device == "cpu" else SHARD_HINT
            shortages.append(
                f"{stage} needs {needed / GIB:.1f} GiB, {describe_device(config, device)}. Lower "
                f"{KEYS_TO_LOWER[stage]}, or {hint}. "
                'See docs/guides/gpu.md, "4. Read the memory lines".'
            )
    if "generate" in stages:
        rollout = config.actor_rollout_ref.rollout
        token = cache_bytes_per_token(config, text_config)
        if stages["generate"]["KV cache"] < token * rollout.max_model_len:
            shortages.append(
                f"The KV cache holds no episode of {rollout.max_model_len} tokens. Raise "
                f"{KEYS_TO_LOWER['generate']}, or {ROLLOUT}.tensor_model_parallel_size. "
                'See docs/guides/gpu.md, "4. Read the memory lines".'
            )
    return shortages
