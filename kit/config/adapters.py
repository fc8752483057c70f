"""Checks of LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

A run starts from an adapter of peft if model.lora_adapter_path is its folder. Its rank, alpha and
target modules are those of its adapter_config.json.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from kit.config.keys import to_plain
from kit.config.load import MODEL
from kit.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PretrainedConfig

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
# Values of init_lora_weights that leave the base model's weights as they are.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")


def check_keys(config: DictConfig) -> Iterator[str]:
    """A separate reference has no adapter."""
    path = config.actor_rollout_ref.model.get("lora_adapter_path")
    if path and config.trainer.resource_pools.ref:
        yield (
            f"{PATH}={path} with trainer.resource_pools.ref: the separate reference would be the "
            "model without this adapter, from which the policy starts. Remove one of them."
        )


def check_adapter(config: DictConfig, hf_config: PretrainedConfig) -> None:
    """Check that the adapter is of a kind that verl sends and exports. Raises ConfigError.

    hf_config: the model's configuration.
    """
    model = config.actor_rollout_ref.model
    path = model.get("lora_adapter_path")
    if path and Path(path) == Path(model.path) / ADAPTER_FOLDER:
        raise ConfigError(
            f"{PATH}={path} is merged into {MODEL}.path={model.path} already. Set {MODEL}.path to "
            "the base model, or remove lora_adapter_path."
        )
    if path:
        check_modules(hf_config, load_adapter_config(path), model.trust_remote_code)
    elif model.lora_rank:
        check_modules(hf_config, make_lora_config(model), model.trust_remote_code)


def take_adapter(config: DictConfig) -> Iterator[ConfigError]:
    """Set rank, alpha and target modules to those of lora_adapter_path -> the problems with it.

    This reads only adapter_config.json, so that all later checks know the rank. Makes the path
    absolute. Rank and alpha are set if the recipe sets no rank. It is an error if the recipe
    contradicts the adapter, or if verl does not support it.
    """
    model = config.actor_rollout_ref.model
    if not model.get("lora_adapter_path"):
        return
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


def make_lora_config(model: DictConfig) -> LoraConfig:
    """Make peft's configuration as verl does (FSDPEngine._build_lora_module)."""
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=to_plain(model.target_modules),
        exclude_modules=to_plain(model.exclude_modules),
        bias="none",
    )


def load_adapter_config(path: str) -> LoraConfig:
    """Load the configuration of an adapter. Raises ConfigError."""
    from peft import PeftConfig

    try:
        adapter = PeftConfig.from_pretrained(path)
    except Exception as error:  # of peft, or of the hub
        raise ConfigError(
            f"{PATH}={path} has no adapter of peft: {describe(error)} Give its folder, such as "
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


def describe(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0]


def check_modules(
    hf_config: PretrainedConfig, lora_config: LoraConfig, trust_remote_code: bool
) -> None:
    """Check that the target modules exist, and are in the transformer's layers.

    This makes a model without memory. Raises ConfigError.
    """
    import torch
    from peft import get_peft_model
    from verl.utils.model import get_hf_auto_model_class

    auto_class = get_hf_auto_model_class(hf_config=hf_config)
    with torch.device("meta"):
        model = auto_class.from_config(hf_config, trust_remote_code=trust_remote_code)
        try:
            adapted = get_peft_model(model, lora_config)
        except ValueError as error:
            raise ConfigError(
                f"{MODEL}.target_modules={sorted_if_set(lora_config.target_modules)}: "
                f"{describe(error)} Change it."
            ) from None
    outside = sorted(set(find_outer_modules(adapted, model._no_split_modules or [])))
    if outside:
        raise ConfigError(
            f"{MODEL}.target_modules adapts {', '.join(outside)}, which verl neither merges nor "
            "exports: it does so only for modules in the transformer's layers. Change it, for "
            f"example to {ALL_LINEAR}."
        )


def find_outer_modules(adapted: torch.nn.Module, layer_classes: Iterable[str]) -> Iterator[str]:
    """The names of adapted modules that are not in a transformer layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [
        f"{name}."
        for name, module in adapted.named_modules()
        if type(module).__name__ in layer_classes
    ]
    for name, module in adapted.named_modules():
        if isinstance(module, BaseTunerLayer) and not name.startswith(tuple(layers)):
            yield name.rpartition(".")[2]


def describe_adapter(model: DictConfig, has_reference: bool) -> list[str]:
    """Return lines of the summary about the adapter that a run starts from.

    has_reference: whether the loss or the advantage reads the reference.
    """
    path = model.get("lora_adapter_path")
    if not path:
        return []
    lines = [f"adapter     {path}: rank {model.lora_rank}, alpha {model.lora_alpha:g}"]
    if has_reference:
        lines.append("            the reference is the model with this adapter (verl: without it)")
    return lines


def warn_of_base(model: DictConfig) -> Iterator[str]:
    """Warn if the adapter was trained on a base model of another name."""
    path = model.get("lora_adapter_path")
    if not path:
        return
    base = str(load_adapter_config(path).base_model_name_or_path or "")
    if base and Path(base).name != Path(model.path).name:
        yield (
            f"{PATH}={path} was trained on {base}, and {MODEL}.path={model.path}. If these are not "
            "the same weights, the adapter does not fit. Then set the first one."
        )
