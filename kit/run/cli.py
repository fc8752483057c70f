"""The command line: check a recipe and run a command on it. Notebooks use `plan`.

Convenience: one command for all that a recipe can do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import env
import gym_client
from kit import optional
from kit.data.fingerprint import Fingerprint
from kit.engine.inputs import RunInputs
from kit.errors import ConfigError, RunError, Stop, UserFunctionError, remove_control_characters
from kit.recipe.keys import is_below
from kit.recipe.load import raise_all, read_source
from kit.recipe.packages import describe_import_error
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings, make_settings
from kit.run import checkpoints, files, identity, isolation, prepare, summary, trial
from kit.run import replay as recorded
from kit.run.console import LogFormatter, console, say
from kit.run.features import Features
from kit.run.verifier_trial import check_verifiers
from kit.verify import network

EXPECTED_ERRORS = (  # printed as a message, without a traceback
    ConfigError,
    RunError,
    UserFunctionError,
    env.DataError,
    gym_client.GymError,
    network.GymStartError,
)
QUIET = {  # {library: the lowest level that is printed}
    "torch.distributed": logging.ERROR,
    "torch.fx": logging.ERROR,
    "vllm.tool_parsers": logging.CRITICAL + 1,  # a traceback for each call that cannot be parsed
}
DESCRIPTION = "Quintet: RL post-training on NeMo Gym tasks with verl and vLLM."
EXAMPLES = """commands, with an example each:
  train       python algorithm.py --config configs/math.yaml trainer.total_training_steps=100
  rollout     python algorithm.py --config math rollout        collect episodes, without training
  evaluate    python algorithm.py --config math evaluate       mean@k and pass@k on held-out rows
  sft         python algorithm.py --config math --config sft sft 'env.train_files=[chats.jsonl]'
  show        python algorithm.py show runs/math               metrics and episodes of a run
  sweep       python algorithm.py sweep --config math --seeds 3 --vary actor.optim.lr=1e-6,2e-6
  compare     python algorithm.py compare 'runs/a*' --with 'runs/b*'     is the difference real?
  explain     python algorithm.py explain runs/math 12 --config math   what did step 12 do, and why?
  price       python algorithm.py price runs/math --rate 2.5   time and money to the end of a run
  probe       python algorithm.py probe --config math          can the verifier be fooled?
"""


class Plan(NamedTuple):
    """A recipe that passed every check."""

    recipe: Recipe
    inputs: RunInputs
    resume_from: Path | None  # a checkpoint
    replay: recorded.Replay | None  # with --replay: episodes to train on
    notes: list[str]  # lines to print
    fingerprint: Fingerprint = Fingerprint()
    features: Features = Features()


def plan(
    recipe_files: Sequence[str],
    overrides: Sequence[str] = (),
    command: str = "train",
    replay: str = "",
    on_features: prepare.OnFeatures = prepare.ignore_features,
    is_dry_run: bool = False,
) -> Plan:
    """Merge recipe files and key=value, and check all that can be checked without a worker.

    on_features: called with the features that are on, before the checks. is_dry_run: a finished run
    of this name is a warning. Raises EXPECTED_ERRORS.
    """
    silence_libraries()
    source = read_source(recipe_files, overrides)
    resume_from: Path | None = None
    notes: list[str] = []
    recording = recorded.find_recording(replay) if replay else None
    if recording:
        trainer = make_settings(source, command).trainer
        resume_from, changes = recorded.prepare(trainer, recording)
        source = source.override(changes)
    if command in optional.COMMANDS:
        module = optional.load(command, f"the command {command}")
        recipe, inputs, features = module.prepare(source, on_features)
    else:
        recipe, inputs, features = prepare.prepare(source, command, on_features)
    if recipe.trains and not recording:  # only now: the rows may set the number of steps
        try:
            resume_from, notes = checkpoints.find_resume_point(recipe)
        except checkpoints.NothingLeftError as error:
            if not is_dry_run:
                raise
            notes = [f"WARNING     {error}"]
    fingerprint = identity.make_fingerprint(recipe, inputs)
    if resume_from:
        notes += checkpoints.check(resume_from, recipe, fingerprint)
        notes.append(f"resume      from {resume_from}")
    loaded: recorded.Replay | None = None
    if recording:
        loaded = recorded.load(recording, recipe, inputs, fingerprint)
        notes.append(loaded.note)
    if command == "train":
        trial.check_functions(recipe, inputs)
    return Plan(recipe, inputs, resume_from, loaded, notes, fingerprint, features)


class FixedLogger(logging.Logger):
    """A logger that keeps its level. The import of vLLM resets those of its loggers."""

    def setLevel(self, level: int | str) -> None:  # noqa: N802  (the name in logging)
        """Do nothing."""


def silence_libraries() -> None:
    """Hide notices of libraries about packages that are missing or unused. Errors still show."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.")
    for name, level in QUIET.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.__class__ = FixedLogger
    # model_hosting_container_standards, which vLLM imports, sets the root logger to ERROR
    handler = logging.lastResort or logging.StreamHandler()  # above the progress bar
    handler.setFormatter(LogFormatter())
    for name in ("gym_client", "kit"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.handlers = [handler]
        logger.propagate = False


@contextlib.contextmanager
def exit_on_errors() -> Iterator[None]:
    """Print an expected error on one line, and exit.

    Exit status: 1 for an error, 130 for Ctrl-C, 143 for SIGTERM.
    """
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        yield
    except EXPECTED_ERRORS as error:
        exit_with(str(error))
    except ImportError as error:
        if is_below(error.name or "kit", "kit"):
            raise
        exit_with(describe_import_error(error))
    except OSError as error:
        if error.errno not in files.WRITE_FAILED:
            raise
        exit_with(files.describe_write_error(error.filename or "the run's folder", error))
    except Stop as stop:
        text = f"error: {stop}" if stop.status == 1 else str(stop)
        print(remove_control_characters(text), file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
        sys.exit(130)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        help="a recipe; later ones override earlier ones",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print it; start no run"
    )
    parser.add_argument(
        "--try",
        dest="try_response",
        metavar="RESPONSE",
        help="a dry run that also prints what the Python verifier pays for this response",
    )
    parser.add_argument(
        "--replay",
        metavar="'STEP_*.jsonl'",
        default="",
        help="train on the rollouts files of a run, without a rollout engine",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "words",
        nargs="*",
        metavar=f"[{'|'.join(prepare.COMMANDS)}] key=value",
        help="a command (default: train) and values that override the recipes",
    )
    return parser.parse_intermixed_args()


def read_plan() -> Plan | None:
    """Parse the command line, check the recipe and print its summary. Raises EXPECTED_ERRORS.

    Returns None if nothing is left to run: after a dry run, and after one of optional.TOOLS.
    """
    if sys.argv[1:] and sys.argv[1] in optional.TOOLS:
        optional.load(sys.argv[1], f"the command {sys.argv[1]}").main(sys.argv[2:])
        return None
    args = parse_arguments()
    console.is_interactive = console.is_interactive and not args.quiet
    for word in args.words:
        if word in optional.TOOLS:
            others = [argument for argument in sys.argv[1:] if argument != word]
            first = shlex.join(["python", "algorithm.py", word, *others])
            raise ConfigError(f"The command {word} must be the first word. Run: {first}")
    commands = [word for word in args.words if word in prepare.COMMANDS] or ["train"]
    overrides = [word for word in args.words if word not in prepare.COMMANDS]
    if len(commands) > 1:
        raise ConfigError(f"{' and '.join(commands)} are two commands. Choose one.")
    command = commands[0]
    if args.replay and command != "train":
        raise ConfigError(f"--replay belongs to `train`. Remove `{command}`.")
    is_dry_run = args.dry_run or args.try_response is not None
    on_features = prepare.ignore_features if is_dry_run else begin_imports
    planned = plan(args.config, overrides, command, args.replay, on_features, is_dry_run)
    if args.try_response is not None:
        try_response(args.try_response, planned)
    say(describe_plan(planned, is_dry_run))
    return None if is_dry_run else planned


def try_response(response: str, planned: Plan) -> None:
    """Repeat the trial of the Python verifiers with a response of the user. Raises ConfigError."""
    inputs = planned.inputs
    specs = inputs.verifiers.specs
    if not specs:
        raise ConfigError(
            "--try needs a Python verifier, since a dry run starts no Gym server. Remove --try, or "
            "use `python algorithm.py probe`."
        )
    inputs.trials = check_verifiers(specs, inputs.tasks, planned.recipe, response=response)


def describe_plan(planned: Plan, is_dry_run: bool) -> str:
    """Return what a command prints before it runs. A dry run prints no more than that."""
    return summary.summarize(
        planned.recipe, planned.inputs, planned.features.checks, planned.notes, is_dry_run
    )


def begin_imports(features: Features, settings: Settings) -> None:
    """Check this machine, and start to import the workers' modules in another process.

    It imports them while the recipe is checked, if the run uses such a process. Raises ConfigError.
    """
    isolation.check_limits()
    raise_all([*itertools.chain(*(each.check_start(settings) for each in features.checks))])
    for check in features.checks:
        check.begin_imports(settings)


def run_other(planned: Plan) -> None:
    """Run a command that is not `train`."""
    from kit.run import collect
    from kit.run.run import Run

    run_command = collect.run_command
    command = planned.recipe.command
    if command in optional.COMMANDS:
        run_command = optional.load(command, f"the command {command}").run_command
    with Run(planned.recipe, planned.resume_from, planned.fingerprint, planned.features) as started:
        run_command(planned.recipe, started, planned.inputs)


def exit_with(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    sys.exit(f"error: {remove_control_characters(message)}")


def exit_on_sigterm(*_: object) -> NoReturn:
    """Exit on SIGTERM before a run has started: there is nothing to clean up."""
    sys.exit(143)
