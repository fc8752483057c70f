"""The command `probe`: can the verifier of a recipe be fooled, and does it accept right answers?

python algorithm.py probe --config math_cpu --config cpu [--rows 8]

It starts the verifiers of the recipe as a run does, and no model. Then it sends them constructed
responses: some deserve nothing, the others are right. Exit status: 0 if no weakness was found, 3 if
one was, 1 for an error, such as a verifier that is down.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from env import Task
from gym_client import RUNS_EPISODES
from kit.engine.interfaces import EventLoop
from kit.engine.sampling import make_rollout_context
from kit.errors import ConfigError
from kit.run import isolation
from kit.run.cli import Plan, plan
from kit.run.console import console, count_nouns, say
from kit.run.event_loops import make_runner
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.servers import GymServers
from kit.verify.verifiers import make_verifiers
from lab.probe import report, truths
from lab.probe.audit import RowAudit, Sender, audit_verifier, find_weaknesses
from lab.probe.responses import Case

if TYPE_CHECKING:
    from kit.engine.inputs import RunInputs

WEAK = 3  # exit status
MAX_OTHERS = 12  # truths of other rows


def main(arguments: Sequence[str]) -> None:
    """Run the command, and exit with WEAK if a weakness was found.

    Raises ConfigError, RunError, GymStartError and GymError if the verifiers cannot be probed.
    """
    args = parse_arguments(arguments)
    # `rollout` reads the rows of `train`, and needs neither a whole batch nor a checkpoint
    planned = plan(args.config, args.words, "rollout")
    tasks = planned.inputs.train
    with running_verifiers(planned) as (sender, loop):
        audits = audit_all(tasks, args.rows, planned.inputs, sender, loop)
    weaknesses = []
    broken = 0
    for name, rows in audits.items():
        found = find_weaknesses(rows, args.threshold, args.ignore)
        console.print(report.build_report(name, rows, found), highlight=False)
        weaknesses += found
        broken += sum(row.is_broken or bool(row.changed) for row in rows)
    kinds = count_nouns(len(weaknesses), "kind")
    say(f"\n{kinds} of weakness in {count_nouns(len(audits), 'verifier')}")
    if weaknesses or broken:
        sys.exit(WEAK)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py probe",
        description="Send constructed responses to the verifiers of a recipe. "
        "Exit status: 0 no weakness found, 3 weaknesses found, 1 error.",
    )
    parser.add_argument("--config", action="append", required=True, help="as of `train`")
    parser.add_argument("--rows", type=int, default=8, help="rows to probe (default: 8)")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="share of the full reward from which a response counts as accepted (default: 0.5)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KIND",
        help="a kind of response that does not count, such as negated; wrong, leak or right",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="values of the recipe")
    return parser.parse_intermixed_args(arguments)


# --- rows ----------------------------------------------------------------------------------------


def group_by_scorer(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Group rows by their verifier and data_source, by which verl's scorer chooses another."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        source = task.row.get("data_source")
        name = f"{task.server}, data_source {source}" if source else task.server
        groups.setdefault(name, []).append(task)
    return groups


def choose_rows(tasks: Sequence[Task], count: int) -> list[Task]:
    """Choose rows evenly, at least one."""
    count = min(len(tasks), max(1, count))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def list_others(task: Task, source: Sequence[Task]) -> list[str]:
    """Return different truths of other rows. source: the rows of the same scorer."""
    own = truths.list_truths(task.row)
    others: list[str] = []
    for other in source:
        text = next(iter(truths.list_truths(other.row)), "")
        if text and not any(truths.is_same_answer(text, each) for each in [*own, *others]):
            others.append(text)
        if len(others) == MAX_OTHERS:
            break
    return others


# --- run -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_verifiers(planned: Plan) -> Iterator[tuple[Sender, EventLoop]]:
    """Start the Gym servers, judges and processes of a recipe as a run does, and stop them at exit.

    Neither Ray nor a rollout engine starts. Raises ConfigError if the policy is a judge, and
    GymStartError.
    """
    from kit.run.launch import Launch, enter  # imports Ray
    from kit.run.run import Run

    recipe = planned.recipe
    inputs = planned.inputs
    run = Run(recipe)  # never entered: it only names things
    run.folder = run.folder / "probe"
    policy = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model": "policy"}
    with contextlib.ExitStack() as stack:
        launch = Launch(run, inputs, stack, policy)
        launch.logs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(isolation.use_own_tmpdir())
        for part in planned.features.parts:
            part.before_gym(launch)
        if launch.serves_policy:
            raise ConfigError(
                "gym.judges has the policy as a judge, and the probe runs no policy. Set base_url "
                "or start for this judge."
            )
        servers = recipe.gym.servers
        if servers:
            say(f"Starting the Gym servers {', '.join([*servers, *launch.gym_process_names])}")
        group = GymServers(servers, launch.logs, policy, launch.gym_processes)
        stack.callback(group.close)
        group.start()
        urls = group.wait_ready()
        loop = stack.enter_context(make_runner())
        pools = make_pools(recipe, inputs.verifiers.specs, launch.logs)
        router, _ = make_verifiers(recipe, urls, pools)
        enter(router, loop, stack)
        client: Any = None  # nothing is sampled
        yield Sender(router, make_rollout_context(recipe, client, inputs, 60.0)), loop


def audit_all(
    tasks: Sequence[Task],
    count: int,
    inputs: RunInputs,
    sender: Sender,
    loop: EventLoop,
) -> dict[str, list[RowAudit]]:
    """Probe the verifiers of `count` rows, one by one, and return {name: its rows}.

    Raises ConfigError if none of them can be probed.
    """
    audits: dict[str, list[RowAudit]] = {}
    groups = group_by_scorer(tasks)
    for name, own in groups.items():
        if loop.run(sender.router.kind(own[0].server)) in RUNS_EPISODES:
            say(
                f"WARNING     {name} is not probed, since its agent samples from the policy. Probe "
                "its resources server: remove `agent`, or set the url of that server."
            )
            continue
        chosen = choose_rows(own, -(-count // len(groups)))
        say(f"Probing {name} with {len(chosen)} rows")
        rows = [RowAudit(task, make_case(task, own, inputs)) for task in chosen]
        loop.run(audit_verifier(rows, sender))
        audits[name] = rows
    if not audits:
        raise ConfigError("No verifier of this recipe can be probed. Name rows of others.")
    return audits


def make_case(task: Task, source: Sequence[Task], inputs: RunInputs) -> Case:
    """Return what is known of a row before a response is sent."""
    markers = inputs.template.markers
    return Case(
        prompt=truths.read_prompt(task),
        choices=truths.read_choices(task.row),
        answers=truths.list_truths(task.row),
        others=list_others(task, source),
        thought=(markers.start, markers.end),
    )
