"""From a command line, or a notebook, to a recipe that is in order and the run that it asks for."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import env
import gym_client
from kit import later
from kit.config import user_functions
from kit.config.load import load_config
from kit.data.episodes import Episode, load_replay
from kit.errors import ConfigError, PluginError, RunError, Stop
from kit.extras import sft
from kit.gym import servers as gym_servers
from kit.runs import checkpoints, collect, files, preparation
from kit.runs.run_dir import Run, console
from kit.runs.text import printable

start = later("kit.runs.launch")  # Ray, which reads the recipe's environment when it is imported
show = later("kit.extras.report.show")  # pandas

GYM_ERRORS = (env.DataError, gym_client.GymError, gym_servers.GymStartError)
OUR_ERRORS = (ConfigError, RunError, PluginError, *GYM_ERRORS)  # a few lines each
COMMANDS = ("train", "rollout", "evaluate", "sft")


class Plan(NamedTuple):
    """A recipe that was found to be in order."""

    config: DictConfig
    defaults: DictConfig  # verl's
    data: preparation.Data
    resume_from: Path | None  # a checkpoint
    recorded: list[list[Episode]]  # of a replay: episodes of one step, by batch of prompts
    told: list[str]  # what there is to say of it


def plan(
    files: Sequence[str],
    overrides: Sequence[str] = (),
    command: str = "train",
    replay: str = "",
    merged: Callable[[DictConfig], None] = lambda config: None,
) -> Plan:
    """Merge recipe files and key=value, and check all that can be checked without starting anything.

    merged: called between the two, with the recipe. Raises OUR_ERRORS.
    """
    quiet()
    problems: list[Exception] = []
    config, defaults = load_config(files, overrides, problems)
    if problems:
        preparation.check_recipe(config, command, problems)  # raises, with all else that is wrong
    merged(config)
    resume_from: Path | None = None
    told: list[str] = []
    if replay:
        resume_from = checkpoints.before_replay(config, Path(replay))
    data = sft.prepare(config) if command == "sft" else preparation.prepare(config, command)
    if (
        command in ("train", "sft") and not replay
    ):  # after the rows, which may say how many steps there are
        resume_from, told = checkpoints.resume_point(config)
    recorded = load_replay(Path(replay), data.train) if replay else []
    if resume_from:
        told += [
            *checkpoints.check(resume_from, config, command),
            f"resume      from {resume_from}",
        ]
    if command == "train":
        user_functions.try_out(config, data)
    return Plan(config, defaults, data, resume_from, recorded, told)


def quiet() -> None:
    """Keep libraries' notices about what is not installed or not used off the console; errors and our warnings show."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.")
    for name in ("ray", "torch.fx", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("vllm.tool_parsers").setLevel(
        logging.CRITICAL
    )  # a traceback for each call that cannot be read
    # ours show although model_hosting_container_standards, which vLLM imports, sets the root logger to ERROR
    for name in ("gym_client", "kit"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.handlers = [
            logging.lastResort or logging.StreamHandler()
        ]  # prints above the progress bar
        logger.propagate = False


def main(train: Callable[[Plan], AbstractContextManager[Any]]) -> None:
    """Parse the command line, check the recipe, run it: by algorithm.train, or sft.py, or collect.py.

    Exit status: 0, 1 error, 130 Ctrl-C, 143 SIGTERM.
    """
    if sys.argv[1:2] == ["show"]:
        return show.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description="RL on NeMo Gym tasks with verl and vLLM.",
        epilog="Of a run that is there: python algorithm.py show runs/NAME [--worst 10]",
    )
    parser.add_argument(
        "--config", action="append", required=True, help="recipe; later ones override earlier ones"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print what would run, start nothing",
    )
    parser.add_argument(
        "--replay", metavar="STEP.jsonl", default="", help="a rollouts file: its update again"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="a line a step at a terminal too, for logs"
    )
    parser.add_argument(
        "words", nargs="*", metavar="[train|rollout|evaluate|sft] key=value", help="default: train"
    )
    args = parser.parse_intermixed_args()
    named = [word for word in args.words if word in COMMANDS] or ["train"]
    overrides = [word for word in args.words if word not in COMMANDS]
    console.is_interactive = console.is_interactive and not args.quiet
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.replay and named != ["train"]:
            raise ConfigError(
                f"--replay makes an update of `train` again, not of `{named[0]}`; leave that word out"
            )
        if len(named) > 1:
            raise ConfigError(f"one command at a time, not {' and '.join(named)}; choose one")
        merged = (
            (lambda config: None) if args.dry_run else (lambda config: start.begin_imports(config))
        )
        planned = plan(args.config, overrides, named[0], args.replay, merged)
        texts = [preparation.summary(planned.config, planned.data, named[0]), *planned.told]
        if args.dry_run:
            texts.append(
                preparation.shown(planned.config, planned.defaults, planned.data, named[0])
            )
        console.print(printable("\n".join(texts)), markup=False, highlight=False, soft_wrap=True)
        if args.dry_run:
            return
        if named == ["train"]:
            with train(planned) as trainer:
                if args.replay:
                    trainer.advance()
                    trainer.run.say(
                        f"the same update again: its weights are in {trainer.run.checkpoint}"
                    )
                else:
                    trainer.fit()
        else:
            command = sft.run_command if named == ["sft"] else collect.run_command
            with Run(planned.config, named[0], planned.resume_from) as run:
                command(planned.config, run, planned.data)
    except (*OUR_ERRORS, OmegaConfBaseException) as error:
        sys.exit(f"error: {printable(str(error))}")
    except OSError as error:
        if error.errno not in files.DISK:
            raise
        where = (
            error.filename or f"the folder of the run, {planned.config.trainer.experiment_name},"
        )
        sys.exit(f"error: {printable(files.describe_failure(where, error))}")
    except Stop as stop:
        print(printable(f"error: {stop}" if stop.status == 1 else str(stop)), file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
        sys.exit(130)
