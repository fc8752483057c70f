"""The attention of a run on a GPU node where flash-attn is not installed.

verl 0.9.1 loads the policy and the reference with flash_attention_2, unless the recipe names
another attention, and every value model with flash_attention_2 in any case
(verl/utils/model.py, load_valuehead_model). Its sequence parallelism replaces a function of
flash-attn (verl/models/transformers/monkey_patch.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from omegaconf import DictConfig, open_dict

from kit.config.load import ACTOR, FSDP, MODEL
from kit.config.user_functions import needs
from kit.extras.preflight import gpus

FLASH_ATTENTION = "flash_attention_2"  # verl's default
SUBSTITUTE = "sdpa"  # torch.nn.functional.scaled_dot_product_attention
INSTALL = "Install flash-attn (make math FLASH_ATTN=build)"
PACKAGES = ("flash_attn", "kernels")  # transformers downloads the same kernel by `kernels`


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def lacks_flash_attention(config: DictConfig, command: str) -> bool:
    """Whether this GPU node trains with FSDP, and has no flash-attn.

    If this node has no GPU, the run will use another one, which may have it.
    """
    trains = command in ("train", "sft")
    if not trains or config.trainer.device == "cpu" or config.model_engine != FSDP:
        return False
    return not any(is_installed(package) for package in PACKAGES) and gpus.count_gpus() > 0


def check(config: DictConfig, command: str) -> Iterator[str]:
    """A problem for each part of a recipe that cannot work without flash-attn."""
    if not lacks_flash_attention(config, command):
        return
    parts = []
    if command == "train" and needs(config, "values"):
        parts.append(f"the critic of algorithm.adv_estimator={config.algorithm.adv_estimator}")
    if command == "train" and config.reward.reward_model.enable:
        parts.append("the reward model")
    if config.actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1:
        parts.append(f"{ACTOR}.ulysses_sequence_parallel_size > 1")
    if parts:
        yield (
            f"flash-attn is not installed, and verl needs it for {' and '.join(parts)}. {INSTALL}, "
            "or train with an advantage that has no critic, such as grpo. "
            'See docs/backends.md, "flash-attn".'
        )


def choose(config: DictConfig, command: str) -> None:
    """Set the policy's attention to sdpa where verl's default is not installed."""
    override = config.actor_rollout_ref.model.override_config
    if lacks_flash_attention(config, command) and "attn_implementation" not in override:
        with open_dict(override):
            override.attn_implementation = SUBSTITUTE


def warnings(config: DictConfig, command: str) -> Iterator[str]:
    """The cost of training without flash-attn."""
    if not lacks_flash_attention(config, command):
        return
    attention = config.actor_rollout_ref.model.override_config.attn_implementation
    if attention == FLASH_ATTENTION:
        yield (
            f"{attention} is not installed. {INSTALL}, or set "
            f"{MODEL}.override_config.attn_implementation={SUBSTITUTE}. "
            'See docs/backends.md, "flash-attn".'
        )
    elif attention == SUBSTITUTE:
        yield (
            "flash-attn is not installed, so the trainer uses sdpa: results are the same, but an "
            "update takes an estimated 4 to 5 times as long (attention over all pairs of tokens of "
            f"a micro-batch, log-probs token by token; not measured on a GPU). {INSTALL}. "
            'See docs/backends.md, "flash-attn".'
        )
