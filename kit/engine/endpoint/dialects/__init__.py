"""The APIs that the endpoint speaks, each as pure functions over JSON.

    read           body -> Request
    write          call -> body of the reply
    make_events    body of a reply -> events of a stream, as (name or "", data)
    write_error    error -> body

Protects: an agent's tools and texts, which mean the same in each API.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from gym_client import Json
from kit.engine.endpoint.requests import Request, RequestError
from kit.engine.endpoint.tree import Call


class Dialect(Protocol):
    """The module of a dialect."""

    def read(self, body: Json) -> Request: ...
    def write(self, body: Json, request: Request, call: Call) -> Json: ...
    def make_events(self, body: Json, reply: Json) -> Iterator[tuple[str, Json]]: ...
    def write_error(self, error: RequestError) -> Json: ...
