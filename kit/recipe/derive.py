"""The values of a recipe that follow from others, from its files and from its rows.

`derive` and `replace_servers` are the only places that set them. A feature returns its values
(Facts.derivations). Before them, kit/recipe/load.py resets two kinds of values that another file of
the recipe replaces.

Protects: a run, from values that contradict each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from env import Json
from kit.errors import ConfigError
from kit.recipe.adapters import Adapter, derive_adapter
from kit.recipe.fused_head import find_obstacle
from kit.recipe.keys import ACTOR, CRITIC, MODEL, REF, REWARD_MODEL, ROLLOUT, TEACHER, TRAIN
from kit.recipe.settings import Settings

MICRO_BATCH_TOKENS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
)


class ModelFacts(NamedTuple):
    """What the configuration of the policy's model says."""

    vocab_size: int
    hidden_size: int
    max_positions: int | None  # None: any number
    head_obstacle: str = ""  # why log-probs need all logits (fused_head.py)
    quantization: str = ""  # the method with which its files are quantized, such as fp8


class RowFacts(NamedTuple):
    """What the rows of a command say."""

    batches: int | None  # whole batches of an epoch; None: rows of functions have no epochs
    tool_format: str = ""  # the tool parser of rows with tools; "": no row has tools
    servers: Mapping[str, str] = {}  # {server of rows: its url}, from gym.head_server


class Facts(NamedTuple):
    """What the files and rows of a recipe say. None: they were not read."""

    chat_template: str | None = None  # the text of model.custom_chat_template
    adapter: Adapter | None = None  # model.lora_adapter_path
    replaced_servers: frozenset[str] = frozenset()  # of gym.servers: env.verifier replaces them
    model: ModelFacts | None = None
    rows: RowFacts | None = None
    image_values: Mapping[str, object] = {}  # values that follow from the rows' images
    derivations: tuple[Callable[[Settings], Mapping[str, object]], ...] = ()  # of features


def derive(settings: Settings, facts: Facts) -> Json:
    """Return {dotted key: value} of the values that follow. Raises ConfigError.

    The order matters: a later value of a key wins, and the lengths depend on those of features.
    """
    changes: Json = dict(facts.image_values)
    for derive_feature in facts.derivations:
        changes |= derive_feature(settings)
    changes |= derive_paths(settings)
    if facts.chat_template is not None:
        changes[f"{MODEL}.custom_chat_template"] = facts.chat_template
    if facts.adapter and settings.model.lora_adapter_path:
        changes |= derive_adapter(settings.model, facts.adapter)
    changes |= derive_loss(settings)
    if facts.model:
        changes |= derive_lengths(settings, facts.model, changes)
        changes |= derive_weight_sync(settings, facts.model)
        changes |= derive_head(settings, facts.model)
    if facts.rows:
        changes |= derive_steps(settings, facts.rows)
        changes |= derive_tool_format(settings, facts.rows)
    return changes


def derive_paths(settings: Settings) -> Json:
    """Return absolute paths, since workers run in other folders."""
    changes: Json = {}
    for key in (f"{MODEL}.path", CRITIC, REWARD_MODEL, TEACHER, f"{MODEL}.lora_adapter_path"):
        path = settings.get(key)
        if path and Path(path).expanduser().is_dir():
            changes[key] = str(Path(path).expanduser().resolve())
    # a Ray process writes this file
    changes[f"{ROLLOUT}.prometheus.file"] = os.path.abspath(settings.rollout.prometheus.file)
    return changes


def replace_servers(gym: Json, facts: Facts) -> None:
    """Let the unresolved section `gym` have the servers of the rows, also of gym.head_server."""
    found = facts.rows.servers if facts.rows else {}
    for name in facts.replaced_servers:
        del gym["servers"][name]
    for name, url in found.items():
        gym["servers"][name] = {"url": url}
    if facts.replaced_servers and not gym["servers"]:
        gym["judges"] = {}  # only servers use judges


def derive_loss(settings: Settings) -> Json:
    """Return settings of the loss that follow from other settings."""
    changes: Json = {}
    actor = settings.actor
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        # verl would divide by the width of a micro-batch
        changes[f"{ACTOR}.loss_scale_factor"] = settings.data.max_response_length
    if settings.algorithm.rollout_correction.bypass_mode:  # as verl's apply_bypass_mode
        changes[f"{ACTOR}.policy_loss.loss_mode"] = "bypass_mode"
        correction = settings.algorithm.rollout_correction.model_dump()
        changes[f"{ACTOR}.policy_loss.rollout_correction"] = correction
    return changes


def derive_lengths(settings: Settings, model: ModelFacts, changes: Json) -> Json:
    """Return the tokens of an episode and of a micro-batch. Raises ConfigError.

    changes: values of features, which may set the length that the rollout engine takes.
    """
    longest = settings.max_episode_length
    key = f"{ROLLOUT}.max_model_len"
    max_model_len = settings.rollout.max_model_len or int(changes.get(key, longest))
    positions = model.max_positions or max_model_len
    if settings.has_episodes and max_model_len > positions:
        raise ConfigError(describe_long_episode(settings, max_model_len, positions))
    # verl packs whole episodes, in parts on the GPUs that share the tokens of one
    share = math.ceil(longest / settings.engine.sequence_gpus)
    sizes = {name: max(settings.get(name), share) for name in MICRO_BATCH_TOKENS}
    return {key: max_model_len} | sizes


def describe_long_episode(settings: Settings, max_model_len: int, positions: int) -> str:
    """Describe an episode of more tokens than the model has positions, with a length that fits."""
    if settings.rollout.max_model_len:
        return (
            f"{ROLLOUT}.max_model_len={max_model_len} is more than the model's {positions} "
            f"positions. Set it to {positions} or less."
        )
    prompt = settings.data.max_prompt_length
    key = "data.max_response_length" if prompt < positions else "data.max_prompt_length"
    fits = positions - prompt if prompt < positions else positions // 2
    return (
        f"Prompt and response may have {max_model_len} tokens, and the model reads {positions}. "
        f"Set {key}={fits}."
    )


def derive_weight_sync(settings: Settings, model: ModelFacts) -> Json:
    """Return a bucket for the largest tensor, the embedding in fp32, and the engine's processes."""
    sync = settings.rollout.checkpoint_engine
    needed = math.ceil(model.vocab_size * model.hidden_size * 4 / 2**20) + 1
    size = max(sync.update_weights_bucket_megabytes, needed)
    changes: Json = {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": size}
    if settings.command != "train":
        # verl creates the engine of this name even if no weights are sent
        changes[f"{ROLLOUT}.checkpoint_engine.backend"] = "naive"
    vllm = dict(settings.rollout.engine_kwargs.get("vllm") or {})
    is_split = settings.rollout.tensor_model_parallel_size > 1
    if settings.trainer.device == "cpu" and is_split and "distributed_executor_backend" in vllm:
        # verl's default for this key starts a process for each part of the model
        del vllm["distributed_executor_backend"]
        changes[f"{ROLLOUT}.engine_kwargs.vllm"] = vllm
    return changes


def derive_head(settings: Settings, model: ModelFacts) -> Json:
    """Return that all logits are computed together, if the log-probs need that."""
    is_on = settings.model.use_fused_kernels
    if is_on and find_obstacle(settings, model.head_obstacle):
        return {f"{MODEL}.use_fused_kernels": False}
    return {}


def derive_steps(settings: Settings, rows: RowFacts) -> Json:
    """Return the number of steps, also for the schedules of the workers. Raises ConfigError.

    Without trainer.total_training_steps, verl counts trainer.total_epochs.
    """
    steps = settings.trainer.total_training_steps
    if steps is None and settings.trains:
        if rows.batches is None:
            raise ConfigError(
                f"trainer.total_training_steps=null: rows of a function in {TRAIN} have no epochs. "
                "Set it."
            )
        steps = settings.trainer.total_epochs * rows.batches
    changes: Json = {
        f"{section}.optim.total_training_steps": steps or -1 for section in (ACTOR, "critic")
    }
    changes["trainer.total_training_steps"] = steps
    return changes


def derive_tool_format(settings: Settings, rows: RowFacts) -> Json:
    """Return the tool parser for multi_turn.format=auto, if the rows have tools."""
    if not rows.tool_format or settings.rollout.multi_turn.format != "auto":
        return {}
    return {f"{ROLLOUT}.multi_turn.format": rows.tool_format}
