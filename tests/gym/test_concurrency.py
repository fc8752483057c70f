"""Who may work at once, and from when a deadline counts: places of the sampler, places of a Gym server.

The client, the rollout and the loop are the real ones; the clock jumps to what happens next, the answers of the
sampler and of the server are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import selectors
from types import SimpleNamespace

import pytest

import inference
from env import Task
from gym_client import Gym, message_response
from kit.gym import concurrency

ROW = {"responses_create_params": {"input": "x"}}


class Jumps(selectors.SelectSelector):
    """Nobody is waited for: where nothing is ready, time goes on."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        assert ready or timeout is not None, "nothing will ever happen"
        self.now += 0.0 if ready else timeout
        return ready


def run(coroutine) -> tuple[object, float]:
    """(result, seconds that it took by the clock that jumps)."""
    clock = Jumps()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    try:
        return loop.run_until_complete(coroutine), clock.now
    finally:
        loop.close()


class Http:
    """In the place of aiohttp's session: /verify takes `verify_s` on one of `cores`, all else no time."""

    def __init__(self, verify_s: float, cores: int = 1000):
        self.verify_s, self.cores, self.calls = verify_s, asyncio.Semaphore(cores), []

    @contextlib.asynccontextmanager
    async def request(self, method, url, **_):
        path = url.removeprefix("http://x")
        self.calls.append(path)
        if path == "/verify":
            async with self.cores:
                await asyncio.sleep(self.verify_s)
        answer = (
            {"paths": {"/seed_session": {"post": {}}, "/verify": {"post": {}}}}
            if method == "GET"
            else {}
        )
        text = json.dumps({"reward": 1.0} if path == "/verify" else answer).encode()

        async def readexactly(count):
            raise asyncio.IncompleteReadError(text, count)

        headers, content = (
            SimpleNamespace(getall=lambda *_: ()),
            SimpleNamespace(readexactly=readexactly),
        )
        yield SimpleNamespace(status=200, headers=headers, content=content)


def gym_of(http, concurrency, **changes) -> Gym:
    gym = Gym({"x": "http://x"}, concurrency=concurrency.Places().limits(concurrency), **changes)
    gym._http = http
    return gym


class Sampler:
    """Answers in a time that its seed draws for each."""

    def __init__(self, low_s: float, high_s: float):
        self.draw, self.low_s, self.high_s, self.now, self.most = (
            random.Random(0),
            low_s,
            high_s,
            0,
            0,
        )

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.draw.uniform(self.low_s, self.high_s))
        self.now -= 1
        return SimpleNamespace(
            token_ids=[5, 1], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={}
        )


def rollout(count, sampler, gym, at_once, deadline_s=100.0):
    """(episodes, seconds) of so many, with places for `at_once`."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "five")
    policy = inference.Policy(
        sampler,
        tokenizer,
        {1},
        32,
        12,
        None,
        100,
        "hermes",
        deadline_s,
        places=asyncio.Semaphore(at_once),
    )
    task = Task("x:1", ROW, "x", [{"role": "user", "content": "x"}], [1, 2])
    return run(inference.rollout([(task, str(i)) for i in range(count)], policy, gym))


def seconds(concurrency, verify_s: float) -> float:
    """Of a step on eight GPUs, of which this is an eighth: 1,024 of 8,192 episodes, places for 256 of 2,048. A verdict
    of 112 ms takes eight times as long, so that the verifier, which has 96 cores, has as much to do."""
    sampler = Sampler(4.0, 12.0)
    episodes, took = rollout(
        1024, sampler, gym_of(Http(verify_s, cores=96), concurrency), at_once=256
    )
    assert {e.status for e in episodes} == {"ok"} and sampler.most == 256
    return took


def test_verdicts_hide_behind_answers(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    alone = seconds("auto", 0.0)
    assert 35 < alone < 45
    assert seconds("auto", 8 * 0.112) < 1.1 * alone
    assert seconds(16, 8 * 0.112) > 1.3 * alone


def test_a_deadline_counts_from_the_place_and_not_in_the_queue():
    episodes, took = rollout(10, Sampler(3.0, 3.0), gym_of(Http(0.0), 8), at_once=1, deadline_s=5.0)
    assert {e.status for e in episodes} == {"ok"} and took == pytest.approx(30.0, abs=0.1)
    (late,), _ = rollout(1, Sampler(6.0, 6.0), gym_of(Http(0.0), 8), at_once=1, deadline_s=5.0)
    assert late.status == "generate_timeout"


def test_who_waits_for_a_verdict_has_given_its_place_back():
    _, took = rollout(10, Sampler(1.0, 1.0), gym_of(Http(20.0), 100), at_once=1)
    assert took == pytest.approx(
        30.0, abs=0.1
    )  # ten answers one by one, and the last one's verdict


def test_a_deadline_of_a_call_counts_from_its_place_too():
    episodes, took = rollout(8, Sampler(0.0, 0.0), gym_of(Http(20.0), 1, timeout_s=30.0), at_once=8)
    assert {e.status for e in episodes} == {"ok"} and took == pytest.approx(160.0, abs=0.1)


@pytest.mark.parametrize("concurrency", [1, "auto", {"x": 1}, {"y": "auto", "default": 1}])
def test_no_session_waits_for_verdicts_to_be_opened(concurrency, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    http = Http(50.0)
    gym = gym_of(http, concurrency)

    async def conversation():
        async with gym.session("x", ROW) as first:
            verdict = asyncio.create_task(first.verify(message_response("7")))
            await asyncio.sleep(1.0)
            async with gym.session("x", ROW):
                assert not verdict.done() and http.calls[-2:] == ["/verify", "/seed_session"]
            return await verdict

    verdict, took = run(conversation())
    assert verdict.reward == 1.0 and took == pytest.approx(50.0, abs=0.1)


def limits(cores: int, calls: int, of_call) -> list[int]:
    """What the measured limit was at the end of each of `calls`, on a server of so many cores."""
    measured, found = concurrency.Measured(16), []

    async def call(free, i):
        async with measured.place(), free:
            await asyncio.sleep(of_call(i))
        found.append(measured.limit)

    async def all_of_them():
        free = asyncio.Semaphore(cores)
        await asyncio.gather(*(call(free, i) for i in range(calls)))

    run(all_of_them())
    return found


def test_a_measured_limit_settles_at_what_the_server_can_do():
    assert max(limits(1000, 3000, lambda _: 0.1)) == concurrency.MOST
    for cores in (24, 64):
        settled = limits(cores, 6000, lambda _: 0.1)[2000:]
        assert 0.5 * cores < min(settled) and max(settled) < 3 * cores
    draw = random.Random(0)
    settled = limits(64, 6000, lambda _: draw.lognormvariate(-2.0, 1.0))[
        2000:
    ]  # tasks differ by far
    assert min(settled) > 0.3 * 64 and max(settled) < 3 * 64


def test_tasks_that_take_longer_are_not_taken_for_too_many_calls():
    settled = limits(1000, 6000, lambda i: 0.05 if i < 3000 else 0.5)
    assert min(settled[1500:]) >= concurrency.MOST // 2 and settled[-1] == concurrency.MOST


def test_nobody_waits_and_nothing_changes():
    measured = concurrency.Measured(16)

    async def one_by_one():
        for _ in range(200):
            async with measured.place():
                await asyncio.sleep(0.1)

    run(one_by_one())
    assert measured.limit == measured.given == 16
