"""What a recipe needs of each device's memory, stage by stage, estimated before anything starts.

Layers are taken as Llama's: grouped-query attention, an MLP of three matrices (or experts of that form), two norms.
Left out: biases, work space, the allocator's fragments, reward models, judges, pools of their own, what verl's
balancing puts over a micro-batch's limit. A critic and a teacher count as large as the policy. On a CPU prompts have no
logits, here they do.
"""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from kit.config import user_functions
from kit.config.load import ACTOR, ROLLOUT, sampling_gpus

GIB = 2**30
ASSUMED = 80 * GIB  # a GPU's memory, where there is none to ask
# Python, torch, Ray, verl and vLLM: on a CPU what the demo's processes take (docs/results.md) over what is estimated;
# on a GPU a guess at two CUDA contexts, NCCL's buffers and CUDA graphs
LIBRARIES = {"cpu": 6 * GIB, "cuda": 2 * GIB}
NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
LOWER = {
    "generate": f"{ROLLOUT}.gpu_memory_utilization (on a CPU engine_kwargs.vllm.kv_cache_memory_bytes)",
    "log-probs": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "update": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
    "sync": f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
}
SPREAD = (
    f"raise trainer.n_gpus_per_node, or set {ACTOR}.fsdp_config.param_offload and optimizer_offload"
)
Parts = dict[str, float]  # bytes, by what takes them


def experts_of(c: Any) -> int:
    """Experts of a layer; 0 where it is not a mixture of some."""
    return next(
        (
            n
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if (n := getattr(c, key, 0))
        ),
        0,
    )


def widths(c: Any) -> tuple[int, int, int, int]:
    """(queries, keys, MLP of all experts, MLP that a token goes through) of a layer. c: a text model's config."""
    heads, experts = c.num_attention_heads, experts_of(c)
    head = getattr(c, "head_dim", None) or c.hidden_size // heads
    keys = (getattr(c, "num_key_value_heads", None) or heads) * head
    mlp = (
        getattr(c, "moe_intermediate_size", c.intermediate_size) if experts else c.intermediate_size
    )
    return heads * head, keys, mlp * (experts or 1), mlp * (c.num_experts_per_tok if experts else 1)


def parameters(c: Any) -> tuple[int, int]:
    """(of the model, of one layer)."""
    queries, keys, mlp, _ = widths(c)
    layer = c.hidden_size * (2 * queries + 2 * keys + 3 * mlp + 2)
    tied = getattr(c, "tie_word_embeddings", False)
    outside = c.vocab_size * (1 if tied else 2) + 1  # embedding, output head, last norm
    return c.num_hidden_layers * layer + outside * c.hidden_size, layer


def kv_bytes(c: Any, width: int) -> int:
    """Of the KV cache, for one token, in numbers of `width` bytes: a key and a value in each layer."""
    return 2 * c.num_hidden_layers * widths(c)[1] * width


def activations(c: Any, width: int) -> int:
    """Bytes of one layer that wait for its backward pass, for one token, in numbers of `width` bytes.

    Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for Llama's layer and flash attention: inputs
    of norms, projections and the MLP's product; queries, keys, values, attention's output; norms' inputs also in fp32.
    """
    queries, keys, _, mlp = widths(c)
    return width * (4 * c.hidden_size + 2 * (queries + keys) + 4 * mlp) + 8 * c.hidden_size


def width_of(dtype: Any) -> int:
    """Bytes of a number: 4 in fp32, else 2."""
    return 4 if "32" in str(dtype) else 2


def shards_of(config: DictConfig, engine: DictConfig) -> int:
    """The GPUs that a model under FSDP is cut among."""
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return engine.fsdp_size if 0 < engine.fsdp_size < world else world


def trainer(
    config: DictConfig, c: Any, tokens: int, engine: DictConfig, model: DictConfig
) -> tuple[Parts, Parts]:
    """(what stays on the device while others work, what an update has beside logits) of a model under FSDP.

    Weights and AdamW's two moments are sharded, in engine.model_dtype; layers at work are gathered in the type that is
    computed in (verl 0.9.1, workers/engine/fsdp/transformer_impl.py). tokens: of the largest micro-batch.
    """
    (everything, layer), (queries, keys, mlp, _), layers = (
        parameters(c),
        widths(c),
        c.num_hidden_layers,
    )
    adapter = layers * model.lora_rank * (7 * c.hidden_size + 2 * queries + 2 * keys + 3 * mlp)
    learned = adapter or everything
    shards = shards_of(config, engine)
    width, master = (
        width_of((engine.get("mixed_precision") or {}).get("param_dtype")),
        width_of(engine.model_dtype),
    )
    one = activations(c, width)
    held = (
        width * c.hidden_size * layers + one
        if model.enable_gradient_checkpointing
        else one * layers
    )
    update: Parts = {
        "weights": master * everything / shards,
        "optimiser": 2 * master * learned / shards,
        "gradients": 4 * learned / (1 if engine.use_no_sync_for_gradient_accumulation else shards),
        "gathered": width * (everything - (layers - 2) * layer * engine.reshard_after_forward),
        "activations": tokens * held,
    }
    offload = {
        "weights": engine.param_offload,
        "optimiser": engine.optimizer_offload,
    }  # which frees nothing on a CPU
    cpu = config.trainer.device == "cpu"
    return {name: update[name] for name, away in offload.items() if cpu or not away}, update


def stages(config: DictConfig, c: Any, total: int, command: str) -> dict[str, Parts]:
    """{stage: parts} of a device that has `total` bytes: generate, log-probs, update, critic (its update), sync.

    Logits are [tokens, vocabulary] twice in a forward pass, as they are and over the temperature, and a third time with
    their gradient (verl 0.9.1, prepare_model_outputs, with flash-attn's cross entropy).
    """
    policy, rollout, critic = (
        config.actor_rollout_ref,
        config.actor_rollout_ref.rollout,
        config.critic,
    )
    cpu, engine = config.trainer.device == "cpu", policy.actor.fsdp_config
    always: Parts = {"libraries": LIBRARIES["cpu" if cpu else "cuda"]}
    sent = {
        "vLLM's weights": width_of(rollout.dtype)
        * parameters(c)[0]
        / rollout.tensor_model_parallel_size
    }
    cache = OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes")
    if rollout.name == "hf":  # of every answer that is sampled at once, to its end
        cache = rollout.max_num_seqs * rollout.max_model_len * kv_bytes(c, width_of(rollout.dtype))
    vllm = sent | {
        "KV cache": cache or max(0, rollout.gpu_memory_utilization * total - sum(sent.values()))
    }
    if command in ("rollout", "evaluate"):
        return {"generate": vllm | always}
    tokens, read = policy.actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu
    kept, update = trainer(config, c, tokens, engine, policy.model)
    width = width_of((engine.get("mixed_precision") or {}).get("param_dtype"))
    logits = 0 if policy.model.use_fused_kernels else width * c.vocab_size
    update["logits"] = 3 * tokens * logits
    if command == "sft":
        return {"update": update | always}
    lora = policy.model.lora_rank and not user_functions.teacher(config)
    pools = config.trainer.resource_pools
    if (
        cpu and user_functions.needs_reference(config) and not (lora or pools.ref)
    ):  # on a GPU it waits on the host
        always["reference"] = update["weights"]
    forward = {name: update[name] for name in ("weights", "gathered")}
    forward |= {"activations": read * activations(c, width), "logits": 2 * read * logits}
    if cpu:  # whose memory all servers share
        ranks = (
            config.trainer.n_gpus_per_node
            * config.trainer.nnodes
            * rollout.tensor_model_parallel_size
        )
        vllm = {name: size * max(1, sampling_gpus(config) / ranks) for name, size in vllm.items()}
    apart = bool(rollout.nnodes and not cpu)
    here, asleep = ({}, {}) if apart else (kept, {} if rollout.free_cache_engine else vllm)
    bucket = {"bucket": rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20}
    found = {
        "generate": here | vllm,
        "log-probs": kept | forward | asleep,
        "update": update | asleep,
    }
    found["sync"] = kept | (asleep or ({} if apart else sent)) | bucket
    if user_functions.asks_for(config, "values") and not pools.critic:
        rest, theirs = trainer(
            config, c, critic.ppo_max_token_len_per_gpu, critic.fsdp, critic.model
        )
        found = {stage: {**parts, "critic": sum(rest.values())} for stage, parts in found.items()}
        found["critic"] = {**theirs, "actor": sum(kept.values())} | asleep
    return {stage: found[stage] | always for stage in LOWER if stage in found}


def device(config: DictConfig) -> tuple[int, str]:
    """(bytes of each device, what is to be said of that): the smallest GPU's here, or a CPU's share of the memory."""
    if config.trainer.device == "cpu":
        return psutil.virtual_memory().total // config.trainer.n_gpus_per_node, ""
    try:  # not torch, which would take a piece of the GPU for this process
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(
            asked, capture_output=True, text=True, timeout=20, check=True
        ).stdout
        return min(int(line) for line in answer.split()) * 2**20, ""
    except (OSError, ValueError, subprocess.SubprocessError):
        return ASSUMED, ", assumed: there is none here to ask"


def report(config: DictConfig, c: Any, command: str) -> tuple[list[str], list[str]]:
    """(the estimate, a line for each stage; what of it does not fit). c: the Hugging Face config of the text model."""
    if missing := [name for name in NEEDED if not getattr(c, name, None)]:
        return [f"memory      not estimated: the model's config has no {', '.join(missing)}"], []
    if config.model_engine != "dp":
        return [f"memory      not estimated with model_engine={config.model_engine}"], []
    (total, said), rollout = device(config), config.actor_rollout_ref.rollout
    has, wrong = (
        f"a {'CPU' if config.trainer.device == 'cpu' else 'GPU'} has {total / GIB:.1f} GiB{said}",
        [],
    )
    lines, found = [f"memory      estimated, in GiB; {has}"], stages(config, c, total, command)
    for stage, parts in found.items():
        told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        lines.append(f"  {stage:9} {sum(parts.values()) / GIB:.1f}: {told}")
        if sum(parts.values()) > total:
            more = "take a smaller model" if config.trainer.device == "cpu" else SPREAD
            wrong.append(
                f"{stage} needs {sum(parts.values()) / GIB:.1f} GiB, {has}: lower {LOWER[stage]}, or {more}"
            )
    if "generate" in found:
        token = kv_bytes(c, width_of(rollout.dtype)) / rollout.tensor_model_parallel_size
        fit = int(found["generate"]["KV cache"] / token / rollout.max_model_len)
        lines.append(
            f"KV cache    {token / 2**10:.0f} KiB a token: {fit} episodes of {rollout.max_model_len} at once"
        )
        if not fit:
            more = f"{LOWER['generate']}, or {ROLLOUT}.tensor_model_parallel_size"
            wrong.append(
                f"the KV cache holds no episode of {rollout.max_model_len} tokens: raise {more}"
            )
    return lines, wrong
