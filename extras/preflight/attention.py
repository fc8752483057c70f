"""The attention of a run on a GPU node where flash-attn is not installed.

verl 0.9.1 loads the policy and the reference with flash_attention_2, unless the recipe names
another attention. Without flash-attn, extras/without_flash_attn.py computes the same by torch.
Two parts of verl call functions of flash-attn themselves: sequence parallelism
(verl/models/transformers/monkey_patch.py) and Qwen2-VL (verl/models/transformers/qwen2_vl.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from extras.preflight import gpus
from kit import features
from kit.recipe.load import ACTOR, FSDP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VARLEN = "torch_varlen"  # of SUBSTITUTE_MODULE
SDPA = "sdpa"  # torch.nn.functional.scaled_dot_product_attention
SUBSTITUTE_MODULE = "extras.without_flash_attn"
PACKAGE = "flash_attn"
PACKAGES = (PACKAGE, "kernels")  # transformers downloads the same kernel by `kernels`
WINDOWS = ("sliding_window", "attention_chunk_size")  # of a model's configuration
CALLS_FLASH_ATTENTION = ("qwen2_vl", "qwen2_5_vl")  # by model_type: verl's code, packed batches


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return features.is_installed(package)


def trains_here(config: DictConfig, command: str) -> bool:
    """Return whether this GPU node trains with FSDP.

    If this node has no GPU, the run will use another one, which may have flash-attn.
    """
    trains = command in ("train", "sft")
    if not trains or config.trainer.device == "cpu" or config.model_engine != FSDP:
        return False
    return gpus.count_gpus() > 0


def lacks_flash_attention(config: DictConfig, command: str) -> bool:
    """Return whether this GPU node trains with FSDP, and has no flash-attn."""
    return trains_here(config, command) and not any(map(is_installed, PACKAGES))


def check_model(config: DictConfig, hf_config: PretrainedConfig, command: str) -> Iterator[str]:
    """Yield a problem for each part of verl that calls flash-attn, which is not installed."""
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    size = OmegaConf.select(config, key)
    kind = hf_config.model_type
    is_packed = config.actor_rollout_ref.model.use_remove_padding
    has_package = is_installed(PACKAGE) or not trains_here(config, command)
    needs = {}
    if lacks_flash_attention(config, command) and size > 1:  # with FSDP, so that it is set
        needs[f"{key}={size}"] = f"set {key}=1"
    if kind in CALLS_FLASH_ATTENTION and is_packed and not has_package:
        needs[f"the model type {kind}"] = "use another model"
    for need, fix in needs.items():
        yield (
            f"flash-attn is not installed, and verl needs it for {need}. Install flash-attn "
            f'(make math FLASH_ATTN=build), or {fix}. See docs/backends.md, "flash-attn".'
        )


# --- choose --------------------------------------------------------------------------------------


def choose(config: DictConfig, hf_config: PretrainedConfig, command: str) -> None:
    """Choose the attention of all models if verl's default is not installed.

    Makes the workers import the module that computes it by torch, if they need that.
    """
    models = (config.actor_rollout_ref.model, config.critic.model)
    has_substitute = features.is_installed(SUBSTITUTE_MODULE)
    if lacks_flash_attention(config, command):
        longest = config.data.max_prompt_length + config.data.max_response_length
        can_replace = has_substitute and not has_short_window(hf_config, longest)
        for model in models:
            name = VARLEN if can_replace and model.use_remove_padding else SDPA
            with open_dict(model.override_config):
                model.override_config.setdefault("attn_implementation", name)
    is_named = any(model.override_config.get("attn_implementation") == VARLEN for model in models)
    computes_log_probs = trains_here(config, command) and not is_installed(PACKAGE)
    if is_named or (has_substitute and computes_log_probs):
        load_substitute(config)


def has_short_window(hf_config: PretrainedConfig, longest: int) -> bool:
    """Return whether a token sees less than `longest` tokens, which the substitute lacks.

    The rows of the trial of models (kit/engine/packing_trial.py) are too short to show that. It
    finds everything else that the substitute cannot compute.
    """
    text_config = hf_config.get_text_config()
    windows = [getattr(text_config, name, None) for name in WINDOWS]
    return any(window is not None and window < longest for window in windows)


def load_substitute(config: DictConfig) -> None:
    """Have verl import the substitute in each process, and import it in this one.

    The driver exports checkpoints, and their config names the attention.
    """
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    modules = variables.VERL_USE_EXTERNAL_MODULES.split(",")
    variables.VERL_USE_EXTERNAL_MODULES = ",".join(dict.fromkeys([*modules, SUBSTITUTE_MODULE]))
    importlib.import_module(SUBSTITUTE_MODULE)


def describe(config: DictConfig, command: str) -> list[str]:
    """Return a line with the attention that replaces flash-attn, if any does."""
    if not lacks_flash_attention(config, command):
        return []
    attention = config.actor_rollout_ref.model.override_config.attn_implementation
    return [f"attention   {attention}: flash-attn is not installed"]
