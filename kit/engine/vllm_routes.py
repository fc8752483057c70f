"""ASGI middleware for vLLM's HTTP servers: it answers only the routes that a run uses.

vLLM imports these classes in its server process (its option `--middleware`). Without them, vLLM
answers some 25 routes. Its API key guards only those below /v1, /v2 and /inference; `/invocations`
samples without a key.

Protects: the policy and the judges, from requests of anybody who reaches the port.
"""

from __future__ import annotations

from typing import ClassVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose


class PolicyRoutes:
    """Allow health and metrics only. Requests for samples reach the policy's server through Ray."""

    ALLOWED: ClassVar[set[tuple[str, str]]] = {("GET", "/health"), ("GET", "/metrics")}

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its method and path are allowed, else answer 403."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await WebSocketClose(code=1008)(scope, receive, send)
        elif (scope["method"], scope["path"]) in self.ALLOWED:
            await self.app(scope, receive, send)
        else:
            message = f"this server does not answer {scope['method']} {scope['path']}"
            await JSONResponse({"error": {"message": message}}, 403)(scope, receive, send)


class JudgeRoutes(PolicyRoutes):
    """Allow also a judge's API, which checks the key, and /openapi.json, which shows readiness."""

    ALLOWED = PolicyRoutes.ALLOWED | {
        ("GET", "/openapi.json"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
    }
