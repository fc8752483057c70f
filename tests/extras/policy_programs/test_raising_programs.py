"""A program that raises, or exits before its test has ended, earns nothing.

verl 0.9.1 gives some of them a reward if the test expects "" or any output
(https://github.com/verl-project/verl/pull/7853).
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer

import pytest

from extras.policy_programs.program_scores import score_program
from gym_client import GymError
from kit.gym.python_verifiers.settings import read_spec
from tests.helpers.http import JsonHandler
from tests.helpers.verifiers import list_rewards, make_router, play

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
    with ThreadingHTTPServer(("127.0.0.1", 0), RunningSandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run_code"
        server.shutdown()


def fence(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.mark.parametrize(
    ("program", "tests", "verl_reward", "reward"),
    [
        (RAISES, EXPECTS_NO_TEXT, 1, 0),
        (EXITS, EXPECTS_NO_TEXT, 1, 0),
        ("x = 1", EXPECTS_NO_TEXT, 1, 0),  # the program does not define `solve`
        (EXITS_FIRST, EXPECTS_ANYTHING, 1, 0),
        (EXITS, ASSERTS, 1, 0),
        (EXITS_FIRST, ASSERTS_OF_FUNCTION, 1, 0),
        (RAISES, ASSERTS, 0, 0),
        (RETURNS_NOTHING, EXPECTS_NO_TEXT, 1, 1),
        (RETURNS_TWO, {**EXPECTS_NO_TEXT, "outputs": ["2"]}, 1, 1),
        (PASSES_ASSERT, ASSERTS, 1, 1),
        (PASSES_ASSERT, ASSERTS_OF_FUNCTION, 1, 1),
        ("raise ValueError", READS_STDIN, 0, 0),
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


def test_a_program_that_raises_in_one_of_two_tests_earns_half(sandbox_url):
    program = "def solve(x):\n    if x == 1:\n        raise ValueError\n    return ''"
    tests = {"fn_name": "solve", "inputs": ["1", "2"], "outputs": ["", ""]}
    arguments = ("taco", fence(program), json.dumps(tests), None, sandbox_url)
    assert score_program(*arguments) == 0.5


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


# answers of SandboxFusion
PROGRAM_ENDED = {
    "status": "Success",
    "run_result": {"status": "Finished", "stdout": "3\n", "return_code": 0},
}
PROGRAM_FAILED = {
    "status": "Failed",
    "run_result": {"status": "Error", "stderr": "no", "return_code": 1},
}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (PROGRAM_ENDED, 0.5),
        (PROGRAM_FAILED, 0.0),
        ({"status": "SandboxError", "message": "no disk"}, "no result for test 0: sandbox_error"),
        ("busy", "no result for test 0: .*API Request Error: 500 Server Error"),
    ],
    ids=["runs", "fails", "sandbox", "http"],
)
def test_an_outage_of_verls_sandbox_is_not_a_reward(tmp_path, answer, reward):
    requests = []

    class Sandbox(JsonHandler):
        def do_POST(self):  # noqa: N802  (the name that its base class calls)
            requests.append(self.read_json())
            self.answer(500 if answer == "busy" else 200, answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        verifier = {"function": "verl", "sandbox_fusion_url": url, "memory_limit_mb": 99}
        router = make_router(tmp_path, verifier)
        tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
        row = {"data_source": "taco", "reward_model": {"ground_truth": json.dumps(tests)}}
        result, without_program = play(router, "```python\nprint(3)\n```", "no program", row=row)
        server.shutdown()
    if isinstance(reward, str):
        assert isinstance(result, GymError)
        assert re.search(f"RuntimeError: the sandbox at {url} has {reward}", str(result))
    else:
        assert result.reward == reward
    assert without_program.reward == 0.0
    assert {request["stdin"] for request in requests} == {"1 2", "3 4"}
    limits = {(request["code"].strip(), request["memory_limit_MB"]) for request in requests}
    assert limits == {("print(3)", 99)}
    (pool,) = router.pools.values()
    assert pool.spec.scores_code("taco") and not pool.spec.runs_response("taco")
    assert read_spec("verl", "").runs_response("taco")
