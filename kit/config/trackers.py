"""Check the experiment trackers of a recipe (trainer.logger) before a run opens them.

verl opens them (verl/utils/tracking.py). Without this check, a tracker without its package or its
key would end the run with a traceback, and a dry run would not notice it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from omegaconf import DictConfig

from kit.config.keys import to_plain

KEY = "trainer.logger"


class Tracker(NamedTuple):
    """A tracker of verl, and the package and the key that it needs."""

    module: str = ""  # empty: a part of verl
    package: str = ""  # its name on PyPI
    find_problem: Callable[[], str] = str  # -> why it cannot start, and the fix; "" if it can


def find_problems(config: DictConfig) -> Iterator[str]:
    """A message for each tracker that cannot start."""
    for name in list_names(config):
        tracker = TRACKERS.get(name)
        if tracker is None:
            yield f"{KEY}: verl has no tracker {name!r}. Use one of: {', '.join(TRACKERS)}."
        elif tracker.module and not is_installed(tracker.module):
            yield (
                f"{KEY}: {name} needs the package {tracker.package}, which is not installed. Run "
                f"`pip install {tracker.package}`, or remove {name}."
            )
        else:
            problem = tracker.find_problem()
            if problem:
                yield f"{KEY}: {name} cannot start: {problem}"


def list_names(config: DictConfig) -> list[str]:
    """Return the names of the trackers. As in verl, the value may be one name."""
    loggers = to_plain(config.trainer.logger)
    return [loggers] if isinstance(loggers, str) else [str(name) for name in loggers or []]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. Its parent package may be missing, too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def find_wandb_problem() -> str:
    """Return why W&B has no key. It reads variables, .netrc and its settings file itself.

    W&B is reset after that, since it keeps the variables of its first use. The run sets others.
    """
    try:
        from wandb.sdk import wandb_setup
    except ImportError:
        return ""  # another version of W&B: it checks the key when the run opens it
    is_in_use = getattr(wandb_setup, "_singleton", None) is not None  # such as in a notebook
    try:
        return find_missing_wandb_key(wandb_setup)
    finally:
        if not is_in_use:
            wandb_setup.teardown()


def find_missing_wandb_key(wandb_setup: ModuleType) -> str:
    """Return why W&B has no key. wandb_setup: its module."""
    try:
        from wandb.sdk.lib import wbauth

        settings = wandb_setup.singleton().settings
        if settings.mode in ("offline", "disabled", "dryrun"):
            return ""
        key = wbauth.authenticate_session(
            host=settings.base_url, source=KEY, prompt=False, update_session=False
        )
    except (ImportError, AttributeError, TypeError):
        return ""  # another version of W&B: it checks the key when the run opens it
    except Exception as error:  # an invalid key or variable, as W&B or pydantic describes it
        return f"{' '.join(str(error).split())} Correct it."
    if key:
        return ""
    return "no key for it. Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."


def find_swanlab_problem() -> str:
    """Return why SwanLab has no key."""
    folder = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    is_online = os.environ.get("SWANLAB_MODE", "cloud") in ("cloud", "online")
    has_key = os.environ.get("SWANLAB_API_KEY") or is_file(f"{folder}/.netrc")
    if has_key or not is_online:
        return ""
    return "no key for it. Run `swanlab login`, set SWANLAB_API_KEY, or set SWANLAB_MODE=offline."


def find_clearml_problem() -> str:
    """Return why ClearML has no credentials."""
    names = ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY")
    has_key = all(os.environ.get(name) for name in names)
    has_file = is_file(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf")
    is_offline = os.environ.get("CLEARML_OFFLINE_MODE", "").lower() in ("1", "true", "yes", "on")
    if has_key or has_file or is_offline:
        return ""
    return (
        f"no key for it. Run `clearml-init`, set {' and '.join(names)}, or CLEARML_OFFLINE_MODE=1."
    )


def find_vemlp_problem() -> str:
    """Return which variable Volcengine's W&B lacks. verl reads these three."""
    needed = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")
    missing = [name for name in needed if not os.environ.get(name)]
    return f"the environment variable {missing[0]} is not set. Set it." if missing else ""


def find_rl_insight_problem() -> str:
    """Return how to turn RL-Insight on: without its variable, verl writes nothing to it."""
    if os.environ.get("VERL_RL_INSIGHT_ENABLE") == "1":
        return ""
    return "verl writes to it only if VERL_RL_INSIGHT_ENABLE=1. Set this environment variable."


def is_file(path: str) -> bool:
    """Return whether a file exists. Without a home folder, `~` stays as it is."""
    return Path(os.path.expanduser(path)).is_file()


WANDB = Tracker("wandb", "wandb", find_wandb_problem)
TRACKERS = {
    "console": Tracker(),
    "file": Tracker(),
    "tensorboard": Tracker("tensorboard", "tensorboard"),
    "wandb": WANDB,
    "tracking": WANDB,  # verl's old name for it
    "mlflow": Tracker("mlflow", "mlflow"),
    "swanlab": Tracker("swanlab", "swanlab", find_swanlab_problem),
    "trackio": Tracker("trackio", "trackio"),
    "clearml": Tracker("clearml", "clearml", find_clearml_problem),
    "vemlp_wandb": Tracker("volcengine_ml_platform", "volcengine-ml-platform", find_vemlp_problem),
    "rl_insight": Tracker("rl_insight", "rl-insight", find_rl_insight_problem),
}
