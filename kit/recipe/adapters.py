"""Check LoRA: where the adapter is, and whether an adapter to start from fits the recipe.

A run starts from an adapter of peft if model.lora_adapter_path is its folder. Its rank, alpha and
target modules are those of its adapter_config.json.

verl 0.9.1 merges, sends and exports plain adapters in the transformer's layers. With others, the
rollout engine or the export would have another policy than the trainer.

Protects: the policy that is exported is the one that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from env import Json
from kit.errors import ConfigError
from kit.recipe.keys import MODEL

if TYPE_CHECKING:
    from peft import LoraConfig

    from kit.recipe.schema import PolicyModel
    from kit.recipe.settings import Settings

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


class Adapter(NamedTuple):
    """The adapter of peft that a run starts from."""

    path: str
    rank: int
    alpha: float
    target_modules: str | list[str] | None
    exclude_modules: str | list[str] | None
    base: str | None  # the model on which it was trained
    unread: tuple[str, ...]  # sentences about features that would be lost


def read_adapter(model: PolicyModel) -> Adapter | None:
    """Read the adapter_config.json of lora_adapter_path; None without one. Raises ConfigError."""
    if not model.lora_adapter_path:
        return None
    folder = Path(model.lora_adapter_path).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else model.lora_adapter_path
    adapter = load_adapter_config(path)
    return Adapter(
        path,
        adapter.r,
        adapter.lora_alpha,
        sorted_if_set(adapter.target_modules),
        sorted_if_set(adapter.exclude_modules),
        adapter.base_model_name_or_path,
        tuple(find_unread_fields(adapter)),
    )


def derive_adapter(model: PolicyModel, adapter: Adapter) -> Json:
    """Return {dotted key: value} that a run takes from its adapter.

    Rank and alpha are the adapter's if the recipe sets no rank.
    """
    changes: Json = {PATH: adapter.path, f"{MODEL}.target_modules": adapter.target_modules}
    if not model.lora_rank:
        changes[f"{MODEL}.lora_rank"] = adapter.rank
        if model.lora_alpha == VERL_ALPHA:
            changes[f"{MODEL}.lora_alpha"] = adapter.alpha
    return changes


def check_lora(settings: Settings, adapter: Adapter | None) -> Iterator[str]:
    """Check that the adapter of the policy fits the recipe, and verl supports it."""
    model = settings.model
    if adapter:
        if settings.trainer.resource_pools.ref:
            yield (
                f"{PATH}={adapter.path} with trainer.resource_pools.ref: the separate reference "
                "would be the model without this adapter, from which the policy starts. Remove one "
                "of them."
            )
        if Path(adapter.path).resolve() == Path(model.path, ADAPTER_FOLDER).resolve():
            yield (
                f"{PATH}={adapter.path} is merged into {MODEL}.path={model.path} already. Set "
                f"{MODEL}.path to the base model, or remove lora_adapter_path."
            )
        problems = " ".join(find_contradictions(model, adapter))
        if problems:
            yield f"{PATH}={adapter.path}: {problems}"
    outside = find_outer_targets(model, adapter)
    if outside:
        yield (
            f"{MODEL}.target_modules adapts {', '.join(outside)}, which verl neither merges nor "
            "exports: it does so only for modules in the transformer's layers. Change it, for "
            f"example to {ALL_LINEAR}."
        )


def find_contradictions(model: PolicyModel, adapter: Adapter) -> Iterator[str]:
    """Yield a sentence for each setting of the recipe that differs from the adapter's."""
    yield from adapter.unread
    alpha = model.lora_alpha if model.lora_rank or model.lora_alpha != VERL_ALPHA else None
    for key, value, own in (
        ("lora_rank", adapter.rank, model.lora_rank),
        ("lora_alpha", adapter.alpha, alpha),
        ("target_modules", adapter.target_modules, sorted_if_set(model.target_modules)),
        ("exclude_modules", adapter.exclude_modules, sorted_if_set(model.exclude_modules)),
    ):
        if own and own not in (value, ALL_LINEAR):
            yield f"it has {key}={value}, and the recipe {own}. Remove {MODEL}.{key}."


def find_outer_targets(model: PolicyModel, adapter: Adapter | None) -> list[str]:
    """Return the target modules of an adapter that are not in the transformer's layers."""
    if not (model.lora_rank or adapter):
        return []
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    lora = LoraConfig(
        target_modules=adapter.target_modules if adapter else model.target_modules,
        exclude_modules=model.exclude_modules,
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
    """Yield sentences about features of an adapter that would be lost."""
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


def describe_adapter(model: PolicyModel, adapter: Adapter | None) -> list[str]:
    """Return the line of the summary about the adapter that a run starts from."""
    if not adapter:
        return []
    rank = f"rank {model.lora_rank}, alpha {model.lora_alpha:g}"
    return [f"adapter     {adapter.path}: {rank}, trained on {adapter.base}"]
