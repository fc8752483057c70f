"""The attention of a run on a GPU node where flash-attn is not installed.

verl 0.9.1 loads the policy and the reference with flash_attention_2, unless the recipe names
another attention. Without flash-attn, kit/extras/without_flash_attn.py computes the same by torch.
Two parts of verl call functions of flash-attn themselves: sequence parallelism
(verl/models/transformers/monkey_patch.py) and Qwen2-VL (verl/models/transformers/qwen2_vl.py).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, open_dict

from kit import features
from kit.config.load import ACTOR, FSDP, MODEL
from kit.extras.preflight import gpus

FLASH_ATTENTION = "flash_attention_2"  # verl's default
VARLEN = "torch_varlen"  # of SUBSTITUTE_MODULE
SDPA = "sdpa"  # torch.nn.functional.scaled_dot_product_attention
SUBSTITUTE_MODULE = "kit.extras.without_flash_attn"
INSTALL = "Install flash-attn (make math FLASH_ATTN=build)"
PAGE = 'See docs/backends.md, "flash-attn".'
PACKAGE = "flash_attn"
PACKAGES = (PACKAGE, "kernels")  # transformers downloads the same kernel by `kernels`
CALLS_FLASH_ATTENTION = ("qwen2_vl", "qwen2_5_vl")  # by model_type: verl's code, packed batches


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def trains_here(config: DictConfig, command: str) -> bool:
    """Whether this GPU node trains with FSDP.

    If this node has no GPU, the run will use another one, which may have flash-attn.
    """
    trains = command in ("train", "sft")
    if not trains or config.trainer.device == "cpu" or config.model_engine != FSDP:
        return False
    return gpus.count_gpus() > 0


def lacks_flash_attention(config: DictConfig, command: str) -> bool:
    """Whether this GPU node trains with FSDP, and has no flash-attn."""
    return trains_here(config, command) and not any(map(is_installed, PACKAGES))


def check(config: DictConfig, command: str) -> Iterator[str]:
    """A problem if the recipe has sequence parallelism, which cannot work without flash-attn."""
    if not lacks_flash_attention(config, command):  # megatron has no such key
        return
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    if size > 1:
        yield (
            f"flash-attn is not installed, and verl needs it for {key}={size}. {INSTALL}, or set "
            f"{key}=1. {PAGE}"
        )


def check_model(config: DictConfig, hf_config: Any, command: str) -> Iterator[str]:
    """A problem if verl's code for the model calls flash-attn, which is not installed."""
    is_packed = config.actor_rollout_ref.model.use_remove_padding
    calls = is_packed and hf_config.model_type in CALLS_FLASH_ATTENTION
    if calls and trains_here(config, command) and not is_installed(PACKAGE):
        yield (
            f"flash-attn is not installed, and verl needs it for the model type "
            f"{hf_config.model_type}. {INSTALL}, or use another model. {PAGE}"
        )


# --- choose --------------------------------------------------------------------------------------


def choose(config: DictConfig, hf_config: Any, command: str) -> None:
    """Choose the attention of all models if verl's default is not installed.

    Makes the workers import the module that computes it by torch, if they need that.
    """
    models = (config.actor_rollout_ref.model, config.critic.model)
    has_substitute = features.is_installed(SUBSTITUTE_MODULE)
    if lacks_flash_attention(config, command):
        longest = config.data.max_prompt_length + config.data.max_response_length
        can_replace = has_substitute and supports_varlen(hf_config, longest)
        for model in models:
            set_attention(model, VARLEN if can_replace and model.use_remove_padding else SDPA)
    is_named = any(model.override_config.get("attn_implementation") == VARLEN for model in models)
    computes_log_probs = trains_here(config, command) and not is_installed(PACKAGE)
    if is_named or (has_substitute and computes_log_probs):
        load_substitute(config)


def set_attention(model: DictConfig, name: str) -> None:
    """Set the attention of a model, unless the recipe names one."""
    if "attn_implementation" not in model.override_config:
        with open_dict(model.override_config):
            model.override_config.attn_implementation = name


def supports_varlen(hf_config: Any, longest: int) -> bool:
    """Whether torch's kernel computes the attention of a model. longest: tokens of an episode."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    text_config = hf_config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    is_windowed = window is not None and window < longest
    if is_windowed or getattr(text_config, "attn_logit_softcapping", None) is not None:
        return False
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        # None for code outside of transformers, of which nothing is known
        model_class = auto_class._model_mapping.get(type(hf_config), None)
        if getattr(model_class, "_supports_flash_attn", False):
            return True
    return False


def load_substitute(config: DictConfig) -> None:
    """Have verl import the substitute in each process, and import it in this one.

    The driver exports checkpoints, and their config names the attention.
    """
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    modules = variables.VERL_USE_EXTERNAL_MODULES.split(",")
    variables.VERL_USE_EXTERNAL_MODULES = ",".join(dict.fromkeys([*modules, SUBSTITUTE_MODULE]))
    importlib.import_module(SUBSTITUTE_MODULE)


# --- describe ------------------------------------------------------------------------------------


def describe(config: DictConfig, command: str) -> list[str]:
    """A line with the attention that replaces flash-attn, if any does."""
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation")
    if attention != VARLEN or not lacks_flash_attention(config, command):
        return []
    return [f"attention   {VARLEN}: flash-attn is not installed, so torch computes its part"]


def warnings(config: DictConfig, command: str) -> Iterator[str]:
    """An attention that is not installed, or that is slower than flash-attn."""
    if not lacks_flash_attention(config, command):
        return
    model = config.actor_rollout_ref.model
    attention = model.override_config.attn_implementation
    if attention == FLASH_ATTENTION:
        yield (
            f"{attention} is not installed. {INSTALL}, or set "
            f"{MODEL}.override_config.attn_implementation={VARLEN}. {PAGE}"
        )
    elif attention == SDPA and model.use_remove_padding:
        yield (
            "flash-attn is not installed, so the trainer uses sdpa: results are the same, but "
            "attention takes longer, because it covers all pairs of tokens of a micro-batch. "
            f"{INSTALL}. {PAGE}"
        )
