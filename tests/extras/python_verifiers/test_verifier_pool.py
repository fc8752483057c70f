"""Verifiers that are functions, and environments that are classes: what they say is a verdict, all else a failed
episode by name; the pool heals, and a mistake is told before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer

import psutil
import pytest
from conftest import CPU, ROOT, load, row, tiny, with_verifiers
from omegaconf import OmegaConf
from test_gym_client import Answers

import gym_client
from env import Task
from gym_client import GymError
from kit.config.load import load_config
from kit.errors import ConfigError, PluginError
from kit.extras.python_verifiers import verifier_pool
from kit.runs import preparation

FILE = '''
import asyncio, ctypes, os, re, subprocess, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("it prints", solution_str)  # which is no answer
    return float(ground_truth in solution_str)

def by_name(ground_truth, **others):
    assert others["extra_info"]["row"]["answer"] == ground_truth and others["extra_info"]["num_turns"] == 2
    return {"score": 0.5, "acc": True, "length": len(others["solution_str"]), "pred": "x", "who": others["data_source"],
            "odd": {1, 2}}

async def later(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    await asyncio.sleep(0.01)
    return {"score": 1 if strict else 0}

def wrong(data_source, solution_str, ground_truth, extra_info):
    return {"none": None, "nan": float("nan"), "text": "1.0", "bool": True, "infinite": float("inf"), "list": [1.0],
            "without": {"acc": 1.0}, "part": {"score": 1.0, "acc": float("nan")}, "huge": 10**400}[solution_str]

async def never_yields(data_source, solution_str, ground_truth, extra_info):
    while True:
        pass

class Rude(Exception):
    def __init__(self, one, two):
        pass
    def __str__(self):
        raise ValueError

def bad(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("no such answer")
    if solution_str == "rude":
        raise Rude(1, 2)
    if solution_str == "sys.exit":
        sys.exit(0)
    if solution_str == "os._exit":
        os._exit(0)
    if solution_str == "crash":
        ctypes.string_at(0)
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "regex":
        re.match("(a+)+$", "a" * 40 + "b")
    if solution_str == "child":
        subprocess.run(["sleep", "1000.5"])
    if solution_str == "memory":
        return len(bytearray(10 * 2**30))
    if solution_str == "afterwards":  # a thread that it leaves behind
        threading.Timer(0.05, os._exit, (3,)).start()
    return 1.0

def picky(solution_str, **_):
    if "?" in solution_str:
        raise ValueError(solution_str)
    return {"score": solution_str.count("7"), "length": len(solution_str)}

def two(data_source, solution_str):
    return 1.0

class Game:
    """Guess the number; an answer that is no number costs a point, and five are all there are."""
    def __init__(self, most=5):
        self.most, self.asked = most, 0
    def reset(self, row):
        self.answer = int(row["answer"])
        return "Guess." if row["question"] == "say 7" else None
    async def step(self, text):
        self.asked += 1
        if text == "crash":
            os._exit(9)
        right = text == str(self.answer)
        return None if right else f"No, {self.asked} of {self.most}.", float(right), right or self.asked == self.most

class Sevens:
    """A seven is worth one, in each of two turns."""
    def reset(self, row):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        return "more", text.count("7"), self.turns == 2

class NoStep:
    def reset(self, row):
        pass

class Unpicklable(Game):
    def reset(self, row):
        self.rest = (n for n in range(3))

class Wrong(Game):
    def step(self, text):
        return "only", 1.0

class Large(Game):
    def reset(self, row):
        self.much = bytes(2**27)
'''


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(chr, ids))

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The verifiers of a recipe with `my.py`, and env as given: named(verifier=..., processes=...)."""
    (tmp_path / "my.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def make(verifier, processes=1, timeout_s=20.0, memory_gb=1.0):
        pool = {"processes": processes, "timeout_s": timeout_s, "memory_gb": memory_gb}
        env = {"verifier": verifier, "verifier_pool": pool, "train_files": [], "val_files": []}
        config = OmegaConf.create({"env": env, "gym": {"servers": {}}})
        own = list(verifier_pool.of_recipe(config).values())
        return verifier_pool.Verifiers(gym_client.Gym({}), own, config, Letters(), tmp_path)

    return make


async def say(verifiers, *texts, row=None):
    """What the one function, or environment, says to each text in turn: verdicts, turns or errors."""
    (name,) = verifiers.pools
    said = []
    row = row or {"question": "say 7", "answer": "7", "responses_create_params": {}}
    async with verifiers.session(name, row) as session:
        for text in texts:
            session.last_ids = list(map(ord, text))
            try:
                said.append(
                    await (session.verify({}) if session.kind == "verify" else session.step({}))
                )
            except GymError as error:
                said.append(error)
    return said


def play(verifiers, *texts, **others):
    async def inside():
        async with verifiers:
            return await say(verifiers, *texts, **others)

    return asyncio.run(inside())


# --- what they say -------------------------------------------------------------------------------


def test_a_function_is_called_as_verl_calls_it(named):
    right, wrong = play(named("my.py:compute_score"), "it is 7", "it is 8")
    assert (right.reward, wrong.reward, right.components) == (1.0, 0.0, {})
    verdict = play(named("my.py:by_name"), "x")[0]
    assert (
        verdict.reward == 0.5
        and verdict.components == {"acc": 1.0, "length": 1.0}
        and verdict.latency_s < 1
    )
    assert verdict.details == {"pred": "x", "who": "by_name", "odd": "{1, 2}"}
    assert play(named({"function": "my.py:later", "strict": True}), "x")[0].reward == 1.0


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ({"answer": "a"}, "a"),
        ({"answer": "a", "expected_answer": "e"}, "e"),
        ({"answer": "a", "reward_model": {"style": "rule", "ground_truth": ["g"]}}, ["g"]),
        ({}, None),
    ],
)
def test_where_the_ground_truth_is(given, truth):
    asked = verifier_pool.arguments(
        {**given, "extra_info": {"index": 3, "row": "its own"}}, "text", "name"
    )
    assert (
        asked["ground_truth"] == truth
        and asked["data_source"] == "name"
        and asked["solution_str"] == "text"
    )
    own = {"index": 3, "row": "its own", "num_turns": 2, "rollout_reward_scores": {}}
    assert asked["extra_info"] == own
    assert (
        verifier_pool.arguments({"data_source": "openai/gsm8k", "extra_info": None}, "", "")[
            "data_source"
        ]
        == "openai/gsm8k"
    )


def test_verls_own_needs_neither_torch_nor_ray(named):
    verifiers = named("verl")
    gsm8k = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}

    async def both():
        async with verifiers:
            said = await say(verifiers, "so\n#### 72", "#### 7", row=gsm8k)
            memory = (
                psutil.Process(verifiers.pools["verl"].workers[0].process.pid).memory_info().rss
            )
            return said, memory, await say(verifiers, "x", row={"data_source": "mine"})

    (right, wrong), memory, (unknown,) = asyncio.run(both())
    assert (right.reward, wrong.reward) == (1.0, 0.0) and memory < 100 * 2**20
    assert "NotImplementedError: Reward function is not implemented for data_source='mine'" in str(
        unknown
    )


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (
            {
                "status": "Success",
                "run_result": {"status": "Finished", "stdout": "3\n", "return_code": 0},
            },
            0.5,
        ),
        (
            {
                "status": "Failed",
                "run_result": {"status": "Error", "stderr": "no", "return_code": 1},
            },
            0.0,
        ),
        ({"status": "SandboxError", "message": "no disk"}, "no verdict on test 0: sandbox_error"),
        ("busy", "no verdict on test 0: .*API Request Error: 500 Server Error"),
    ],
    ids=["runs", "fails", "sandbox", "http"],
)
def test_verls_own_runs_programs_in_a_sandbox_and_its_outage_is_no_reward(named, answer, reward):
    asked = []

    class Sandbox(Answers):
        def do_POST(self):  # noqa: N802  (its base is of the library's)
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(500 if answer == "busy" else 200, answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        verifiers = named({"function": "verl", "sandbox_fusion_url": url, "memory_limit_mb": 99})
        tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
        row = {"data_source": "taco", "reward_model": {"ground_truth": json.dumps(tests)}}
        said, prose = play(verifiers, "```python\nprint(3)\n```", "no program", row=row)
        server.shutdown()
    if isinstance(reward, str):
        assert isinstance(said, GymError) and re.search(
            f"RuntimeError: the sandbox at {url} has {reward}", str(said)
        )
    else:
        assert said.reward == reward
    assert prose.reward == 0.0 and {call["stdin"] for call in asked} == {"1 2", "3 4"}
    assert {(call["code"].strip(), call["memory_limit_MB"]) for call in asked} == {("print(3)", 99)}
    (own,) = (pool.function for pool in verifiers.pools.values())
    assert not verifier_pool.runs_code(own, {"taco"}) and verifier_pool.runs_code(
        verifier_pool.read("verl", ""), {"taco"}
    )


def test_a_game_travels_between_processes(named):
    """Two processes, and episodes that take turns: each finds its own state, whichever process has it."""
    verifiers = named({"function": "my.py:Game", "most": 3}, processes=2)

    async def three():
        async with verifiers:
            return await asyncio.gather(
                *(say(verifiers, str(first), "3", "7") for first in (1, 2, 7))
            )

    games = asyncio.run(three())
    turns = [(t.observation, t.reward, t.terminated, t.truncated) for t in games[0]]
    assert turns == [
        ("No, 1 of 3.", 0.0, False, False),
        ("No, 2 of 3.", 0.0, False, False),
        (None, 1.0, True, False),
    ]
    assert games[1] == games[0] and games[2][0].reward == 1.0


def test_a_game_speaks_first_or_not(named):
    async def observations():
        async with named("my.py:Game") as verifiers:
            for question in ("say 7", "other"):
                async with verifiers.session(
                    "Game", {"question": question, "answer": "7"}
                ) as session:
                    yield session.observation

    async def listed():
        return [observation async for observation in observations()]

    assert asyncio.run(listed()) == ["Guess.", None]


# --- what is no verdict --------------------------------------------------------------------------


def test_what_is_no_score_is_a_failure_that_names_it(named):
    kinds = {
        "none": "None",
        "nan": "nan",
        "text": "'1.0'",
        "bool": "True",
        "infinite": "inf",
        "list": "[1.0]",
    }
    kinds |= {
        "without": "{'acc': 1.0}",
        "part": "{'acc': nan, 'score': 1.0}",
        "huge": "1000000000000000",
    }
    said = play(named("my.py:wrong"), *kinds)
    for error, shown in zip(said, kinds.values(), strict=True):
        assert isinstance(error, GymError) and error.reason == "bad_answer" and not error.retry
        assert str(error).startswith(
            f"my.py:wrong returned {shown}"
        ) and "a finite number, or a dict" in str(error)


DIED, SLOW = r"my.py:bad: its process ended with", r"my.py:bad gave no answer within 1 s at"


@pytest.mark.parametrize(
    ("text", "reason", "why", "line"),
    [
        (
            "raise",
            "raised",
            "my.py:bad failed at FILE:LINE: ValueError: no such answer",
            "raise ValueError(",
        ),
        ("rude", "raised", "my.py:bad failed at FILE:LINE: Rude", "raise Rude"),
        ("sys.exit", "raised", "my.py:bad failed at FILE:LINE: SystemExit: 0", "sys.exit(0)"),
        ("os._exit", "died", f"{DIED} exit status 0; its log is .*/verifier_bad_0.log", ""),
        ("crash", "died", f"{DIED} SIGSEGV at FILE:LINE;", "ctypes.string_at"),
        (
            "memory",
            "memory",
            r"FILE:LINE: MemoryError; a process has 1 GiB \(env.verifier_pool.memory_gb",
            "2**30))",
        ),
        ("loop", "timeout", f"{SLOW} FILE:.* env.verifier_pool.timeout_s", ""),
        ("regex", "timeout", f"{SLOW} FILE:LINE; ", "re.match("),
        ("child", "timeout", f"{SLOW} FILE:LINE; ", "subprocess.run("),
    ],
)
def test_what_a_function_does_wrong_fails_by_name_and_the_pool_heals(
    named, tmp_path, text, reason, why, line
):
    began, others = time.monotonic(), psutil.Process().children(recursive=True)
    before, error, after = play(named("my.py:bad", timeout_s=1.0), "fine", text, "fine")
    assert (before.reward, after.reward) == (1.0, 1.0) and time.monotonic() - began < 10
    numbers = [str(n) for n, source in enumerate(FILE.splitlines(), 1) if line in source]
    why = why.replace("FILE", str(tmp_path / "my.py")).replace("LINE", numbers[0])
    assert isinstance(error, GymError) and error.reason == reason and re.search(why, str(error)), (
        str(error)
    )
    assert "\n" not in str(error)
    started = set(psutil.Process().children(recursive=True)) - set(others)
    assert not [p for p in started if "sleep" in p.name() or "worker" in str(p.cmdline())]


def test_an_async_function_that_never_yields(named):
    (error,) = play(named("my.py:never_yields", timeout_s=1.0), "x")
    assert error.reason == "timeout" and re.search(r"my.py:2\d", str(error))


def test_a_process_that_ends_between_two_calls_costs_nothing(named):
    async def pause():
        async with named("my.py:bad") as verifiers:
            first = await say(verifiers, "afterwards")
            await asyncio.sleep(0.5)
            return first + await say(verifiers, "fine")

    assert [verdict.reward for verdict in asyncio.run(pause())] == [1.0, 1.0]


def test_a_crash_costs_one_episode_of_many(named):
    verifiers = named("my.py:Game", processes=2)

    async def many():
        async with verifiers:
            return await asyncio.gather(
                *(say(verifiers, "1", "crash" if k == 3 else "2", "7") for k in range(8))
            )

    games = asyncio.run(many())
    assert [g[1].reason for g in games if isinstance(g[1], GymError)] == ["died"]
    assert sum(isinstance(g[2], gym_client.Turn) and g[2].reward == 1.0 for g in games) >= 7


def test_waiting_in_the_queue_is_not_the_calls_time(named, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(**_):\n    time.sleep(0.4)\n    return 1\n"
    )
    verifiers = named("slow.py:score", timeout_s=1.0)

    async def many():
        async with verifiers:
            return await asyncio.gather(*(say(verifiers, "x") for _ in range(5)))  # 2 s in all

    assert [said[0].reward for said in asyncio.run(many())] == [1.0] * 5


def test_who_is_not_waited_for_is_ended(named):
    async def cancelled():
        async with named("my.py:bad", timeout_s=60.0) as verifiers:
            await verifiers.kind("bad")
            call = asyncio.create_task(say(verifiers, "loop"))
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await say(verifiers, "fine")

    assert asyncio.run(cancelled())[0].reward == 1.0


def test_no_process_outlives_a_driver_that_is_killed(named, tmp_path):
    """Though it is busy, and reads no more requests."""
    verifiers = named("my.py:bad")  # for its files
    code = f"""
import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from omegaconf import OmegaConf
from pathlib import Path
from kit.extras.python_verifiers.verifier_pool import Function, Worker

async def main():
    pool = OmegaConf.create({{"env": {{"verifier_pool": {{"timeout_s": 60.0, "memory_gb": 1}}}}}})
    worker = Worker(Function("bad", "my.py:bad", "env.verifier", "{tmp_path}/my.py"), pool, Path("log"))
    await worker.start()
    print(worker.process.pid, flush=True)
    row = dict.fromkeys(("data_source", "ground_truth", "extra_info"))
    await worker.call("score", {{**row, "solution_str": "loop"}})

asyncio.run(main())
"""
    assert verifiers.pools
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(driver.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running() and driver.poll() is None
    driver.kill()
    driver.communicate()
    psutil.wait_procs([worker], timeout=5)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


# --- told at start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verifier", "why"),
    [
        (
            "my.py:two",
            r"two of \S+/my.py cannot be called with data_source, solution_str, ground_truth, extra_info, by",
        ),
        ("my.py:absent", r"my.py has no function or class absent; it has .*compute_score"),
        (
            "my.py:NoStep",
            r"the class NoStep of \S+/my.py has no step; an environment has reset\(row\)",
        ),
        (
            "my.py:Unpicklable",
            r"an instance of Unpicklable cannot be pickled \(TypeError: cannot pickle 'generator'",
        ),
        (
            "my.py:Wrong",
            r"my.py:Wrong step returned \('only', 1.0\); it must return \(observation, reward, done\)",
        ),
        ("my.py:Large", r"my.py:Large leaves 134217\d+ bytes after reset .*, over 67108864"),
        (
            "my.py:wrong",
            r"my.py:wrong failed at \S+/my.py:18: KeyError: .*\(tried on r:1 and the answer 'So the answer",
        ),
        (
            {"function": "my.py:compute_score", "strict": 1},
            r"cannot be called with .* unexpected keyword argument 'strict'",
        ),
        (
            "broken.py:f",
            r"broken.py cannot be imported: failed at \S+/broken.py:1: ModuleNotFoundError: .*nothing_at_all",
        ),
        ("none.py:f", r"none.py:f returned None; it must return a finite number"),
        ("verl", r"verl failed: NotImplementedError: .* data_source='verl'"),
    ],
)
def test_a_mistake_is_told_at_start_in_one_line(named, tmp_path, verifier, why):
    (tmp_path / "broken.py").write_text("import nothing_at_all\n")
    (tmp_path / "none.py").write_text("def f(**_):\n    pass\n")
    verifiers = named(verifier)
    task = Task("r:1", row(), next(iter(verifiers.pools)), [], [])
    pool = next(iter(verifiers.pools.values()))
    config = OmegaConf.create({"env": {"verifier_pool": dict(pool.workers[0].pool)}})
    with pytest.raises(PluginError) as error:
        verifier_pool.try_out({pool.function.name: pool.function}, [task], config, Letters())
    said = str(error.value)
    assert said.startswith("env.verifier=") and "\n" not in said
    assert re.search(why, said), said


CHECKED = [
    ("env.verifier=absent.py:f", "env.verifier=absent.py:f: no file absent.py here"),
    ("env.verifier=my.py:a/b", "env.verifier=my.py:a/b: wants path.py:function"),
    ("env.verifier=compute_score", "wants path.py:function, path.py:Class, verl"),
    ("env.verifier_pool.processes=0", "env.verifier_pool.processes=0: wants 1 or more"),
    ("env.verifier_pool.timeout_s=0", "env.verifier_pool.timeout_s=0: wants more than 0"),
    ("env.verifier_pool.memory_gb=true", "env.verifier_pool.memory_gb=True: wants more than 0"),
    (
        "env.train_files=[{path: train.jsonl, server: a, verifier: verl}]",
        "has a server and a verifier",
    ),
    (
        "gym.servers.verl={url: http://127.0.0.1:9} env.train_files=[{path: val.jsonl, server: verl}]",
        "has a verl too",
    ),
    (
        "env.val_files=[{path: val.jsonl, verifier: {function: verl, other: 1}}]",
        "two verifiers are called verl",
    ),
]


@pytest.mark.parametrize(("change", "said"), CHECKED)
def test_what_a_recipe_gets_wrong_is_told_before_anything_is_loaded(
    workspace, monkeypatch, change, said
):
    monkeypatch.chdir(workspace)
    config, _ = load_config(
        [str(ROOT / "tests" / "tiny.yaml")],
        tiny(workspace, "env.verifier=verl", *re.split(" (?=env)", change)),
    )
    with pytest.raises((ConfigError, PluginError), match=re.escape(said)):
        preparation.prepare(config)


def test_a_recipe_without_servers(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    (tmp_path / "my.py").write_text(FILE)
    whole = OmegaConf.load(ROOT / "tests" / "tiny.yaml")
    del whole["gym"]
    OmegaConf.save(whole, tmp_path / "alone.yaml")
    changes = [change for change in tiny(workspace) if not change.startswith("gym.")]
    config, _ = load_config([str(tmp_path / "alone.yaml"), str(CPU)], changes)
    with pytest.raises(
        ConfigError, match=r"gym.servers is not set; .* or env.verifier to a function"
    ):
        preparation.prepare(config)
    config.env.verifier = f"{tmp_path}/my.py:compute_score"
    data = preparation.prepare(config)
    assert {task.server for task in [*data.train, *data.validation]} == {"compute_score"} and len(
        data.train
    ) == 8
    told = preparation.summary(config, data, "train")
    assert (
        "servers     compute_score (16 rows)" in told
        and f"verifier    {tmp_path}/my.py:compute_score: " in told
    )
    (tmp_path / "my.py").write_text(FILE.replace("float(ground_truth in solution_str)", "None"))
    with pytest.raises(PluginError, match=r"my.py:compute_score returned None; it must return"):
        preparation.prepare(config)


def test_a_mix_of_servers_and_functions(workspace, tmp_path, monkeypatch):
    """env.verifier takes all rows but those of files that name a server, or a verifier of their own."""
    monkeypatch.chdir(workspace)
    (tmp_path / "my.py").write_text(FILE)
    mix = [f"{{path: train.jsonl, verifier: '{tmp_path}/my.py:Game', weight: 1}}"]
    mix += ["{path: tools.jsonl, server: reasoning_gym, weight: 1}", "{path: val.jsonl, weight: 2}"]
    changes = [
        f"env.verifier={tmp_path}/my.py:compute_score",
        f"env.train_files=[{', '.join(mix)}]",
        "env.val_files=[]",
    ]
    _, data = load(workspace, *changes, "data.max_prompt_length=64")
    rows = [(task.server, task.weight) for task in data.train[::8]]
    assert rows == [("Game", 1), ("reasoning_gym", 1), ("compute_score", 2)]
    _, data = load(workspace, *changes, "env.only_servers=[Game]")
    assert {task.server for task in data.train} == {"Game"} and len(data.train) == 8


# --- over the real stack -------------------------------------------------------------------------


@contextlib.contextmanager
def trainer(stack, name, *changes):
    """A Trainer of the tiny recipe, and what its functions say in the place of the session's servers."""
    (stack.workspace / "my.py").write_text(FILE)
    changes = ("env.train_files=[train.jsonl]", "env.val_files=[]", *changes)
    with with_verifiers(stack, *changes) as gym, stack.trainer(name, *changes, gym=gym) as made:
        yield made


def records(folder):
    return [
        json.loads(line) for line in (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    ]


def test_a_step_with_a_function_and_no_server(stack):
    """Verl's word on every answer; what cannot be scored is a failed episode, and the step goes on."""
    with trainer(stack, "function", "env.verifier=my.py:picky", "gym.max_failed_frac=1") as made:
        metrics = dict(made.advance())
        said = records(made.run.folder)
        failures = [
            json.loads(line)
            for line in (made.run.folder / "failures.jsonl").read_text().splitlines()
        ]
    assert metrics["actor/grad_norm"] > 0 and metrics["training/rollout_probs_diff_max"] < 1e-3
    decode = made.data.tokenizer.decode
    for record in said:
        text = decode(
            record["response"]["output"][-1]["generation_token_ids"], skip_special_tokens=True
        )
        failed = record["_episode"]["status"] == "raised"
        assert failed == ("?" in text) and record["reward"] == (None if failed else text.count("7"))
        assert failed or record["reward_components"] == {"length": len(text)}
    broken = [r for r in said if r["_episode"]["status"] != "ok"]
    assert len(said) == 64 and 0 < len(broken) == len(failures) == metrics["rollout/failed/raised"]
    assert {
        "reward/picky/mean",
        "reward/picky/length/mean",
        "rollout/picky/failed_frac",
        "verify/latency_s/p50",
    } <= set(metrics)


def test_a_step_with_a_game_of_ones_own(stack):
    changes = ["env.verifier=my.py:Sevens", "data.max_response_length=48"]
    with trainer(stack, "game", *changes) as made:
        metrics = dict(made.advance())
        said = records(made.run.folder)
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/failed_frac"] == 0
    turns = [record["_episode"]["turn_rewards"] for record in said]
    assert max(map(len, turns)) == 2 and all(
        sum(turn) == r["reward"] for turn, r in zip(turns, said, strict=True)
    )
    assert metrics["rollout/turns/mean"] > 1 and "reward/Sevens/mean" in metrics
    ended = {(len(turn), r["_episode"]["ended"]) for turn, r in zip(turns, said, strict=True)}
    assert ended <= {(2, "terminated"), (1, "length"), (2, "length")} and (2, "terminated") in ended
