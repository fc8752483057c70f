"""Checks of LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
# Fields of peft's LoraConfig that verl's merge, weight sync or export does not read, and the values
# that turn them off.
UNREAD_FIELDS = (
    "alpha_pattern",
    "arrow_config",
    "bias",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "alora_invocation_tokens",
)
OFF: tuple[object, ...] = (None, False, "none", {}, [])
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

    With lora_adapter_path, this also checks its files, makes the path absolute, and sets
    target_modules to those of the adapter, which verl uses. hf_config: the model's configuration.
    """
    model = config.actor_rollout_ref.model
    path = model.get("lora_adapter_path")
    if not (path or model.lora_rank):
        return
    lora_config = read_adapter_config(config) if path else make_lora_config(model)
    shapes = find_adapter_shapes(hf_config, lora_config, model.trust_remote_code)
    if path:
        check_weights(str(model.lora_adapter_path), shapes)


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
    """Read the configuration of lora_adapter_path, and compare it with the recipe.

    Raises ConfigError if the recipe contradicts it.
    """
    from peft import PeftConfig

    model = config.actor_rollout_ref.model
    folder = Path(model.lora_adapter_path).expanduser()
    if folder.is_dir():
        model.lora_adapter_path = str(folder.resolve())  # workers run in other folders
    path = model.lora_adapter_path
    try:
        adapter = PeftConfig.from_pretrained(path)
    except Exception as error:  # of peft, or of the hub
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{PATH}={path} has no adapter of peft: {reason} Correct it.") from None
    if adapter.peft_type != "LORA":
        raise ConfigError(f"{PATH}={path} is {adapter.peft_type}, not LoRA. Give a LoRA adapter.")
    problems = [*find_unread_fields(adapter), *find_contradictions(model, adapter)]
    if problems:
        raise ConfigError(f"{PATH}={path}: {' '.join(problems)} Correct it.")
    model.target_modules = sorted_if_set(adapter.target_modules)
    return adapter


def find_unread_fields(adapter: LoraConfig) -> Iterator[str]:
    """Sentences about features of an adapter that would be lost."""
    for name in UNREAD_FIELDS:
        value = getattr(adapter, name, None)
        if value not in OFF:
            yield f"it has {name}={value}, which verl does not export. Give a plain adapter."
    if adapter.init_lora_weights not in PLAIN_STARTS:
        yield (
            f"it has init_lora_weights={adapter.init_lora_weights}, which changed its base model. "
            "Convert it to a plain adapter."
        )


def find_contradictions(model: DictConfig, adapter: LoraConfig) -> Iterator[str]:
    """Sentences about keys of the recipe that differ from the adapter."""
    for key, value in (("lora_rank", adapter.r), ("lora_alpha", adapter.lora_alpha)):
        if model[key] != value:
            yield f"it has {value}, and {MODEL}.{key}={model[key]}. Set {key}={value}."
    modules = to_plain(model.target_modules)
    own = adapter.target_modules
    if modules not in (ALL_LINEAR, own) and sorted_if_set(modules) != sorted_if_set(own):
        yield (
            f"its target_modules are {sorted_if_set(own)}, and {MODEL}.target_modules={modules}. "
            f"Set target_modules={ALL_LINEAR}, which takes those of the adapter."
        )


def sorted_if_set(modules: Collection[str] | None) -> Collection[str] | None:
    """Return names as a sorted list; a pattern as it is."""
    return modules if modules is None or isinstance(modules, str) else sorted(modules)


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
            adapted = get_peft_model(model, lora_config)
        except ValueError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"{MODEL}.target_modules={sorted_if_set(lora_config.target_modules)}: {reason} "
                "Change it."
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
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{PATH}={path} has no readable weights: {reason} Correct it.") from None
    own_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    differing = sorted(name for name, _ in set(own_shapes.items()) ^ set(shapes.items()))
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{PATH}={path} is of another model: {name} has the shape {own_shapes.get(name)}, and "
            f"{MODEL}.path needs {shapes.get(name)}. Give an adapter of this model."
        )
