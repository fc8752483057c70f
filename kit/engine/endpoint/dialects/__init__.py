"""The APIs that the endpoint speaks, each as pure functions over JSON.

    read           body -> Request
    resume         body and what was stored under the id that it names -> whole body
    store          body and reply -> (id, what to store), or None
    write          call -> body of the reply
    make_events    body of a reply -> events of a stream, as (name or "", data)
    write_error    error -> body

Protects: an agent's tools and texts, which mean the same in each API.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from gym_client import Json
from kit.engine.endpoint.requests import Failure, Request
from kit.engine.endpoint.tree import Call


class Dialect(Protocol):
    """The module of a dialect."""

    def read(self, body: Json) -> Request: ...
    def resume(self, body: Json, stored: dict[str, Json]) -> Json: ...
    def store(self, body: Json, reply: Json) -> Json | None: ...
    def write(self, body: Json, request: Request, call: Call) -> Json: ...
    def make_events(self, body: Json, reply: Json) -> Iterator[tuple[str, Json]]: ...
    def write_error(self, failure: Failure) -> Json: ...
