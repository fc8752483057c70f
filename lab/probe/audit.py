"""Send constructed responses to the verifiers of a recipe, and judge the rewards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import gym_client
from env import Task
from gym_client import GymError, ServerDownError
from kit.chat import responses as chat
from kit.data.reward_scale import UNKNOWN, RewardScale, are_equal, find_scale
from kit.engine.sampling import RolloutContext
from kit.errors import RunError
from kit.run.verifier_trial import rank
from kit.verify.verifiers import VerifierRouter
from lab.probe import truths
from lab.probe.responses import RIGHT, Case, make_probes

CONCURRENT = 8  # responses
SENT_TWICE = ("empty", "another answer", "negated", "the truth")  # kinds
NO_ANSWER = "x"  # a wrong answer where no other one is known


class Reply(NamedTuple):
    """The reward of a response, or the reason of the failure."""

    text: str
    reward: float | None
    reason: str = ""
    error: str = ""


class Outcome(NamedTuple):
    """What a probe of a row earned.

    expects: WRONG, LEAK or RIGHT. reply: of the probe's texts, the one with the lowest reward.
    gain: the share of the full reward, at most 1: 0 for a wrong answer, below 0 for a penalty.
    """

    kind: str
    expects: str
    reply: Reply
    gain: float

    def is_weak(self, threshold: float) -> bool:
        """Return whether a verifier accepts what deserves nothing, or rejects what is right."""
        return (self.gain >= threshold) != (self.expects == RIGHT)


@dataclass
class RowAudit:
    """All results of a row.

    replies: to the truth in all forms and to all probes. scale: of the truth's form, or that of the
    verifier if no truth is accepted. changed: two rewards of one response, if they differ.
    """

    task: Task
    case: Case
    scale: RewardScale = UNKNOWN
    replies: list[Reply] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    changed: str = ""

    @property
    def is_broken(self) -> bool:
        """Return whether no form of the truth earns more than a wrong answer.

        The verifier of a row with tools may look at calls and not at the text.
        """
        return bool(self.case.answers) and not self.case.truth and not self.task.tools


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
        parsed = await chat.parse_response(self.context.template, ids, task.tools, task.prompt_ids)
        response = gym_client.make_response(parsed.items)
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
    replies = list(itertools.chain.from_iterable(row.replies for row in rows))
    if all(reply.reward is None for reply in replies):
        raise RunError(
            f"The verifier {rows[0].task.server} gave no reward to any of {len(replies)} responses "
            f"({replies[0].reason}): {replies[0].error} Correct the verifier or its rows, then "
            "probe again."
        )
    if await sender.router.kind(rows[0].task.server) == "verify":  # a game may begin otherwise
        await asyncio.gather(*(send_again(row, sender) for row in reversed(rows)))


async def audit_row(row: RowAudit, sender: Sender) -> None:
    """Find the form of a row's truth, then send its probes."""
    row.scale = find_scale(sender.context.scales, row.task.server, row.task.row.get("data_source"))
    await find_form(row, sender)
    probes = make_probes(row.case)
    replies: list[list[Reply]] = await asyncio.gather(
        *(sender.send_all(row.task, probe.texts) for probe in probes)
    )
    for probe, some in zip(probes, replies, strict=True):
        row.replies += some
        reply = min(some, key=lambda each: rank(each.reward))
        if reply.reward is not None:
            gain = 1.0 if row.scale.is_full(reply.reward) else row.scale.share(reply.reward)
            row.outcomes.append(Outcome(probe.kind, probe.expects, reply, gain))


async def find_form(row: RowAudit, sender: Sender) -> None:
    """Set truth, form and scale: of the candidates, the first one that earns most.

    A candidate must earn more than a wrong answer in the same form.
    """
    case = row.case
    if not case.answers:
        return
    forms = truths.list_forms(case.prompt)
    pairs = list(itertools.product(case.answers, forms))
    wrong = [truths.write(form, case.wrong or NO_ANSWER) for form in forms]
    nothing = dict(zip(forms, await sender.send_all(row.task, wrong), strict=True))
    texts = [truths.write(form, answer) for answer, form in pairs]
    row.replies += await sender.send_all(row.task, texts)
    best = 0.0
    for (answer, form), reply in zip(pairs, row.replies, strict=True):
        if reply.reward is None:
            continue
        scale = RewardScale(nothing[form].reward or UNKNOWN.nothing, reply.reward)
        is_better = not row.case.truth or (scale.full > best and not are_equal([best, scale.full]))
        if scale.tells_apart and is_better:
            best = scale.full
            row.scale = scale
            row.case = replace(case, truth=answer, form=form)


async def send_again(row: RowAudit, sender: Sender) -> None:
    """Send some responses of a row again, in the opposite order, until a reward differs."""
    for first in [each.reply for each in row.outcomes if each.kind in SENT_TWICE][::-1]:
        second = await sender.send(row.task, first.text)
        if first.reward is None or second.reward is None:
            continue
        if not are_equal([first.reward, second.reward]):
            row.changed = f"{first.reward:.4g}, then {second.reward:.4g}"
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
        sent.setdefault((outcome.kind, outcome.expects), []).append(outcome)
    found = []
    for (kind, expects), outcomes in sent.items():
        weak = [each for each in outcomes if each.is_weak(threshold)]
        if weak and not {kind, expects} & set(ignored):
            found.append(Weakness(kind, expects, len(outcomes), weak))
    return sorted(found, key=lambda each: -len(each.weak) / each.applied)
