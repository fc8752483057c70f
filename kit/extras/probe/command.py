"""The command `probe`: can the verifier of a recipe be fooled, and does it accept right answers?

python algorithm.py probe --config math_cpu --config cpu [--rows 8] [--output exploits.jsonl]

It starts the verifiers of the recipe as a run does, and no model. Then it sends them constructed
responses: some deserve nothing, the others are right. Exit status: 0 if no weakness was found, 3 if
one was, 1 for an error, such as a verifier that is down.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import env
from env import Task
from kit.errors import ConfigError
from kit.extras.probe import report, truths
from kit.extras.probe.audit import Sender, ServerAudit, audit_server
from kit.extras.probe.responses import Case
from kit.extras.probe.verifiers import Started, running_verifiers
from kit.runs import files
from kit.runs.cli import plan
from kit.runs.console import console, say

if TYPE_CHECKING:
    from kit.rollout.inputs import RunInputs

WEAK = 3  # exit status
MAX_OTHERS = 12  # truths of other rows
MAX_SPECIAL = 12  # special tokens in one response


def main(arguments: Sequence[str]) -> None:
    """Run the command, and exit with WEAK if a weakness was found.

    Raises ConfigError, RunError, GymStartError and GymError if the verifiers cannot be probed.
    """
    args = parse_arguments(arguments)
    began = time.monotonic()
    # `rollout` reads the rows of `train`, and needs neither a whole batch nor a checkpoint
    planned = plan(args.config, args.words, "rollout")
    tasks = planned.inputs.train
    chosen = choose_rows(tasks, args.rows)
    with running_verifiers(planned.recipe, planned.inputs) as started:
        audits = audit_all(chosen, tasks, started, planned.inputs)
    check_ignored(args.ignore, audits)
    judged = [report.judge(audit, args.threshold, args.ignore) for audit in audits]
    for each in judged:
        console.print(report.build_report(each), highlight=False)
    say(f"\n{report.summarize(judged)} ({time.monotonic() - began:.0f} s)")
    write_files(args, judged)
    if not any(audit.rows for audit in audits):
        raise ConfigError("No verifier of this recipe can be probed. Name rows of others.")
    if any(each.is_weak for each in judged):
        sys.exit(WEAK)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError."""
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
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="rows with the exploits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument("words", nargs="*", metavar="key=value", help="values of the recipe")
    args = parser.parse_intermixed_args(arguments)
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows} is no number of rows. Set 1 or more.")
    if not 0 < args.threshold <= 1:
        raise ConfigError(f"--threshold {args.threshold:g} is no share. Set a number up to 1.")
    return args


def check_ignored(ignored: Sequence[str], audits: Sequence[ServerAudit]) -> None:
    """Check that --ignore names kinds of responses that were sent. Raises ConfigError."""
    outcomes = itertools.chain.from_iterable(audit.outcomes for audit in audits)
    kinds = {outcome.probe.kind for outcome in outcomes}
    for name in ignored:
        if name not in {*kinds, *report.TITLES}:
            raise ConfigError(
                f"--ignore {name} is none of {', '.join([*report.TITLES, *sorted(kinds)])}."
            )


def write_files(args: argparse.Namespace, judged: Sequence[report.Judged]) -> None:
    """Write the files that the arguments name. Raises RunError if one cannot be written."""
    if args.output:
        rows = itertools.chain.from_iterable(report.list_exploits(each) for each in judged)
        with files.explain_write_errors(args.output):
            count = env.write_rows(args.output, rows)
        say(f"{args.output}: {count} rows with a response that is judged wrongly")
    if args.json:
        results = [report.to_json(each) for each in judged]
        with files.explain_write_errors(args.json):
            args.json.write_text(json.dumps(results, indent=1) + "\n")


# --- rows ----------------------------------------------------------------------------------------


def choose_rows(tasks: Sequence[Task], count: int) -> list[Task]:
    """Choose rows in turn from all data sets, and evenly within each."""
    groups = group_by_source(tasks)
    spread = []
    for members in groups.values():
        share = min(len(members), -(-count // len(groups)))
        spread.append([members[n * len(members) // share] for n in range(share)])
    turns = itertools.zip_longest(*spread)
    return [task for task in itertools.chain.from_iterable(turns) if task][:count]


def group_by_source(tasks: Sequence[Task]) -> dict[tuple[str, str], list[Task]]:
    """Group tasks by their verifier and their data set."""
    groups: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.server, name_source(task)), []).append(task)
    return groups


def name_source(task: Task) -> str:
    """Return the name of a row's data set: its own name for it, or its file."""
    metadata: Any = task.row.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    return str(name or task.row.get("data_source") or task.file)


# --- run -----------------------------------------------------------------------------------------


def audit_all(
    chosen: Sequence[Task], tasks: Sequence[Task], started: Started, inputs: RunInputs
) -> list[ServerAudit]:
    """Probe the verifiers of the chosen rows, one after the other."""
    sender = Sender(started.router, started.context)
    sources = group_by_source(tasks)
    special = write_special_tokens(inputs)
    markers = inputs.template.markers

    def make_case(task: Task) -> Case:
        """Return what is known of a row before a response is sent."""
        return Case(
            prompt=truths.read_prompt(task),
            choices=truths.read_choices(task.row),
            answers=truths.list_truths(task.row),
            others=list_others(task, sources[task.server, name_source(task)]),
            schema=truths.fill_schema(task.row),
            special=special,
            thought=(markers.start, markers.end),
        )

    audits = []
    for name, own in group_by_scorer(chosen).items():
        say(f"Probing {name} with {len(own)} rows")
        audit = audit_server(name, own[0].server, own, sender, make_case)
        audits.append(started.loop.run(audit))
    return audits


def group_by_scorer(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Group tasks by their verifier, and by data_source, by which verl's scorer chooses another."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        source = task.row.get("data_source")
        name = f"{task.server}, data_source {source}" if source else task.server
        groups.setdefault(name, []).append(task)
    return groups


def list_others(task: Task, source: Sequence[Task]) -> list[str]:
    """Return different truths of other rows. source: the rows of the same data set."""
    own = truths.list_truths(task.row)
    others: list[str] = []
    for other in source:
        for text in truths.list_truths(other.row)[:1]:
            known = [*own, *others]
            if not any(truths.is_same_answer(text, each) for each in known):
                others.append(text)
        if len(others) == MAX_OTHERS:
            break
    return others


def write_special_tokens(inputs: RunInputs) -> str:
    """Return the text of the special tokens that do not end a response."""
    added: Mapping[int, object] = getattr(inputs.tokenizer, "added_tokens_decoder", {})
    tokens = [str(token) for token_id, token in added.items() if token_id not in inputs.stop_ids]
    return "".join(tokens[:MAX_SPECIAL])
