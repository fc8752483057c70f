"""Load recipes: YAML files that override verl's configuration.

Only this module, `Recipe.for_verl` and the resolvers of resources.py use OmegaConf: here it
composes verl's defaults and resolves ${...}.

Protects: a key that nothing reads, or an invalid value, ends the run before a worker starts.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.errors import ConfigError
from kit.recipe import resources  # noqa: F401  (it registers the resolvers of base.yaml)
from kit.recipe.keys import (
    FSDP,
    KEYS,
    MODEL_ENGINES,
    ROOT,
    describe_unknown,
    describe_unused,
    diff,
    find_unknown_keys,
    flatten,
    is_below,
    is_used,
    merge_nested,
    select_nested,
    set_nested,
)
from kit.recipe.numbers import AT_LEAST_ZERO, COUNT, COUNT_OR_ZERO, show
from kit.recipe.recipe_text import parse_argument, parse_yaml
from kit.recipe.schema import find_problems, list_types

VERL = Path(importlib.util.find_spec("verl").origin).parent  # type: ignore[union-attr, arg-type]
VERL_CONFIG = VERL / "trainer" / "config"
ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"


class Overlay(NamedTuple):
    """A recipe file, or one key=value of the command line. content: nested, unresolved."""

    source: str
    content: Json
    is_file: bool


@dataclass(frozen=True)
class Source:
    """A recipe as it was written, merged over verl's configuration and checked key by key.

    values: nested, with ${...} as written. resolved: without. defaults: those of verl and of the
    kit's keys, as written. written: {dotted key: value} of base.yaml, the files and the arguments.
    files, arguments: as they were given to read_source, and to `override`.
    """

    values: Json
    resolved: Json
    defaults: Json
    written: Json
    files: tuple[str, ...]
    arguments: tuple[str, ...]

    def override(self, arguments: Sequence[str]) -> Source:
        """Return this recipe with the values of key=value arguments. Raises ConfigError."""
        overlays, messages = read_overlays([], arguments)
        usual = Merged(self.values, self.resolved)
        merged = apply_overlays(usual, overlays, self.defaults, messages)
        written = self.written | list_written(overlays)
        return Source(*merged, self.defaults, written, self.files, (*self.arguments, *arguments))

    def add_files(self, *files: str) -> Source:
        """Return this recipe with further files, before its arguments. Raises ConfigError."""
        return read_source([*self.files, *files], self.arguments)


def read_source(files: Sequence[str], overrides: Sequence[str]) -> Source:
    """Merge verl's ppo_trainer.yaml, configs/base.yaml, `files` and `overrides`.

    files: paths, or names of the kit's recipes (`dapo`). Raises a ConfigError that lists every
    unknown key and invalid value.

    Sets the environment variables of ray_kwargs.ray_init.runtime_env.env_vars in this process.
    Call it before verl is imported.
    """
    overlays, messages = read_overlays(files, overrides)
    defaults, base = read_defaults(pick_engine(overlays))
    merged = apply_overlays(base, overlays, defaults, messages)
    variables = list_environment(merged.resolved)
    os.environ.update(variables)
    for values in merged:
        set_nested(values, ENVIRONMENT, variables)
    base_file = Overlay("configs/base.yaml", read_yaml(str(ROOT / "configs" / "base.yaml")), True)
    written = list_written([base_file, *overlays])
    return Source(*merged, defaults, written, tuple(files), tuple(overrides))


def resolve(values: Json) -> Json:
    """Return nested values with each ${...} replaced. Raises OmegaConfBaseException."""
    return cast(Json, OmegaConf.to_container(OmegaConf.create(values), resolve=True))


def list_written(overlays: Sequence[Overlay]) -> Json:
    """Return {dotted key: value} of overlays, unresolved."""
    written: Json = {}
    for overlay in overlays:
        written |= flatten(overlay.content)
    return written


def raise_all(problems: Sequence[Exception | str]) -> None:
    """Raise one problem as it is, or several as one ConfigError that lists them."""
    if len(problems) == 1:
        problem = problems[0]
        raise problem if isinstance(problem, Exception) else ConfigError(problem)
    if problems:
        lines = [f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise ConfigError(f"{len(problems)} problems with this recipe:{''.join(lines)}")


# --- defaults ------------------------------------------------------------------------------------


class Merged(NamedTuple):
    """The values of merged recipes, nested."""

    values: Json  # with ${...}
    resolved: Json


class Defaults(NamedTuple):
    """The values before any recipe."""

    defaults: Json  # verl's, with the keys that only the kit has; unresolved
    base: Merged  # verl's, with all of configs/base.yaml on top


@functools.cache
def read_defaults(engine: str = FSDP) -> Defaults:
    """Return verl's defaults, and the base that recipes override. engine: verl's model_engine.

    The results are cached: do not change them.
    """
    with initialize_config_dir(str(VERL_CONFIG), version_base=None):
        composed = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    verl: Json = cast(Json, OmegaConf.to_container(composed))
    verl["model_engine"] = engine
    base = read_yaml(str(ROOT / "configs" / "base.yaml"))
    if engine != FSDP:  # only FSDP has these keys
        del base["actor_rollout_ref"]["actor"]["strategy"]
        del base["critic"]["strategy"], base["critic"]["fsdp"]
    kit: Json = {"gym": base["gym"], "env": base["env"]}
    for key in KEYS.kit:
        set_nested(kit, key, select_nested(base, key))
    merged = merge_nested(verl, base)
    return Defaults(merge_nested(verl, kit), Merged(merged, resolve(merged)))


def pick_engine(overlays: Sequence[Overlay]) -> str:
    """Return the last model_engine that is set, or FSDP. Raises ConfigError if it cannot run."""
    engines = [overlay.content.get("model_engine") for overlay in overlays]
    engine = str(next((name for name in reversed(engines) if name), FSDP))
    if engine not in MODEL_ENGINES:
        raise ConfigError(
            f"model_engine={engine} is not one of {', '.join(MODEL_ENGINES)}. Change it."
        )
    return engine


# --- files and arguments -------------------------------------------------------------------------


def read_overlays(
    files: Sequence[str], overrides: Sequence[str]
) -> tuple[list[Overlay], list[str]]:
    """Return recipe files and key=value as they apply in turn, and messages about bad arguments."""
    overlays = [Overlay(file, expand_paths(read_yaml(file)), True) for file in files]
    base = flatten(read_defaults().base.resolved)
    messages = []
    for text in overrides:
        if "=" not in text:
            messages.append(
                f"{text!r} is neither key=value nor a command. Remove it, or choose a command of "
                "`python algorithm.py --help`."
            )
            continue
        try:
            overlays.append(Overlay(text, expand_paths(parse_argument(text, base)), False))
        except ConfigError as error:
            messages.append(str(error))
    return overlays, messages


def read_yaml(file: str) -> Json:
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


def expand_paths(value: Any) -> Any:  # as the value
    """Return a recipe, or the value of a key, with ~/ replaced at the start of its texts."""
    if isinstance(value, dict):
        return {name: expand_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_path else value


# --- merge ---------------------------------------------------------------------------------------


def apply_overlays(
    base: Merged, overlays: Sequence[Overlay], defaults: Json, messages: Sequence[str]
) -> Merged:
    """Merge the overlays over `base`. Raises a ConfigError of `messages` and its own."""
    has_steps_argument = any(
        not overlay.is_file
        and overlay.source.lstrip("+").startswith("trainer.total_training_steps=")
        for overlay in overlays
    )
    problems = list(messages)
    unknown = []
    values = base.values
    for overlay in overlays:
        source = f"{overlay.source}: " if overlay.is_file else ""
        for key in find_unknown_keys(overlay.content, defaults):
            hint = describe_unknown(key, overlay.content, list(flatten(defaults)))
            problems.append(f"{overlay.source}: unknown key {key}. {hint}")
            unknown.append(key)
        content = dict(overlay.content)
        problems += [f"{source}{text}" for text in remove_misplaced(content, base.values)]
        values = merge_nested(values, list_resets(overlay, has_steps_argument))
        values = merge_nested(values, content)
    values = remove_nulls(values, base.values)
    try:
        merged = Merged(values, resolve(values))
    except OmegaConfBaseException as error:
        raise_all([*problems, describe_error(error)])
        raise
    raise_all([*problems, *find_invalid_values(merged, base, unknown)])
    return merged


def list_resets(overlay: Overlay, has_steps_argument: bool) -> Json:
    """Return values to set to null before an overlay is merged, because it replaces them.

    A function with settings, or an agent, must not inherit the settings of the one that it
    replaces. A recipe with total_epochs must not inherit the number of steps of another recipe,
    which would take precedence. A number of steps on the command line stays.
    """
    resets: Json = {}
    trainer = overlay.content.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    counts_epochs = "total_epochs" in trainer and "total_training_steps" not in trainer
    if counts_epochs and (overlay.is_file or not has_steps_argument):
        resets["trainer"] = {"total_training_steps": None}
    for name in ("reward", "sampler", "agent"):
        spec = select_nested(overlay.content, f"env.{name}")
        if isinstance(spec, Mapping) and spec.keys() & {"function", "command", "url"}:
            resets.setdefault("env", {})[name] = None
    return resets


def remove_misplaced(content: Json, base: Json, prefix: str = "") -> Iterator[str]:
    """Remove values that are given for whole sections. Yields a message for each.

    base: the values that `content` overrides.
    """
    for name, value in list(content.items()):
        key = f"{prefix}{name}"
        default = base.get(name)
        if not default or not isinstance(default, dict):
            continue
        used = [below for below in default if is_used(f"{key}.{below}")]
        if isinstance(value, dict):
            content[name] = dict(value)
            yield from remove_misplaced(content[name], default, f"{key}.")
        elif used:
            del content[name]
            yield (
                f"{key}={show(value)}: {key} is a section of keys. Set its keys, such as "
                f"{key}.{used[-1]}."
            )


def remove_nulls(values: Json, base: Json) -> Json:
    """Return values without servers that are null, and with {} or [] for null if it is default."""
    cleaned = merge_nested(values, {})
    for key, default in flatten(base).items():
        if default in ({}, []) and select_nested(cleaned, key) is None:
            set_nested(cleaned, key, default)
    servers = select_nested(cleaned, "gym.servers")
    if isinstance(servers, dict):
        kept = {name: server for name, server in servers.items() if server is not None}
        set_nested(cleaned, "gym.servers", kept)
    return cleaned


# --- values --------------------------------------------------------------------------------------


def find_invalid_values(merged: Merged, base: Merged, unknown: Sequence[str]) -> list[str]:
    """Return a message for each changed key that nothing reads, or with an invalid value.

    unknown: keys that have a message.
    """
    messages = []
    known = list(unknown)
    changed = diff(merged.values, base.values)
    for key, (written, _) in changed.items():
        if is_below(key, *unknown):
            continue
        value = select_nested(merged.resolved, key)
        value = written if value is None else value  # a name with a dot cannot be selected
        problem = describe_unquoted(key, written)
        problem = problem or check_value(key, value, select_nested(base.resolved, key))
        if problem:
            messages.append(problem)
            known.append(key)
    problems = {}
    for key, text in find_problems(merged.resolved):
        if not is_below(key, *known):
            problems[key] = text
    # a key that refers to an invalid one has the same value
    own = [
        key for key in problems if any(is_below(one, key) or is_below(key, one) for one in changed)
    ]
    return messages + [problems[key] for key in own or problems]


def check_value(key: str, value: object, default: object) -> str:
    """Describe a changed key that nothing reads, or an invalid value of a key without a type.

    Returns an empty text if the value is valid.
    """
    if value == "???" and default is not None:
        return f"{key}=??? is OmegaConf's missing value. Set it."
    if not is_used(key):
        unused = f"{key} is a verl option that this trainer does not use. {describe_unused(key)}"
        return "" if value == default else unused
    if list_types(key) or is_below(key, *KEYS.free_form):  # schema.py checks the former
        return ""
    if isinstance(default, bool):
        is_switch = isinstance(value, (bool, int)) and value in (0, 1)
        return "" if is_switch else f"{key}={show(value)} must be true or false. Change it."
    if isinstance(default, (int, float)):
        whole = COUNT if default else COUNT_OR_ZERO
        rule = AT_LEAST_ZERO if isinstance(default, float) else whole
        is_valid = rule.is_valid(value) or value == default
        return "" if is_valid else f"{key}={show(value)} must be {rule.describe()}. Change it."
    if isinstance(default, str) and isinstance(value, (bool, list, dict)):
        return f"{key}={show(value)} must be a text. Change it."
    return ""


def describe_unquoted(key: str, written: object) -> str:
    """Describe a number or a switch in the place of a text, which YAML may have changed: 007."""
    is_text = list_types(key) - {type(None)} == {str}
    if is_text and isinstance(written, (bool, int, float)):
        return f"{key}={show(written)} is a number or a switch in YAML, not a text. Quote it."
    return ""


def describe_error(error: OmegaConfBaseException) -> str:
    """Describe an error of OmegaConf in one line, with a fix."""
    reason = str(error).partition("\n")[0].strip().rstrip(".")
    fix = "Correct it"
    if "interpolation" in reason.lower() or "${" in reason:
        fix = "Correct ${...}, or write \\${ for these characters"
    key = f"{error.full_key}: " if error.full_key else ""
    return f"{key}{reason}. {fix}."


# --- the environment -----------------------------------------------------------------------------


def list_environment(values: Json) -> dict[str, str]:
    """Return the environment variables of every process of the run, with PYTHONPATH."""
    variables: Json = {}
    if not select_nested(values, "ray_kwargs.ray_init.address"):
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one node: listen on loopback only
    written = select_nested(values, ENVIRONMENT)
    variables |= written if isinstance(written, dict) else {}
    paths = [str(ROOT)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    texts = {}
    for name, value in variables.items():
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts
