"""extras/agents: the processes of an agent, its deadlines, its answer, and its failures.

A double stands for the policy endpoint. test_real_agents.py has SDKs and the endpoint itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from env import Task
from extras.agents import Agents
from extras.agents.processes import FunctionAgent, run_command
from extras.agents.runner import AgentRunner, call_url
from gym_client import GymError
from kit.chat.parsed_response import ParsedResponse
from kit.data.episode import Episode, append_tokens
from kit.errors import ConfigError
from kit.recipe.load import raise_all, read_source
from kit.recipe.schema import AgentSpec
from kit.recipe.settings import make_settings
from tests.extras.agents import scripted
from tests.helpers.http import ScriptedServer, watch_event_loop
from tests.helpers.recipes import load
from tests.helpers.rollouts import make_limits

POLICY = "the policy's text"  # its last one
AGENTS = """
import asyncio, json, os, subprocess, time, urllib.request
import aiohttp

async def asks(row, base_url, key):
    function = {"name": "search", "parameters": {"type": "object", "properties": {}}}
    body = {
        "messages": [{"role": "user", "content": row["question"]}],
        "tools": [{"type": "function", "function": function}],
    }
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{base_url}/v1/chat/completions"
    async with aiohttp.request("POST", url, json=body, headers=headers) as response:
        raise ValueError((await response.json())["choices"][0]["message"]["content"])

async def echo(row, base_url, key):
    await asyncio.sleep(0.1)
    return {"pid": os.getpid(), "number": row["number"], "key": key, "url": base_url}

async def broken(row, base_url, key):
    raise ValueError("no such tool")

async def ends(row, base_url, key):
    os._exit(3)

async def blocks(row, base_url, key):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(row["path"], "a").write(f"{os.getpid()} {child.pid} ")
    time.sleep(1000 * row["number"])
    await asyncio.sleep(1000)

history = []

async def shares(row, base_url, key):
    history.append({"role": "user", "content": row["question"]})
    body = json.dumps({"model": "policy", "messages": history}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/v1/chat/completions", body, headers)
    await asyncio.to_thread(urllib.request.urlopen, request)

def no_coroutine(row, base_url, key):
    pass
"""


class Endpoint:
    """Stands for the sessions of the policy endpoint. changes: of the next session."""

    def __init__(self, **changes: Any):
        self.changes = changes
        self.keys: set[str] = set()
        self.count = 0

    def open(self, *_: object) -> Any:
        self.count += 1
        session = SimpleNamespace(
            key=f"key-{self.count}", over=asyncio.Event(), failure=None, limit="", cut=""
        )
        session.tree = SimpleNamespace(calls=[])
        session.fill = fill
        vars(session).update(self.changes)
        self.keys.add(session.key)
        return session

    def close(self, session: Any) -> None:
        self.keys.remove(session.key)


def fill(episode: Episode) -> None:
    episode.responses.append(ParsedResponse.of_text(POLICY))
    episode.output += episode.responses[-1].items
    append_tokens(episode, [1, 2], [-1.0, -1.0])
    episode.ended = "stop"


class Read(NamedTuple):
    """What a verifier reads."""

    answer: str
    row: dict[str, Any]
    files: dict[str, str]  # in the work folder


async def play(
    run_agent: Any, row: dict[str, Any], timeout_s: float = 60.0, **changes: Any
) -> Read:
    """Run the turns of an episode, and return what its verifier reads. changes: of the session."""
    endpoint: Any = Endpoint(**changes)
    limits = make_limits(timeout_s=timeout_s)
    runner = AgentRunner(run_agent, endpoint, "http://127.0.0.1:9", limits)
    task = Task("rows:1", row, "s", [{"role": "user", "content": "What is 'x'?"}], [])
    episode = Episode(task.row_id, "0/0", task.server, [], row=row)
    session: Any = SimpleNamespace(kind="verify", row=row)
    context: Any = None
    try:
        async with runner.run_turns(episode, task, session, context, {}, "0/0-0"):
            folder = Path((session.row.get("extra_info") or {}).get("work_folder", "none"))
            files = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
            read = Read(episode.responses[-1].written, session.row, files)
        assert not folder.exists()
        return read
    finally:
        assert endpoint.count == 1 and not endpoint.keys  # its key is closed


def run(agent: Any, row: dict[str, Any], **options: Any) -> Read:
    async def run_and_close() -> Read:
        if not isinstance(agent, FunctionAgent):
            return await play(agent, row, **options)
        try:
            return await play(agent.run, row, **options)
        finally:
            await agent.aclose()

    return asyncio.run(run_and_close())


def failure_of(agent: Any, row: dict[str, Any], **options: Any) -> GymError:
    with pytest.raises(GymError) as caught:
        run(agent, row, **options)
    return caught.value


def wait_until_dead(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while running := [process for process in psutil.process_iter() if process.pid in pids]:
        assert time.monotonic() < end, running
        time.sleep(0.05)


@pytest.fixture
def functions(tmp_path):
    """A function of AGENTS by its name."""
    (tmp_path / "agents_of_test.py").write_text(AGENTS)

    def make(name: str) -> FunctionAgent:
        spec = AgentSpec(function=f"{tmp_path}/agents_of_test.py:{name}")
        return FunctionAgent(spec, tmp_path / "agent.log")

    return make


# --- functions -----------------------------------------------------------------------------------


def test_hundreds_of_episodes_run_at_the_same_time_in_one_process(functions):
    agent = functions("echo")

    async def run_all() -> list[Read]:
        try:
            await play(agent.run, {"number": -1})  # starts the process
            began = time.monotonic()
            reads = await asyncio.gather(*(play(agent.run, {"number": n}) for n in range(300)))
            assert time.monotonic() - began < 10  # one after another: 30 s
            return reads
        finally:
            await agent.aclose()

    answers = [json.loads(read.answer) for read in asyncio.run(run_all())]
    assert [answer["number"] for answer in answers] == list(range(300))
    assert answers[0]["url"] == "http://127.0.0.1:9" and answers[0]["key"] == "key-1"
    (pid,) = {answer["pid"] for answer in answers}
    wait_until_dead([pid])


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("broken", "agent_raised", "agents_of_test.py:21: ValueError: no such tool"),
        ("ends", "agent_lost", "ended. Read"),
    ],
    ids=["broken", "ends"],
)
def test_a_function_that_fails_is_a_failed_episode(functions, name, reason, text):
    error = failure_of(functions(name), {})
    assert error.reason == reason and text in str(error)
    assert error.session_lost == (name == "ends")  # another attempt may succeed


def test_an_agent_that_blocks_its_loop_meets_its_deadline_and_is_replaced(functions, tmp_path):
    """The driver continues, and a neighbor with a later deadline starts again."""
    agent = functions("blocks")
    path = tmp_path / "pids"

    async def run_both() -> list[Any]:
        row = {"path": str(path), "number": 0}
        neighbor = asyncio.create_task(play(agent.run, row, timeout_s=30))
        while len(path.read_text().split() if path.exists() else "") < 2:
            await asyncio.sleep(0.05)
        blocker = play(agent.run, {**row, "number": 1}, timeout_s=0.5)
        results = await asyncio.gather(neighbor, blocker, return_exceptions=True)
        agent.spec = functions("echo").spec
        assert (await play(agent.run, {"number": 3})).answer
        await agent.aclose()
        return list(results)

    results: list[Any] = []

    async def work() -> None:
        results.extend(await run_both())

    assert asyncio.run(watch_event_loop(work)) < 0.5
    assert [error.reason for error in results] == ["agent_lost", "agent_timeout"]
    assert [error.session_lost for error in results] == [True, False]
    wait_until_dead(list(map(int, path.read_text().split())))


def test_a_limit_ends_the_agent_and_its_last_text_is_verified(functions, tmp_path):
    row = {"path": str(tmp_path / "pids"), "number": 0}
    over = asyncio.Event()
    over.set()
    assert run(functions("blocks"), row, over=over, limit="turns").answer == POLICY
    assert run(functions("broken"), {}, cut="too long").answer == POLICY
    error = GymError("aborted", "vLLM")
    assert failure_of(functions("blocks"), row, over=over, failure=error) is error


def test_a_list_that_joins_episodes_is_reported_once(functions, tmp_path, caplog):
    row = scripted.ROW
    for rows, count in (([row, {**row, "number": 1}], 0), ([row] * 3, 1)):
        scripted.run_episodes(functions("shares").spec, scripted.Policy(["42"]), tmp_path, rows)
        assert caplog.text.count("begin with different prompts") == count


# --- commands ------------------------------------------------------------------------------------


def command(text: str, fails: bool = True, **fields: Any) -> partial:
    return partial(run_command, AgentSpec(command=text, **fields), fails)


def test_a_command_has_its_own_folders_files_and_few_variables(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "search")
    script = 'env > variables; cat ~/.codex/config.json; echo "$1"; echo "$PWD" "$HOME"'
    files = {"~/.codex/config.json": '{"url": "{base_url}", "key": "{key}"}\n', "sub/row": "{row}"}
    agent = command(f"sh -c '{script}' - {{prompt}}", files=files, env=["SEARCH_KEY"])
    read = run(agent, {"number": 5, "extra_info": {"a": 1}})
    config, prompt, folders = read.answer.splitlines()
    assert json.loads(config) == {"url": "http://127.0.0.1:9", "key": "key-1"}
    assert prompt == "What is 'x'?"
    work, home = folders.split()
    assert read.row == {"number": 5, "extra_info": {"a": 1, "work_folder": work}}
    assert work == f"{home}/work" and not Path(home).exists()
    variables = dict(line.split("=", 1) for line in read.files["variables"].splitlines())
    assert variables.pop("OPENAI_API_KEY") == variables.pop("ANTHROPIC_API_KEY") == "key-1"
    assert variables.pop("OPENAI_BASE_URL") == "http://127.0.0.1:9/v1"
    assert variables.pop("ANTHROPIC_BASE_URL") == "http://127.0.0.1:9"
    assert json.loads(read.files["row"]) == {"number": 5, "extra_info": {"a": 1}}
    assert variables.keys() <= {"PATH", "LANG", "TMPDIR", "HOME", "SEARCH_KEY", "PWD", "SHLVL", "_"}


def test_the_exit_status_of_a_command_fails_its_episode_or_not():
    error = failure_of(command("sh -c 'echo wrong key >&2; exit 3'"), {})
    assert error.reason == "agent_exit" and str(error).endswith("ended with 3: wrong key")
    assert run(command("sh -c 'echo 42; exit 3'", fails=False), {}).answer == "42"


@pytest.mark.parametrize("ends", [True, False], ids=["at its end", "at its deadline"])
def test_all_processes_of_a_command_end_with_its_episode(ends, tmp_path):
    """Also a daemon in another session, without the variables of its parent."""
    path = tmp_path / "pids"
    daemon = f"(setsid env -i sh -c 'echo $$ >> {path}; exec sleep 1000' &)"
    script = tmp_path / "script"
    script.write_text(f"{daemon}; sleep 0.3; echo $$ >> {path}; {'' if ends else 'sleep 1000'}")
    agent = command(f"sh {script}")
    if ends:
        run(agent, {})
    else:
        assert failure_of(agent, {}, timeout_s=1.0).reason == "agent_timeout"
    pids = list(map(int, path.read_text().split()))
    assert len(pids) == 2
    wait_until_dead(pids)


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("env.agent={function: none.py:solve}", "no file none.py"),
        ("env.agent={function: templates/reward.py:compute_score}", "argument"),
        ("env.agent={function: AGENTS:no_coroutine}", "not an async function"),
        ("env.agent={function: AGENTS:echo, python: none/python}", "no program none/python"),
        ("env.agent={command: no-such-program}", "no program no-such-program"),
        ("env.agent={command: a, url: http://b}", "must have one of function, command and url"),
        ("env.agent={url: http://b, python: c}", "has python"),
        ("actor_rollout_ref.rollout.agent.num_workers=2", "num_workers=0"),
        ("gym.servers.math_with_judge.kind=step", "math_with_judge runs the turns"),
        ("agents.exit_code=ignore", "Use one of: fail, verify"),
    ],
)
def test_a_recipe_that_cannot_work_gets_one_line(change, message, tmp_path):
    path = tmp_path / "agents_of_test.py"
    path.write_text(AGENTS)
    changes = ["env.agent={command: ls}", change.replace("AGENTS", str(path))]
    unused: Any = None
    with pytest.raises(ConfigError, match=message) as caught:
        settings = make_settings(read_source(["math"], changes), "train")
        feature = Agents(settings)
        raise_all([*feature.check_settings(settings)])
        feature.check_inputs(unused, unused)
    assert "\n" not in str(caught.value)


def test_a_dry_run_shows_the_first_request_and_a_failure(workspace, tmp_path):
    path = tmp_path / "agents_of_test.py"
    path.write_text(AGENTS)
    changes = [f"env.agent={{function: '{path}:asks'}}", "data.max_response_length=64"]
    recipe, inputs, features = load(workspace, *changes)
    (feature,) = [each for each in features.checks if isinstance(each, Agents)]
    row_id = inputs.train[0].row_id
    head, prompt, output, end = feature.dry_run_lines(recipe, inputs)
    assert head.startswith(f"the agent's first prompt ({row_id}, ") and "say 7" in prompt
    assert "Traceback" in output
    # the tiny model has no token for S and the period
    failure = f"FAILED: {path}:asks failed at {path}:14: ValueError: o the answer is 7"
    assert end.endswith(f"if the policy answers 'So the answer is 7.': {failure}")


# --- a server ------------------------------------------------------------------------------------


def test_a_server_runs_the_episode():
    server = ScriptedServer(solve=[(500, b"no row"), (200, {"answer": "7"})])
    agent = partial(call_url, f"{server.url}/solve")
    error = failure_of(agent, {})
    assert error.reason == "agent_raised" and re.search(r"500.* no row", str(error))
    assert run(agent, {"number": 7}).answer == "7"
    body = {"row": {"number": 7}, "base_url": "http://127.0.0.1:9", "key": "key-1"}
    assert server.log[-1][1] == body
