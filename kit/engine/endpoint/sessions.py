"""Sessions: the agent of one episode, its limits, its calls and its training rows.

    sessions = Sessions()                          # of the endpoint
    session = sessions.open(context, sampling, limits)
    ... start an agent with session.key, and kill it if session.over is set ...
    session.fill(episode)                          # raises the failure, if any
    sessions.close(session)

Each episode has its own key. Its calls are a tree (tree.py), and each leaf of the tree becomes a
training row. A limit is a last answer in words, since no error of HTTP stops all agents. That
answer is not recorded, and soon after it `over` is set.

Protects: episodes from each other's agents, and a run from an agent that never stops.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import gym_client
from gym_client import GymError, Json
from kit.chat.parsed_response import ParsedResponse
from kit.chat.template import LATER_SYSTEM, SYSTEM
from kit.data.episode import Branch, Episode, append_tokens
from kit.engine.endpoint.prompts import Prompts, respond
from kit.engine.endpoint.requests import Request, RequestError
from kit.engine.endpoint.shared import find_row_room
from kit.engine.endpoint.tree import Call, Tree
from kit.engine.sampling import RolloutContext, Sampling
from kit.recipe.schema import AgentsSection

KEY_PREFIX = "agent-"
LIMIT_TEXT = "Limit reached."
GRACE_S = 2.0  # after the answer at a limit, for the agent to end by itself
MAX_STORED = 32  # conversations that a client continues by an id

logger = logging.getLogger(__name__)


class AgentSession:
    """The agent of one episode. A client has it by its key."""

    def __init__(
        self,
        context: RolloutContext,
        sampling: Sampling,
        limits: AgentsSection,
        prompts: Prompts,
        request_id: str,
    ):
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.over = asyncio.Event()  # a limit or a failure ended it: kill the agent
        self.failure: Exception | None = None  # what the episode fails with
        self.context = context
        self.sampling = sampling
        self.limits = limits
        self.max_tokens = limits.max_tokens or limits.max_rows * context.max_response_length
        self.prompts = prompts
        self.request_id = request_id or self.key
        self.tree = Tree()
        self.limit = ""  # the first limit that was reached: turns or length
        self.cut = ""  # why the last call had not the room that it needed
        self.flights: dict[bytes, Flight] = {}  # {hash of a request: its latest call}
        self.stored: dict[str, Json] = {}  # {id of a reply: its conversation, of a dialect}
        self.unused: set[str] = set()  # fields of requests that are known and ignored
        self.call_count = 0
        self.token_count = 0  # sampled
        self.retry_count = 0
        self.limited_count = 0  # calls after a limit

    # --- a call ---

    async def complete(self, request: Request) -> Call:
        """Answer a request. Raises RequestError, or another error, which ends the session."""
        self.call_count += 1
        self.unused |= request.unused
        if self.call_count > self.limits.max_calls:
            self.end("turns")
        elif self.token_count >= self.max_tokens:
            self.end("length")
        if self.limit or self.failure:
            self.limited_count += 1
            return Call(response=ParsedResponse.of_text(LIMIT_TEXT))
        if request.choice == "forced" and not self.limits.ignore_tool_choice:
            problem = "The policy decides which tools it calls. Use auto, or set"
            raise RequestError(f"{problem} agents.ignore_tool_choice=true.", "tool_choice")
        if request.messages[-1]["role"] == "assistant":
            problem = "the last message is of the assistant. Remove it."
            raise RequestError(problem, "messages")
        try:
            return await self.sample(request)
        except RequestError:
            raise
        except Exception as error:
            self.failure = self.failure or error  # the first one counts
            self.over.set()
            raise

    async def sample(self, request: Request) -> Call:
        """Sample the response to a request, and record it."""
        request.messages = adapt_system(request.messages, self.context)
        self.tree.mark_seen(request.messages)
        call = await self.prompts.build(self.context, self.tree, request)
        has_answer = any(message["role"] == "assistant" for message in request.messages)
        is_rewritten = has_answer and not call.parent and bool(self.tree.calls)
        if is_rewritten and self.limits.on_rewrite == "fail":
            problem = "the agent has rewritten the history of its conversation"
            raise GymError("not_contiguous", f"{problem}. Set agents.on_rewrite=fork.")
        try:
            room = find_row_room(call, self.context)
        except RequestError as error:
            self.cut = str(error)
            raise
        request.room = min(room, self.max_tokens - self.token_count)
        request_id = f"{self.request_id}#{self.call_count}"
        await respond(self.context, self.sampling, request_id, request, call, call.prompt)
        self.token_count += len(call.sampled_ids)
        self.cut = "the response used all tokens" if call.ended == "length" else ""
        self.tree.add(call)
        return call

    def store(self, reply_id: str, conversation: Json) -> None:
        """Keep a conversation that the client may continue by the id of a reply."""
        self.stored[reply_id] = conversation
        if len(self.stored) > MAX_STORED:
            self.stored.pop(next(iter(self.stored)))

    def end(self, limit: str) -> None:
        """End the session at a limit: soon, since the agent may end by itself."""
        if not self.limit:
            self.limit = limit
            asyncio.get_running_loop().call_later(GRACE_S, self.over.set)

    # --- its rows ---

    def fill(self, episode: Episode) -> None:
        """Fill an empty episode with the rows.

        Raises the failure, or GymError('no_calls' | 'prompt_too_long').
        """
        if self.failure:
            raise self.failure
        rows = list(self.tree.list_rows())
        if not rows:
            if self.cut:
                raise GymError("prompt_too_long", self.cut)
            raise GymError("no_calls", "the agent made no call of the policy. Read its output.")
        row_count = len(rows)
        if row_count > self.limits.max_rows:
            problem = f"an episode has {row_count} rows, over agents.max_rows"
            logger.warning("%s=%d. Its main row is used alone.", problem, self.limits.max_rows)
        if row_count > self.limits.max_rows or self.limits.branches == "main":
            rows = rows[:1]
        (main_path, _), *others = rows
        add_row(episode, main_path, 0)
        episode.responses += [call.response for call in main_path]
        for path, first in others:
            branch = Branch([])
            add_row(branch, path, first)
            episode.branches.append(branch)
        is_cut = bool(self.cut) or main_path[-1].ended == "length"
        episode.ended = self.limit or ("length" if is_cut else "stop")
        episode.measures |= {
            "agent_calls": float(self.call_count),
            "agent_rows_dropped": float(row_count - len(rows)),
            "agent_auxiliary": float(len(self.tree.list_auxiliary())),
            "agent_retries": float(self.retry_count),
            "agent_limited": float(self.limited_count),
            "agent_ignored_fields": float(len(self.unused)),
        }


@dataclass
class Flight:
    """A call, with the connection that waits for its answer."""

    task: asyncio.Future[Json]
    transport: asyncio.BaseTransport | None = None
    is_answered: bool = False

    @property
    def is_lost(self) -> bool:
        """Return whether the client left before it had the answer."""
        is_closed = self.transport is None or self.transport.is_closing()
        return is_closed and not self.is_answered


class Sessions:
    """The sessions of an endpoint."""

    def __init__(self) -> None:
        self.prompts = Prompts()
        self.by_key: dict[str, AgentSession] = {}

    def open(
        self,
        context: RolloutContext,
        sampling: Sampling,
        limits: AgentsSection,
        request_id: str = "",
    ) -> AgentSession:
        """Open the session of an episode. request_id: for the rollout engine, of the episode."""
        session = AgentSession(context, sampling, limits, self.prompts, request_id)
        self.by_key[session.key] = session
        return session

    def close(self, session: AgentSession) -> None:
        """Refuse the key of a session from now on, and end its calls.

        A killed agent's call would go on after the next update of the weights.
        """
        self.by_key.pop(session.key, None)
        for flight in session.flights.values():
            flight.task.cancel()


def adapt_system(messages: Sequence[Json], context: RolloutContext) -> list[Json]:
    """Return messages whose system messages are of the user where the template has none."""
    failures = context.template.failures
    adapted = []
    for place, message in enumerate(messages):
        part = LATER_SYSTEM if place else SYSTEM
        is_moved = message["role"] == "system" and part in failures
        adapted.append({**message, "role": "user"} if is_moved else message)
    return adapted


def add_row(row: Episode | Branch, path: Sequence[Call], first: int) -> None:
    """Fill a row: the calls before `first`, and that one's prompt, are its prompt."""
    row.prompt_ids = path[first].prompt
    for number, call in enumerate(path[first:]):
        if number:
            row.output += [make_item(message) for message in call.new_messages]
            append_tokens(row, list(call.prompt_ids))
        row.output += call.response.items
        append_tokens(row, list(call.sampled_ids), list(call.log_probs), call.policy_versions)


def make_item(message: Json) -> Json:
    """Return a chat message as a Responses item."""
    if message["role"] == "tool":
        return gym_client.function_call_output(message["tool_call_id"], message["content"])
    return {"type": "message", "role": message["role"], "content": message["content"]}
