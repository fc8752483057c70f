"""Check LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

A run starts from an adapter of peft if model.lora_adapter_path is its folder. Its rank, alpha and
target modules are those of its adapter_config.json.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from kit.errors import ConfigError
from kit.recipe.keys import to_plain
from kit.recipe.load import MODEL

if TYPE_CHECKING:
    from peft import LoraConfig

PATH = f"{MODEL}.lora_adapter_path"
ALL_LINEAR = "all-linear"
VERL_ALPHA = 16  # verl's default of model.lora_alpha
ADAPTER_FOLDER = "lora_adapter"  # the folder of the adapter in an export of the kit
# Fields of peft's LoraConfig that verl's merge, weight sync and export read, or that do not change
# the policy. Any other field must have peft's default.
READ_FIELDS = {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"}
READ_FIELDS |= {"layers_pattern", "fan_in_fan_out", "lora_dropout", "inference_mode", "task_type"}
READ_FIELDS |= {"base_model_name_or_path", "revision", "auto_mapping", "peft_version"}
READ_FIELDS |= {"runtime_config", "megatron_config", "megatron_core", "eva_config"}
OUTER_MODULES = ("model.embed_tokens", "lm_head")
# Values of init_lora_weights that leave the base model's weights as they are.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")


def check_lora(config: DictConfig) -> Iterator[ConfigError]:
    """Check the adapter of the policy, and take its settings -> the problems with it."""
    model = config.actor_rollout_ref.model
    path = model.get("lora_adapter_path")
    if path and config.trainer.resource_pools.ref:
        yield ConfigError(
            f"{PATH}={path} with trainer.resource_pools.ref: the separate reference would be the "
            "model without this adapter, from which the policy starts. Remove one of them."
        )
    if path and Path(path).resolve() == Path(model.path, ADAPTER_FOLDER).resolve():
        yield ConfigError(
            f"{PATH}={path} is merged into {MODEL}.path={model.path} already. Set {MODEL}.path to "
            "the base model, or remove lora_adapter_path."
        )
    if path:
        yield from take_adapter(model)
    outside = find_outer_targets(model)
    if outside:
        yield ConfigError(
            f"{MODEL}.target_modules adapts {', '.join(outside)}, which verl neither merges nor "
            "exports: it does so only for modules in the transformer's layers. Change it, for "
            f"example to {ALL_LINEAR}."
        )


def take_adapter(model: DictConfig) -> Iterator[ConfigError]:
    """Set rank, alpha and target modules to those of lora_adapter_path -> the problems with it.

    model: the section of a recipe. This reads only adapter_config.json, and makes the path
    absolute. Rank and alpha are set if the recipe sets no rank. It is an error if the recipe
    contradicts the adapter, or if verl does not support it.
    """
    folder = Path(model.lora_adapter_path).expanduser()
    if folder.is_dir():
        model.lora_adapter_path = str(folder.resolve())  # workers run in other folders
    try:
        adapter = load_adapter_config(model.lora_adapter_path)
    except ConfigError as error:
        yield error
        return
    if not model.lora_rank:
        model.lora_rank = adapter.r
        if model.lora_alpha == VERL_ALPHA:
            model.lora_alpha = adapter.lora_alpha
    problems = list(find_unread_fields(adapter))
    for key, value in (
        ("lora_rank", adapter.r),
        ("lora_alpha", adapter.lora_alpha),
        ("target_modules", sorted_if_set(adapter.target_modules)),
        ("exclude_modules", sorted_if_set(adapter.exclude_modules)),
    ):
        own = sorted_if_set(to_plain(model[key]))
        if own and own not in (value, ALL_LINEAR):
            problems.append(f"it has {key}={value}, and the recipe {own}. Remove {MODEL}.{key}.")
    if problems:
        yield ConfigError(f"{PATH}={model.lora_adapter_path}: {' '.join(problems)}")
    model.target_modules = sorted_if_set(adapter.target_modules)


def find_outer_targets(model: DictConfig) -> list[str]:
    """The target modules of a recipe's adapter that are not in the transformer's layers."""
    if not model.lora_rank:
        return []
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    lora = LoraConfig(
        target_modules=to_plain(model.target_modules),
        exclude_modules=to_plain(model.exclude_modules),
    )
    return [name for name in OUTER_MODULES if check_target_module_exists(lora, name)]


def load_adapter_config(path: str) -> LoraConfig:
    """Load the configuration of an adapter. Raises ConfigError."""
    from peft import PeftConfig

    try:
        adapter = PeftConfig.from_pretrained(path)
    except Exception as error:  # of peft, or of the hub
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{PATH}={path} has no adapter of peft: {reason} Give its folder, such as "
            f"{ADAPTER_FOLDER} in an export."
        ) from None
    if adapter.peft_type != "LORA":
        raise ConfigError(f"{PATH}={path} is {adapter.peft_type}, not LoRA. Give a LoRA adapter.")
    taken = (adapter.r, adapter.lora_alpha, adapter.target_modules)
    if "${" in str(taken):  # the recipe would resolve it
        raise ConfigError(f"{PATH}={path} has the values {taken!r:.200}. Give a plain adapter.")
    return adapter


def find_unread_fields(adapter: LoraConfig) -> Iterator[str]:
    """Sentences about features of an adapter that would be lost."""
    from peft import LoraConfig

    usual = LoraConfig().to_dict()
    if adapter.init_lora_weights in PLAIN_STARTS:  # others changed the base model
        usual["init_lora_weights"] = adapter.init_lora_weights
    for name, value in adapter.to_dict().items():
        if name not in READ_FIELDS and (value or None) != (usual.get(name) or None):
            yield f"it has {name}={value}, which verl does not export. Give a plain adapter."


def sorted_if_set(modules: object) -> Any:  # names as a sorted list; any other value as it is
    """Return a collection of names as a sorted list, and any other value as it is."""
    return sorted(modules) if isinstance(modules, (list, set)) else modules


def describe_adapter(model: DictConfig) -> list[str]:
    """Return the line of the summary about the adapter that a run starts from."""
    path = model.get("lora_adapter_path")
    if not path:
        return []
    base = load_adapter_config(path).base_model_name_or_path
    rank = f"rank {model.lora_rank}, alpha {model.lora_alpha:g}"
    return [f"adapter     {path}: {rank}, trained on {base}"]
