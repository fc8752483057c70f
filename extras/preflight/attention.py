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

from env import Json
from extras.preflight import gpus
from kit.optional import is_installed
from kit.recipe.keys import ACTOR, MODEL, select_nested
from kit.recipe.load import ENVIRONMENT
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODULES = "VERL_USE_EXTERNAL_MODULES"
VARLEN = "torch_varlen"  # of SUBSTITUTE_MODULE
SDPA = "sdpa"  # torch.nn.functional.scaled_dot_product_attention
SUBSTITUTE_MODULE = "extras.without_flash_attn"
PACKAGE = "flash_attn"
PACKAGES = (PACKAGE, "kernels")  # transformers downloads the same kernel by `kernels`
WINDOWS = ("sliding_window", "attention_chunk_size")  # of a model's configuration
CALLS_FLASH_ATTENTION = ("qwen2_vl", "qwen2_5_vl")  # by model_type: verl's code, packed batches


def trains_here(settings: Settings) -> bool:
    """Return whether this GPU node trains with FSDP.

    If this node has no GPU, the run will use another one, which may have flash-attn.
    """
    if not settings.trains or settings.trainer.device == "cpu" or not settings.engine.is_fsdp:
        return False
    return bool(gpus.list_gpus())


def lacks_flash_attention(settings: Settings) -> bool:
    """Return whether this GPU node trains with FSDP, and has no flash-attn."""
    return trains_here(settings) and not any(map(is_installed, PACKAGES))


def check_model(settings: Settings, hf_config: PretrainedConfig) -> Iterator[str]:
    """Yield a problem for each part of verl that calls flash-attn, which is not installed."""
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    size = settings.actor.ulysses_sequence_parallel_size
    kind = hf_config.model_type
    has_package = is_installed(PACKAGE) or not trains_here(settings)
    needs = {}
    if lacks_flash_attention(settings) and size > 1:
        needs[f"{key}={size}"] = f"set {key}=1"
    if kind in CALLS_FLASH_ATTENTION and settings.model.use_remove_padding and not has_package:
        needs[f"the model type {kind}"] = "use another model"
    for need, fix in needs.items():
        yield (
            f"flash-attn is not installed, and verl needs it for {need}. Install flash-attn "
            f'(make math FLASH_ATTN=build), or {fix}. See docs/backends.md, "flash-attn".'
        )


# --- choose --------------------------------------------------------------------------------------


def choose(settings: Settings, hf_config: PretrainedConfig) -> Json:
    """Return the attention of all models if verl's default is not installed.

    Makes the workers import the module that computes it by torch, if they need that.
    """
    changes: Json = {}
    has_substitute = is_installed(SUBSTITUTE_MODULE)
    is_missing = lacks_flash_attention(settings)
    is_short = has_short_window(hf_config, settings.max_episode_length)
    is_named = False
    for key, model in ((MODEL, settings.model), ("critic.model", settings.critic.model)):
        attention = model.override_config.get("attn_implementation")
        if is_missing and attention is None:
            can_replace = has_substitute and not is_short and model.use_remove_padding
            attention = VARLEN if can_replace else SDPA
            changes[f"{key}.override_config"] = model.override_config | {
                "attn_implementation": attention
            }
        is_named |= attention == VARLEN
    computes_log_probs = trains_here(settings) and not is_installed(PACKAGE)
    if is_named or (has_substitute and computes_log_probs):
        changes |= load_substitute(settings)
    return changes


def has_short_window(hf_config: PretrainedConfig, longest: int) -> bool:
    """Return whether a token sees less than `longest` tokens, which the substitute lacks.

    The substitute lacks that. The rows of the trial of models (kit/engine/packing_trial.py) are too
    short to show it. The trial finds everything else that the substitute cannot compute.
    """
    text_config = hf_config.get_text_config()
    windows = [getattr(text_config, name, None) for name in WINDOWS]
    return any(window is not None and window < longest for window in windows)


def load_substitute(settings: Settings) -> Json:
    """Return variables with which verl imports the substitute, and import it in this process.

    The driver exports checkpoints, and their config names the attention.
    """
    variables = select_nested(settings.ray_kwargs.ray_init, "runtime_env.env_vars")
    assert isinstance(variables, dict)
    modules = variables[MODULES].split(",")
    names = ",".join(dict.fromkeys([*modules, SUBSTITUTE_MODULE]))
    importlib.import_module(SUBSTITUTE_MODULE)
    return {ENVIRONMENT: variables | {MODULES: names}}


def describe(recipe: Recipe) -> list[str]:
    """Return a line with the attention that replaces flash-attn, if any does."""
    if not lacks_flash_attention(recipe):
        return []
    attention = recipe.model.override_config["attn_implementation"]
    return [f"attention   {attention}: flash-attn is not installed"]
