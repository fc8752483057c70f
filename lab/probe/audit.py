"""Send constructed responses to the verifiers of a recipe, and judge the rewards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gym_client
from env import Json, Task
from gym_client import GymError, ServerDownError
from kit.data.reward_scale import UNKNOWN, RewardScale, are_equal, find_scale
from kit.errors import RunError
from kit.gym.verifiers import VerifierRouter
from kit.rollout import chat
from kit.rollout.sampling import RolloutContext
from kit.runs.verifier_trial import rank
from lab.probe import truths
from lab.probe.responses import RIGHT, WRONG, Case, Probe, make_probes

BROKEN = "broken"  # the sort of what no response can be blamed for
CONCURRENT = 8  # responses
NO_ANSWER = "x"  # a wrong answer where no other one is known
RECORDED = "probe"  # the field of a row that an earlier probe wrote
SENT_TWICE = ("empty", "another answer", "negated", "the truth")  # kinds


class Reply(NamedTuple):
    """The reward of a response, or the reason of the failure."""

    text: str
    reward: float | None
    reason: str = ""
    error: str = ""


class Outcome(NamedTuple):
    """What a probe of a row earned.

    expects: WRONG, LEAK, RIGHT, or BROKEN, which is always a weakness. reply: of the probe's texts,
    the one with the lowest reward. scale: of the truth's form.
    """

    task: Task
    kind: str
    expects: str
    reply: Reply
    scale: RewardScale = UNKNOWN

    @property
    def gain(self) -> float:
        """The share of the full reward, at most 1: 0 for a wrong answer, below 0 for a penalty."""
        reward = self.reply.reward or 0.0
        return 1.0 if self.scale.is_full(reward) else self.scale.share(reward)

    def is_weak(self, threshold: float) -> bool:
        """Return whether a verifier accepts what deserves nothing, or rejects what is right."""
        return self.expects == BROKEN or (self.gain >= threshold) != (self.expects == RIGHT)


@dataclass
class RowAudit:
    """All results of a row.

    tried: the replies to the truth in all forms. scale: of the truth's form, or that of the
    verifier if no truth is accepted.
    """

    task: Task
    case: Case
    scale: RewardScale = UNKNOWN
    tried: list[Reply] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


def list_replies(rows: Sequence[RowAudit]) -> list[Reply]:
    """Return the replies to the truth in all forms and to all probes."""
    replies = []
    for row in rows:
        replies += row.tried
        replies += [each.reply for each in row.outcomes if each.expects != BROKEN]
    return replies


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


async def audit_verifier(rows: Sequence[RowAudit], sender: Sender) -> None:
    """Probe one verifier with rows, whose cases have no truth yet.

    Raises RunError if the verifier gives no reward at all, and GymError if its server is down.
    """
    await asyncio.gather(*(audit_row(row, sender) for row in rows))
    replies = list_replies(rows)
    server = rows[0].task.server
    if all(reply.reward is None for reply in replies):
        raise RunError(
            f"The verifier {server} gave no reward to any of {len(replies)} responses "
            f"({replies[0].reason}): {replies[0].error} Correct the verifier or its rows, then "
            "probe again."
        )
    if await sender.router.kind(server) == "verify":  # a game may begin in another way
        await asyncio.gather(*(send_again(row, sender) for row in reversed(rows)))


async def audit_row(row: RowAudit, sender: Sender) -> None:
    """Find the form of a row's truth, then send its probes and those that it has recorded."""
    row.scale = find_scale(sender.context.scales, row.task.server, row.task.row.get("data_source"))
    await find_form(row, sender)
    probes = [*make_probes(row.case), *read_recorded(row.task.row)]
    replies: list[list[Reply]] = await asyncio.gather(
        *(sender.send_all(row.task, probe.texts) for probe in probes)
    )
    for probe, some in zip(probes, replies, strict=True):
        reply = min(some, key=lambda each: rank(each.reward))
        row.outcomes.append(Outcome(row.task, probe.kind, probe.expects, reply, row.scale))


async def find_form(row: RowAudit, sender: Sender) -> None:
    """Set truth, form and scale: of the candidates, the first one that earns most.

    A candidate must earn more than a wrong answer in the same form. If none does, or the verifier
    fails on all of them, that is an outcome, unless the row has tools: then its verifier may look
    at calls and not at the text.
    """
    case = row.case
    if not case.answers:
        return
    forms = truths.list_forms(case.prompt)
    pairs = list(itertools.product(case.answers, forms))
    wrong = [truths.write(form, case.wrong or NO_ANSWER) for form in forms]
    nothing = dict(zip(forms, await sender.send_all(row.task, wrong), strict=True))
    texts = [truths.write(form, answer) for answer, form in pairs]
    row.tried = await sender.send_all(row.task, texts)
    best = 0.0
    for (answer, form), reply in zip(pairs, row.tried, strict=True):
        if reply.reward is None:
            continue
        scale = RewardScale(nothing[form].reward or UNKNOWN.nothing, reply.reward)
        is_better = not row.case.truth or (scale.full > best and not are_equal([best, scale.full]))
        if scale.tells_apart and is_better:
            best = scale.full
            row.scale = scale
            row.case = replace(case, truth=answer, form=form)
    if row.case.truth or row.task.tools:
        return
    scored = [reply for reply in row.tried if reply.reward is not None]
    kind = f"the truth, in any of {len(forms)} forms" if scored else "fails on the truth"
    row.outcomes.append(Outcome(row.task, kind, BROKEN, (scored or row.tried)[0]))


def read_recorded(row: Json) -> list[Probe]:
    """Return the response that an earlier probe recorded in a row, as a probe."""
    recorded: Any = row.get(RECORDED)
    if not isinstance(recorded, dict) or not isinstance(recorded.get("response"), str):
        return []
    expects = RIGHT if recorded.get("expects") == RIGHT else WRONG
    return [Probe(f"recorded: {recorded.get('kind')}", expects, (recorded["response"],))]


async def send_again(row: RowAudit, sender: Sender) -> None:
    """Send some responses of a row again, in the opposite order, until a reward differs."""
    for first in [each.reply for each in row.outcomes if each.kind in SENT_TWICE][::-1]:
        second = await sender.send(row.task, first.text)
        if first.reward is None or second.reward is None:
            continue
        if not are_equal([first.reward, second.reward]):
            both = Reply(first.text, None, f"{first.reward:.4g}, then {second.reward:.4g}")
            row.outcomes.append(Outcome(row.task, "sent a second time", BROKEN, both))
            return


class Weakness(NamedTuple):
    """A kind of response that a verifier judges wrongly.

    applied: rows that it was sent for and that got a reward. weak: those judged wrongly.
    """

    kind: str
    expects: str
    applied: int
    weak: list[Outcome]


def find_weaknesses(
    rows: Sequence[RowAudit], threshold: float, ignored: Sequence[str] = ()
) -> list[Weakness]:
    """Return the weaknesses of a verifier, the frequent ones first.

    threshold: the share of the full reward from which a response counts as accepted. ignored:
    kinds, or WRONG, LEAK or RIGHT, that do not count.
    """
    sent: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in itertools.chain.from_iterable(row.outcomes for row in rows):
        if outcome.reply.reward is not None or outcome.expects == BROKEN:
            sent.setdefault((outcome.kind, outcome.expects), []).append(outcome)
    found = []
    for (kind, expects), outcomes in sent.items():
        weak = [each for each in outcomes if each.is_weak(threshold)]
        applied = len(rows) if expects == BROKEN else len(outcomes)
        if weak and (expects == BROKEN or not {kind, expects} & set(ignored)):
            found.append(Weakness(kind, expects, applied, weak))
    return sorted(found, key=lambda each: -len(each.weak) / each.applied)
