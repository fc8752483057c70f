"""Tiny random models of architectures of transformers.

A configuration is the default one of its class, with small sizes: two layers, and a window of
WINDOW tokens if it has one.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kit.config.recipe import Recipe
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
# {size: keys of configurations with this size}
SIZES = {
    WIDTH: "hidden_size",
    96: "intermediate_size",
    HEADS: "num_attention_heads num_local_experts",
    2: "num_hidden_layers num_key_value_heads num_experts_per_tok",
    1: "n_groups",
    16: "head_dim state_size",
    WINDOW: "sliding_window num_heads chunk_size time_step_rank",
    256: "max_position_embeddings",
}
VALUES = {name: size for size, names in SIZES.items() for name in names.split()}


def shrink(model_type: str) -> Any:
    """Make a small configuration of the text part of an architecture."""
    default = CONFIG_MAPPING[model_type]().get_text_config()
    values = default.to_dict()
    is_size = {key: type(value) in (int, float) for key, value in values.items()}
    changes: dict[str, Any] = {k: VALUES[k] for k in values if k in VALUES and is_size[k]}
    if values.get("layer_types"):
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    changes["vocab_size"] = len(make_tokenizer())
    changes |= {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": END}
    return type(default)(**changes)


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
