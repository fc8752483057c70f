"""Checks of LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

A run starts from an adapter of peft if model.lora_adapter_path is its folder. Its rank, alpha and
target modules are those of its adapter_config.json.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

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
    """The keys of LoRA fit together. This check reads no files."""
    model = config.actor_rollout_ref.model
    if OmegaConf.select(config, "critic.model.lora_adapter_path"):
        yield (
            "critic.model.lora_adapter_path: an adapter of a policy does not fit a critic. Remove "
            "it."
        )
    if model.get("target_parameters"):
        yield (
            f"{MODEL}.target_parameters: verl's export loses adapters of parameters. Remove it, "
            "and use target_modules."
        )
    path = model.get("lora_adapter_path")
    if path and config.trainer.resource_pools.ref:
        yield (
            f"{PATH}={path} with trainer.resource_pools.ref: the separate reference would be the "
            "model without this adapter, from which the policy starts. Remove one of them."
        )


def check_adapter(config: DictConfig, hf_config: PretrainedConfig) -> None:
    """Check that the adapter is of a kind that verl sends and exports. Raises ConfigError.

    With lora_adapter_path, this also checks its weights and its base model. hf_config: the model's
    configuration.
    """
    model = config.actor_rollout_ref.model
    path = model.get("lora_adapter_path")
    if not (path or model.lora_rank):
        return
    lora_config = read_adapter_config(config) if path else make_lora_config(model)
    shapes = find_adapter_shapes(hf_config, lora_config, model.trust_remote_code)
    if path:
        check_weights(str(model.lora_adapter_path), shapes)
        check_base(str(model.lora_adapter_path), lora_config, str(model.path), next(iter(shapes)))


def take_adapter(config: DictConfig) -> Iterator[ConfigError]:
    """Set rank, alpha and target modules to those of lora_adapter_path -> the problems with it.

    This reads only adapter_config.json, so that all later checks know the rank.
    """
    if not config.actor_rollout_ref.model.get("lora_adapter_path"):
        return
    try:
        read_adapter_config(config)
    except ConfigError as error:
        yield error


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


def read_adapter_config(config: DictConfig) -> LoraConfig:
    """Read the configuration of lora_adapter_path, and complete the recipe with it.

    Makes the path absolute. Sets rank and alpha if the recipe sets no rank, and the target modules.
    Raises ConfigError if the recipe contradicts it, or if verl does not support it.
    """
    model = config.actor_rollout_ref.model
    folder = Path(model.lora_adapter_path).expanduser()
    if folder.is_dir():
        model.lora_adapter_path = str(folder.resolve())  # workers run in other folders
    adapter = load_adapter_config(model.lora_adapter_path)
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
        raise ConfigError(f"{PATH}={model.lora_adapter_path}: {' '.join(problems)}")
    model.target_modules = sorted_if_set(adapter.target_modules)
    return adapter


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
    usual["init_lora_weights"] = adapter.init_lora_weights
    if adapter.init_lora_weights not in PLAIN_STARTS:  # it changed the base model
        usual["init_lora_weights"] = True
    for name, value in adapter.to_dict().items():
        if name not in READ_FIELDS and (value or None) != (usual.get(name) or None):
            yield f"it has {name}={value}, which verl does not export. Give a plain adapter."


def sorted_if_set(modules: object) -> Any:  # names as a sorted list; any other value as it is
    """Return a collection of names as a sorted list, and any other value as it is."""
    return sorted(modules) if isinstance(modules, (list, set)) else modules


def describe(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0]


def find_adapter_shapes(
    hf_config: PretrainedConfig, lora_config: LoraConfig, trust_remote_code: bool
) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the adapter's weights, from a model without memory.

    Raises ConfigError if the modules do not exist, or are outside of the transformer's layers.
    """
    import torch
    from peft import get_peft_model, get_peft_model_state_dict
    from verl.utils.model import get_hf_auto_model_class

    auto_class = get_hf_auto_model_class(hf_config=hf_config)
    with torch.device("meta"):
        model = auto_class.from_config(hf_config, trust_remote_code=trust_remote_code)
        try:
            adapted = get_peft_model(model, copy.copy(lora_config))  # it sets its base model
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
    state = get_peft_model_state_dict(adapted)
    return {name: tuple(weight.shape) for name, weight in state.items()}


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


def check_weights(path: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that an adapter's weights are those that the model needs. Raises ConfigError."""
    from peft import load_peft_weights

    try:
        weights = load_peft_weights(path, device="cpu")
    except Exception as error:  # of safetensors, torch, or the hub
        raise ConfigError(
            f"{PATH}={path} has no readable weights: {describe(error)} Correct it."
        ) from None
    own_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    differing = sorted(name for name, _ in set(own_shapes.items()) ^ set(shapes.items()))
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{PATH}={path} is of another model: {name} has the shape {own_shapes.get(name)}, and "
            f"{MODEL}.path needs {shapes.get(name)}. Give an adapter of this model."
        )


# --- the base model of an adapter ----------------------------------------------------------------


def check_base(path: str, adapter: LoraConfig, model: str, name: str) -> None:
    """Check that an adapter was trained on the weights of the folder `model`. Raises ConfigError.

    If its base model is a folder here, one weight of them is compared. In an export the adapter is
    merged already, so that it would be added twice. name: of one of the adapter's weights.
    """
    base = str(adapter.base_model_name_or_path or "")
    is_other = Path(path) == Path(model) / ADAPTER_FOLDER
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    expected = read_weight(Path(base), f"{module}.weight")
    weight = read_weight(Path(model), f"{module}.weight")
    if expected is not None and weight is not None:
        dtype = min(expected.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
        is_other = not expected.to(dtype).equal(weight.to(dtype))
    if is_other:
        raise ConfigError(
            f"{PATH}={path} was trained on {base}, whose weights are not those of "
            f"{MODEL}.path={model}. Set {MODEL}.path={base}, or remove lora_adapter_path."
        )


def read_weight(folder: Path, name: str) -> torch.Tensor | None:
    """Read one weight of a model's folder, None if no safetensors file there has it."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118  (it is no dict)
                return cast("torch.Tensor", weights.get_tensor(name))
    return None


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
    """Warn if the name of the adapter's base model is another one, and cannot be compared."""
    path = model.get("lora_adapter_path")
    if not path:
        return
    from peft import PeftConfig

    base = str(PeftConfig.from_pretrained(path).base_model_name_or_path or "")
    if base and not Path(base).is_dir() and Path(base).name != Path(model.path).name:
        yield (
            f"{PATH}={path} was trained on {base}, and {MODEL}.path={model.path}. If these are not "
            "the same weights, the adapter does not fit. Then set the first one."
        )
