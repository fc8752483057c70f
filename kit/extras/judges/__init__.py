"""Language models that Gym's verifiers use as judges (gym.judges).

Hooks of kit/extras/__init__.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from kit.config.keys import to_plain
from kit.extras.judges import judge_processes, judge_proxy, judge_settings
from kit.gym import process_specs


def check_recipe(config: DictConfig, command: str) -> Iterator[str]:
    """Yield a message for each invalid judge, and for each judge that no server uses."""
    if command == "sft":
        return
    judges = to_plain(config.gym.judges)
    yield from judge_settings.find_problems(judges, config.gym.timeout_s, config.trainer.device)
    used: set[str] = set()
    for name, server in to_plain(config.gym.servers).items():
        start = (server or {}).get("start")
        if start:
            used |= set(find_judges(name, start).values())
            yield from find_visible_keys(name, start, judges)
    for name in judges:
        if name not in used:
            names = ", ".join(sorted(used)) or "no judge"
            yield (
                f"gym.judges.{name}: no server that this run starts uses it; they use {names}. "
                "Remove it."
            )


def find_visible_keys(name: str, start: dict[str, Any], judges: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each judge whose key `start.env` would show to a server.

    No server needs it: servers call their judges through the proxy, which adds the key.
    """
    visible = start.get("env")
    if not isinstance(visible, list):  # another check reports it
        return
    for judge, spec in judges.items():
        variable = spec.get("api_key_env") if isinstance(spec, dict) else None
        if variable and variable in visible:
            yield (
                f"gym.servers.{name}.start.env shows {variable}, the key of gym.judges.{judge}, to "
                "the server. Remove it. If the server needs a key for another purpose, export it "
                "under another name."
            )


def find_judges(name: str, start: dict[str, Any]) -> dict[str, str]:
    """Return a server's judges; {} if its `start` is invalid, which another check reports."""
    try:
        return process_specs.find_judges(name, start)
    except process_specs.GymStartError:
        return {}


def check_inputs(config: DictConfig, inputs: Any, command: str) -> None:
    """Check that each judge with base_url answers. Raises ConfigError."""
    for judge in build_judges(config).values():
        if judge.url and not judge.start:
            judge_settings.check_endpoint(judge)


def summary_lines(config: DictConfig, inputs: Any, command: str) -> list[str]:
    """Return the lines of the summary that describe the judges."""
    return list(judge_settings.describe_judges(build_judges(config)))


def build_judges(config: DictConfig) -> dict[str, judge_settings.Judge]:
    """Return the judges of a recipe, by name."""
    return judge_settings.build_judges(to_plain(config.gym.judges), config.gym.timeout_s)


def before_ray(launch: Any) -> None:
    """Start the proxy in front of the judges, and plan their processes.

    launch: kit.runs.launch.Launch.
    """
    if not launch.policy:  # this command does not sample
        return
    config = launch.config
    specs = to_plain(config.gym.judges)
    dtype = config.actor_rollout_ref.rollout.dtype if config.trainer.device == "cpu" else ""
    judges = judge_settings.build_judges(specs, config.gym.timeout_s, launch.policy, dtype)
    proxy = launch.stack.enter_context(judge_proxy.JudgeProxy(judges))
    launch.stack.enter_context(judge_processes.reserve_gpus(specs))
    launch.gym_processes += proxy.process_specs()
    launch.gym_process_names += [f"{name} (a judge)" for name in judges]
    launch.run.gauges.append(proxy.metrics)
