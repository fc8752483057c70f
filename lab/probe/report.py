"""Describe the results of a probe as tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kit.errors import remove_control_characters
from kit.run.console import count_nouns
from lab.probe import truths
from lab.probe.audit import RowAudit, Weakness
from lab.probe.responses import LEAK, RIGHT, WRONG

TITLES = {
    WRONG: "Rewarded, but deserves nothing: a wrong answer, or none (wrong)",
    LEAK: "Rewarded, but deserves nothing, although it contains the answer (leak)",
    RIGHT: "Not rewarded, but right (right)",
}
MAX_SHOWN = 60  # characters of an example


def build_report(name: str, rows: Sequence[RowAudit], weaknesses: Sequence[Weakness]) -> Group:
    """Build what the console shows of a verifier."""
    parts: list[Text | Table] = [Text(f"\n{name}"), *map(Text, describe(rows))]
    for expects, title in TITLES.items():
        table = Table("  response", "rows", "reward", "example", box=None, header_style="dim")
        for weakness in weaknesses:
            if weakness.expects == expects:
                add_row(table, weakness)
        if table.row_count:
            parts += [Text(f"  {title}", style="bold"), table]
    return Group(*parts)


def add_row(table: Table, weakness: Weakness) -> None:
    """Add a weakness to a table, with its clearest example."""
    # of a right answer, the one with the lowest reward
    sign = 1 if weakness.expects == RIGHT else -1
    reply = min(weakness.weak, key=lambda outcome: sign * outcome.gain).reply
    example = remove_control_characters(reply.text)
    if len(example) > MAX_SHOWN:
        half = MAX_SHOWN // 2 - 2
        example = f"{example[:half]}...{example[-half:]}"
    counted = f"{len(weakness.weak)} of {weakness.applied}"
    table.add_row(f"  {weakness.kind}", counted, f"{reply.reward:.3g}", escape(repr(example)))


def describe(rows: Sequence[RowAudit]) -> Iterator[str]:
    """Yield the lines above the tables of a verifier."""
    replies = list(itertools.chain.from_iterable(row.replies for row in rows))
    rewards = [reply.reward for reply in replies if reply.reward is not None]
    count = f"{count_nouns(len(rows), 'row')}, {len(replies)} responses"
    yield f"    {count}, rewards from {min(rewards):g} to {max(rewards):g}"
    forms = Counter(row.case.form for row in rows if row.case.truth)
    for form, number in forms.most_common():
        shown = truths.write(form, "X").replace("\n", "\\n")
        yield f"    the truth earns the full reward as {shown}, for {count_nouns(number, 'row')}"
    broken = sum(row.is_broken for row in rows)
    if broken:
        broken_rows = count_nouns(broken, "row")
        yield f"    no form of the truth earns more than a wrong answer, for {broken_rows}"
    changed = [row.changed for row in rows if row.changed]
    if changed:
        changed_rows = count_nouns(len(changed), "row")
        yield f"    one response got two rewards ({changed[0]}), for {changed_rows}"
    unknown = sum(not row.case.answers for row in rows)
    if unknown:
        rows_without = count_nouns(unknown, "row")
        yield f"    only responses without a truth were sent for {rows_without} without a known one"
    failed = Counter(reply.reason for reply in replies if reply.error)
    if failed:
        reasons = ", ".join(f"{number} {reason}" for reason, number in failed.most_common())
        yield f"    {failed.total()} responses got no reward, and count as neither: {reasons}"
