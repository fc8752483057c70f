"""Describe the results of a probe: as tables, as JSON, as a file of rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from env import Json
from kit.errors import remove_control_characters
from kit.extras.probe import truths
from kit.extras.probe.audit import (
    RECORDED,
    Outcome,
    Reply,
    RowAudit,
    ServerAudit,
    Weakness,
    find_unsatisfied,
    find_weaknesses,
)
from kit.extras.probe.responses import LEAK, RIGHT, WRONG
from kit.runs.console import count_nouns

TITLES = {
    WRONG: "Rewarded, but deserves nothing: a wrong answer, or none (wrong)",
    LEAK: "Rewarded, but deserves nothing, although it contains the answer (leak)",
    RIGHT: "Not rewarded, but right (right)",
}
MAX_SHOWN = 60  # characters of an example
MAX_LISTED = 3  # failures


class Judged(NamedTuple):
    """A verifier with its weaknesses."""

    audit: ServerAudit
    weaknesses: list[Weakness]
    unsatisfied: list[RowAudit]
    failing: list[RowAudit]

    @property
    def is_weak(self) -> bool:
        """Whether anything was found."""
        changes = any(row.changes for row in self.audit.rows)
        return bool(self.weaknesses or self.unsatisfied or self.failing or changes)


def summarize(judged: Sequence[Judged]) -> str:
    """Return the last line: all that makes the exit status 3."""
    count = sum(len(each.weaknesses) for each in judged)
    text = f"{count_nouns(count, 'kind')} of weakness in {count_nouns(len(judged), 'verifier')}"
    rows = sum(len(each.unsatisfied) for each in judged)
    if rows:
        text += f", {count_nouns(rows, 'row')} whose truth earns nothing"
    failing = sum(len(each.failing) for each in judged)
    if failing:
        text += f", {count_nouns(failing, 'row')} on whose truth the verifier fails"
    audited = itertools.chain.from_iterable(each.audit.rows for each in judged)
    changes = sum(len(row.changes) for row in audited)
    if changes:
        text += f", {count_nouns(changes, 'response')} with two rewards"
    return text


def judge(audit: ServerAudit, threshold: float, ignored: Sequence[str]) -> Judged:
    """Find the weaknesses of a verifier. ignored: kinds that do not count."""
    weaknesses = find_weaknesses(audit, threshold, ignored)
    failing = [row for row in audit.rows if row.fails_on_truth]
    return Judged(audit, weaknesses, find_unsatisfied(audit), failing)


# --- text ----------------------------------------------------------------------------------------


def build_report(judged: Judged) -> Group:
    """Build what the console shows of a verifier: the most important result first."""
    parts: list[Text | Table] = [Text(line) for line in describe(judged)]
    for expects, title in TITLES.items():
        weaknesses = [each for each in judged.weaknesses if each.expects == expects]
        if weaknesses:
            parts += [Text(f"  {title}", style="bold"), build_table(weaknesses)]
    return Group(*parts)


def describe(judged: Judged) -> Iterator[str]:
    """Yield the lines above the tables of a verifier."""
    audit = judged.audit
    yield f"\n{audit.name}"
    if audit.skipped:
        yield f"    not probed: {audit.skipped}"
        return
    yield from describe_unsatisfied(judged)
    yield from describe_failing(judged)
    rewards = [reply.reward for reply in audit.replies if reply.reward is not None]
    count = f"{count_nouns(len(audit.rows), 'row')}, {len(audit.replies)} responses"
    yield f"    {count}, rewards from {min(rewards):g} to {max(rewards):g}"
    yield from describe_truths(audit)
    yield from describe_changes(audit)
    failed = Counter(
        f"{reply.reason} for {kind}" for kind, reply in list_replies(audit) if reply.reward is None
    )
    if failed:
        most = ", ".join(f"{n} {reason}" for reason, n in failed.most_common(MAX_LISTED))
        yield f"    {failed.total()} responses got no reward, and count as neither: {most}"
    if not judged.is_weak:
        yield "    no weakness found"


def describe_unsatisfied(judged: Judged) -> Iterator[str]:
    """Yield a line if the truth of some rows earns nothing."""
    rows = judged.unsatisfied
    if not rows:
        return
    first = rows[0]
    texts = [reply.text for reply in first.tried if reply.reward is not None]
    subject = (
        "Rewards stay flat" if len(rows) == len(judged.audit.rows) else "There, they stay flat"
    )
    yield (
        "    The verifier cannot be satisfied: the truth earns no more than a wrong answer in any "
        f"of {len(texts)} forms, for {len(rows)} of {len(judged.audit.rows)} rows, such as "
        f"{shorten(texts[0])} for {first.task.row_id}. {subject}. Read which format the verifier "
        "requires."
    )


def describe_failing(judged: Judged) -> Iterator[str]:
    """Yield a line if the verifier fails on the truth of some rows."""
    rows = judged.failing
    if rows:
        first = rows[0].tried[0]
        yield (
            f"    The verifier fails on the truth of {len(rows)} of {len(judged.audit.rows)} rows "
            f"in all forms, such as {shorten(first.text)} for {rows[0].task.row_id} "
            f"({first.reason}): {shorten(first.error)}. Correct the verifier or these rows."
        )


def list_replies(audit: ServerAudit) -> Iterator[tuple[str, Reply]]:
    """Yield each reply with the kind of its response, without rows whose truth always fails."""
    for row in audit.rows:
        for reply in row.tried if not row.fails_on_truth else []:
            yield "the truth in some form", reply
        for outcome in row.outcomes:
            yield outcome.probe.kind, outcome.reply


def describe_truths(audit: ServerAudit) -> Iterator[str]:
    """Yield lines about the formats in which the truth is accepted."""
    formats = Counter(row.case.format for row in audit.rows if row.is_satisfied)
    for format_, count in formats.most_common():
        shown = truths.write(format_, "X").replace("\n", "\\n")
        yield f"    the truth earns the full reward as {shown}, for {count_nouns(count, 'row')}"
    unknown = sum(not row.knows_truth for row in audit.rows)
    if unknown:
        have = "has" if unknown == 1 else "have"
        rows = f"{count_nouns(unknown, 'row')} {have}"
        yield f"    {rows} no known truth: only responses without one were sent"


def describe_changes(audit: ServerAudit) -> Iterator[str]:
    """Yield a line if the same response got two rewards."""
    changes = list(itertools.chain.from_iterable(row.changes for row in audit.rows))
    if changes:
        first = changes[0]
        yield (
            f"    {len(changes)} responses got another reward the second time, such as "
            f"{shorten(first.first.text)}: {first.first.reward:g}, then {first.second.reward:g}"
        )


def build_table(weaknesses: Sequence[Weakness]) -> Table:
    """Build the table of weaknesses of one sort, with an example each."""
    table = Table("  response", "rows", "reward", "example", box=None, header_style="dim")
    for weakness in weaknesses:
        example = pick_example(weakness)
        counted = f"{len(weakness.weak)} of {weakness.applied}"
        reward = f"{example.reply.reward:.3g}"
        table.add_row(f"  {weakness.kind}", counted, reward, escape(shorten(example.reply.text)))
    return table


def pick_example(weakness: Weakness) -> Outcome:
    """Return the clearest example: of a right answer the one with the lowest reward."""
    gains = [outcome.gain or 0.0 for outcome in weakness.weak]
    clearest = min(gains) if weakness.expects == RIGHT else max(gains)
    return weakness.weak[gains.index(clearest)]


def shorten(text: str) -> str:
    """Return a text in quotes on one line, cut in the middle."""
    shown = remove_control_characters(text)
    if len(shown) > MAX_SHOWN:
        half = MAX_SHOWN // 2 - 2
        shown = f"{shown[:half]}...{shown[-half:]}"
    return repr(shown)


# --- files ---------------------------------------------------------------------------------------


def list_exploits(judged: Judged) -> Iterator[Json]:
    """Yield the row of each wrongly judged response, with the response in the field `probe`.

    A later probe of these rows sends the response again.
    """
    rows = {row.task.row_id: row for row in judged.audit.rows}
    for weakness in judged.weaknesses:
        for outcome in weakness.weak:
            recorded = {
                "kind": weakness.kind.removeprefix("recorded: "),
                "expects": RIGHT if weakness.expects == RIGHT else WRONG,
                "response": outcome.reply.text,
                "reward": outcome.reply.reward,
                "full_reward": rows[outcome.row_id].scale.full,
                "row": outcome.row_id,
            }
            yield {**rows[outcome.row_id].task.row, RECORDED: recorded}


def to_json(judged: Judged) -> Json:
    """Return the results of a verifier as plain data."""
    audit = judged.audit
    return {
        "verifier": audit.name,
        "skipped": audit.skipped,
        "rows": len(audit.rows),
        "rows_with_a_rewarded_truth": sum(row.is_satisfied for row in audit.rows),
        "rows_with_an_unrewarded_truth": [row.task.row_id for row in judged.unsatisfied],
        "responses": len(audit.replies),
        "rows_with_a_failing_truth": [row.task.row_id for row in judged.failing],
        "failures": sum(reply.reward is None for reply in audit.replies),
        "changed_rewards": sum(len(row.changes) for row in audit.rows),
        "weaknesses": [weakness_to_json(each) for each in judged.weaknesses],
        "probes": dict(Counter(outcome.probe.kind for outcome in audit.outcomes)),
    }


def weakness_to_json(weakness: Weakness) -> Json:
    """Return a weakness as plain data."""
    example = pick_example(weakness)
    return {
        "kind": weakness.kind,
        "expects": weakness.expects,
        "rows": weakness.applied,
        "weak": len(weakness.weak),
        "example": {
            "row": example.row_id,
            "response": example.reply.text,
            "reward": example.reply.reward,
        },
    }
