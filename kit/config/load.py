"""Load recipes: YAML files that override verl's configuration.

A key that nothing reads is an error (keys.py): verl does not have it, or this trainer does not use
it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kit.config import resources  # noqa: F401  (it registers the resolvers of base.yaml)
from kit.config.keys import (
    KEYS,
    find_unknown_keys,
    flatten,
    reset_invalid_keys,
    unknown_key_hint,
)
from kit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
VERL = Path(importlib.util.find_spec("verl").origin).parent  # type: ignore[union-attr, arg-type]
VERL_CONFIG = VERL / "trainer" / "config"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MICRO_BATCH_TOKENS = [
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
]
FSDP = "dp"  # verl's name of the engine that this kit runs by default
MODEL_ENGINES = (FSDP, "megatron", "veomni")  # verl composes a different configuration for each
REFUSED_ENGINES = {
    "torchtitan": "verl's torchtitan engine has no critic, and saves no folder of the actor.",
    "automodel": "verl 0.9.1 has this engine, but no actor configuration for it.",
}
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of /proc/cpuinfo
DTYPE_PLACEHOLDER = "${matmul_dtype:}"


class Overlay(NamedTuple):
    """A recipe file, or one key=value of the command line."""

    source: str
    content: DictConfig
    is_file: bool


def load_config(
    files: Sequence[str], overrides: Sequence[str], problems: list[Exception] | None = None
) -> tuple[DictConfig, DictConfig]:
    """Merge verl's ppo_trainer.yaml, configs/base.yaml, `files` and `overrides`.

    Returns (config, the defaults that it started from). files: paths, or names of the kit's recipes
    (`dapo`). problems: a list to add the errors to, so that the caller can raise them with others.
    Without it, the errors are raised here.

    Sets the environment variables of ray_kwargs.ray_init.runtime_env.env_vars in this process.
    Call it before verl is imported.
    """
    overlays = read_overlays(files, overrides)
    engine = pick_engine(overlays)
    defaults, base = base_configs(engine)
    config = merge(base, overlays)
    apply_environment(config)
    messages = [
        f"{text!r} is not key=value, and not one of train, rollout, evaluate, sft. Remove it."
        for text in overrides
        if "=" not in text
    ]
    unknown = list(unknown_keys(overlays, defaults, engine))
    messages += [message for _, message in unknown]
    messages += reset_invalid_keys(config, base, [key for key, _ in unknown])
    errors = [ConfigError(message) for message in messages]
    if problems is None:
        raise_all(errors)
    else:
        problems += errors
    return config, defaults


def raise_all(problems: Sequence[Exception]) -> None:
    """Raise one problem as it is, or several as one ConfigError that lists them."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise ConfigError(f"{len(problems)} problems with this recipe:{''.join(lines)}")


def read_overlays(files: Sequence[str], overrides: Sequence[str]) -> list[Overlay]:
    """The recipe files and the key=value arguments, in the order in which they apply."""
    overlays = [Overlay(file, read_yaml(file), True) for file in files]
    for text in overrides:
        if "=" in text:
            content = OmegaConf.from_dotlist([text.lstrip("+")])
            overlays.append(Overlay(text, content, False))
    return overlays


def pick_engine(overlays: Sequence[Overlay]) -> str:
    """The last model_engine that is set, or FSDP. Raises ConfigError if it cannot run."""
    engines = [overlay.content.get("model_engine") for overlay in overlays]
    engine = next((name for name in reversed(engines) if name), FSDP)
    if engine not in MODEL_ENGINES:
        reason = REFUSED_ENGINES.get(engine, "No other engine is supported.")
        raise ConfigError(
            f"model_engine={engine} is not one of {', '.join(MODEL_ENGINES)}. {reason} Change it."
        )
    devices = [OmegaConf.select(overlay.content, "trainer.device") for overlay in overlays]
    if engine != FSDP and "cpu" in devices:
        raise ConfigError(f"model_engine={engine} needs GPUs. Remove it on a CPU.")
    return engine


@functools.cache
def base_configs(engine: str = FSDP) -> tuple[DictConfig, DictConfig]:
    """Return two configurations: the defaults, and the base that recipes override.

    The defaults are verl's, with the keys that only the kit has. The base is verl's defaults with
    all of configs/base.yaml on top. engine: verl's model_engine. The results are cached: do not
    change them.
    """
    with initialize_config_dir(str(VERL_CONFIG), version_base=None):
        verl = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    OmegaConf.set_struct(verl, False)
    verl.model_engine = engine
    base = read_yaml(str(ROOT / "configs" / "base.yaml"))
    if engine != FSDP:  # only FSDP has these keys
        del base.actor_rollout_ref.actor.strategy
        del base.critic.strategy
        del base.critic.fsdp
    kit = OmegaConf.create({"gym": base.gym, "env": base.env})
    for key in KEYS.kit:
        OmegaConf.update(kit, key, OmegaConf.select(base, key), force_add=True)
    defaults = cast(DictConfig, OmegaConf.merge(verl, kit))
    return defaults, cast(DictConfig, OmegaConf.merge(verl, base))


@functools.cache
def default_keys(engine: str) -> list[str]:
    """The keys of the defaults of an engine."""
    return list(flatten(base_configs(engine)[0]))


def merge(base: DictConfig, overlays: Sequence[Overlay]) -> DictConfig:
    """Merge the overlays into a copy of `base`; later ones override earlier ones.

    A server that is null is removed.
    """
    has_steps_argument = any(
        not overlay.is_file
        and overlay.source.lstrip("+").startswith("trainer.total_training_steps=")
        for overlay in overlays
    )
    parts: list[Any] = []
    for overlay in overlays:
        parts += [values_to_reset(overlay, has_steps_argument), overlay.content]
    config = cast(DictConfig, OmegaConf.merge(base, *parts))
    config.gym.servers = config.gym.servers or {}
    if OmegaConf.is_dict(config.gym.servers):
        for name in [name for name, spec in config.gym.servers.items() if spec is None]:
            del config.gym.servers[name]
    return config


def values_to_reset(overlay: Overlay, has_steps_argument: bool) -> dict[str, Any]:
    """Values to set to null before an overlay is merged, because it replaces them as a whole.

    A function with settings must not inherit the settings of the function that it replaces. A
    recipe with total_epochs must not inherit the number of steps of another recipe, which would
    take precedence. A number of steps on the command line stays.
    """
    reset: dict[str, Any] = {}
    trainer = overlay.content.get("trainer") or {}
    counts_epochs = "total_epochs" in trainer and "total_training_steps" not in trainer
    if counts_epochs and (overlay.is_file or not has_steps_argument):
        reset["trainer"] = {"total_training_steps": None}
    for name in ("reward", "sampler"):
        spec = OmegaConf.select(overlay.content, f"env.{name}")
        if OmegaConf.is_dict(spec) and "function" in spec:
            reset.setdefault("env", {})[name] = None
    return reset


def unknown_keys(
    overlays: Sequence[Overlay], defaults: DictConfig, engine: str
) -> Iterator[tuple[str, str]]:
    """(key, message) of each key of the overlays that neither verl nor the kit has."""
    default_values: Any = OmegaConf.to_container(defaults)
    for source, content, _ in overlays:
        overlay: Any = OmegaConf.to_container(content)
        for key in find_unknown_keys(overlay, default_values):
            engine_keys = {name: default_keys(name) for name in MODEL_ENGINES}
            hint = unknown_key_hint(key, overlay, engine, engine_keys)
            yield key, f"{source}: unknown key {key}. {hint}"


def read_yaml(file: str) -> DictConfig:
    """Read a recipe: a path, or the name of one in configs/. Raises ConfigError.

    ${matmul_dtype:} in it becomes the type in which this machine's cores multiply fastest: bfloat16
    if /proc/cpuinfo lists instructions for it, else float32.
    """
    recipes = {path.stem: path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
    path = Path(file) if Path(file).is_file() else recipes.get(file, Path(file))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {file} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8."
        ) from None
    except (FileNotFoundError, IsADirectoryError):
        similar = difflib.get_close_matches(path.stem, recipes, n=1)
        hint = "See configs/ for the kit's recipes."
        if similar:
            recipe = recipes[similar[0]].relative_to(ROOT)
            hint = f"Use {recipe}, or just {recipe.stem}."
        raise ConfigError(f"--config {file}: no such file. {hint}") from None
    dtype = matmul_dtype()
    text = text.replace(f'"{DTYPE_PLACEHOLDER}"', dtype).replace(DTYPE_PLACEHOLDER, dtype)
    try:
        content = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {file}: not valid YAML. Correct it: {reason}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"--config {file}: a recipe is a YAML mapping. Write it as key: value.")
    return content


def matmul_dtype() -> str:
    """bfloat16 if this machine's cores have instructions for it, else float32."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"


def apply_environment(config: DictConfig) -> None:
    """Set the recipe's environment variables and PYTHONPATH, here and for every worker."""
    ray_init = config.ray_kwargs.ray_init
    variables: dict[str, Any] = {}
    if not ray_init.get("address"):
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one node: listen on loopback only
    variables |= OmegaConf.select(ray_init, "runtime_env.env_vars") or {}
    paths = [str(ROOT)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    texts = {name: str(value) for name, value in variables.items()}
    os.environ.update(texts)
    OmegaConf.update(ray_init, "runtime_env.env_vars", texts, force_add=True)
