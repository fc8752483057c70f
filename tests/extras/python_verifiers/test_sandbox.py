"""Programs that the policy writes: they earn what their tests say, and pay nobody, themselves and others, by the pipes
of the process that verifies; what they start ends with the call; a sandbox hides the machine from them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
import time

import psutil
import pytest
from conftest import load, row, write_rows
from omegaconf import OmegaConf
from test_verifier_pool import Letters, play, say

import gym_client
from gym_client import GymError
from kit.errors import ConfigError
from kit.extras.python_verifiers import sandbox, verifier_pool

bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="needs bubblewrap, an optional package"
)

# Write an answer that pays 1,000,000 to every pipe in reach: the own ones, and by /proc those of all ancestors. The
# request's number is looked for in all frames; if it is not there, 0 to 3 are tried.
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
        paths += ["/proc/%s/fd/%s" % (pid, fd) for fd in names.listdir("/proc/%s/fd" % pid) if int(fd) > 2]
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
LEAVES_A_CHILD = """
import _posixsubprocess, posix
pid = _posixsubprocess.fork_exec([b"/bin/sleep", b"1000.75"], [b"/bin/sleep"], True, (), None, None,
    -1, -1, -1, -1, -1, -1, *posix.pipe(), False, True, -1, None, None, None, -1, None, False)
running = posix.waitpid(pid, posix.WNOHANG) == (0, 0)
print(7 if running else "it did not start")
"""
MAPS_MEMORY = """
import mmap
try:
    mapped = mmap.mmap(-1, 3 * 2**30)
    print("7")
except OSError:
    print("too much")
"""

# Code in a mathematical answer, in the process that answers for the verifier: pay 1,000,000 to this request.
MATH_ATTACK = """
import json, struct, sys
text = json.dumps({"reward": 1e6, "reward_components": {}, "_seconds": 0.0}).encode()
frame = sys._getframe()
while frame:
    number, answers = frame.f_locals.get("request"), frame.f_locals.get("answers")
    if number and answers:
        answers.write(struct.pack("!QQQ", number, len(text), 0) + text)
        answers.flush()
    frame = frame.f_back
open("ran", "w").close()
"""

FILE = '''
import json, os, socket, struct, subprocess, time
from pathlib import Path

def leaves_a_child(solution_str, **_):
    subprocess.Popen(["sleep", "1000.25"], start_new_session=True)
    time.sleep(60)

def shows_environment(**_):
    return {"score": 1.0, "names": " ".join(sorted(os.environ))}

def floods(solution_str, **_):
    for _ in range(int(solution_str)):
        print("x" * 2**20)
    return 0.5

def claims_much(**_):
    """An answer of 2**60 bytes, to a request that was never made."""
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!QQQ", 1, 2**60, 0))
        except OSError:
            pass
    time.sleep(60)

def answers_in_advance(**_):
    """A whole answer to the next request."""
    text = json.dumps({"reward": 1e6, "reward_components": {}, "_seconds": 0.0}).encode()
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!QQQ", 0, len(text), 0) + text)
        except OSError:
            pass
    return 0.25

def looks_around(solution_str, **_):
    host, port, secret, folder = solution_str.split()
    seen = {"secret": Path(secret).exists(), "processes": sum(n.isdigit() for n in os.listdir("/proc"))}
    try:
        Path(folder, "written").write_text("x")
        seen["writes"] = True
    except OSError:
        seen["writes"] = False
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        seen["network"] = True
    except OSError:
        seen["network"] = False
    return {"score": 1.0, "seen": json.dumps(seen)}
'''
TESTS = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["7", "7"]})
MATH = {
    "data_source": "numina_olympiads",
    "reward_model": {"ground_truth": "x+y"},
    "responses_create_params": {},
}
TASK = {
    "data_source": "taco",
    "reward_model": {"ground_truth": TESTS},
    "responses_create_params": {},
}


def in_fences(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """The verifier of a recipe, with these keys of env.verifier_pool: pool_of(verifier, **keys)."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my.py").write_text(FILE)
    monkeypatch.chdir(tmp_path / "mine")

    def make(verifier, allowed=True, **keys):
        pool = {
            "processes": 1,
            "timeout_s": 60.0,
            "memory_gb": 2.0,
            "sandbox": None,
            "env": [],
        } | keys
        env = {"verifier": verifier, "verifier_pool": pool, "train_files": [], "val_files": []}
        env["allow_unsandboxed_code"] = allowed
        config = OmegaConf.create({"env": env, "gym": {"servers": {}}})
        own = list(verifier_pool.of_recipe(config).values())
        return verifier_pool.Verifiers(gym_client.Gym({}), own, config, Letters(), tmp_path)

    return make


def running(*command: str) -> list[int]:
    """Processes with this command line, 2 seconds after they should have ended at the latest."""
    deadline = time.monotonic() + 2
    while True:
        found = [
            p.pid
            for p in psutil.process_iter(["cmdline", "status"])
            if p.info["cmdline"] == [*command]
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def rewards(said) -> list[object]:
    return [error.reason if isinstance(error := one, GymError) else one.reward for one in said]


@pytest.mark.parametrize("kind", [None, pytest.param("bwrap", marks=bubblewrap)])
def test_a_program_is_paid_by_its_tests_and_forges_nobodys_reward(pool_of, kind):
    """Before and after an attack the verdicts are right and in order. An attack is never paid."""
    verifiers = pool_of("verl", sandbox=kind)
    right, wrong, attack = in_fences("print(7)"), in_fences("print(8)"), in_fences(ATTACK)
    said = play(verifiers, right, wrong, attack, right, wrong, attack, wrong, right, row=TASK)
    found = rewards(said)
    assert [found[i] for i in (0, 1, 3, 4, 6, 7)] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    attacks = [found[2], found[5]]
    allowed = (
        {0.0} if kind else {0.0, "bad_answer", "died"}
    )  # root may write to any pipe; it is noticed
    assert set(attacks) <= allowed, said


def test_code_in_a_mathematical_answer_forges_no_reward(pool_of, tmp_path):
    """verl's prime_math calls eval on an answer with a pi in it; bytes, since it cuts answers at underscores."""
    attack = rf"\boxed{{\pi+exec(bytes(({','.join(map(str, MATH_ATTACK.encode()))})))}}"
    right, wrong = r"\boxed{y+x}", r"\boxed{x-y}"
    said = play(pool_of("verl"), right, wrong, attack, right, wrong, row=MATH)
    assert rewards(said) == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert (tmp_path / "mine" / "ran").exists()  # else the attack proves nothing


def test_code_of_rows_that_were_not_known_before_the_run_is_refused(pool_of):
    """A function makes rows batch by batch: a later one may bring the first program."""
    for answered, source in ((TASK, "taco"), (MATH, "numina_olympiads")):
        (error,) = play(pool_of("verl", allowed=False), "print(7)", row=answered)
        assert error.reason == "raised" and f"data_source={source} runs code of the policy" in str(
            error
        )
    list_as_source = {**TASK, "data_source": ["taco"]}
    assert rewards(play(pool_of("verl", allowed=False), "print(7)", row=list_as_source)) == [
        "raised"
    ]


def test_a_sandbox_hides_the_folder_of_temporary_files_wherever_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = sandbox.wrap(["true"], [])
    hidden = {path for option, path in itertools.pairwise(command) if option == "--tmpfs"}
    assert {"/tmp", str(tmp_path)} <= hidden


@pytest.mark.parametrize(
    "program", ["import sys\nsys.exit(0)", "import posix\nposix._exit(0)", "raise SystemExit"]
)
def test_an_exit_status_of_0_is_no_right_answer(pool_of, program):
    assert rewards(play(pool_of("verl"), in_fences(program), in_fences("print(7)"), row=TASK)) == [
        0.0,
        1.0,
    ]


def test_a_program_that_prints_without_end_is_wrong_and_costs_no_memory(pool_of):
    flood = in_fences("for _ in range(10**5):\n    print('7' * 10**3)")
    before = psutil.Process().memory_info().rss
    assert rewards(play(pool_of("verl"), flood, in_fences("print(7)"), row=TASK)) == [0.0, 1.0]
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_a_programs_children_end_with_its_call(pool_of):
    verifiers = pool_of("verl")
    started = []

    async def calls():
        async with verifiers:
            said = await say(verifiers, in_fences(LEAVES_A_CHILD), row=TASK)
            started.append(running("/bin/sleep", "1000.75"))
            return said + await say(verifiers, in_fences("print(7)"), row=TASK)

    assert rewards(asyncio.run(calls())) == [1.0, 1.0]  # the first is paid only if its child ran
    assert started == [[]]


def test_memory_that_a_program_maps_counts(pool_of):
    assert rewards(play(pool_of("verl", memory_gb=1.0), in_fences(MAPS_MEMORY), row=TASK)) == [0.0]
    assert rewards(play(pool_of("verl", memory_gb=6.0), in_fences(MAPS_MEMORY), row=TASK)) == [1.0]


def test_a_deadline_ends_children_with_a_session_of_their_own(pool_of):
    said = play(pool_of("my.py:leaves_a_child", timeout_s=1.5), "x")
    assert rewards(said) == ["timeout"] and running("sleep", "1000.25") == []


def test_secrets_of_the_environment_are_hidden_unless_the_recipe_names_them(pool_of, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    monkeypatch.setenv("PLAIN_SETTING", "on")
    for shown in ([], ["OPENAI_API_KEY"]):
        (verdict,) = play(pool_of("my.py:shows_environment", env=shown), "x")
        names = set(verdict.details["names"].split())
        assert "PLAIN_SETTING" in names and "HF_TOKEN" not in names
        assert ("OPENAI_API_KEY" in names) == bool(shown)


def test_a_log_begins_anew_when_it_is_long(pool_of, tmp_path):
    assert rewards(play(pool_of("my.py:floods"), "20", "1")) == [0.5, 0.5]
    assert 0 < (tmp_path / "verifier_floods_0.log").stat().st_size < 2 * 2**20


def test_an_answer_that_claims_to_be_long_is_not_read(pool_of):
    before = psutil.Process().memory_info().rss
    said = play(pool_of("my.py:claims_much"), "x")
    assert rewards(said) == ["bad_answer"] and "too long" in str(said[0])
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_an_answer_in_advance_counts_for_nobody(pool_of):
    assert rewards(play(pool_of("my.py:answers_in_advance"), "x", "y")) == [
        "bad_answer",
        "bad_answer",
    ]


@bubblewrap
def test_a_sandbox_hides_files_processes_and_the_network(pool_of, tmp_path):
    (tmp_path / "secret").write_text("x")
    seen = {}

    async def serve_and_ask():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            for kind in (None, "bwrap"):
                verifiers = pool_of("my.py:looks_around", sandbox=kind)
                async with verifiers:
                    asked = f"127.0.0.1 {port} {tmp_path / 'secret'} {tmp_path / 'mine'}"
                    (verdict,) = await say(verifiers, asked)
                    seen[kind] = json.loads(verdict.details["seen"])

    assert sandbox.why_unavailable() == ""
    asyncio.run(serve_and_ask())
    assert (seen[None]["secret"], seen[None]["writes"], seen[None]["network"]) == (True, True, True)
    inside = seen["bwrap"]
    assert (inside["secret"], inside["writes"], inside["network"]) == (False, False, False)
    assert inside["processes"] < 5 < seen[None]["processes"]


def test_a_sandbox_that_is_not_installed_is_an_error_before_the_run(workspace, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    sandbox.why_unavailable.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"sandbox=bwrap: bubblewrap is not installed; install it"
        ):
            load(workspace, "env.verifier_pool.sandbox=bwrap")
    finally:
        sandbox.why_unavailable.cache_clear()


def code_rows(workspace):
    path = write_rows(workspace / "code.jsonl", [row(f"write {n}", **TASK) for n in range(8)])
    return [f"env.train_files=[{path}]", "env.val_files=[]", "env.verifier=verl"]


def test_a_recipe_whose_answers_verl_evaluates_is_refused_too(workspace):
    path = write_rows(workspace / "math.jsonl", [row(f"add {n}", **MATH) for n in range(8)])
    asked = [f"env.train_files=[{path}]", "env.val_files=[]", "data.max_prompt_length=64"]
    verifier = "env.verifier={function: verl, sandbox_fusion_url: 'http://127.0.0.1:9/run_code'}"  # for programs only
    with pytest.raises(ConfigError, match="verl runs the policy's code on this machine"):
        load(workspace, *asked, verifier)


def test_a_recipe_whose_rows_run_programs_says_so_or_is_refused(workspace):
    asked = [*code_rows(workspace), "data.max_prompt_length=64"]
    wanted = r"verl runs the policy's code on this machine, as you, without a sandbox: set .*allow_unsandboxed_code"
    with pytest.raises(ConfigError, match=wanted):
        load(workspace, *asked)
    load(workspace, *asked, "env.allow_unsandboxed_code=true")
    if shutil.which("bwrap"):
        load(workspace, *asked, "env.verifier_pool.sandbox=bwrap")


def test_a_server_that_runs_programs_is_started_only_if_the_recipe_allows_it(workspace):
    start = "gym.servers.reasoning_gym.start.server=code_gen"
    with pytest.raises(
        ConfigError, match=r"reasoning_gym runs the policy's code .* container and give its url"
    ):
        load(workspace, start)
    load(workspace, start, "env.allow_unsandboxed_code=true")
