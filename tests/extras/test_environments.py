"""Environments by address: OpenEnv's package, MCP servers of PyPI and classes with TRL's interface.

`make test` installs the packages in .venv-environments. The failures are those that users of each
meet: who is at fault decides whether the policy reads an error, or the episode has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import time

import psutil
import pytest

import env
import gym_client
import inference
from gym_client import GymError
from kit.engine.sampling import request_group
from kit.errors import ConfigError, UserFunctionError
from kit.verify.network import find_free_port
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.python_verifiers.settings import read_verifiers
from kit.verify.verifiers import VerifierRouter
from tests.helpers.http import ScriptedServer
from tests.helpers.recipes import ROOT, load, make_partial
from tests.helpers.rollouts import call, chatml_tokenizer, context_of, one_turn_each
from tests.helpers.verifiers import find_remaining_processes

BIN = ROOT / ".venv-environments" / "bin"
APP = str(ROOT / "tests" / "extras" / "openenv_app.py")
pytestmark = pytest.mark.skipif(not BIN.exists(), reason="needs make .venv-environments/ready")

MY = '''
import subprocess


def count_branches(extra_info, **_):
    names = subprocess.run(["git", "branch"], cwd=extra_info["dir"], stdout=subprocess.PIPE).stdout
    return len(names.splitlines())


def pay_for_seven(solution_str, **_):
    return solution_str == "7"


class Counter:
    """An environment for TRL."""

    def __init__(self):
        self.count = 0

    def reset(self, prompt, target=3, **_):
        if target < 0:
            raise ConnectionError("no database")
        self.target = target
        self.prompt = prompt
        return "Count."

    @staticmethod
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: any
        """
        return 2 * number

    async def add(self, amount: int) -> dict:
        """Add to the count.

        Args:
            amount: how much
        """
        self.count += amount
        return {"count": self.count}

    def fail(self) -> str:
        """Raise."""
        raise ValueError("broken tool")

    def connect(self) -> str:
        """Lose a connection."""
        raise ConnectionError("no server")

    def get_reward(self):
        return float(self.count == self.target) if self.target else None


class Untyped(Counter):
    def add(self, amount):
        pass


class Unrewarded:
    def reset(self, **_):
        pass


def equal_counts(prompts, completions, environments, log_metric, log_extra, **columns):
    log_extra("same", [e.prompt == prompt for e, prompt in zip(environments, prompts)])
    log_metric("count", environments[0].count)
    return [2.0 * (e.count == target) for e, target in zip(environments, columns["target"])]
'''
TRL = {"trl_class": "my.py:Counter"}
GIT = {"mcp": {"command": [str(BIN / "mcp-server-git"), "--repository", "{dir}"]}, "files": "repo"}
TIME = {"mcp": {"command": [str(BIN / "mcp-server-time"), "--local-timezone", "UTC"]}}
START = {"command": [str(BIN / "python"), APP, "{port}", "2"]}
SEED = {"reset": {"seed": 7}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the functions, and a git repository with one branch."""
    (tmp_path / "my.py").write_text(MY)
    repository = tmp_path / "repo"
    subprocess.run(["git", "init", "--quiet", "-b", "main", repository], check=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    commit = ("commit", "--quiet", "--allow-empty", "-m", "first")
    subprocess.run(["git", *identity, *commit], cwd=repository, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def running_server(*arguments):
    """Run a Python program that listens on {port}, and yield the port."""
    port = str(find_free_port())
    words = [word.replace("{port}", port) for word in arguments]
    server = subprocess.Popen([BIN / "python", *words], stdout=subprocess.DEVNULL)
    try:
        for _ in range(900):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def openenv_url():
    """An OpenEnv server with two places."""
    with running_server(APP, "{port}", "2") as port:
        yield f"http://127.0.0.1:{port}"


def make_router(folder, environment, verifier=None, timeout_s=4.0, **gym):
    """Make the router of a recipe with an environment."""
    pool = {"processes": 1, "timeout_s": timeout_s}
    section = {"environment": environment, "verifier": verifier, "verifier_pool": pool}
    recipe = make_partial({"env": section, "gym": {"servers": {}, "timeout_s": timeout_s, **gym}})
    specs = read_verifiers(recipe.env, []).specs
    return VerifierRouter(gym_client.Gym({}), make_pools(recipe, specs, folder))


def play(router, texts, row=None, copies=1, **changes):
    """Run episodes of a policy that writes the next of `texts` in each turn."""
    (name,) = router.pools
    tokenizer = chatml_tokenizer()
    names = sorted(set(re.findall(r'"name": "(\w+)"', str(texts))))
    tools = [{"type": "function", "name": name, "parameters": {}} for name in names]
    row = {"responses_create_params": {"input": "Begin.", "tools": tools}, **(row or {})}
    messages, tools = env.render_row(row, "x:1")
    ids = env.encode_messages(messages, tools, tokenizer, "x:1")
    task = env.Task("x:1", row, name, messages, ids, tools=tools)
    client = one_turn_each(texts, tokenizer)
    context = context_of(client, tokenizer, **changes)

    async def run():
        async with router:
            requests = request_group(task, "g", copies)
            return await inference.rollout(requests, {}, context, router)

    return asyncio.run(run())


def list_outputs(episode):
    """Return the outputs of the tools, and the messages of the environment."""
    texts = [item.get("output", item.get("content")) for item in episode.output]
    return [text for text in texts if isinstance(text, str)]


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "row", "status", "reward", "text"),
    [
        (["3", "7"], SEED, "ok", 1.25, '"hint": "Not 3."'),
        (["?", "7"], SEED, "ok", 1.0, '"hint": "Not ?."'),  # null, then 1
        (["?", "?"], SEED, "no_reward", None, "the reward of every step is null"),
        (["raise"], SEED, "raised", None, "EXECUTION_ERROR: the database is down"),
        (["1"], {"reset": {"seed": -1}}, "raised", None, "no such seed"),
        (["hang"], SEED, "timeout", None, "no answer in gym.timeout_s"),
    ],
)
def test_openenv(folder, openenv_url, texts, row, status, reward, text):
    router = make_router(folder, {"openenv": openenv_url})
    (episode,) = play(router, texts, row, max_turns=2)
    assert (episode.status, episode.reward) == (status, reward)
    assert text in str([episode.error, list_outputs(episode)])


def test_openenv_takes_the_last_reward_and_shows_the_policys_errors(folder, openenv_url):
    settings = {"openenv": openenv_url, "reward": "last", "observation": "hint"}
    (episode,) = play(make_router(folder, settings), ["1", "2"], SEED, max_turns=2)
    assert (episode.reward, list_outputs(episode)[0]) == (0.25, "Not 1.")
    settings["action"] = "nonsense"  # a field that the schema does not have
    (episode,) = play(make_router(folder, settings), ["1", "2"], SEED, max_turns=2)
    assert (episode.status, episode.reward) == ("ok", 0.0)
    assert list_outputs(episode)[0].startswith("Error: Invalid message\nguess: Field required")


def test_a_full_openenv_server_is_waited_for(folder, openenv_url):
    router = make_router(folder, {"openenv": openenv_url})
    episodes = play(router, ["7"] * 5, SEED, copies=5)
    assert [episode.reward for episode in episodes] == [1.0] * 5

    async def wait_for_others():
        router = make_router(folder, {"openenv": openenv_url}, outage_budget_s=1.0)
        other = make_router(folder, {"openenv": openenv_url})
        async with router, other, other.session("OpenEnv", SEED), other.session("OpenEnv", SEED):
            with pytest.raises(GymError) as error:
                async with router.session("OpenEnv", SEED):
                    pass
        return error.value.reason

    assert asyncio.run(wait_for_others()) == "capacity"


def test_an_openenv_server_that_dies_is_started_again_and_so_is_the_episode(folder):
    """The run starts the server, and ends it."""
    others = find_servers("openenv_app.py")
    (episode,) = play(make_router(folder, {"openenv": START}), ["1", "die", "7", "7"], SEED)
    assert (episode.status, episode.reward) == ("ok", 1.0)
    assert find_servers("openenv_app.py") == others


def branch(**arguments):
    return call(json.dumps({"repo_path": ".", **arguments}), "git_create_branch")


@pytest.mark.parametrize(
    ("texts", "reward", "text"),
    [
        ([branch(branch_name="a"), branch(branch_name="b"), "done"], 3.0, "Created branch 'b'"),
        ([branch(), "done"], 1.0, "'branch_name' is a required property"),
        ([branch(branch_name="main"), "done"], 1.0, "already exists"),
        ([call("[1]", "git_status"), "done"], 1.0, "not a JSON object"),
    ],
)
def test_mcp(folder, texts, reward, text):
    """The tools change a copy of the repository, in which the verifier counts branches."""
    (episode,) = play(make_router(folder, GIT, "my.py:count_branches", 20.0), texts)
    assert (episode.status, episode.reward) == ("ok", reward)
    assert text in list_outputs(episode)[-1]
    assert len(list((folder / "repo/.git/refs/heads").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "action", "expected"),
    [
        ("no_such_tool", None, "Unknown tool"),
        ("git_status", psutil.Process.kill, "session_lost"),
        ("git_status", psutil.Process.suspend, "timeout"),
    ],
)
def test_an_mcp_process_that_dies_or_hangs_fails_the_episode(folder, name, action, expected):
    shell = f"sleep 1000.5 >/dev/null & exec {BIN}/mcp-server-git --repository ."
    (folder / "my_server.sh").write_text(shell)
    settings = {**GIT, "mcp": {"command": ["sh", "my_server.sh"]}}
    router = make_router(folder, settings, "my.py:count_branches", 10.0)

    async def call_tool():
        async with router, router.session("count_branches", {}) as session:
            (server,) = find_servers("mcp-server-git")
            if action:
                action(server)
            try:
                return await session.call_tool(name, '{"repo_path": "."}')
            except GymError as error:
                assert error.session_lost == (expected == "session_lost")
                return error.reason

    assert expected in asyncio.run(call_tool())
    assert find_servers("mcp-server-git") == [] == find_remaining_processes("sleep", "1000.5")


def find_servers(name):
    children = psutil.Process().children(recursive=True)
    return [p for p in children if any(word.endswith(name) for word in p.cmdline())]


HTTP_SERVER = """
import os
from mcp.server.fastmcp import FastMCP
from mcp.types import *
server = FastMCP("s", host="127.0.0.1", port={port}, stateless_http=True)
@server.tool()
def add(a: str, b: str) -> str:
    return a + b
@server.tool()
def find() -> CallToolResult:
    note = EmbeddedResource(type="resource", resource=TextResourceContents(uri="n://1", text="Hi."))
    link = ResourceLink(type="resource_link", name="more", uri="n://2")
    return CallToolResult(content=[note, link, ImageContent(type="image", data="", mimeType="i/p")])
@server.tool()
def count() -> CallToolResult:
    return CallToolResult(content=[], structuredContent={"found": 3})
@server.tool()
def die() -> str:
    os._exit(3)
server.run("streamable-http")
"""


def test_mcp_over_http(folder):
    texts = [call('{"a": "x", "b": "y"}', "add"), call("{}", "add"), call("{}", "find")]
    texts += [call("{}", "count"), "7"]
    with running_server("-c", HTTP_SERVER) as port:
        settings = {"mcp": f"http://127.0.0.1:{port}/mcp"}
        (episode,) = play(make_router(folder, settings, "my.py:pay_for_seven", 20.0), texts)
        router = make_router(folder, settings, "my.py:pay_for_seven", 20.0)
        (lost,) = play(router, [call("{}", "die")])
    assert (lost.status, lost.reward) == ("session_lost", None)
    assert (episode.status, episode.reward) == ("ok", 1.0)
    outputs = list_outputs(episode)
    assert outputs[0] == "xy" and "Field required" in outputs[1]
    assert outputs[2:] == ["Hi.\n<resource_link more: n://2>\n<image>", '{"found": 3}']


@pytest.mark.parametrize(
    ("texts", "row", "status", "reward", "text"),
    [
        ([call('{"amount": 3}', "add"), "done"], {}, "ok", 1.0, "{'count': 3}"),
        ([call("{}", "fail"), "done"], {}, "ok", 0.0, "broken tool"),
        ([call('{"number": 2}', "double"), "done"], {}, "ok", 0.0, "4"),
        ([call("{}", "add"), "done"], {}, "ok", 0.0, "missing 1 required"),
        ([call("[3]", "add"), "done"], {}, "ok", 0.0, "must be a JSON object, not list"),
        (["done"], {"target": 0}, "bad_answer", None, "returned None"),
        ([call("{}", "connect")], {}, "raised", None, "in Counter.connect: ConnectionError: no"),
        (["done"], {"target": -1}, "raised", None, "in Counter.reset: ConnectionError"),
    ],
)
def test_trl_class(folder, texts, row, status, reward, text):
    (episode,) = play(make_router(folder, TRL), texts, row)
    assert (episode.status, episode.reward) == (status, reward)
    assert text in str([episode.error, list_outputs(episode)])


def test_a_reward_function_of_trl_gets_the_environment(folder):
    settings = {**TRL, "reward": "my.py:equal_counts"}
    texts = [call('{"amount": 3}', "add"), "done"]
    (episode,) = play(make_router(folder, settings), texts, {"target": 3})
    assert (episode.reward, episode.reward_components) == (2.0, {"count": 3.0})
    assert episode.question == "Begin.\nCount."
    assert [tool["name"] for tool in episode.tools] == ["add"]


# --- before the run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "verifier", "problem"),
    [
        ({"openenv": "http://127.0.0.1:9"}, None, r"answers at http://127.0.0.1:9 \(.*Start it"),
        ({"openenv": "{gym}"}, None, "/schema describes no action"),
        ({"openenv": {"command": ["no-server"]}}, None, "the command no-server is not found"),
        ({"openenv": {"command": ["false"]}}, None, "false does not start"),
        ({"mcp": {"command": ["no-server"]}}, "my", "the command no-server is not found"),
        ({"mcp": {"command": ["ls", "absent"]}}, "my", "its process ended. .*No such file"),
        ({"mcp": "http://127.0.0.1:9/mcp"}, "my", "does not answer"),
        (TIME, None, "gives no reward. Set env.verifier"),
        ({**TIME, "files": "absent"}, "my", "files: Path does not point to a directory"),
        ({"trl_class": "my.py:absent"}, None, "has no function or class absent|no function absent"),
        ({"trl_class": "missing.py:C"}, None, "nothing_at_all"),
        ({"trl_class": "my.py:Untyped"}, None, "the tool add has no schema"),
        ({"trl_class": "my.py:Unrewarded"}, None, "has no get_reward"),
        (TRL, "my", "gives the reward, so env.verifier has no use"),
        ({"openenv": "http://a", "rewards": "sum"}, None, "rewards: Extra inputs"),
        ({"gym": "http://a"}, None, "must have one of openenv, mcp, trl_class"),
    ],
)
def test_an_environment_that_cannot_work_is_an_error_of_one_line(
    folder, workspace, environment, verifier, problem
):
    (folder / "missing.py").write_text("import nothing_at_all\n")
    text = json.dumps(environment).replace("{gym}", ScriptedServer().url).replace('"', "'")
    changes = [f"env.environment={text}"]
    changes += [f"env.verifier={folder}/{verifier}.py:count_branches"] if verifier else []
    with pytest.raises((ConfigError, UserFunctionError), match=problem) as error:
        load(workspace, *changes, *use_rows(workspace / "train"))
    assert "\n" not in str(error.value)


def use_rows(path):
    """Return changes of tests/tiny.yaml, whose rows name a Gym server."""
    return [f"env.train_files=[{path}.jsonl]", "env.val_files=[]", "data.max_prompt_length=2000"]


def test_rows_get_the_tools_and_a_dry_run_shows_them(folder, workspace):
    prepared = load(
        workspace,
        "env.environment={trl_class: 'my.py:Counter'}",
        *use_rows(workspace / "train"),
    )
    names = {tool["function"]["name"] for tool in prepared.inputs.train[0].tools}
    assert names == {"add", "fail", "connect", "double"}
    assert prepared.inputs.train[0].server == "TrlEnvironment"
    (feature,) = [each for each in prepared.features.checks if hasattr(each, "tools")]
    assert [*feature.dry_run_lines(*prepared[:2])] == ["tools       add, connect, double, fail"]


def test_a_dry_run_shows_the_first_observation(folder, workspace, openenv_url):
    of_openenv = f"{{openenv: '{openenv_url}', observation: hint}}"
    for environment, text in ((of_openenv, "Guess."), ("{trl_class: 'my.py:Counter'}", "Count.")):
        changes = [f"env.environment={environment}", *use_rows(workspace / "train")]
        prepared = load(workspace, *changes)
        assert f"after the first observation {text!r}" in prepared.inputs.trials[0].result


def test_a_tool_of_a_row_that_the_environment_does_not_have_is_an_error(folder, workspace):
    row = {"responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "t"}]}}
    (workspace / "other_tools.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="the row has the tools t, but"):
        load(
            workspace,
            "env.environment={trl_class: 'my.py:Counter'}",
            *use_rows(workspace / "other_tools"),
            "data.train_batch_size=1",
        )
