"""The calls of a session as a tree: which call continues which.

A call continues another if its messages begin with those of the other call and its response. They
are compared by what they mean: role, text and calls. Clients change the rest: they drop or move
thoughts, make new ids, and write the JSON of arguments in another way. The prompt is then the
stored ids of the other call and the encoding of the new messages.

Protects: sampled tokens, each of which is trained exactly once however an agent branches.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gym_client import Json
from kit.chat.parsed_response import ParsedResponse
from kit.chat.thoughts import THINK, split_text
from kit.data.episode import PolicyVersions
from kit.engine.endpoint.requests import IDS, render_items

encode_sorted = json.JSONEncoder(sort_keys=True).encode


@dataclass(slots=True, eq=False)
class Call:
    """One call of the policy. It keeps only the ids that it adds to the one before."""

    parent: Call | None = None  # the call that it continues
    new_messages: list[Json] = field(default_factory=list)  # after the parent's response
    prompt_ids: array[int] = field(default_factory=lambda: array("I"))  # after the parent's ids
    prompt_length: int = 0  # with the parent's ids
    has_tools: bool = False
    is_rewritten: bool = False  # whether a message claims token ids that nothing here has sampled
    chain: Chain | None = None  # of its messages, until it is added to a tree
    sampled_ids: array[int] = field(default_factory=lambda: array("I"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    policy_versions: PolicyVersions = field(default_factory=list)
    response: ParsedResponse = field(default_factory=lambda: ParsedResponse.of_text(""))
    ended: str = "stop"  # or calls, length, stop_string
    stop_string: str | None = None
    token_fields: Json = field(default_factory=dict)  # Gym's, for the reply
    has_children: bool = False

    @property
    def path(self) -> list[Call]:
        """Return the calls from the root to this one."""
        calls: list[Call] = []
        call: Call | None = self
        while call:
            calls.append(call)
            call = call.parent
        return calls[::-1]

    @property
    def prompt(self) -> list[int]:
        """Return all ids of the prompt."""
        ids: list[int] = []
        for call in self.path[:-1]:
            ids += call.prompt_ids
            ids += call.sampled_ids
        return [*ids, *self.prompt_ids]


@dataclass
class Tree:
    """The calls of a session, in the order of the responses."""

    calls: list[Call] = field(default_factory=list)
    by_chain: dict[bytes, Call] = field(default_factory=dict)  # {hash up to the response: call}
    unseen: list[Call] = field(default_factory=list)  # roots without tools: see list_auxiliary

    def find(self, chain: Chain, messages: Sequence[Json]) -> tuple[Call | None, int]:
        """Find the call that a conversation continues -> (call, number of messages up to its end).

        The last message of the assistant must be its response.
        """
        answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        if not answers:
            return None, 0
        return self.by_chain.get(chain.digests[answers[-1]]), answers[-1] + 1

    def add(self, call: Call, claims: Sequence[Sequence[int]] = ()) -> None:
        """Add a call that has its response.

        claims: the ids of prompt and response, if the client sends them back with the response.
        """
        message = render_items(call.response.items)[-1]
        if claims:
            message[IDS] = claims
        assert call.chain
        self.by_chain[call.chain.add(message)] = call
        call.chain = None
        self.calls.append(call)
        if call.parent:
            call.parent.has_children = True
        elif not call.has_tools:
            self.unseen.append(call)

    def mark_seen(self, messages: Sequence[Json]) -> None:
        """Forget the calls in `unseen` whose text a new prompt has."""
        for call in list(self.unseen):
            text = call.response.text.strip()
            if any(text in message["content"] for message in messages):
                self.unseen.remove(call)

    def list_auxiliary(self) -> list[Call]:
        """List the calls that have no part in the episode, such as one for a title.

        They have no tools, although the agent has some, and no later prompt has their text. A
        summary for a compacted history has no tools either, but the next prompt has it.
        """
        if not any(call.has_tools for call in self.calls):
            return []
        return [call for call in self.unseen if not call.has_children]

    def list_rows(self) -> Iterator[tuple[list[Call], int]]:
        """Yield a row per leaf -> (its calls from the root, the number that other rows train).

        First the main row, which has the last response.
        """
        auxiliary = self.list_auxiliary()
        leaves = [each for each in self.calls if not each.has_children and each not in auxiliary]
        trained: set[Call] = set()
        for leaf in [*leaves[-1:], *leaves[:-1]]:
            path = leaf.path
            first = sum(call in trained for call in path)
            trained.update(path)
            yield path, first


# --- the identity of a conversation --------------------------------------------------------------


def make_key(message: Json) -> str:
    """Return what identifies a message. Clients change everything else in it."""
    text = message["content"]
    if message["role"] == "assistant":  # Gym's converter writes thoughts into the text
        split = split_text(text, THINK)
        text = split.answer + split.open_thought
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(each["name"], normalize(each["arguments"])) for each in functions]
    claims = [digest_ids(ids) for ids in message.get(IDS, [])]
    return encode_sorted([message["role"], text.strip(), calls, claims])


def normalize(arguments: str | Json) -> str | Json:
    """Return the arguments of a call without a choice of white space."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return encode_sorted(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments.strip()


def digest_ids(ids: Sequence[int]) -> str:
    """Return a hash of token ids."""
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=16).hexdigest()


class Chain:
    """The hashes of a conversation: one for each of its beginnings."""

    def __init__(self, messages: Sequence[Json], setup: bytes):
        """setup: the tools and the arguments of the chat template."""
        self.state = hashlib.blake2b(setup, digest_size=16)
        self.digests = [self.add(message) for message in messages]

    def add(self, message: Json) -> bytes:
        """Add a message, and return the hash of the conversation up to its end."""
        self.state.update(make_key(message).encode())
        return self.state.digest()
