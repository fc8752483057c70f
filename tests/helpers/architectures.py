"""Tiny random models of architectures of transformers.

A configuration is the default one of its class, with small sizes. It has one layer of each type
that the code of the model names, and a window of WINDOW tokens if it may have one.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kit.recipe.recipe import Recipe
from tests.helpers.models import END, make_tokenizer

VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform",
}
WINDOW = 8
HEADS = 4
WIDTH = 64
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LAYER_TYPES = ("layer_types", "layers_block_type")
TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "attention",
    "hybrid",
)
# {size: keys of configurations with this size}
SIZES = {
    WIDTH: "hidden_size d_model n_embd word_embed_proj_dim block_dim conv_dim index_topk",
    96: "intermediate_size n_inner ffn_dim ffn_hidden_size shared_intermediate_size "
    "intermediate_size_mlp block_ff_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size qk_head_dim "
    "moe_shared_expert_intermediate_size",
    HEADS: "num_attention_heads n_head n_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads index_n_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token moe_top_k moe_k moe_topk "
    "linear_num_key_heads altup_num_inputs",
    1: "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups "
    "mamba_n_groups mamba_ngroups first_k_dense_replace num_mem_blocks",
    16: "head_dim global_head_dim attention_head_dim kv_channels q_lora_rank kv_lora_rank "
    "o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim mamba_d_state ssm_state_size state_size linear_key_head_dim "
    "linear_value_head_dim index_head_dim hidden_size_per_layer_input",
    WINDOW: "sliding_window sliding_window_size attention_chunk_size num_heads mamba_n_heads "
    "mamba_num_heads n_mamba_heads rotary_dim mamba_chunk_size chunk_size mamba_dt_rank "
    "time_step_rank adapter_rank laurel_rank block_multiple_of",
    128: "mamba_d_ssm attention_hidden_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    0: "num_nextn_predict_layers zero_expert_num num_kv_shared_layers",
}
VALUES = {name: size for size, names in SIZES.items() for name in names.split()}


def shrink(model_type: str) -> Any:
    """Make a small configuration of the text part of an architecture."""
    default = CONFIG_MAPPING[model_type]().get_text_config()
    values = default.to_dict()
    is_size = {key: type(value) in (int, float) for key, value in values.items()}
    changes: dict[str, Any] = {k: VALUES[k] for k in values if k in VALUES and is_size[k]}
    if "use_sliding_window" in values:
        changes |= {"use_sliding_window": True, "sliding_window": WINDOW}
    if values.get("kv_lora_rank"):
        changes["num_key_value_heads"] = HEADS
    if "head_dim" in values and "num_attention_heads" in values:
        changes["head_dim"] = WIDTH // HEADS
    count = 2
    for key in LAYER_TYPES:
        if isinstance(values.get(key), list):
            types = list_layer_types(type(default), values[key])
            changes[key] = types if len(types) > 1 else types * 2
            count = len(changes[key])
    changes |= {key: count for key in LAYERS if key in values}
    changes |= {"vocab_size": len(make_tokenizer()), "vocab_size_per_layer_input": 64}
    changes |= {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": END}
    return type(default)(**changes)


def list_layer_types(config_class: type, types: list[str]) -> list[str]:
    """The layer types of a default configuration, and those that the code of the model names."""
    module = config_class.__module__
    files = [module, module.replace("configuration_", "modeling_")]
    code = ""
    for name in files:
        code += Path(str(importlib.import_module(name).__file__)).read_text(encoding="utf-8")
    return list(dict.fromkeys([*types, *(name for name in TYPES if f'"{name}"' in code)]))


def join_process_group() -> None:
    """Let this process train on a CPU, as a worker of a run does."""
    for name, value in VARIABLES.items():
        os.environ[name] = value
    torch.set_num_threads(1)
    importlib.import_module("kit.cpu.platform")
    importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def load_actor(recipe: Recipe, folder: Path) -> Any:
    """Load an actor's worker with the model of a folder, which it tries."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    config = recipe.for_verl().actor_rollout_ref
    config.model.path = str(folder)
    actor = ActorRolloutRefWorker(config=config, role="actor")
    actor.init_model()
    return actor


def make_architecture(model_type: str, folder: Path) -> Path:
    """Write a random model with large weights, which show a mixture of rows, and a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrink(model_type))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
