"""Test doubles for judges: an endpoint with scripted replies, and the settings to use it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Settings of a resources server: its judge is gym.judges.judge_model.
JUDGE_CONFIG = {
    "judge_model_server": {"type": "responses_api_models", "name": "judge_model"},
}


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

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self, status, body, headers=()):
                if body is None:
                    time.sleep(5.0)
                    return
                if callable(body):
                    body = body(judge.log[-1][2])
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in [("content-length", str(len(data))), *headers]:
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def do_GET(self):
                if self.headers.get("authorization") in (None, "Bearer right-key"):
                    self.reply(200, {"data": [{"id": "stub"}]})
                else:
                    self.reply(401, {"error": "who?"})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                judge.log.append((self.path, self.headers.get("authorization"), request))
                entry = judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]
                self.reply(*entry)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
