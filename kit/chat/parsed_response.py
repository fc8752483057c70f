"""One response of the policy in its parts. kit/chat/responses.py parses it.

Protects: rewards, since verifiers, tools and logs read the same answer.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import gym_client
from gym_client import Json


class ParsedResponse(NamedTuple):
    """One response of the policy, parsed once (responses.py). All readers take from it."""

    reasoning: str
    text: str  # of the answer, without its calls
    calls: list[Json]  # function_call items
    written: str  # the answer with its calls, as the policy wrote them
    raw: str  # the whole response with its thought, without special tokens

    @classmethod
    def of_text(cls, text: str) -> ParsedResponse:
        """Make a response without a thought and calls."""
        return cls("", text, [], text, text)

    @property
    def items(self) -> list[Json]:
        """Return the response as Responses items. Without calls it has a message, maybe empty."""
        items: list[Json] = []
        if self.reasoning:
            items.append(gym_client.make_reasoning(self.reasoning))
        if self.text or not self.calls:
            items.append(gym_client.make_message(self.text))
        return items + self.calls


def write_call(call: Json) -> str:
    """Write a function_call item as JSON text."""
    return json.dumps({"name": call["name"], "arguments": call["arguments"]})
