"""Test doubles for faults: Gym servers that fail on purpose, and a scripted policy."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from aiohttp import web

import env
from gym_client import make_message
from kit.engine.sampling import EpisodeId, EpisodeRequest, SampleStore
from tests.helpers.rollouts import TOOL, call, encode_turns, keep_samples

FAILURE_RATE = 0.3
# The client's timeout if a server hangs. In other tests it is ten times as long.
TIMEOUT_S = 3.0
GROUPS = 60
MEMBERS = {group: 2 if group % 2 else 4 for group in range(GROUPS)}
# {fault: the statuses of episodes with this fault}
FAULTS = {
    "delay": set(),
    "reset": {"connect"},
    "500": {"http_500"},
    "503": {"http_503"},
    "404": {"http_404"},
    "truncated json": {"connect"},
    "html": {"bad_answer"},
    "nan": {"bad_answer"},
    "wrong cookie": {"session_lost"},
    "masked": {"masked"},
    "hang": {"timeout"},
}
# The faults of an Environment Server, which has no sessions and can report a failure.
ENVIRONMENT_FAULTS = {
    **{fault: statuses for fault, statuses in FAULTS.items() if fault != "wrong cookie"},
    "failure": {"environment_agent"},
    "terminal failure": {"environment_failed"},
}
SCHEMA = {"properties": {}, "required": ["episode_id", "task"]}
RUN = {"requestBody": {"content": {"application/json": {"schema": SCHEMA}}}}
# The description of an Environment Server.
ENVIRONMENT = {"paths": {"/run": {"post": RUN}, "/aggregate_metrics": {"post": {}}}}


class FaultServer:
    """A Gym server with HTTP sessions, a tool that must be called, rewards, and faults.

    fault: the fault of FAILURE_RATE of the calls of /seed_session, /look_up and /verify. "" is no
    fault, and "mixed" is any of FAULTS. If the session belongs to another episode, or the tool was
    not called, the reward is -1. No correct episode has this reward.
    """

    possible_faults = FAULTS
    samples: SampleStore | None = None  # of the policy endpoint

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.rng = random.Random(fault)
        self.sessions = {}
        self.calls = Counter()  # by path
        self.faults = Counter()  # by path

    def draw_fault(self, path: str) -> str:
        """Return the fault of this call, or ""."""
        self.calls[path] += 1
        if not self.fault or self.rng.random() > FAILURE_RATE:
            return ""
        fault = self.rng.choice(list(self.possible_faults)) if self.fault == "mixed" else self.fault
        if path == "/look_up" and fault in ("500", "404"):  # the model reads these
            return ""
        self.faults[path] += 1
        return fault

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.draw_fault(request.path)
        cookie = request.cookies.get("Gym", "")
        open_sessions = [name for name in self.sessions if cookie.startswith(name)]
        session = open_sessions[0] if open_sessions else self.open()
        if fault == "reset":
            abort(request)
            raise ConnectionResetError
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("500", "503", "404"):
            return web.json_response("ValueError('injected')", status=int(fault))
        if fault == "delay":
            await asyncio.sleep(self.rng.uniform(0.0, TIMEOUT_S / 4))
        answer = self.answer(request.path, session, body)
        if request.path in ("/verify", "/run"):
            self.spoil(answer, fault)
        if fault == "wrong cookie":  # of another session, or of none
            session = "tampered" if request.path == "/seed_session" else self.open()
        text = "<html>" if fault == "html" else json.dumps(answer)
        headers = {"Set-Cookie": f"Gym={session}.{self.rng.random()}.signature; path=/; httponly"}
        if fault == "truncated json":
            return await self.truncate(request, text, headers)
        return web.Response(text=text, content_type="application/json", headers=headers)

    def spoil(self, answer: dict, fault: str) -> None:
        """Replace the reward in an answer."""
        if fault == "nan":
            answer["reward"] = float("nan")
        if fault == "masked":
            answer |= {"reward": 0.0, "mask_sample": True}

    def answer(self, path: str, session: str, body: dict) -> dict:
        """Return the answer without a fault."""
        if path == "/seed_session":
            self.sessions[session] = {"row": body["question"], "looked": 0}
            return {}
        state = self.sessions[session]
        if path == "/verify":
            looks = 1 if body["with_tool"] else 0
            is_right = state["row"] == body["question"] and state["looked"] == looks
            text = body["response"]["output"][-1]["content"][0]["text"]
            return {**body, "reward": float(text) if is_right else -1.0}
        if path == "/look_up":
            state["looked"] += 1
        return {"found": "it"}

    async def truncate(self, request: web.Request, text: str, headers) -> web.StreamResponse:
        """Send an answer that is one byte shorter than its header states."""
        reply = web.StreamResponse(headers={**headers, "Content-Length": str(len(text) + 1)})
        await reply.prepare(request)
        await reply.write(text.encode())
        abort(request)
        return reply

    def open(self) -> str:
        """Open a session and return its cookie, like Starlette's but without a signature."""
        session_id = json.dumps({"session_id": f"{len(self.sessions):08d}"})
        name = base64.b64encode(session_id.encode()).decode()
        self.sessions[name] = {"row": "", "looked": 0}
        return name

    def forget(self) -> None:
        """Forget all calls of the tool, as a restart does."""
        for state in self.sessions.values():
            state["looked"] = 0

    async def openapi(self, _: web.Request) -> web.Response:
        paths = ("/seed_session", "/verify", "/look_up")
        return web.json_response({"paths": {path: {"post": {}} for path in paths}})


def abort(request: web.Request) -> None:
    """Break the connection of a request."""
    assert request.transport
    request.transport.abort()


class FaultyEnvironment(FaultServer):
    """An Environment Server of Gym 0.7 with faults. It samples the response of RowPolicy."""

    possible_faults = ENVIRONMENT_FAULTS

    def __init__(self, fault: str, tokenizer):
        super().__init__(fault)
        self.tokenizer = tokenizer
        self.samples = SampleStore()

    def spoil(self, answer: dict, fault: str) -> None:
        super().spoil(answer["result"], fault)
        if fault.endswith("failure"):
            failure = {"failure_reason": "injected", "terminal": fault == "terminal failure"}
            if not failure["terminal"]:
                failure |= {"stage": "agent", "partial_response": answer["result"]["response"]}
            answer |= {"result": None, "failure": failure}

    def answer(self, path: str, session: str, body: dict) -> dict:
        """Return the answer of /run without a fault: the reward is the text of the response."""
        row = body["task"]["task_input"]
        prompt = [{"role": "user", "content": row["responses_create_params"]["input"]}]
        prompt_ids = env.encode_messages(prompt, [], self.tokenizer, "x")
        text = str(row["worth"])
        item = make_message(text)
        item["prompt_token_ids"] = prompt_ids
        item["generation_token_ids"] = encode_turns([text], self.tokenizer)[0]
        keep_samples(self.samples, [item])
        result = {"reward": row["worth"], "response": {"output": [item]}, "mask_sample": False}
        identity = {"episode_id": body["episode_id"], "task_id": body["task"]["task_id"]}
        return {**identity, "result": result, "failure": None}

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(ENVIRONMENT)


@contextlib.asynccontextmanager
async def serve(server: FaultServer, port: int = 0) -> AsyncIterator[str]:
    """Serve in the present event loop, and yield the URL."""
    app = web.Application()
    app.router.add_get("/openapi.json", server.openapi)
    app.router.add_post("/{name:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class RowPolicy:
    """A policy that reads its responses from the row: first a tool call, then a number."""

    def __init__(self, tokenizer, tasks):
        self.tokenizer = tokenizer
        self.tasks = {task.row_id: task for task in tasks}

    async def generate(self, request_id, prompt_ids, sampling_params):
        await asyncio.sleep(0)
        prompt = self.tokenizer.decode(prompt_ids)
        task = self.tasks[prompt.split("row ")[1].split(".")[0]]
        has_looked = "<|im_start|>tool" in prompt
        text = call() if task.tools and not has_looked else str(task.row["worth"])
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        log_probs = [-1.0] * len(ids)
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={}
        )


def make_requests(tokenizer, with_tool: bool):
    """Request episodes of groups. The members of a group have different responses."""
    worth = random.Random(7)
    requests = []
    for group in range(GROUPS):
        for member in range(MEMBERS[group]):
            name = f"{group}-{member}"
            params: dict[str, Any] = {"input": f"row {name}."}
            if with_tool:
                params["tools"] = [TOOL]
            row = {"responses_create_params": params, "question": name, "with_tool": with_tool}
            row["worth"] = worth.choice([0.0, 0.25, 1.0])
            messages, tools = env.render_row(row, name)
            ids = env.encode_messages(messages, tools, tokenizer, name)
            task = env.Task(name, row, "faulty", messages, ids, tools=tools)
            requests.append(EpisodeRequest(task, EpisodeId(str(group), group, member)))
    return requests
