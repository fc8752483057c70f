"""HTTP servers that answer from a script, also as Gym servers and judges, and calls of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gym_client import Gym, GymError, message_response
from kit.data.episode import gc_paused

TOOLS = [{"type": "function", "name": name} for name in ("look", "away", "verify")]
ROW = {"responses_create_params": {"input": "x", "tools": TOOLS}}
MESSAGE = {
    **message_response("hi")["output"][0],
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}
VERIFY_ROUTES = {"seed_session": [(200, {})], "verify": [(200, {"reward": 1.0})]}
# Settings of a resources server: its judge is gym.judges.judge_model.
JUDGE_CONFIG = {
    "judge_model_server": {"type": "responses_api_models", "name": "judge_model"},
}


class JsonHandler(BaseHTTPRequestHandler):
    """A request handler that can send JSON, or bytes."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, body, cookie=None, headers=()):
        """Send an answer. headers: further (name, value) pairs; they replace the standard ones."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"content-length": len(data)} | dict(headers)).items():
            self.send_header(name, str(value))
        if cookie:
            self.send_header("set-cookie", cookie + "; path=/")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def read_json(self):
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def log_message(self, *_):
        pass


def start_server(handler, port=0) -> ThreadingHTTPServer:
    """Serve HTTP from a thread of this process, until the process ends or it is shut down."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class ScriptedServer:
    """An HTTP server with a list of answers for each route. The last answer repeats.

    An answer is (status, JSON or bytes, optional cookie, optional headers), a function that returns
    it, "reset", or "truncated". `log` has (path, body, cookie) of each POST request. `openapi` is
    the answer to GET, or None for 404.
    """

    def __init__(self, **routes):
        script = {f"/{name}": list(answers) for name, answers in routes.items()}
        self.openapi = {"paths": {path: {"post": {}} for path in script}}
        self.log = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self):
                self.answer(200 if server.openapi else 404, server.openapi or {})

            def do_POST(self):
                server.log.append((self.path, self.read_json(), self.headers.get("cookie")))
                answers = script[self.path]
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer == "truncated":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
                if answer in ("reset", "truncated"):
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.answer(*(answer() if callable(answer) else answer))

        self.server = start_server(Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def paths(self):
        return [path for path, _, _ in self.log]


def after(seconds, answer):
    """Return a function that takes this long to return an answer of a ScriptedServer."""

    def wait():
        time.sleep(seconds)
        return answer

    return wait


def run_session(url, conversation, row=ROW):
    """Return the result of `conversation(session)` in one session with the server at `url`."""

    async def run():
        async with Gym({"s": url}, timeout_s=1.0) as gym, gym.session("s", row) as session:
            return await conversation(session)

    return asyncio.run(run())


async def verify_x(session):
    """Verify the response "x"."""
    return await session.verify(message_response("x"))


async def step_x(session):
    """Do a step with the response "x"."""
    return await session.step(message_response("x"))


def verify_result(answer, conversation=verify_x, **routes):
    """Return the result of a conversation with a server that answers /verify with `answer`."""
    routes = {"look": [(200, {})], **VERIFY_ROUTES, "verify": [(200, answer)], **routes}
    return run_session(ScriptedServer(**routes).url, conversation)


def catch_reason(call, *args, **options):
    """Return the reason of the GymError that a call raises.

    Also assert that its message is one short line.
    """
    with pytest.raises(GymError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return caught.value.reason


def measure_longest_pause(work, limit_s: float) -> float:
    """Return the longest time, in seconds, for which the coroutine `work()` blocks the event loop.

    Other processes use the cores, too, and make pauses longer. So it is measured up to ten times,
    until it is below `limit_s`; the shortest result is returned.
    """
    results = []
    while len(results) < 10 and min(results, default=limit_s) >= limit_s:
        with gc_paused():  # as in a rollout; a garbage collection may take longer
            results.append(asyncio.run(watch_event_loop(work)))
    print("longest pauses", [f"{pause:.3f} s" for pause in results])
    return min(results)


async def watch_event_loop(work) -> float:
    """Run `work()` once and return the longest time for which it blocked the event loop."""
    pauses = []
    is_done = False

    async def watch():
        while not is_done:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - began)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    with contextlib.suppress(GymError):
        await work()
    is_done = True
    await watcher
    return max(pauses)


def completion(text, **message):
    """A chat completion with one choice, and 5 + 2 tokens. message: more fields of the message."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text, **message},
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "stub"}
    return {**head, "choices": [choice], "usage": usage}


class StubJudge:
    """An OpenAI-compatible endpoint with the model `stub` and scripted replies.

    script: (status, body, optional headers) of each reply; the last one repeats. A body is JSON,
    bytes, a function from the request's body to JSON, or None for no reply. `log` has (route,
    Authorization header, body) of each request.
    """

    def __init__(self, *script):
        self.script = list(script)
        self.log = []
        judge = self

        class Handler(JsonHandler):
            def reply(self, status, body, headers=()):
                if body is None:
                    time.sleep(5.0)
                    return
                if callable(body):
                    body = body(judge.log[-1][2])
                self.answer(status, body, headers=headers)

            def do_GET(self):
                if self.headers.get("authorization") in (None, "Bearer right-key"):
                    self.reply(200, {"data": [{"id": "stub"}]})
                else:
                    self.reply(401, {"error": "who?"})

            def do_POST(self):
                request = self.read_json()
                judge.log.append((self.path, self.headers.get("authorization"), request))
                entry = judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]
                self.reply(*entry)

        self.url = f"http://127.0.0.1:{start_server(Handler).server_port}/v1"


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP from a thread of this process, and yield the address."""
    server = start_server(handler)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
