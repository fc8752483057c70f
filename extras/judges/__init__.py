"""Language models that Gym's verifiers use as judges (gym.judges).

Every run that starts a Gym server imports this file, so it imports the rest of the folder only for
recipes with judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from env import Json
from kit.recipe.schema import ServerStart
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck, RunPart
from kit.verify import process_specs
from kit.verify.network import GymStartError
from kit.verify.server_process import MODELS, RESOURCES, ProcessSpec, build_settings

if TYPE_CHECKING:
    from kit.run.launch import Launch

# settings that switch a verifier's judge off if they are false
SWITCHES = ("should_use_judge", "use_judge", "enable_llm_judge")


class ServerJudges(RecipeCheck):
    """The judges that the Gym servers of a run need, also if the recipe has none."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Yield a message for each missing judge."""
        for name, start in list_starts(settings).items():
            models = list_models(name, start)
            yield from find_missing_judges(name, start, models, settings.gym.judges)


class Judges(RecipeCheck, RunPart):
    """The judges of a recipe."""

    def __init__(self, settings: Settings):
        self.specs = settings.gym.judges
        self.timeout_s = settings.gym.timeout_s

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Yield a message for each invalid or unused judge."""
        from extras.judges import judge_settings

        device = settings.trainer.device
        yield from judge_settings.find_problems(self.specs, self.timeout_s, device)
        used: set[str] = set()
        for name, start in list_starts(settings).items():
            used |= set(list_models(name, start).values())
        for name in self.specs:
            if name not in used:
                names = ", ".join(sorted(used)) or "no judge"
                yield (
                    f"gym.judges.{name}: no server that this run starts uses it; they use {names}. "
                    "Remove it."
                )

    def before_gym(self, launch: Launch) -> None:
        """Start the proxy in front of the judges, and plan their processes."""
        if not launch.policy:  # this command does not sample
            return
        from extras.judges import judge_processes, judge_proxy, judge_settings

        recipe = launch.recipe
        dtype = str(recipe.rollout.dtype) if recipe.trainer.device == "cpu" else ""
        judges = judge_settings.build_judges(self.specs, self.timeout_s, launch.policy, dtype)
        starts = [server.start for server in recipe.gym.servers.values() if server.start]
        python = next((start.python for start in starts if start.python), None)
        proxy = launch.stack.enter_context(judge_proxy.JudgeProxy(judges))
        judge_processes.reserve_gpus(judges)
        launch.gym_processes += proxy.process_specs(launch.logs, python)
        launch.gym_process_names += [f"{name} (a judge)" for name in judges]
        launch.serves_policy |= "policy" in self.specs.values()
        launch.run.log.gauges.append(proxy.metrics)


# --- the judges that a server's settings name ----------------------------------------------------


def list_starts(settings: Settings) -> dict[str, ServerStart]:
    """Return {name: start} of the Gym servers that the run starts."""
    return {name: server.start for name, server in settings.gym.servers.items() if server.start}


def list_models(name: str, start: ServerStart) -> dict[str, str]:
    """Return the models that the settings of a server name as judges: {key: model}.

    Returns {} if nemo-gym has no such server, or if `start` is invalid, which another check
    reports.
    """
    try:
        folder = process_specs.find_folder(name, start)
        package = process_specs.find_package(process_specs.find_python(start))
    except GymStartError:
        return {}
    if package is None or not (package / RESOURCES / folder / "app.py").is_file():
        return {}
    spec = ProcessSpec(name, RESOURCES, folder, start.config or {}, resources_server=folder)
    return find_models(build_settings(spec, package))


def find_models(settings: Json) -> dict[str, str]:
    """Return {key: name} of the models in the settings of a resources server.

    Returns {} if the settings switch the judge off.
    """
    if any(settings.get(key) is False for key in SWITCHES):
        return {}
    servers = {key: value for key, value in settings.items() if isinstance(value, dict)}
    models = {key: v.get("name") for key, v in servers.items() if v.get("type") == MODELS}
    models["judge_server_name"] = settings.get("judge_server_name")  # verifif
    return {key: name for key, name in models.items() if name}


def find_missing_judges(
    name: str, start: ServerStart, models: Mapping[str, str], judges: Json
) -> Iterator[str]:
    """Yield a message for each model that a server needs and that gym.judges does not have.

    models: {key of the server's settings: model}.
    """
    folder = process_specs.find_folder(name, start) if models else ""
    server = folder if start.path else f"nemo-gym's {folder}"
    for key, model in models.items():
        is_policy = model == process_specs.POLICY_MODEL and start.agent
        if model not in judges and not is_policy:
            yield (
                f"gym.servers.{name}: {server} needs the model {model} ({key}). Set "
                f"gym.judges.{model}, or set another {key} in gym.servers.{name}.start.config. "
                'See docs/guides/judges.md, "Configure judges".'
            )
