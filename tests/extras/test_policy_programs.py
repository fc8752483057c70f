"""Programs of the policy: their rewards, forgeries, a program that raises, and the sandbox.

A program gets the reward of its tests, and changes no other reward. All processes that it starts
end with its call. verl 0.9.1 gives some programs that raise, or exit early, a reward if the test
expects "" or any output (https://github.com/verl-project/verl/pull/7853).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from extras.policy_programs import sandbox
from extras.policy_programs.program_scores import score_program
from gym_client import GymError
from kit.errors import ConfigError
from tests.helpers.http import JsonHandler, served
from tests.helpers.recipes import load, write_rows
from tests.helpers.recipes import row as make_row
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
    """Return a function that makes a router for a verifier: build_router("verl").

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
    for memory_gb, reward in ((1.0, 0.0), (6.0, 1.0)):
        router = build_router("verl", memory_gb=memory_gb)
        assert list_rewards(play(router, program, row=PROGRAM_ROW)) == [reward]


# --- programs that raise or exit -----------------------------------------------------------------

EXPECTS_NO_TEXT = {"fn_name": "solve", "inputs": ["1"], "outputs": [""]}
EXPECTS_ANYTHING = {"fn_name": "solve", "inputs": ["1"], "outputs": [None]}
ASSERTS = {"assert_case": ["assert solve(1) == 2"]}
ASSERTS_OF_FUNCTION = {"fn_name": "solve", **ASSERTS}
READS_STDIN = {"inputs": ["1"], "outputs": [""]}
RAISES = "def solve(x):\n    raise ValueError(x)"
EXITS = "def solve(x):\n    import sys\n    sys.exit(0)"
EXITS_FIRST = "import os\nos._exit(0)"
RETURNS_NOTHING = "def solve(x):\n    return ''"
RETURNS_TWO = "class Solution:\n    def solve(self, x):\n        return 2"
PASSES_ASSERT = "def solve(x):\n    return 2"


class RunningSandbox(JsonHandler):
    """Runs each program, and answers as SandboxFusion does."""

    def do_POST(self):  # noqa: N802  (the name that its base class calls)
        request = self.read_json()
        command = [sys.executable, "-c", request["code"]]
        done = subprocess.run(command, input=request["stdin"], capture_output=True, text=True)
        run_result = {
            "status": "Finished",
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        status = "Failed" if done.returncode else "Success"
        self.answer(200, {"status": status, "run_result": run_result})


@pytest.fixture(scope="module")
def sandbox_url():
    with served(RunningSandbox) as url:
        yield f"{url}/run_code"


@pytest.mark.parametrize(
    ("program", "tests", "verl_reward", "reward"),
    [
        (RAISES, EXPECTS_NO_TEXT, 1, 0),
        (EXITS, EXPECTS_NO_TEXT, 1, 0),
        ("x = 1", EXPECTS_NO_TEXT, 1, 0),  # the program does not define `solve`
        (EXITS_FIRST, EXPECTS_ANYTHING, 1, 0),
        (EXITS, ASSERTS, 1, 0),
        (RETURNS_NOTHING, EXPECTS_NO_TEXT, 1, 1),
        (PASSES_ASSERT, ASSERTS, 1, 1),
        (PASSES_ASSERT, ASSERTS_OF_FUNCTION, 1, 1),
        ("import sys\nsys.exit()", READS_STDIN, 1, 1),
    ],
)
def test_a_program_earns_its_reward_only_if_its_test_ended(
    sandbox_url, program, tests, verl_reward, reward
):
    sandbox = importlib.import_module("verl.utils.reward_score.sandbox_fusion")
    text = fence(program)
    verl_score, _ = sandbox.compute_score(
        sandbox_url, None, 99, text, json.dumps(tests), continuous=True
    )
    assert verl_score == verl_reward
    arguments = ("taco", text, json.dumps(tests), None, sandbox_url)
    assert score_program(*arguments) == reward


def test_a_function_that_raises_on_this_machine_earns_nothing(tmp_path):
    """verl runs a program again without the call, and would reward the first two for that."""
    router = make_router(
        tmp_path, "verl", allow_unsandboxed_code=True, timeout_s=60.0, memory_gb=2.0
    )
    prints = "print(2)\n" + RAISES
    texts = [fence(program) for program in (RAISES, prints, RETURNS_TWO)]
    rewards_by_output = []
    for outputs in ([""], ["2"]):
        tests = {"fn_name": "solve", "inputs": ["1"], "outputs": outputs}
        row = {"data_source": "taco", "reward_model": {"ground_truth": json.dumps(tests)}}
        rewards_by_output.append(list_rewards(play(router, *texts, row=row)))
    assert rewards_by_output == [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (200, {"status": "SandboxError", "message": "no disk"}, "test 0: sandbox_error"),
        (500, "busy", "test 0: .*API Request Error: 500 Server Error"),
    ],
)
def test_an_outage_of_verls_sandbox_is_not_a_reward(tmp_path, status, answer, reason):
    class Outage(JsonHandler):
        def do_POST(self):  # noqa: N802  (the name that its base class calls)
            self.read_json()
            self.answer(status, answer)

    with served(Outage) as url:
        router = make_router(tmp_path, {"function": "verl", "sandbox_fusion_url": url})
        result, without_program = play(router, RIGHT, "no program", row=PROGRAM_ROW)
    assert isinstance(result, GymError)
    assert re.search(f"RuntimeError: the sandbox at {url} has no result for {reason}", str(result))
    assert without_program.reward == 0.0
    (pool,) = router.pools.values()
    assert pool.spec.scores_code("taco") and not pool.spec.runs_response("taco")


# --- the sandbox ---------------------------------------------------------------------------------


@needs_bubblewrap
def test_a_sandbox_hides_files_processes_and_the_network(build_router, tmp_path):
    secret = tmp_path / "mine" / "rows.jsonl"  # next to the verifier, in the working directory
    secret.write_text("x")
    visible = {}  # {sandbox: what the verifier could see or do}

    async def look_with_and_without_sandbox():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        targets = f"127.0.0.1 {port} {secret} {tmp_path / 'mine'}"
        async with server:
            for kind in (None, "bwrap"):
                async with build_router("my.py:look_around", sandbox=kind) as router:
                    (result,) = await run_session(router, targets)
                    visible[kind] = json.loads(result.details["visible"])
                    written = tmp_path / "mine" / "written"
                    visible[kind]["writes"] = written.exists()
                    written.unlink(missing_ok=True)

    assert sandbox.find_problem() == ""
    asyncio.run(look_with_and_without_sandbox())
    outside = visible[None]
    inside = visible["bwrap"]
    assert (outside["secret"], outside["writes"], outside["network"]) == (True, True, True)
    assert (inside["secret"], inside["writes"], inside["network"]) == (False, False, False)
    assert inside["processes"] < 5 < outside["processes"]


# --- recipes --------------------------------------------------------------------------------------


def test_a_sandbox_that_is_not_installed_is_an_error_before_the_run(workspace, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    sandbox.find_problem.cache_clear()
    message = r"sandbox=bwrap: bubblewrap does not start .*Install it"
    try:
        with pytest.raises(ConfigError, match=message):
            load(workspace, "env.verifier=verl", "env.verifier_pool.sandbox=bwrap")
    finally:
        sandbox.find_problem.cache_clear()


def test_a_recipe_whose_rows_run_programs_is_refused_unless_it_allows_that(workspace):
    rows = [make_row(f"write {n}", **PROGRAM_ROW) for n in range(8)]
    path = write_rows(workspace / "code.jsonl", rows)
    changes = [
        f"env.train_files=[{path}]",
        "env.val_files=[]",
        "env.verifier=verl",
        "data.max_prompt_length=64",
    ]
    message = (
        r"verl runs the policy's code on this machine, as your user, without a sandbox. "
        r"Set .*allow_unsandboxed_code.* See docs/"
    )
    with pytest.raises(ConfigError, match=message):
        load(workspace, *changes)
    load(workspace, *changes, "env.allow_unsandboxed_code=true")
    if shutil.which("bwrap"):
        load(workspace, *changes, "env.verifier_pool.sandbox=bwrap")
