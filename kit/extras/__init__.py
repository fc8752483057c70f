"""Optional features, and the table by which the rest of the kit finds them.

Each entry of EXTRAS is a module or folder that you can delete. A key of the recipe or a command
turns a feature on. If you delete a feature, recipes that do not turn it on keep working. A recipe
that does gets one error with its name.

No other part of the kit names a feature. At fixed points the kit calls a hook of every feature that
is on and has this hook (`call`). The hooks:

    check_recipe(config, command)             -> problems, before verl is imported
    check_workers(config, command)            -> problems, when verl is imported
    set_sizes(config, hf_config, command)     fill in values that follow from the model
    check_inputs(config, inputs, command)     check the loaded rows; raises
    summary_lines(config, inputs, command)    -> lines of the summary
    warnings(config, inputs, command)         -> warnings, one line each
    dry_run_lines(config, inputs, command)    -> more lines of a dry run
    sandbox_command(command, folders)         -> the command line of a verifier process in a sandbox
    score_code(verifier, runner, arguments, memory)   -> the CallResult of a response that is code.
                                              Called in a verifier process (`find_module`)
    check_model(config, hf_config, command)   -> problems with the model's sizes
    model_parallel_size, sequence_parallel_size, parallel_sizes(config)    -> GPU counts
    layout_keys()                             -> keys that a resumed run must not change
    checkpoint_files(config, contents, ranks) -> files of a complete checkpoint
    write_report(folder)                      write the report of a run
    begin_imports(config)                     start work that can overlap with the checks
    hooks that start something: see kit/runs/launch.py

config: the recipe. command: train, rollout, evaluate or sft. inputs: kit.rollout.inputs.RunInputs.
hf_config: the Hugging Face configuration of the model. A problem is an Exception or a text.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from kit.errors import ConfigError


def uses_sandbox(config: DictConfig, command: str) -> bool:
    """Whether Python verifiers run in a sandbox."""
    return bool(command != "sft" and config.env.verifier_pool.sandbox)


def uses_other_backend(config: DictConfig, command: str) -> bool:
    """Whether sampling uses SGLang, transformers, fp8 or speculative decoding."""
    rollout = config.actor_rollout_ref.rollout
    engine_kwargs = rollout.engine_kwargs
    return bool(
        rollout.name != "vllm"
        or rollout.quantization
        or engine_kwargs.get("sglang")
        or (engine_kwargs.get("vllm") or {}).get("speculative_config")
    )


def uses_transformers(config: DictConfig, command: str) -> bool:
    """Whether transformers samples."""
    return bool(config.actor_rollout_ref.rollout.name == "hf")


def uses_gloo(config: DictConfig, command: str) -> bool:
    """Whether weights are sent to separate servers by gloo."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    return bool(command == "train" and engine.backend == "gloo")


def uses_monitor(config: DictConfig, command: str) -> bool:
    """Whether the run serves metrics to Prometheus, or reads those of speculative decoding."""
    rollout = config.actor_rollout_ref.rollout
    drafts = (rollout.engine_kwargs.get("vllm") or {}).get("speculative_config")
    return bool(rollout.prometheus.enable or drafts)


def forks_workers(config: DictConfig, command: str) -> bool:
    """Whether workers are forked from a process that has imported their modules."""
    is_other_cluster = config.ray_kwargs.ray_init.get("address")
    return bool(os.environ.get("PRELOAD_MODULES")) and not is_other_cluster


def samples_ahead(config: DictConfig, command: str) -> bool:
    """Whether the next batch is sampled while this one is trained on."""
    return command == "train" and config.trainer.one_step_off == 1


def uses_rollout_workers(config: DictConfig, command: str) -> bool:
    """Whether other processes run the episodes."""
    return bool(command != "sft" and config.actor_rollout_ref.rollout.agent.num_workers)


def may_use_judges(config: DictConfig, command: str) -> bool:
    """Whether the run starts a Gym server, whose settings may name a judge."""
    servers = [server for server in config.gym.servers.values() if OmegaConf.is_dict(server)]
    return uses_judges(config, command) or any(server.get("start") for server in servers)


def uses_judges(config: DictConfig, command: str) -> bool:
    """Whether a verifier uses a language model as a judge."""
    return bool(config.gym.judges)


def uses_megatron(config: DictConfig, command: str) -> bool:
    """Whether Megatron trains."""
    return bool(config.model_engine == "megatron")


def always(config: DictConfig, command: str) -> bool:
    """For features that every run uses."""
    return True


class Extra(NamedTuple):
    """A feature that can be deleted."""

    module: str
    turned_on_by: str  # a key of the recipe, or a command
    is_on: Callable[[DictConfig, str], bool]
    hooks: tuple[str, ...]  # the functions that the kit calls
    is_optional: bool = False  # True: a run that turns it on also works without it


EXTRAS = [
    Extra(
        "kit.extras.preflight",
        "every run",
        always,
        ("check_workers", "set_sizes", "check_model", "warnings", "dry_run_lines"),
        True,
    ),
    Extra("kit.extras.supervisor", "every run", always, ("before_ray", "after_ray"), True),
    Extra("kit.extras.report", "every run", always, ("write_report",), True),
    Extra("kit.extras.judges", "a Gym server", may_use_judges, ("check_recipe",), True),
    Extra(
        "kit.extras.judges",
        "gym.judges",
        uses_judges,
        ("check_inputs", "summary_lines", "before_ray"),
    ),
    Extra(
        "kit.extras.policy_programs",
        "env.verifier_pool.sandbox",
        uses_sandbox,
        ("check_recipe", "sandbox_command", "score_code"),
    ),
    Extra(
        "kit.extras.megatron",
        "model_engine",
        uses_megatron,
        (
            "check_workers",
            "model_parallel_size",
            "sequence_parallel_size",
            "parallel_sizes",
            "layout_keys",
            "checkpoint_files",
        ),
    ),
    Extra(
        "kit.extras.backends",
        "rollout.name, or another option of the rollout engine",
        uses_other_backend,
        ("check_recipe", "set_sizes", "check_model"),
    ),
    Extra("kit.extras.hf_rollout", "rollout.name=hf", uses_transformers, ("import_engine",)),
    Extra("kit.extras.gloo", "checkpoint_engine.backend=gloo", uses_gloo, ("set_sizes",)),
    Extra(
        "kit.extras.monitor",
        "rollout.prometheus.enable",
        uses_monitor,
        ("check_recipe", "after_start"),
    ),
    Extra(
        "kit.extras.one_step_off",
        "trainer.one_step_off",
        samples_ahead,
        ("make_loop", "servers_class"),
    ),
    Extra(
        "kit.extras.rollout_workers",
        "rollout.agent.num_workers",
        uses_rollout_workers,
        ("start_rollout_workers",),
    ),
    Extra(
        "kit.cpu.preload",
        "PRELOAD_MODULES",
        forks_workers,
        ("begin_imports", "before_ray", "after_ray"),
    ),
]
COMMANDS = {"show": "kit.extras.report.show", "sft": "kit.extras.sft"}


def call(hook: str, config: DictConfig, command: str, *args: Any) -> list[Any]:
    """Call a hook of every feature that is on and has it -> the results, in the order of EXTRAS.

    Raises ConfigError if the recipe turns on a feature that was deleted.
    """
    results = []
    for extra in EXTRAS:
        if hook not in extra.hooks or not extra.is_on(config, command):
            continue
        if is_installed(extra.module) or not extra.is_optional:
            module = load(extra.module, extra.turned_on_by)
            results.append(getattr(module, hook)(*args))
    return results


def find_missing(config: DictConfig, command: str) -> list[ConfigError]:
    """An error for each feature that a recipe and a command turn on, and that was deleted."""
    needed = [extra for extra in EXTRAS if not extra.is_optional and extra.is_on(config, command)]
    missing = [extra for extra in needed if not is_installed(extra.module)]
    return [missing_error(extra.module, extra.turned_on_by) for extra in missing]


def missing_error(module: str, turned_on_by: str) -> ConfigError:
    """The error about a feature that was deleted."""
    path = module.replace(".", "/")
    return ConfigError(
        f"{turned_on_by} needs {path}, which this copy does not have. Restore it, or remove that "
        "key or command."
    )


def collect(hook: str, config: DictConfig, command: str, *args: Any) -> list[Any]:
    """Call a hook of every feature that is on -> one list of all items that these return."""
    return list(itertools.chain.from_iterable(call(hook, config, command, *args)))


def first(hook: str, config: DictConfig, command: str, *args: Any, default: Any = None) -> Any:
    """Call a hook -> the result of the first feature that is on and has it, or `default`."""
    return next(iter(call(hook, config, command, *args)), default)


def make_processor(config: DictConfig, hf_config: Any, tokenizer: Any) -> Any:
    """The processor of a model: a TextProcessor, or the one for images if the model reads them."""
    from kit.data.processor import TextProcessor

    if getattr(hf_config, "vision_config", None) is None:
        return TextProcessor(tokenizer)
    model = config.actor_rollout_ref.model.path
    images = load("kit.extras.images", f"the model {model}, which reads images,")
    return images.make_processor(config, hf_config, tokenizer) or TextProcessor(tokenizer)


def find_module(hook: str) -> str:
    """The module of the feature with a hook, for a process that imports it itself."""
    return next(extra.module for extra in EXTRAS if hook in extra.hooks)


def require(hook: str, turned_on_by: str) -> None:
    """Check that the feature with a hook is there. Raises ConfigError if it was deleted."""
    module = find_module(hook)
    if not is_installed(module):
        raise missing_error(module, turned_on_by)


def load_command(name: str) -> ModuleType:
    """The module of a command. Raises ConfigError if it was deleted."""
    return load(COMMANDS[name], f"the command {name}")


def load(module: str, turned_on_by: str) -> ModuleType:
    """Import a feature. Raises ConfigError if it was deleted."""
    if not is_installed(module):
        raise missing_error(module, turned_on_by)
    return importlib.import_module(module)


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module or folder is there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent folder is missing
        return False
