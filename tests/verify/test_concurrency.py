"""The slots of the rollout engine and of a Gym server, and the start of a timeout.

The tests run the Gym client and the rollout. The rollout engine and HTTP are replaced by doubles,
and the clock skips to the next event.
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
from kit.engine.sampling import RolloutContext, repeat_per_group
from kit.verify import concurrency
from kit.verify.concurrency import ConcurrencyLimit, ConcurrencyLimits
from tests.helpers.rollouts import make_tokenizer

ROW = {"responses_create_params": {"input": "x"}}


class SkippingSelector(selectors.SelectSelector):
    """A selector that does not wait: if nothing is ready, the clock skips to the next event."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        assert ready or timeout is not None, "no event is scheduled: the loop would wait forever"
        if not ready:
            self.now += timeout
        return ready


def run(coroutine) -> tuple[object, float]:
    """Run a coroutine on the clock that skips. Return its result, and the seconds that passed."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        return loop.run_until_complete(coroutine), selector.now
    finally:
        loop.close()


class FakeHttp:
    """A double of aiohttp's session. /verify takes `verify_s`, and all other calls no time."""

    def __init__(self, verify_s: float):
        self.verify_s = verify_s
        self.calls = []

    @contextlib.asynccontextmanager
    async def request(self, method, url, **_):
        path = url.removeprefix("http://x")
        self.calls.append(path)
        answer = {}
        if method == "GET":
            answer = {"paths": {"/seed_session": {"post": {}}, "/verify": {"post": {}}}}
        elif path == "/verify":
            answer = {"reward": 1.0}
            await asyncio.sleep(self.verify_s)
        text = json.dumps(answer).encode()

        async def readexactly(count):
            raise asyncio.IncompleteReadError(text, count)

        headers = SimpleNamespace(getall=lambda *_: ())
        content = SimpleNamespace(readexactly=readexactly)
        yield SimpleNamespace(status=200, headers=headers, content=content)


def make_gym(http, limit, **changes) -> Gym:
    """Make a Gym client with this HTTP session and this limit."""
    limits = ConcurrencyLimits().resolve({"default": limit})
    gym = Gym({"x": "http://x"}, concurrency=limits, **changes)
    gym._http = http
    return gym


class FakeEngine:
    """A rollout engine that takes `seconds` for each response."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    async def generate(self, request_id, prompt_ids, sampling_params):
        await asyncio.sleep(self.seconds)
        return SimpleNamespace(
            token_ids=[5, 1], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={}
        )


def run_rollout(count, engine, gym, slots, timeout_s=100.0):
    """Sample `count` episodes with this number of slots. Return (episodes, seconds)."""
    context = RolloutContext(
        engine,
        make_tokenizer("five"),
        {1},
        32,
        12,
        None,
        100,
        timeout_s,
        episode_slots=asyncio.Semaphore(slots),
    )
    task = Task("x:1", ROW, "x", [{"role": "user", "content": "x"}], [1, 2])
    requests = repeat_per_group([task] * count, 1, "x")
    return run(inference.rollout(requests, {}, context, gym))


def test_the_timeout_of_a_response_starts_with_its_slot():
    engine = FakeEngine(3.0)
    gym = make_gym(FakeHttp(0.0), 8)
    episodes, seconds = run_rollout(10, engine, gym, slots=1, timeout_s=5.0)
    assert {e.status for e in episodes} == {"ok"}
    assert seconds == pytest.approx(30.0, abs=0.1)
    engine = FakeEngine(6.0)
    gym = make_gym(FakeHttp(0.0), 8)
    (late,), _ = run_rollout(1, engine, gym, slots=1, timeout_s=5.0)
    assert late.status == "generate_timeout"


def test_the_timeout_of_a_call_starts_with_its_slot():
    gym = make_gym(FakeHttp(20.0), 1, timeout_s=30.0)
    episodes, seconds = run_rollout(8, FakeEngine(0.0), gym, slots=8)
    assert {e.status for e in episodes} == {"ok"}
    assert seconds == pytest.approx(160.0, abs=0.1)


@pytest.mark.parametrize("limit", [1, "auto"])
def test_a_session_opens_while_other_responses_are_verified(limit, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    http = FakeHttp(50.0)
    gym = make_gym(http, limit)

    async def conversation():
        async with gym.session("x", ROW) as first:
            verify = asyncio.create_task(first.verify(message_response("7")))
            await asyncio.sleep(1.0)
            async with gym.session("x", ROW):
                assert not verify.done()
                assert http.calls[-2:] == ["/verify", "/seed_session"]
            return await verify

    result, seconds = run(conversation())
    assert result.reward == 1.0
    assert seconds == pytest.approx(50.0, abs=0.1)


# --- adaptive limits -----------------------------------------------------------------------------


def simulate_calls(cores: int, calls: int, latency_of) -> list[int]:
    """Simulate calls to a server with this number of cores. Return the limit after each call.

    latency_of: the seconds of a call, by its number.
    """
    limit = ConcurrencyLimit(16)
    history = []

    async def run_one(free, number):
        async with limit.slot(), free:
            await asyncio.sleep(latency_of(number))
        history.append(limit.limit)

    async def run_all():
        free = asyncio.Semaphore(cores)
        await asyncio.gather(*(run_one(free, number) for number in range(calls)))

    run(run_all())
    return history


def test_a_limit_settles_near_the_number_of_cores_of_the_server():
    assert max(simulate_calls(1000, 3000, lambda _: 0.1)) == concurrency.MAX_LIMIT
    for cores in (24, 64):
        settled = simulate_calls(cores, 6000, lambda _: 0.1)[2000:]
        assert 0.5 * cores < min(settled)
        assert max(settled) < 3 * cores
    generator = random.Random(0)
    # latencies that differ greatly
    settled = simulate_calls(64, 6000, lambda _: generator.lognormvariate(-2.0, 1.0))[2000:]
    assert min(settled) > 0.3 * 64
    assert max(settled) < 3 * 64


def test_slower_tasks_do_not_lower_the_limit_for_long():
    limits = simulate_calls(1000, 6000, lambda number: 0.05 if number < 3000 else 0.5)
    assert min(limits[1500:]) >= concurrency.MAX_LIMIT // 2
    assert limits[-1] == concurrency.MAX_LIMIT


def test_a_limit_does_not_change_while_no_call_waits():
    limit = ConcurrencyLimit(16)

    async def run_one_by_one():
        for _ in range(200):
            async with limit.slot():
                await asyncio.sleep(0.1)

    run(run_one_by_one())
    assert limit.limit == limit.slots == 16
