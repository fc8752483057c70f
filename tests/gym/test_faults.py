"""The fault matrix: a Gym server that fails in 30% of its calls, in every way there is; and one that goes away.

Whatever fails, no failed call becomes a reward, and the advantages of the groups that survive whole are those
of a run without faults, exactly. The policy is a script (what it says follows from the row), so that the two
runs can be compared; the HTTP, the client and the rollout are the real ones.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from conftest import ALGORITHM
from omegaconf import OmegaConf
from test_turns import CHATML, STOPS, TOOL, bytes_tokenizer, call, policy_of

import env
import gym_client
import inference
import training
from gym_client import Gym, GymError, ServerDownError, message_response
from kit.data.episodes import keep
from kit.gym.servers import GymStartError, check_server
from kit.rollout.chat import understand

GROUPS, FAILING = 120, 0.3
CONFIG = OmegaConf.create({"algorithm": ALGORITHM})
MEMBERS = {group: 2 if group % 2 else 4 for group in range(GROUPS)}
TIMEOUT_S = 3.0  # of the client, and ten times that where nothing hangs: a busy machine must not look as if it did
# way -> the status that an episode of it may end with
WAYS = {
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


class FaultServer:
    """A Gym server over real HTTP: sessions by cookie, a tool that must be called, verdicts; and its faults.

    `way`: what happens to FAILING of the calls to /seed_session, /look_up and /verify; "" for none, "mixed" for
    all of WAYS. A verdict of a session that is not the episode's own, or whose tool was not called, would be
    -1: a reward that no honest call has.
    """

    def __init__(self, way: str = ""):
        self.way, self.rng, self.sessions = way, random.Random(way), {}
        self.calls, self.faults = Counter(), Counter()  # by path
        self.paths, self.status, self.hanging = [], 0, set()

    @web.middleware
    async def before(self, request: web.Request, handler) -> web.StreamResponse:
        """Keep `paths` as they were sent; answer nothing to those of `hanging`, and all by `status` where it is set."""
        self.paths.append(request.raw_path)
        if request.path in self.hanging:
            await asyncio.sleep(3600)
        return web.Response(status=self.status) if self.status else await handler(request)

    def fault(self, path: str) -> str:
        self.calls[path] += 1
        if not self.way or self.rng.random() > FAILING:
            return ""
        way = self.rng.choice(list(WAYS)) if self.way == "mixed" else self.way
        if path == "/look_up" and way in ("500", "404"):  # those are the tool's answer to the model
            return ""
        self.faults[path] += 1
        return way

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body, way = await request.json(), self.fault(request.path)
        known = [name for name in self.sessions if request.cookies.get("Gym", "").startswith(name)]
        session = known[0] if known else self.open()
        if way == "reset":
            request.transport.abort()
            raise ConnectionResetError
        if way == "hang":
            await asyncio.sleep(3600)
        if way in ("500", "503", "404"):
            return web.json_response("ValueError('injected')", status=int(way))
        if way == "delay":
            await asyncio.sleep(self.rng.uniform(0.0, TIMEOUT_S / 4))
        answer = {"found": "it"}
        if request.path == "/seed_session":
            self.sessions[session] = {"row": body["question"], "looked": 0}
            answer = {}
        elif request.path == "/look_up":
            self.sessions[session]["looked"] += 1
        elif request.path == "/verify":
            state = self.sessions[session]
            right = state["row"] == body["question"] and state["looked"] == (
                1 if body["with_tool"] else 0
            )
            text = body["response"]["output"][-1]["content"][0]["text"]
            answer = {**body, "reward": float(text) if right else -1.0}
        if way == "nan":
            answer["reward"] = float("nan") if request.path == "/verify" else 0.0
        if way == "masked":
            answer |= {"reward": 0.0, "mask_sample": True} if request.path == "/verify" else {}
        if way == "wrong cookie":  # another session's; before there is any, one that nobody signed
            session = self.open() if request.path != "/seed_session" else "tampered"
        text = "<html>" if way == "html" else json.dumps(answer)
        headers = {"Set-Cookie": f"Gym={session}.{self.rng.random()}.signature; path=/; httponly"}
        if way == "truncated json":
            headers["Content-Length"] = str(len(text) + 1)
            reply = web.StreamResponse(headers=headers)
            await reply.prepare(request)
            await reply.write(text.encode())
            request.transport.abort()
            return reply
        return web.Response(text=text, content_type="application/json", headers=headers)

    def open(self) -> str:
        name = base64.b64encode(
            json.dumps({"session_id": f"{len(self.sessions):08d}"}).encode()
        ).decode()
        self.sessions[name] = {"row": "", "looked": 0}
        return name

    def forget(self) -> None:
        for state in self.sessions.values():
            state["looked"] = 0

    async def openapi(self, _: web.Request) -> web.Response:
        paths = ("/seed_session", "/verify", "/look_up")
        return web.json_response({"paths": {path: {"post": {}} for path in paths}})


class Server:
    """FaultServer in a thread of its own: one of its own, or one that was there before, on the port that it had."""

    def __enter__(self):
        return self

    def __init__(self, way: str = "", faults: FaultServer | None = None, port: int = 0):
        self.faults, self.loop, ready = (
            faults or FaultServer(way),
            asyncio.new_event_loop(),
            threading.Event(),
        )

        async def start():
            app = web.Application(middlewares=[self.faults.before])
            app.router.add_get("/openapi.json", self.faults.openapi)
            app.router.add_post("/{name:.*}", self.faults.handle)
            self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", port)
            await site.start()
            self.port = self.runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self.port}"
            ready.set()

        self.loop.create_task(start())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        ready.wait(10)

    def __exit__(self, *_):
        async def stop():
            await self.runner.cleanup()
            hanging = asyncio.all_tasks() - {asyncio.current_task()}
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)

        if not self.thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class Says:
    """A policy whose answers follow from the row: one call of the tool where it is offered, then a number."""

    def __init__(self, tokenizer, tasks):
        self.tokenizer, self.tasks = tokenizer, {task.row_id: task for task in tasks}

    async def generate(self, request_id, prompt_ids, sampling_params):
        await asyncio.sleep(0)
        text = self.tokenizer.decode(prompt_ids)
        task = self.tasks[text.split("row ")[1].split(".")[0]]
        looked = "<|im_start|>tool" in text
        said = call() if task.tools and not looked else str(task.row["worth"])
        ids = self.tokenizer.encode(said, add_special_tokens=False) + [self.tokenizer.eos_token_id]
        return SimpleNamespace(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", extra_fields={}
        )


def requests_of(tokenizer, with_tool: bool):
    """(task, group id): each member of a group says another number."""
    worth, requests = random.Random(7), []
    for group in range(GROUPS):
        for member in range(MEMBERS[group]):
            name = f"{group}-{member}"
            params = {"input": f"row {name}.", **({"tools": [TOOL]} if with_tool else {})}
            row = {"responses_create_params": params, "question": name, "with_tool": with_tool}
            row["worth"] = worth.choice([0.0, 0.25, 1.0])
            messages, tools = env.render(row, name)
            task = env.Task(
                name,
                row,
                "faulty",
                messages,
                env.encode(messages, tools, tokenizer, name),
                tools=tools,
            )
            requests.append((task, str(group)))
    return requests


def run(way: str, with_tool: bool):
    """(episodes, the server) of one rollout against a server that fails in this way."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    requests = requests_of(tokenizer, with_tool)
    policy = policy_of(Says(tokenizer, [task for task, _ in requests]), tokenizer)

    async def collect(url):
        patience = TIMEOUT_S if way in ("hang", "mixed") else 10 * TIMEOUT_S
        async with Gym({"faulty": url}, timeout_s=patience, concurrency=64) as gym:
            return await inference.rollout(requests, policy, gym)

    with Server(way) as server:
        return asyncio.run(collect(server.url)), server.faults


def advantages(episodes) -> dict[str, torch.Tensor]:
    """{row: its advantage on every sampled token} of the episodes that may be trained on."""
    batch = training.to_batch(episodes, 0, 1.0)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    training.advantages(batch, CONFIG)
    values = batch.batch["advantages"]
    sampled = batch.batch["response_mask"].bool()
    return {e.row_id: row[mask] for e, row, mask in zip(episodes, values, sampled, strict=True)}


@pytest.fixture(scope="module")
def faultless():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    chat_tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    asyncio.run(
        understand(policy_of(None, tokenizer), [0], [chat_tool])
    )  # imports vLLM's parsers, for seconds
    return {with_tool: run("", with_tool)[0] for with_tool in (False, True)}


@pytest.mark.parametrize("with_tool", [False, True], ids=["verify", "tool"])
@pytest.mark.parametrize("way", [*WAYS, "mixed"])
def test_no_failed_call_becomes_a_reward(way, with_tool, faultless):
    honest = {e.row_id: e for e in faultless[with_tool]}
    assert {e.status for e in honest.values()} == {"ok"} and len(honest) == sum(MEMBERS.values())
    assert all(e.reward == e.reward and e.response == str(e.reward) for e in honest.values())

    episodes, server = run(way, with_tool)
    failed = [e for e in episodes if e.status != "ok"]
    allowed = set().union(*WAYS.values()) if way == "mixed" else WAYS[way]
    assert {e.status for e in failed} <= allowed, Counter(e.status for e in failed)
    assert all(e.reward is None and e.error for e in failed)
    assert all(e.reward == honest[e.row_id].reward for e in episodes if e.status == "ok")
    paths = {
        "/seed_session",
        "/verify",
        *(("/look_up",) if with_tool and way not in ("500", "404") else ()),
    }
    assert set(server.faults) == paths  # the server did fail at each of them
    assert bool(failed) == (way != "delay")
    if way in (
        "reset",
        "truncated json",
        "503",
    ):  # what is sent again: fewer episodes fail than calls
        assert server.calls["/seed_session"] > len(episodes) and len(failed) < sum(
            server.faults.values()
        )

    kept, _ = keep(episodes)
    groups = defaultdict(list)
    for e in kept:
        groups[e.group_id].append(e)
    assert kept and all(len(members) > 1 for members in groups.values())
    ours, theirs = advantages(kept), advantages(list(honest.values()))
    whole = [
        e
        for group, members in groups.items()
        if len(members) == MEMBERS[int(group)]
        for e in members
    ]
    assert whole
    for e in whole:
        assert torch.equal(ours[e.row_id], theirs[e.row_id]), e.row_id
    without = advantages(
        [honest[e.row_id] for e in kept]
    )  # what is left of a group, as if the rest had never been
    assert all(torch.equal(ours[e.row_id], without[e.row_id]) for e in kept)


def test_an_episode_is_verified_while_others_still_generate():
    """The second answer is not begun until the first episode has its verdict."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    requests = requests_of(tokenizer, with_tool=False)[:2]
    verified = asyncio.Event()

    class Waits(Says):
        async def generate(self, request_id, prompt_ids, sampling_params):
            if "row 0-1." in self.tokenizer.decode(prompt_ids):
                await asyncio.wait_for(verified.wait(), 5)
            return await super().generate(request_id, prompt_ids, sampling_params)

    policy = policy_of(Waits(tokenizer, [task for task, _ in requests]), tokenizer)

    async def collect(url):
        async with Gym({"faulty": url}) as gym:
            return await inference.rollout(
                requests, policy, gym, lambda index, _: index or verified.set()
            )

    with Server("") as server:
        episodes = asyncio.run(collect(server.url))
    assert [e.status for e in episodes] == ["ok", "ok"] and verified.is_set()


# --- a server that goes away ---------------------------------------------------------------------


@pytest.mark.parametrize("with_tool", [False, True], ids=["verify", "tool"])
@pytest.mark.parametrize("way", ["gone", "503"])
def test_a_server_that_is_away_for_a_while_costs_no_episode(way, with_tool, faultless):
    """For 2 s in the middle of a rollout: longer than all the pauses between three tries can be."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    requests = requests_of(tokenizer, with_tool)
    policy = policy_of(Says(tokenizer, [task for task, _ in requests]), tokenizer)

    async def collect(server):
        async with Gym({"faulty": server.url}, concurrency=64) as gym:
            rollout = asyncio.create_task(inference.rollout(requests, policy, gym))
            while server.faults.calls["/verify"] < 50:
                await asyncio.sleep(0.01)
            server.faults.status = 503 if way == "503" else 0
            if way == "gone":
                await asyncio.to_thread(server.__exit__)
            await asyncio.sleep(2.0)
            server.faults.status = 0
            if way == "gone":  # it knows the old cookies, but not what was done in their sessions
                server.faults.forget()
                server = await asyncio.to_thread(Server, faults=server.faults, port=server.port)
            with server:
                return await rollout

    episodes = asyncio.run(collect(Server()))
    honest = {e.row_id: e.reward for e in faultless[with_tool]}
    assert Counter(e.status for e in episodes) == {"ok": len(honest)}
    assert {e.row_id: e.reward for e in episodes} == honest


SAID = message_response("1.0")
ROW = {
    "responses_create_params": {"input": "x", "tools": [TOOL]},
    "question": "x",
    "with_tool": False,
}


def converse(conversation, **limits):
    """What `conversation(gym, server)` returns, with a gym whose routes are known."""

    async def run(server):
        async with Gym({"s": server.url}, **limits) as gym:
            await gym.routes("s")
            return await conversation(gym, server)

    with Server() as server:
        return asyncio.run(run(server))


async def failure(call) -> GymError | None:
    try:
        await call
    except GymError as error:
        return error


async def episode(gym):
    async with gym.session("s", ROW) as session:
        return await session.verify(SAID)


def test_a_server_that_stays_away_ends_the_run():
    async def conversation(gym, server):
        server.faults.status, begin = 503, time.monotonic()
        ends = await asyncio.gather(*[failure(episode(gym)) for _ in range(64)])
        return ends, time.monotonic() - begin

    ends, seconds = converse(conversation, concurrency=64, outage_budget_s=1.0)
    assert {(type(e), e.reason, e.retry, e.lost) for e in ends} == {
        (ServerDownError, "server_down", False, False)
    }
    said = r"gym server s \(http://\S+\) gave no answer for \d+ s, while (\d+) calls failed, the last with http\S+"
    todo = ": HTTP 503: ; see its log, start it again and resume .*gym.outage_budget_s"
    assert (
        1.0 < seconds < 30.0 and max(int(re.match(said + todo, str(end))[1]) for end in ends) > 64
    )


@pytest.fixture
def later(monkeypatch):
    """later(seconds): time.monotonic(), as the client reads it, goes on."""
    skipped = [0.0]
    goes_on = {"monotonic": lambda: sum(skipped, time.monotonic())}
    monkeypatch.setattr(gym_client, "time", SimpleNamespace(**(vars(time) | goes_on)))
    return skipped.append


@pytest.mark.parametrize("between", [200, 404, 422, 429, 500, 503, None])
def test_an_answer_ends_an_outage_and_so_does_silence_on_our_side(between, later):
    async def conversation(gym, server):
        async with gym.session("s", ROW) as session:
            for status in (503, 503, between, 503, 503):
                later(6.0 if status else 20.0)
                if status:
                    server.faults.status = status
                    end = await failure(session.call_tool("look_up", "{}"))
        return end

    end = converse(conversation, outage_budget_s=15.0)
    assert (end.reason, end.lost) == (
        ("server_down", False) if between == 503 else ("http_503", True)
    )


async def hangs(gym, server, later, *paths):
    """An episode whose verifier has had it for 100 s."""
    server.faults.hanging, task = {"/verify", *paths}, asyncio.create_task(episode(gym))
    while "/verify" not in server.faults.paths:
        await asyncio.sleep(0.01)
    later(100.0)
    return task


@pytest.mark.parametrize(("paths", "reason"), [([], "timeout"), (["/openapi.json"], "server_down")])
def test_a_timeout_counts_from_its_begin_but_one_slow_verifier_is_no_outage(paths, reason, later):
    async def conversation(gym, server):
        return await failure(await hangs(gym, server, later, *paths)), server.faults.paths

    end, paths = converse(conversation, timeout_s=1.5)
    assert end.reason == reason and paths.count("/verify") == 1


def test_a_long_call_that_breaks_is_no_long_outage(later):
    async def conversation(gym, server):
        waits = await hangs(gym, server, later)
        await asyncio.to_thread(server.__exit__)
        with await asyncio.to_thread(Server, port=server.port):
            return (await waits).reward

    assert converse(conversation) == 1.0


def test_a_session_older_than_its_server_is_not_continued():
    """The server takes the old cookie, and begins at nothing: the verdict would be -1."""

    async def conversation(gym, server):
        with_tool = {**ROW, "with_tool": True}
        async with gym.session("s", with_tool) as touched, gym.session("s", ROW) as untouched:
            await touched.call_tool("look_up", "{}")
            await asyncio.to_thread(server.__exit__)
            waits = asyncio.create_task(episode(gym))
            while gym._watches["s"].failed < 0:
                await asyncio.sleep(0.01)
            server.faults.forget()
            with await asyncio.to_thread(Server, faults=server.faults, port=server.port):
                rewards = [(await waits).reward, (await untouched.verify(SAID)).reward]
                return rewards, await failure(touched.verify(SAID)), server.faults.calls

    rewards, end, calls = converse(conversation)
    assert rewards == [1.0, 1.0] and (end.reason, end.lost) == ("session_lost", True)
    assert calls["/seed_session"] == 4 and calls["/verify"] == 2


def test_a_restart_that_gym_is_told_of_loses_sessions_too():
    async def conversation(gym, server):
        async with gym.session("s", ROW) as touched, gym.session("s", ROW) as untouched:
            await touched.call_tool("look_up", "{}")
            gym.restarted("s")
            repeated = gym._repeat(
                "s", lambda: touched.call_tool("look_up", "{}")
            )  # as steps may be: not for ever
            return (await untouched.verify(SAID)).reward, await failure(
                asyncio.wait_for(repeated, 5)
            )

    reward, end = converse(conversation)
    assert reward == 1.0 and (end.reason, end.lost) == ("session_lost", True)


# --- what servers and data could do to the client -------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_an_endless_answer_is_not_read_to_its_end(declared):
    sent = 0

    async def endless(_, writer):
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\n" + b"Content-Length: 999999999999\r\n" * declared + b"\r\n"
        )
        while sent < 2**28:  # which is endless enough
            writer.write(b" " * 2**16)
            await writer.drain()
            sent += 2**16

    async def run():
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, Gym({"s": url}) as gym:
            return await failure(gym.routes("s"))

    assert asyncio.run(run()).reason == "too_large"
    assert sent < gym_client.MAX_ANSWER_BYTES + 16 * 2**20  # what the sockets hold


def test_no_tool_is_called_by_another_route():
    names = [
        ".",
        "..",
        "/",
        "../verify",
        "verify/",
        "a/b",
        "%2e",
        "\\verify",
        "verify\n",
        "",
        None,
        7,
        "close",
    ]
    tools = [{"type": "function", "name": name} for name in [*names, "what is it?#"]]
    row = {**ROW, "responses_create_params": {"input": "x", "tools": tools}}

    async def conversation(gym, server):
        async with gym.session("s", row) as session:
            assert session.tools == {"what is it?#"}
            answers = [await session.call_tool(name, "{}") for name in [*names, "what is it?#"]]
        return answers, server.faults.paths

    answers, paths = converse(conversation)
    assert [json.loads(answer) for answer in answers[:-1]] == [
        {"error": f"Unknown tool: {name}"} for name in names
    ]
    assert json.loads(answers[-1]) == {"found": "it"} and paths[1:] == [
        "/seed_session",
        "/what%20is%20it%3F%23",
    ]


def test_no_server_is_called_by_a_name_that_leaves_the_log_folder():
    names = ("../x", "a/b", ".x", "", "a b", "a\n", "x" * 101)
    for name, spec in [*((name, {}) for name in names), ("x", {"start": {"agent": "../y"}})]:
        with pytest.raises(
            GymStartError, match=r"^gym.servers(.x.start.agent)?: '.* is no name; take letters"
        ):
            check_server(name, spec)
