"""The calls of a session as a tree: which call continues which.

A call continues another if its messages begin with those of the other call and its response. They
are compared by what they mean: role, text and calls. Clients change the rest: they drop or move
thoughts, make new ids, and write the JSON of arguments in another way. The prompt is then the
stored ids of the other call and the encoding of the new messages.

Protects: sampled tokens, each of which is trained exactly once however an agent branches.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gym_client import Json
from kit.chat.parsed_response import ParsedResponse
from kit.chat.thoughts import THINK, split_text
from kit.data.episode import PolicyVersions
from kit.engine.endpoint.requests import IDS


@dataclass(slots=True, eq=False)
class Node:
    """One call of the policy. It keeps only the ids that it adds to its parent."""

    parent: Node | None
    new_messages: list[Json]  # of the prompt; of a root: none
    prompt_ids: array[int]  # that the prompt adds to the parent
    sampled_ids: array[int]
    log_probs: array[float]
    policy_versions: PolicyVersions
    response: ParsedResponse
    ended: str
    number: int  # the order of the responses
    start: int  # tokens before prompt_ids
    root_length: int  # tokens of the first prompt
    turn: int  # calls before this one
    has_tools: bool
    has_children: bool = False
    is_seen: bool = False  # whether a later prompt has its text

    @property
    def path(self) -> list[Node]:
        """Return the calls from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def ids(self) -> list[int]:
        """Return all ids up to the end of the response."""
        parts = [part for node in self.path for part in (node.prompt_ids, node.sampled_ids)]
        return list(itertools.chain.from_iterable(parts))

    @property
    def end(self) -> int:
        """Return the number of ids up to the end of the response."""
        return self.start + len(self.prompt_ids) + len(self.sampled_ids)


@dataclass
class Tree:
    """The calls of a session."""

    nodes: list[Node] = field(default_factory=list)
    by_chain: dict[bytes, Node] = field(default_factory=dict)  # {hash up to the response: call}
    unseen: list[Node] = field(default_factory=list)  # calls without tools, as `mark_seen` needs
    has_claims: bool = False  # whether clients send token ids back, which then identify a response

    def find(self, chain: Chain, messages: Sequence[Json]) -> tuple[Node | None, int]:
        """Find the call that a conversation continues -> (call, number of messages up to its end).

        The last message of the assistant must be its response.
        """
        answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        if not answers:
            return None, 0
        return self.by_chain.get(chain.digests[answers[-1]]), answers[-1] + 1

    def add(self, node: Node, digest: bytes) -> None:
        """Add a call. digest: the hash of the conversation with its response."""
        if node.parent:
            node.parent.has_children = True
        elif not node.has_tools:
            self.unseen.append(node)
        self.nodes.append(node)
        self.by_chain[digest] = node

    def mark_seen(self, messages: Sequence[Json]) -> None:
        """Mark the calls without tools whose text a new prompt has."""
        for node in list(self.unseen):
            text = node.response.text.strip()
            if any(text in message["content"] for message in messages):
                node.is_seen = True
                self.unseen.remove(node)

    def list_auxiliary(self) -> list[Node]:
        """List the calls that have no part in the episode, such as one for a title.

        They have no tools, although the agent has some, and no later prompt has their text. A
        summary for a compacted history has no tools either, but the next prompt has it.
        """
        if not any(node.has_tools for node in self.nodes):
            return []
        return [node for node in self.unseen if not node.has_children]

    def list_rows(self) -> Iterator[tuple[list[Node], int]]:
        """Yield a row per leaf -> (its calls from the root, the number that other rows train).

        First the main row, which has the last response.
        """
        auxiliary = set(map(id, self.list_auxiliary()))
        ends = [each for each in self.nodes if not each.has_children and id(each) not in auxiliary]
        ends.sort(key=lambda node: node.number)
        trained: set[int] = set()
        for end in [*ends[-1:], *ends[:-1]]:
            path = end.path
            first = next(place for place, node in enumerate(path) if id(node) not in trained)
            trained.update(map(id, path))
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
    return json.dumps([message["role"], text.strip(), calls, claims], sort_keys=True)


def normalize(arguments: str | Json) -> str | Json:
    """Return the arguments of a call without a choice of white space."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
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
