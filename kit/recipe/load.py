"""Load recipes: YAML files that override verl's configuration.

A key that nothing reads is an error (keys.py): verl does not have it, or this trainer does not use
it.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit import features
from kit.errors import ConfigError
from kit.recipe import resources  # noqa: F401  (it registers the resolvers of base.yaml)
from kit.recipe.keys import (
    EPISODE_COMMANDS,
    KEYS,
    ROOT,
    find_unknown_keys,
    flatten,
    select_nested,
    to_plain,
    unknown_key_hint,
)
from kit.recipe.recipe_text import (
    describe_error,
    parse_argument,
    parse_yaml,
    to_config,
)
from kit.recipe.values import (
    expand_paths,
    fill_empty,
    find_invalid_keys,
    remove_misplaced,
)

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
COMMANDS = (*EPISODE_COMMANDS, *features.COMMANDS)  # without `show`, which reads no recipe
FSDP = "dp"  # verl's name of the engine that this kit runs by default
MODEL_ENGINES = (FSDP, "megatron")  # verl composes a different configuration for each


class Overlay(NamedTuple):
    """A recipe file, or one key=value of the command line. content: nested, unresolved."""

    source: str
    content: Json
    is_file: bool


def load_config(files: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Merge verl's ppo_trainer.yaml, configs/base.yaml, `files` and `overrides`.

    Returns (config, the defaults that it started from). files: paths, or names of the kit's recipes
    (`dapo`). Raises a ConfigError that lists every unknown key and invalid value.

    Sets the environment variables of ray_kwargs.ray_init.runtime_env.env_vars in this process.
    Call it before verl is imported.
    """
    overlays, messages = read_overlays(files, overrides)
    defaults, base = base_configs(pick_engine(overlays))
    config = apply_overlays(base, overlays, defaults, messages)
    apply_environment(config)
    return config, defaults


def override(config: DictConfig, defaults: DictConfig, arguments: Sequence[str]) -> DictConfig:
    """Copy a configuration, with values of key=value arguments. Raises ConfigError."""
    overlays, messages = read_overlays([], arguments)
    base = copy.deepcopy(config)
    OmegaConf.set_readonly(base, False)
    return apply_overlays(base, overlays, defaults, messages)


def apply_overlays(
    base: DictConfig, overlays: Sequence[Overlay], defaults: DictConfig, messages: list[str]
) -> DictConfig:
    """Merge the overlays into a copy of `base`. Raises a ConfigError of `messages` and its own."""
    base_values: Any = OmegaConf.to_container(base)
    for overlay in overlays:
        for problem in remove_misplaced(overlay.content, base_values):
            messages.append(f"{overlay.source}: {problem}" if overlay.is_file else problem)
    config = merge(base, overlays)
    fill_empty(config, base_values)
    unknown = list(unknown_keys(overlays, defaults))
    messages += [message for _, message in unknown]
    messages += find_invalid_keys(config, base, [key for key, _ in unknown])
    raise_all([ConfigError(message) for message in messages])
    return config


def raise_all(problems: Sequence[Exception]) -> None:
    """Raise one problem as it is, or several as one ConfigError that lists them."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise ConfigError(f"{len(problems)} problems with this recipe:{''.join(lines)}")


def read_overlays(
    files: Sequence[str], overrides: Sequence[str]
) -> tuple[list[Overlay], list[str]]:
    """(recipe files and key=value in the order in which they apply, messages about the others)."""
    defaults = resolve_defaults()
    overlays = [Overlay(file, expand_paths(parse_file(file)), True) for file in files]
    messages = []
    for text in overrides:
        if "=" not in text:
            messages.append(
                f"{text!r} is not key=value and no command ({', '.join(COMMANDS)}). Remove it."
            )
            continue
        try:
            content = expand_paths(parse_argument(text, defaults))
            to_config(content, text)
        except ConfigError as error:
            messages.append(str(error))
        else:
            overlays.append(Overlay(text, content, False))
    return overlays, messages


def list_written(files: Sequence[str], overrides: Sequence[str]) -> Json:
    """{dotted key: value} of configs/base.yaml, recipe files and key=value, unresolved."""
    written = flatten(read_yaml(str(ROOT / "configs" / "base.yaml")))
    for overlay in read_overlays(files, overrides)[0]:
        written |= flatten(overlay.content)
    return written


@functools.cache
def resolve_defaults() -> Json:
    """{dotted key: its resolved default}, of the default engine."""
    base = base_configs()[1]
    return {key: to_plain(OmegaConf.select(base, key)) for key in flatten(base)}


def pick_engine(overlays: Sequence[Overlay]) -> str:
    """The last model_engine that is set, or FSDP. Raises ConfigError if it cannot run."""
    engines = [overlay.content.get("model_engine") for overlay in overlays]
    engine = str(next((name for name in reversed(engines) if name), FSDP))
    if engine not in MODEL_ENGINES:
        raise ConfigError(
            f"model_engine={engine} is not one of {', '.join(MODEL_ENGINES)}. Change it."
        )
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


def merge(base: DictConfig, overlays: Sequence[Overlay]) -> DictConfig:
    """Merge the overlays into a copy of `base`; later ones override earlier ones.

    A server that is null is removed.
    """
    has_steps_argument = any(
        not overlay.is_file
        and overlay.source.lstrip("+").startswith("trainer.total_training_steps=")
        for overlay in overlays
    )
    config = copy.deepcopy(base)
    for overlay in overlays:
        content = to_config(overlay.content, overlay.source)
        try:
            config.merge_with(values_to_reset(overlay, has_steps_argument), content)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{overlay.source}: {describe_error(error)}") from None
    gym: Any = OmegaConf.to_container(config.gym)
    for name, server in (gym["servers"] or {}).items():
        if server is None:
            del config.gym.servers[name]
    return config


def values_to_reset(overlay: Overlay, has_steps_argument: bool) -> Json:
    """Values to set to null before an overlay is merged, because it replaces them as a whole.

    A function with settings must not inherit the settings of the function that it replaces. A
    recipe with total_epochs must not inherit the number of steps of another recipe, which would
    take precedence. A number of steps on the command line stays.
    """
    reset: Json = {}
    trainer = overlay.content.get("trainer") or {}
    counts_epochs = "total_epochs" in trainer and "total_training_steps" not in trainer
    if counts_epochs and (overlay.is_file or not has_steps_argument):
        reset["trainer"] = {"total_training_steps": None}
    for name in ("reward", "sampler"):
        spec = select_nested(overlay.content, f"env.{name}")
        if isinstance(spec, Mapping) and "function" in spec:
            reset.setdefault("env", {})[name] = None
    return reset


def unknown_keys(overlays: Sequence[Overlay], defaults: DictConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of each key of the overlays that neither verl nor the kit has."""
    default_values: Any = OmegaConf.to_container(defaults)
    for source, content, _ in overlays:
        for key in find_unknown_keys(content, default_values):
            hint = unknown_key_hint(key, content, list(flatten(default_values)))
            yield key, f"{source}: unknown key {key}. {hint}"


def read_yaml(file: str) -> DictConfig:
    """Read a recipe: a path, or the name of one in configs/. Raises ConfigError."""
    return to_config(parse_file(file), f"--config {file}")


def parse_file(file: str) -> Json:
    """Parse a recipe: a path, or the name of one in configs/. Raises ConfigError."""
    content = parse_yaml(read_recipe(file), f"--config {file}")
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: a recipe is a YAML mapping. Write it as key: value.")
    return content


def read_recipe(file: str) -> str:
    """Read the text of a recipe: a path, or the name of one in configs/. Raises ConfigError."""
    recipes = {path.stem: path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
    path = Path(file).expanduser()
    try:
        if not path.exists():
            path = recipes.get(file, path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = difflib.get_close_matches(path.stem, recipes, n=1) or sorted(recipes)
        raise ConfigError(
            f"--config {file}: no such file. Use a path, or a name: {', '.join(names)}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}. Correct it.") from None


def apply_environment(config: DictConfig) -> None:
    """Set the recipe's environment variables and PYTHONPATH, here and for every worker."""
    ray_init = config.ray_kwargs.ray_init
    variables: Json = {}
    if not ray_init.get("address"):
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one node: listen on loopback only
    variables |= OmegaConf.select(ray_init, "runtime_env.env_vars") or {}
    paths = [str(ROOT)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    texts = {}
    for name, value in variables.items():
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    os.environ.update(texts)
    OmegaConf.update(ray_init, "runtime_env.env_vars", texts, force_add=True)
