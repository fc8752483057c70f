"""Checks of LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

A run starts from an adapter of peft if model.lora_adapter_path is its folder. Its rank, alpha and
target modules are those of its adapter_config.json.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
        exported = Path(path) / ADAPTER_FOLDER
        fix = f"Set {PATH}={exported}." if exported.is_dir() else "Give the folder of an adapter."
        raise ConfigError(f"{PATH}={path} has no adapter of peft: {reason} {fix}") from None
    if adapter.peft_type != "LORA":
        raise ConfigError(f"{PATH}={path} is {adapter.peft_type}, not LoRA. Give a LoRA adapter.")
    taken = (adapter.r, adapter.lora_alpha, adapter.target_modules)
    if "${" in str(taken):  # the recipe would resolve it
        raise ConfigError(f"{PATH}={path} has the values {taken!r:.200}. Give a plain adapter.")
    if not model.lora_rank:
        model.lora_rank = adapter.r
        if model.lora_alpha == VERL_ALPHA:
            model.lora_alpha = adapter.lora_alpha
    problems = [*find_unread_fields(adapter), *find_contradictions(model, adapter)]
    if problems:
        raise ConfigError(f"{PATH}={path}: {' '.join(problems)}")
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
    excluded = to_plain(model.exclude_modules)
    own_excluded = adapter.exclude_modules
    if excluded and sorted_if_set(excluded) != sorted_if_set(own_excluded):
        yield (
            f"it excludes {sorted_if_set(own_excluded)}, and {MODEL}.exclude_modules={excluded}. "
            "Remove exclude_modules."
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
            adapted = get_peft_model(model, copy.copy(lora_config))  # it sets its base model
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
    damaged = sorted(name for name, weight in weights.items() if not weight.isfinite().all())
    if damaged:
        raise ConfigError(
            f"{PATH}={path} has NaN or infinity in {damaged[0]}. Give another adapter."
        )


# --- the base model of an adapter ----------------------------------------------------------------


def check_base(path: str, adapter: LoraConfig, model: str, name: str) -> None:
    """Check that an adapter was trained on the weights of the folder `model`. Raises ConfigError.

    An adapter has the name of its base model, but not its weights. If both are folders here, one
    weight of them is compared. name: of one of the adapter's weights.
    """
    base = str(adapter.base_model_name_or_path or "")
    folder = Path(path)
    if folder.name == ADAPTER_FOLDER and folder.parent == Path(model):
        raise ConfigError(
            f"{PATH}={path} is merged into {MODEL}.path={model} already, and would be added "
            f"twice. Set {MODEL}.path={base or 'its base model'}, or remove lora_adapter_path."
        )
    if not (Path(base).is_dir() and Path(model).is_dir()):
        return
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    expected = read_weight(Path(base), f"{module}.weight")
    weight = read_weight(Path(model), f"{module}.weight")
    if expected is None or weight is None:
        return
    dtype = min(expected.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    if not expected.to(dtype).equal(weight.to(dtype)):
        raise ConfigError(
            f"{PATH}={path} is of another model: it was trained on {base}, whose {module} differs "
            f"from that of {MODEL}.path={model}. Set {MODEL}.path={base}."
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
