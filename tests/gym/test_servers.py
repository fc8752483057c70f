"""Gym servers that a run starts: the secrets that they see, their start, restart and stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from omegaconf import OmegaConf

from extras.judges import judge_proxy, judge_settings
from gym_client import Gym, GymError, message_response
from kit.gym import network, process_specs, server_process
from kit.gym import servers as gym_servers
from kit.gym.network import GymStartError, discover_servers, find_free_port, wait_ready
from kit.gym.servers import GymServers, running_servers
from tests.helpers.http import Endpoint, send
from tests.helpers.recipes import GYM_PYTHON, row

# --- the settings and secrets of a server --------------------------------------------------------

SPY_SERVER = """
import os
import sys

from nemo_gym import base_resources_server as gym
from nemo_gym.global_config import get_global_config_dict
from omegaconf import OmegaConf


class Config(gym.BaseResourcesServerConfig):
    shop_key: str


class Server(gym.SimpleResourcesServer):
    config: Config

    def setup_webserver(self):
        app = super().setup_webserver()
        app.get("/look")(self.look)
        return app

    async def look(self) -> dict:
        config = OmegaConf.to_container(get_global_config_dict())
        view = {"environment": dict(os.environ), "arguments": sys.argv, "config": config}
        return {**view, "stdin": sys.stdin.read()}

    async def verify(self, body: gym.BaseVerifyRequest) -> gym.BaseVerifyResponse:
        return gym.BaseVerifyResponse(**body.model_dump(), reward=0.0)


if __name__ == "__main__":
    Server.run_webserver()
"""
SECRETS = {  # {variable: value} in the environment of the run
    "HF_TOKEN": "hidden-1",
    "WANDB_API_KEY": "hidden-2",
    "MY_PASSWORD": "hidden-3",
    "aws_secret_access": "hidden-4",
    "A_CREDENTIALS_FILE": "hidden-5",
    "PLAIN": "hidden-7",
    "JUDGE_WORD": "hidden-6",  # only api_key_env names it
}


def read_process(pid):
    """Return the environment and the command line of a process, as /proc shows them to the user."""
    folder = Path("/proc") / str(pid)
    return (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()


def list_children():
    """Return {process id: process} of all descendants of this process."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def fetch_view(folder, children):
    """Find the server in `folder`/shop among the processes, and return the answer of its /look."""
    for child in children:
        connections = child.net_connections("tcp")
        ports = [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]
        for port in ports:
            answer = httpx.get(f"http://127.0.0.1:{port}/look")
            if answer.status_code == 200:
                return answer.json()
    raise AssertionError((folder / "gym_shop.log").read_text())


def send_to_policy(config):
    """Send a request to the model server of the policy, which forwards it to the policy."""
    model = config["policy_model"]["responses_api_models"]["vllm_model"]
    url = f"http://{model['host']}:{model['port']}/v1/chat/completions"
    httpx.post(url, json={"messages": [], "model": "x"}, timeout=60.0)


def test_a_server_sees_its_settings_and_no_secret_that_its_recipe_does_not_name(
    tmp_path, monkeypatch
):
    """The servers are one in a folder, Gym's agent, and the model servers of policy and judge."""
    for name, value in {**SECRETS, "SHOP_TOKEN": "shown-1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "app.py").write_text(SPY_SERVER)
    start = {"python": str(GYM_PYTHON), "path": str(tmp_path / "shop"), "agent": "simple_agent"}
    start |= {"config": {"shop_key": "own-key"}, "env": ["SHOP_TOKEN"]}
    start["global_config"] = {"sandbox": {"docker": {"key": "sandbox-key"}}}
    endpoint = Endpoint(send(500, {}))
    policy = {"base_url": f"{endpoint.url}/v1", "api_key": "policy-key", "model": "policy"}
    judge = {"base_url": endpoint.url, "model": "m", "api_key_env": "JUDGE_WORD"}
    judges = judge_settings.build_judges({"judge": judge}, 60.0)
    earlier = list_children()  # processes of other tests, such as Ray
    with judge_proxy.JudgeProxy(judges) as proxy:
        specs = proxy.process_specs(tmp_path, str(GYM_PYTHON))
        with running_servers(
            {"shop": {"start": start}}, tmp_path, policy=policy, other_specs=specs
        ) as urls:
            children = [child for pid, child in list_children().items() if pid not in earlier]
            process_texts = {child.pid: read_process(child.pid) for child in children}
            paths = httpx.get(f"{urls['shop']}/openapi.json").json()["paths"]
            assert "/run" in paths, paths  # the URL is that of the agent
            view = fetch_view(tmp_path, children)
            send_to_policy(view["config"])
        key = proxy.key
    assert len(process_texts) >= 4
    for pid, text in process_texts.items():
        for secret in [*SECRETS.values(), "policy-key", "own-key", "sandbox-key", key]:
            assert secret.encode() not in text, (pid, secret)
    view_text = json.dumps(view)
    for secret in [*SECRETS.values(), "policy-key", key]:
        assert secret not in view_text, secret
    assert view["environment"]["SHOP_TOKEN"] == "shown-1"
    config = view["config"]
    assert config["shop"]["resources_servers"]["shop"]["shop_key"] == "own-key"
    assert config["sandbox"] == {"docker": {"key": "sandbox-key"}}
    judge_view = config["judge"]["responses_api_models"]["vllm_model"]
    assert judge_view.keys() == {"entrypoint", "host", "port"}
    assert view["stdin"] == ""
    assert len(view["arguments"]) == 1
    # The policy's model server has the key that it needs.
    path, headers = endpoint.log[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer policy-key"


def test_the_model_server_of_the_policy_does_not_see_the_secrets_of_an_agent(monkeypatch):
    monkeypatch.setenv("SHOP_TOKEN", "x")
    start = {"python": str(GYM_PYTHON), "agent": "simple_agent", "env": ["SHOP_TOKEN"]}
    sandbox = {"sandbox": {"docker": {"key": "k"}}}
    policy = {"base_url": "http://x/v1", "api_key": "k", "model": "m"}
    specs = process_specs.plan_processes("mcqa", {**start, "global_config": sandbox}, policy)
    visible = {spec.name: (spec.visible_variables, spec.global_config) for spec in specs}
    assert visible == {
        "mcqa": (["SHOP_TOKEN"], sandbox),
        "policy_model": ([], {}),
        "mcqa_simple_agent": (["SHOP_TOKEN"], sandbox),
    }
    shown = gym_servers.redact_spec(specs[0], specs[2])
    assert shown.global_config == {} and shown.overrides is None


def test_the_url_of_a_server_with_an_environment_is_that_of_its_environment_server():
    package = process_specs.find_package(str(GYM_PYTHON))
    start = {"python": str(GYM_PYTHON), "server": "mcqa", "port": find_free_port()}
    start |= {"agent": "simple_agent", "environment": "single_agent_turn"}
    policy = {"base_url": "http://x/v1", "api_key": "k", "model": "m"}
    *others, spec = process_specs.plan_processes("x", start, policy)
    assert [each.name for each in others] == ["x", "policy_model", "x_simple_agent"]
    assert spec.port == start["port"]
    assert (server_process.find_app_folder(spec, package) / "app.py").is_file()
    config = server_process.build_gym_config(spec, [*others, spec], package)
    settings = config["x_single_agent_turn"]["environment_servers"]["single_agent_turn"]
    assert settings["resources_server"]["name"] == "x"
    assert settings["agent_server"]["name"] == "x_simple_agent"
    assert settings["default_episode_timeout_seconds"] > 0  # of its YAML
    with pytest.raises(SystemExit, match="no folder 'simple' in environment_servers"):
        server_process.find_app_folder(dataclasses.replace(spec, folder="simple"), package)


@pytest.mark.parametrize("name", ["x", "policy_model", "head_server", "dry_run"])
def test_an_entry_of_global_config_cannot_replace_a_server(name):
    package = process_specs.find_package(str(GYM_PYTHON))
    start = {"python": str(GYM_PYTHON), "server": "mcqa", "agent": "simple_agent"}
    policy = {"base_url": "http://x/v1", "api_key": "k", "model": "m"}
    specs = process_specs.plan_processes("x", start | {"global_config": {name: {}}}, policy)
    with pytest.raises(SystemExit, match=f"global_config of mcqa has an entry {name}"):
        server_process.build_gym_config(specs[0], specs, package)


@pytest.mark.parametrize("is_set", [False, True])
def test_global_config_sets_the_values_to_which_a_servers_yaml_refers(tmp_path, is_set):
    (tmp_path / "shop" / "configs").mkdir(parents=True)
    (tmp_path / "shop" / "app.py").touch()
    text = "any: {resources_servers: {shop: {key: '${shop_key}'}}}"
    (tmp_path / "shop" / "configs" / "any.yaml").write_text(text)
    start = {"python": str(GYM_PYTHON), "path": str(tmp_path / "shop")}
    start["global_config"] = {"shop_key": "k"} if is_set else {"other": "k"}
    (spec,) = process_specs.plan_processes("x", start, None)
    expectation = contextlib.nullcontext()
    if not is_set:
        message = r"does not set key\. Set it in gym\.servers\.x"
        expectation = pytest.raises(SystemExit, match=message)
    with expectation:
        config = OmegaConf.create(server_process.build_gym_config(spec, [spec], tmp_path))
        assert config.x.resources_servers.shop.key == "k"


# --- real servers of nemo-gym --------------------------------------------------------------------

HEAD_SERVER = """
import os, sys, time
os.environ["NEMO_GYM_CONFIG_DICT"], os.environ["NEMO_GYM_CONFIG_PATH"] = sys.argv[1], "head_server"
from nemo_gym.server_utils import HeadServer
HeadServer.run_webserver()
time.sleep(600)
"""


def wait_for_discovery(url):
    """Return the servers that a head server lists, once it answers."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(GymStartError):
            return discover_servers(url)
        time.sleep(0.5)
    raise AssertionError("the head server did not answer")


@pytest.mark.soak
def test_a_real_head_server_lists_servers_and_agents(tmp_path):
    port = find_free_port()
    started = {"reasoning_gym": {"start": {"python": str(GYM_PYTHON)}}}
    with running_servers(started, tmp_path) as urls:
        address = {"host": "0.0.0.0", "port": int(urls["reasoning_gym"].rpartition(":")[2])}
        agent = {"resources_server": {"name": "puzzles"}}
        config = {
            "head_server": {"host": "127.0.0.1", "port": port},
            "puzzles": {"resources_servers": {"reasoning_gym": address}},
            "some_agent": {"responses_api_agents": {"simple_agent": agent}},
            # Environment Servers of Gym 0.7: one of an agent with a resources server, one of an
            # agent without, and one that is not started
            "one_turn": {
                "environment_servers": {
                    "single_agent_turn": {**address, "agent_server": {"name": "some_agent"}}
                }
            },
            "relay": {
                "environment_servers": {
                    "legacy_agent": {**address, "agent_server": {"name": "whole_agent"}}
                }
            },
            "whole_agent": {"responses_api_agents": {"swe_agents": {"entrypoint": "app.py"}}},
            "stopped": {"environment_servers": {"legacy_agent": {"entrypoint": "app.py"}}},
            "not_started": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}},
            "policy_model": {
                "responses_api_models": {"vllm_model": {"base_url": "${policy_base_url}"}}
            },
            "policy_base_url": "http://127.0.0.1:1/v1",
        }
        with (tmp_path / "head.log").open("wb") as log:
            command = [str(GYM_PYTHON), "-c", HEAD_SERVER, json.dumps(config)]
            head = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        try:
            servers, agents = wait_for_discovery(f"http://127.0.0.1:{port}")
            assert agents == {"some_agent": "puzzles", "whole_agent": "relay"}
            assert servers == dict.fromkeys(("puzzles", "one_turn", "relay"), urls["reasoning_gym"])

            async def verify():
                async with Gym(servers) as gym, gym.session("puzzles", row()) as session:
                    return (await session.verify(message_response("7"))).reward

            assert asyncio.run(verify()) == 1.0
        finally:
            head.kill()
            head.wait()


async def verify_with_two_servers(urls):
    """Return the rewards of six responses."""
    math_row = row("What is 1/2 + 1/4?", expected_answer="\\frac{3}{4}")
    cases = [
        ("reasoning_gym", row(), "7"),
        ("reasoning_gym", row(), "it is 7"),
        ("reasoning_gym", row(), "8"),
        ("reasoning_gym", row(), ""),
        ("math", math_row, "It is \\boxed{0.75}."),
        ("math", math_row, "It is \\boxed{0.5}."),
    ]
    rewards = []
    async with Gym(urls, concurrency=4) as gym:
        for server, task_row, text in cases:
            async with gym.session(server, task_row) as session:
                rewards.append((await session.verify(message_response(text))).reward)
        incomplete = {"responses_create_params": {"input": "x"}}  # without the verifier's fields
        with pytest.raises(GymError) as caught:
            async with gym.session("reasoning_gym", incomplete) as session:
                await session.verify(message_response("7"))
        assert caught.value.reason == "http_422"
    return rewards


def test_real_servers_start_verify_restart_and_stop(tmp_path, monkeypatch):
    start = {"python": str(GYM_PYTHON)}
    start_server = gym_servers.start_server
    processes = []

    def record_start(*args):
        processes.append(start_server(*args))
        return processes[-1]

    monkeypatch.setattr(gym_servers, "start_server", record_start)
    servers = {
        "reasoning_gym": {"start": start},
        "math": {"start": {**start, "server": "math_with_judge"}},
    }
    with running_servers(servers, tmp_path) as urls:
        for _ in range(2):
            rewards = asyncio.run(verify_with_two_servers(urls))
            assert rewards == [1.0, pytest.approx(1 / 7), 0.0, 0.0, 1.0, 0.0]
            processes[0].kill()
    assert len(processes) == 3
    assert all(process.poll() is not None for process in processes)
    for name, url in urls.items():
        with pytest.raises(GymStartError, match="does not answer"):
            wait_ready(name, url)


# --- restarts ------------------------------------------------------------------------------------


class BreakableServer(NamedTuple):
    """A server that exits immediately while the file `broken` exists."""

    servers: dict
    broken: Path
    processes: list[subprocess.Popen]  # started so far


@pytest.fixture
def breakable_server(tmp_path, monkeypatch):
    """A BreakableServer. Each restart takes a second."""
    port = find_free_port()
    broken = tmp_path / "broken"
    processes = []
    start_server = gym_servers.start_server
    serve = f"{sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} {port}"
    (tmp_path / "openapi.json").write_text('{"paths": {}}')
    # the kit runs the interpreter with -c to find nemo-gym, which this one does not have
    no_package = 'test "$2" = -c && exit 1'
    script = f"#!/bin/sh\n{no_package}\necho begins\ntest -e {broken} && exit 3\n{serve} & wait\n"
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)

    def start_slowly(*args):
        (tmp_path / f"start {len(processes)}").touch()
        time.sleep(1.0 if processes else 0.0)
        processes.append(start_server(*args))
        return processes[-1]

    monkeypatch.setattr(gym_servers, "start_server", start_slowly)
    servers = {"a": {"start": {"python": str(tmp_path / "python"), "port": port}}}
    return BreakableServer(servers, broken, processes)


def test_a_server_that_dies_is_restarted_after_an_interval(breakable_server, tmp_path, caplog):
    caplog.set_level("WARNING", "kit")  # an import of vLLM changes the levels of all loggers
    servers, broken, processes = breakable_server
    restarts = queue.Queue()

    def fail_on_restart(name):
        restarts.put(time.monotonic())
        raise AttributeError(name)

    with running_servers(servers, tmp_path, on_restart=fail_on_restart) as urls:
        broken.touch()
        processes[0].kill()
        first = restarts.get(timeout=60)
        processes[1].wait(60)
        broken.unlink()
        second = restarts.get(timeout=60)  # an error of on_restart does not end the watch
        wait_ready("a", urls["a"], processes[2])
    assert second - first > 4.5
    assert (tmp_path / "gym_a.log").read_text().count("begins") == 3
    for status in (-9, 3):
        message = f"a exited with status {status} and is restarted; log {tmp_path}/gym_a.log"
        assert message in caplog.text


def test_a_server_that_is_restarted_during_the_stop_is_stopped(breakable_server, tmp_path):
    servers, _, processes = breakable_server
    with running_servers(servers, tmp_path):
        processes[0].kill()  # its child still runs
        while not (tmp_path / "start 1").exists():
            time.sleep(0.05)
    time.sleep(1.5)
    assert len(processes) == 2
    assert processes[1].poll() is not None
    network.check_address("a", "127.0.0.1", servers["a"]["start"]["port"])  # it is free


def test_a_server_that_was_never_ready_is_not_restarted(breakable_server, tmp_path):
    servers, broken, processes = breakable_server
    broken.touch()
    group = GymServers(servers, tmp_path)
    with contextlib.closing(group):
        group.start()
        time.sleep(3.0)
        problem = r"did not start: it exited with status 3.* See docs/"
        with pytest.raises(GymStartError, match=problem):
            group.wait_ready()
    assert len(processes) == 1


def test_the_servers_start_while_the_caller_does_something_else(breakable_server, tmp_path):
    servers, _, processes = breakable_server
    group = GymServers(servers, tmp_path)
    with contextlib.closing(group):
        group.start()
        assert len(processes) == 1
        assert group.wait_ready() == group.urls
        assert processes[0].poll() is None
    assert processes[0].poll() is not None
