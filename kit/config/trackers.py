"""Check the experiment trackers of a recipe (trainer.logger) before a run opens them.

verl opens them (verl/utils/tracking.py), before any worker starts. They check their keys.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from omegaconf import DictConfig

from kit.config.keys import to_plain

KEY = "trainer.logger"
# {tracker of verl: the module that it needs; "": none}
MODULES = {
    "console": "",
    "file": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "tracking": "wandb",  # verl's old name for it
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "clearml": "clearml",
    "vemlp_wandb": "volcengine_ml_platform",
    "rl_insight": "rl_insight",
}


def find_problems(config: DictConfig) -> Iterator[str]:
    """A message for each tracker that verl does not have, or whose package is missing."""
    for name in list_names(config):
        module = MODULES.get(name)
        if module is None:
            yield f"{KEY}: verl has no tracker {name!r}. Use one of: {', '.join(MODULES)}."
        elif module and importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            yield (
                f"{KEY}: {name} needs the package {package}, which is not installed. Run "
                f"`pip install {package}`, or remove {name}."
            )


def list_names(config: DictConfig) -> list[str]:
    """Return the names of the trackers. As in verl, the value may be one name."""
    loggers = to_plain(config.trainer.logger)
    return [loggers] if isinstance(loggers, str) else [str(name) for name in loggers or []]
