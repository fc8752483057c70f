"""A program that the policy writes gets the reward of its tests, and changes no other reward.

All processes that it starts end with its call.
"""

from __future__ import annotations

import asyncio
import functools

import psutil
import pytest

from tests.helpers.verifiers import (
    MATH_ROW,
    PROGRAM_ROW,
    enter_hostile_folder,
    find_remaining_processes,
    list_rewards,
    make_router,
    needs_bubblewrap,
    play,
    run_session,
)

# Write an answer with the reward 1,000,000 to the pipes of this process and, by /proc, of all its
# ancestors. An answer needs the number of its request: try 0 to 3, and the large integers of all
# frames.
ATTACK = """
import builtins, json, struct, sys
names = __import__("posix")
numbers = list(range(4))
frame = sys._getframe()
while frame:
    numbers += [value for value in frame.f_locals.values() if type(value) is int and value > 2**40]
    frame = frame.f_back
text = json.dumps({"reward": 1e6, "reward_components": {}, "_seconds": 0.0}).encode()
frames = b"".join(struct.pack("!QQQ", number, len(text), 0) + text for number in numbers)
paths = []
pid = "self"
for _ in range(8):
    try:
        folder = "/proc/%s/fd/" % pid
        paths += [folder + fd for fd in names.listdir(folder) if int(fd) > 2]
    except OSError:
        pass
    try:
        with builtins.open("/proc/%s/stat" % pid) as file:
            pid = file.read().rpartition(")")[2].split()[1]
    except OSError:
        break
for path in paths:
    try:
        fd = names.open(path, names.O_WRONLY | names.O_NONBLOCK)
        names.write(fd, frames)
        names.close(fd)
    except OSError:
        pass
for fd in range(3, 64):
    try:
        names.write(fd, frames)
    except OSError:
        pass
print("wrong")
"""
# verl evaluates a mathematical answer in the process that scores it. Find the request and the pipe
# of answers in the frames of this process, and answer the request with the reward 1,000,000.
MATH_ATTACK = """
import json, struct, sys
text = json.dumps({"reward": 1e6, "reward_components": {}, "_seconds": 0.0}).encode()
frame = sys._getframe()
while frame:
    number, answers = frame.f_locals.get("request"), frame.f_locals.get("answers")
    if number and answers:
        answers.write(struct.pack("!QQQ", number, len(text), 0) + text)
        answers.flush()
        open("reached", "w").close()
    frame = frame.f_back
open("ran", "w").close()
"""
LEAVE_A_CHILD = """
import _posixsubprocess, posix
pid = _posixsubprocess.fork_exec([b"/bin/sleep", b"1000.75"], [b"/bin/sleep"], True, (), None, None,
    -1, -1, -1, -1, -1, -1, *posix.pipe(), False, True, -1, None, None, None, -1, None, False)
running = posix.waitpid(pid, posix.WNOHANG) == (0, 0)
print(7 if running else "it did not start")
"""
MAP_MEMORY = """
import mmap
try:
    mapped = mmap.mmap(-1, 3 * 2**30)
    print("7")
except OSError:
    print("too much")
"""


def fence(program: str) -> str:
    """Put a program into a Markdown code block."""
    return f"```python\n{program}\n```"


RIGHT = fence("print(7)")
WRONG = fence("print(8)")


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router for a verifier: build_router("verl", memory_gb=1.0).

    The logs are in tmp_path.
    """
    enter_hostile_folder(tmp_path, monkeypatch)
    defaults = {"allow_unsandboxed_code": True, "timeout_s": 60.0, "memory_gb": 2.0}
    return functools.partial(make_router, tmp_path, **defaults)


@pytest.mark.parametrize("kind", [None, pytest.param("bwrap", marks=needs_bubblewrap)])
def test_a_program_earns_what_its_tests_say_and_forges_no_reward(build_router, kind):
    """An attack earns nothing, and the answers before and after it get their own rewards."""
    attack = fence(ATTACK)
    texts = [RIGHT, WRONG, attack, RIGHT, WRONG, attack, WRONG, RIGHT]
    results = play(build_router("verl", sandbox=kind), *texts, row=PROGRAM_ROW)
    values = list_rewards(results)
    assert [values[i] for i in (0, 1, 3, 4, 6, 7)] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    # Without a sandbox, root can write to any pipe. If an attack does so, the pool fails the call.
    allowed = {0.0} if kind else {0.0, "bad_answer", "died"}
    assert {values[2], values[5]} <= allowed, results


def test_code_in_a_mathematical_answer_forges_no_reward(build_router, tmp_path):
    """verl's prime_math calls eval on an answer with a pi in it.

    The code is written as bytes, since verl cuts answers at underscores.
    """
    code = ",".join(map(str, MATH_ATTACK.encode()))
    attack = rf"\boxed{{\pi+exec(bytes(({code})))}}"
    right = r"\boxed{y+x}"
    wrong = r"\boxed{x-y}"
    results = play(build_router("verl"), right, wrong, attack, right, wrong, row=MATH_ROW)
    assert list_rewards(results) == [1.0, 0.0, 0.0, 1.0, 0.0]
    # The code ran, and it found the pipe. Otherwise this test would show nothing.
    for name in ("ran", "reached"):
        assert (tmp_path / "mine" / name).exists()


def test_a_program_in_a_row_that_is_generated_during_the_run_is_refused(build_router):
    """The check before a run cannot see rows that a function generates for later batches."""
    for row, source in ((PROGRAM_ROW, "taco"), (MATH_ROW, "numina_olympiads")):
        router = build_router("verl", allow_unsandboxed_code=False)
        (error,) = play(router, "print(7)", row=row)
        assert error.reason == "raised"
        assert f"data_source={source} runs code of the policy" in str(error)
    row = {**PROGRAM_ROW, "data_source": ["taco"]}
    router = build_router("verl", allow_unsandboxed_code=False)
    assert list_rewards(play(router, "print(7)", row=row)) == ["raised"]


@pytest.mark.parametrize(
    "program", ["import sys\nsys.exit(0)", "import posix\nposix._exit(0)", "raise SystemExit"]
)
def test_an_exit_status_of_0_is_not_a_right_response(build_router, program):
    results = play(build_router("verl"), fence(program), RIGHT, row=PROGRAM_ROW)
    assert list_rewards(results) == [0.0, 1.0]


def test_a_program_that_prints_without_end_earns_nothing_and_costs_no_memory(build_router):
    flood = fence("for _ in range(10**5):\n    print('7' * 10**3)")
    before = psutil.Process().memory_info().rss
    assert list_rewards(play(build_router("verl"), flood, RIGHT, row=PROGRAM_ROW)) == [0.0, 1.0]
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_the_children_of_a_program_end_with_its_call(build_router):
    router = build_router("verl")
    children = []

    async def run_twice():
        async with router:
            results = await run_session(router, fence(LEAVE_A_CHILD), row=PROGRAM_ROW)
            children.extend(find_remaining_processes("/bin/sleep", "1000.75"))
            return results + await run_session(router, RIGHT, row=PROGRAM_ROW)

    # The first program earns 1 only if its child ran.
    assert list_rewards(asyncio.run(run_twice())) == [1.0, 1.0]
    assert children == []


def test_memory_that_a_program_maps_counts_for_its_limit(build_router):
    program = fence(MAP_MEMORY)
    assert list_rewards(play(build_router("verl", memory_gb=1.0), program, row=PROGRAM_ROW)) == [
        0.0
    ]
    assert list_rewards(play(build_router("verl", memory_gb=6.0), program, row=PROGRAM_ROW)) == [
        1.0
    ]
