"""Language models that Gym's verifiers use as judges (gym.judges).

Hooks of kit/extras/__init__.py. Every run that starts a Gym server calls `check_recipe`, so this
file imports the rest of the folder only for recipes with judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from env import Json
from kit.config.keys import to_plain
from kit.config.recipe import Recipe
from kit.gym import process_specs
from kit.gym.network import HOST, GymStartError
from kit.gym.server_process import MODELS, RESOURCES, build_settings

if TYPE_CHECKING:
    from kit.extras.judges.judge_settings import Judge
    from kit.rollout.inputs import RunInputs
    from kit.runs.launch import Launch

# settings that switch a verifier's judge off if they are false
SWITCHES = ("should_use_judge", "use_judge", "enable_llm_judge")


# --- hooks ---------------------------------------------------------------------------------------


def check_recipe(config: DictConfig, command: str) -> Iterator[str]:
    """Yield a message for each invalid, missing or unused judge."""
    if command == "sft":
        return
    judges = to_plain(config.gym.judges)
    if judges:
        from kit.extras.judges import judge_settings

        yield from judge_settings.find_problems(judges, config.gym.timeout_s, config.trainer.device)
    used: set[str] = set()
    for name, server in to_plain(config.gym.servers).items():
        start = (server or {}).get("start")
        if start:
            models = list_models(name, start)
            used |= set(models.values())
            yield from find_missing_judges(name, start, models, judges)
            yield from find_visible_keys(name, start, judges)
    for name in judges:
        if name not in used:
            names = ", ".join(sorted(used)) or "no judge"
            yield (
                f"gym.judges.{name}: no server that this run starts uses it; they use {names}. "
                "Remove it."
            )


def check_inputs(recipe: Recipe, inputs: RunInputs) -> None:
    """Check that each judge with base_url answers. Raises ConfigError."""
    from kit.extras.judges import judge_settings

    for judge in build_judges(recipe).values():
        if judge.url and not judge.start:
            judge_settings.check_endpoint(judge)


def summary_lines(recipe: Recipe, inputs: RunInputs) -> list[str]:
    """Return the lines of the summary that describe the judges."""
    from kit.extras.judges import judge_settings

    return list(judge_settings.describe_judges(build_judges(recipe)))


def before_ray(launch: Launch) -> None:
    """Start the proxy in front of the judges, and plan their processes."""
    if not launch.policy:  # this command does not sample
        return
    from kit.extras.judges import judge_processes, judge_proxy, judge_settings

    recipe = launch.recipe
    specs = recipe.gym.judges
    dtype = recipe.rollout.dtype if recipe.trainer.device == "cpu" else ""
    judges = judge_settings.build_judges(specs, recipe.gym.timeout_s, launch.policy, dtype)
    starts = [server.start for server in recipe.gym.servers.values() if server.start]
    python = next((start.python for start in starts if start.python), None)
    proxy = launch.stack.enter_context(judge_proxy.JudgeProxy(judges))
    launch.stack.enter_context(judge_processes.reserve_gpus(specs))
    launch.gym_processes += proxy.process_specs(launch.logs, python)
    launch.gym_process_names += [f"{name} (a judge)" for name in judges]
    launch.serves_policy |= "policy" in specs.values()
    launch.run.log.gauges.append(proxy.metrics)


def build_judges(recipe: Recipe) -> dict[str, Judge]:
    """Return the judges of a recipe, by name."""
    from kit.extras.judges import judge_settings

    return judge_settings.build_judges(recipe.gym.judges, recipe.gym.timeout_s)


# --- the judges that a server's settings name ----------------------------------------------------


def list_models(name: str, start: Json) -> dict[str, str]:
    """Return the models that the settings of a server name as judges: {key: model}.

    Returns {} if nemo-gym has no such server, or if `start` is invalid, which another check
    reports.
    """
    try:
        folder = process_specs.find_folder(name, start)
        package = process_specs.find_package(str(start.get("python") or process_specs.PYTHON))
    except GymStartError:
        return {}
    if package is None or not (package / RESOURCES / folder / "app.py").is_file():
        return {}
    spec = process_specs.make_spec(name, RESOURCES, folder, start.get("config") or {}, "")
    spec |= {"resources_server": folder, "host": HOST, "port": 0}
    return find_models(build_settings(spec, package))


def find_models(settings: Json) -> dict[str, str]:
    """Return {key: name} of the models in the settings of a resources server.

    Returns {} if the settings switch the judge off.
    """
    if any(settings.get(key) is False for key in SWITCHES):
        return {}
    models = {}
    for key, value in settings.items():
        is_model = isinstance(value, dict) and value.get("type") == MODELS
        if is_model and isinstance(value.get("name"), str):
            models[key] = value["name"]
    if settings.get("judge_server_name"):  # verifif
        models["judge_server_name"] = settings["judge_server_name"]
    return models


def find_missing_judges(
    name: str, start: Json, models: Mapping[str, str], judges: Json
) -> Iterator[str]:
    """Yield a message for each model that a server needs and that gym.judges does not have.

    models: {key of the server's settings: model}.
    """
    folder = process_specs.find_folder(name, start) if models else ""
    server = folder if start.get("path") else f"nemo-gym's {folder}"
    for key, model in models.items():
        is_policy = model == process_specs.POLICY_MODEL and start.get("agent")
        if model not in judges and not is_policy:
            yield (
                f"gym.servers.{name}: {server} needs the model {model} ({key}). Set "
                f"gym.judges.{model}, or set another {key} in gym.servers.{name}.start.config. "
                'See docs/guides/judges.md, "Configure judges".'
            )


def find_visible_keys(name: str, start: Json, judges: Json) -> Iterator[str]:
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
