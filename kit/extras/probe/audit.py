"""Send constructed responses to the verifiers of a recipe, and judge the rewards."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gym_client
from env import Json, Task
from gym_client import RUNS_EPISODES, GymError, ServerDownError
from kit.data.reward_scale import UNKNOWN, RewardScale, are_equal, find_scale
from kit.errors import RunError
from kit.extras.probe import truths
from kit.extras.probe.responses import LEAK, RIGHT, WRONG, Case, Probe, make_probes
from kit.gym.verifiers import VerifierRouter
from kit.rollout import chat
from kit.rollout.sampling import RolloutContext

CONCURRENT = 8  # responses
NO_ANSWER = "x"  # a wrong answer where no other one is known
RECORDED = "probe"  # the field of a row that an earlier probe wrote


class Reply(NamedTuple):
    """The reward of a response, or the reason of the failure."""

    text: str
    reward: float | None
    reason: str = ""
    error: str = ""


class Outcome(NamedTuple):
    """A probe of a row, and what it earned.

    gain: the share of the full reward, at most 1: 0 for what a wrong answer in the same format
    earns, below 0 for a penalty, None if the verifier failed.
    """

    row_id: str
    probe: Probe
    reply: Reply  # the one with the lowest reward
    gain: float | None


class Change(NamedTuple):
    """A response whose second reward differs from its first one."""

    row_id: str
    first: Reply
    second: Reply


@dataclass
class RowAudit:
    """All results of a row.

    tried: the replies to the truth in all formats. wrong: those to a wrong answer, by format.
    scale: of the truth's format, or that of the verifier if no truth is accepted.
    """

    task: Task
    case: Case
    tried: list[Reply] = field(default_factory=list)
    wrong: dict[str, Reply] = field(default_factory=dict)
    scale: RewardScale = UNKNOWN
    outcomes: list[Outcome] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def knows_truth(self) -> bool:
        """Whether the row has a text that could be its truth."""
        return bool(self.tried)

    @property
    def is_satisfied(self) -> bool:
        """Whether the truth earned a reward in one of the formats."""
        return bool(self.case.truth)

    @property
    def fails_on_truth(self) -> bool:
        """Whether the verifier fails on the truth in all formats.

        Not if the row has tools: its verifier may look at calls and not at the text.
        """
        failed = [reply.reward is None for reply in self.tried]
        return bool(failed) and all(failed) and not self.task.tools


@dataclass
class ServerAudit:
    """All results of a verifier. skipped: why it cannot be probed."""

    name: str
    rows: list[RowAudit] = field(default_factory=list)
    skipped: str = ""

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all rows."""
        return list(itertools.chain.from_iterable(row.outcomes for row in self.rows))

    @property
    def replies(self) -> list[Reply]:
        """All replies."""
        tried = itertools.chain.from_iterable(
            [*row.tried, *row.wrong.values()] for row in self.rows
        )
        return [*tried, *(outcome.reply for outcome in self.outcomes)]


class Sender:
    """Sends responses to the verifiers as a run does: as token ids, parsed and then verified."""

    def __init__(self, router: VerifierRouter, context: RolloutContext):
        self.router = router
        self.context = context
        self.slots = asyncio.Semaphore(CONCURRENT)
        self.stop_id = min(context.stop_ids)

    async def send(self, task: Task, text: str) -> Reply:
        """Verify one response. Raises ServerDownError if the verifier's server is lost."""
        async with self.slots:
            try:
                return Reply(text, await self.verify(task, text))
            except ServerDownError:
                raise
            except GymError as error:
                return Reply(text, None, error.reason, str(error))

    async def verify(self, task: Task, text: str) -> float:
        """Return the reward of a response; on a server with turns, of the first turn."""
        template = self.context.template
        written = template.write_response(task.prompt_ids, text)
        ids = [*template.encode_text(written), self.stop_id]
        parsed = await chat.parse_response(self.context, ids, task.tools, task.prompt_ids)
        response = gym_client.response(parsed.items)
        async with self.router.session(task.server, task.row) as session:
            if session.kind == "step":
                return (await session.step(response, parsed)).reward
            return (await session.verify(response, parsed)).reward

    async def send_all(self, task: Task, texts: Iterable[str]) -> list[Reply]:
        """Verify several responses, concurrently."""
        return await asyncio.gather(*(self.send(task, text) for text in texts))


# --- a verifier ----------------------------------------------------------------------------------


async def audit_server(
    name: str,
    server: str,
    tasks: Sequence[Task],
    sender: Sender,
    make_case: Callable[[Task], Case],
) -> ServerAudit:
    """Probe one verifier with the rows of `tasks`. name: for the report.

    make_case: makes the case of a row, still without truth and format. Raises RunError if the
    verifier gives no reward at all, and GymError if its server is down.
    """
    audit = ServerAudit(name)
    kind = await sender.router.kind(server)
    if kind in RUNS_EPISODES:
        audit.skipped = (
            "its agent runs the turns and samples from the policy, so no constructed response can "
            "be sent. Probe its resources server: remove `agent`, or set the url of that server."
        )
        return audit
    audit.rows = [RowAudit(task, make_case(task)) for task in tasks]
    await asyncio.gather(*(try_formats(row, sender) for row in audit.rows))
    choose_formats(audit.rows)
    await asyncio.gather(*(send_probes(row, sender) for row in audit.rows))
    check_any_reward(audit)
    if kind == "verify":  # a game may begin in another way each time
        await asyncio.gather(*(repeat(row, sender) for row in reversed(audit.rows)))
    return audit


async def try_formats(row: RowAudit, sender: Sender) -> None:
    """Send the candidates of a row's truth in all formats."""
    row.scale = find_scale(sender.context.scales, row.task.server, row.task.row.get("data_source"))
    formats = truths.list_formats(row.case.prompt)
    pairs = itertools.product(row.case.answers, formats)
    written = dict.fromkeys(truths.write(format_, text) for text, format_ in pairs)
    row.tried = await sender.send_all(row.task, written)
    if row.tried:
        wrong = [truths.write(format_, row.case.wrong or NO_ANSWER) for format_ in formats]
        replies = await sender.send_all(row.task, wrong)
        row.wrong = dict(zip(formats, replies, strict=True))


class Accepted(NamedTuple):
    """A truth and its format, with its reward and that of a wrong answer."""

    text: str
    format: str
    scale: RewardScale


def list_accepted(row: RowAudit) -> list[Accepted]:
    """Return the truths and formats that earn most, in the order in which they were tried."""
    rewards = {reply.text: reply.reward for reply in row.tried}
    accepted = []
    for text, format_ in itertools.product(row.case.answers, row.wrong):
        reward = rewards.get(truths.write(format_, text))
        if reward is None:
            continue
        wrong = row.wrong[format_].reward
        scale = RewardScale(UNKNOWN.nothing if wrong is None else wrong, reward)
        if scale.tells_apart:
            accepted.append(Accepted(text, format_, scale))
    best = max((each.scale.full for each in accepted), default=0.0)
    return [each for each in accepted if are_equal([each.scale.full, best])]


def choose_formats(rows: Sequence[RowAudit]) -> None:
    """Set truth, format and full reward of each row whose truth is accepted.

    The format is the one that earns most in most rows, or another one where only that earns most.
    """
    accepted = [list_accepted(row) for row in rows]
    counts = Counter[str]()
    for each in accepted:
        counts.update({one.format for one in each})
    for row, choices in zip(rows, accepted, strict=True):
        if not choices:
            continue
        demanded = truths.find_demanded_format(row.case.prompt)
        uses = [counts[one.format] for one in choices]
        best = choices[uses.index(max(uses))]
        best = next((one for one in choices if one.format == demanded), best)
        row.case = replace(row.case, truth=best.text, format=best.format)
        row.scale = best.scale


async def send_probes(row: RowAudit, sender: Sender) -> None:
    """Send the probes of a row, and the responses that an earlier probe recorded in it."""
    probes = [*make_probes(row.case), *read_recorded(row.task.row)]
    replies: list[list[Reply]] = await asyncio.gather(
        *(sender.send_all(row.task, probe.texts) for probe in probes)
    )
    for probe, some in zip(probes, replies, strict=True):
        reply = pick_lowest(some)
        gain = None if reply.reward is None else min(1.0, row.scale.share(reply.reward))
        row.outcomes.append(Outcome(row.task.row_id, probe, reply, gain))


def pick_lowest(replies: Sequence[Reply]) -> Reply:
    """Return a reply that failed, or else the one with the lowest reward."""
    failed = [reply for reply in replies if reply.reward is None]
    rewards = [reply.reward or 0.0 for reply in replies]
    return failed[0] if failed else replies[rewards.index(min(rewards))]


def read_recorded(row: Json) -> list[Probe]:
    """Return the response that an earlier probe recorded in a row, as a probe."""
    recorded: Any = row.get(RECORDED)
    if not isinstance(recorded, dict) or not isinstance(recorded.get("response"), str):
        return []
    expects = RIGHT if recorded.get("expects") == RIGHT else WRONG
    kind = f"recorded: {recorded.get('kind')}"
    return [Probe(kind, expects, (recorded["response"],))]


def check_any_reward(audit: ServerAudit) -> None:
    """Raise RunError if a verifier failed on every response."""
    replies = audit.replies
    if any(reply.reward is not None for reply in replies):
        return
    first = replies[0]
    raise RunError(
        f"The verifier {audit.name} gave no reward to any of {len(replies)} responses "
        f"({first.reason}): {first.error} Correct the verifier or its rows, then probe again."
    )


async def repeat(row: RowAudit, sender: Sender) -> None:
    """Send some responses of a row again, in the opposite order, one after the other."""
    chosen: dict[str, Reply] = {}
    for outcome in row.outcomes:
        if outcome.probe.kind in ("empty", "another answer", "negated", "the truth"):
            chosen[outcome.reply.text] = outcome.reply
    for text, first in reversed(chosen.items()):
        second = await sender.send(row.task, text)
        if first.reward is None or second.reward is None:
            continue
        if not are_equal([first.reward, second.reward]):
            row.changes.append(Change(row.task.row_id, first, second))


# --- judge ---------------------------------------------------------------------------------------


class Weakness(NamedTuple):
    """A kind of response that a verifier judges wrongly.

    applied: rows that it was sent for and that got a reward. weak: those judged wrongly.
    """

    kind: str
    expects: str
    applied: int
    weak: list[Outcome]


def find_weaknesses(
    audit: ServerAudit, threshold: float, ignored: Sequence[str] = ()
) -> list[Weakness]:
    """Return the weaknesses of a verifier: those that need no truth first, then the frequent ones.

    threshold: the share of the full reward from which a response counts as accepted. ignored:
    kinds, or WRONG, LEAK or RIGHT, that do not count.
    """
    by_kind: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in audit.outcomes:
        if outcome.gain is not None:
            by_kind.setdefault((outcome.probe.kind, outcome.probe.expects), []).append(outcome)
    found = []
    for (kind, expects), outcomes in by_kind.items():
        weak = [each for each in outcomes if is_wrong(each, threshold)]
        if weak and kind not in ignored and expects not in ignored:
            found.append(Weakness(kind, expects, len(outcomes), weak))
    return sorted(found, key=rank)


def rank(weakness: Weakness) -> tuple[int, float]:
    """Return the sort key of a weakness."""
    share = len(weakness.weak) / weakness.applied
    return ((WRONG, LEAK, RIGHT).index(weakness.expects), -share)


def is_wrong(outcome: Outcome, threshold: float) -> bool:
    """Return whether a verifier accepts what deserves nothing, or rejects what is right."""
    assert outcome.gain is not None, outcome
    return (outcome.gain >= threshold) != (outcome.probe.expects == RIGHT)


def find_unsatisfied(audit: ServerAudit) -> list[RowAudit]:
    """Return the rows whose truth earns nothing in any format, not counting failures.

    As in `fails_on_truth`, not those with tools.
    """
    rows = []
    for row in audit.rows:
        has_reward = any(reply.reward is not None for reply in row.tried)
        if has_reward and not row.is_satisfied and not row.task.tools:
            rows.append(row)
    return rows
