"""Gym servers of a run: their checks, secrets, start, restart and stop."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from omegaconf import OmegaConf

from extras.judges import judge_proxy, judge_settings
from gym_client import Gym, GymError, message_response
from kit.gym import network, process_specs, server_process
from kit.gym import servers as gym_servers
from kit.gym.network import GymStartError, find_free_port, wait_ready
from kit.gym.process_specs import check_server
from kit.gym.servers import running_servers
from tests.helpers.http import StubJudge
from tests.helpers.recipes import GYM_PYTHON, row

START = {"python": str(GYM_PYTHON)}

# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        ({"python": "nowhere/python"}, r"no interpreter at nowhere/python.*make .*gym`"),
        ({"host": "192.0.2.1"}, r"x\.start: .* host=192\.0\.2\.1, port=None \(Cannot"),
        ({"path": "templates"}, r"start\.path=templates: there is no app\.py in"),
        ({"path": "templates/verifier", "install": True}, "start has path and install"),
        ({"env": ["NO_SUCH"]}, r"start\.env: .* NO_SUCH is not set"),
    ],
)
def test_a_server_that_cannot_start_is_an_error_of_one_line(start, problem):
    with pytest.raises(GymStartError, match=problem) as caught:
        check_server("x", {"start": START | start})
    assert "\n" not in str(caught.value)


def test_a_name_or_a_port_that_cannot_be_used_is_an_error(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(GymStartError, match=r"port=\d+ \(Address already in use"),
    ):
        check_server("x", {"start": START | {"port": busy.getsockname()[1]}})
    for name in ("../x", "a/b", ".x", "", "a\n", "x" * 101):
        with pytest.raises(GymStartError, match="is not a valid name"):
            check_server(name, {})
    servers = {"x": {"start": START | {"server": "nosuch"}}}
    with (
        pytest.raises(GymStartError, match="no folder 'nosuch' in resources_servers"),
        running_servers(servers, tmp_path),
    ):
        pass


def test_a_url_without_a_server_is_an_error_with_the_command_that_starts_one():
    port = find_free_port()
    with pytest.raises(GymStartError, match=f"`python -m kit.gym.servers mcqa --port {port}`"):
        check_server("mcqa", {"url": f"http://127.0.0.1:{port}"})


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
    start = START | {"path": str(tmp_path / "shop"), "agent": "simple_agent"}
    start |= {"config": {"shop_key": "own-key"}, "env": ["SHOP_TOKEN"]}
    start["global_config"] = {"sandbox": {"docker": {"key": "sandbox-key"}}}
    endpoint = StubJudge((500, {}))
    policy = {"base_url": endpoint.url, "api_key": "policy-key", "model": "policy"}
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
    assert endpoint.log[0][:2] == ("/v1/chat/completions", "Bearer policy-key")


def test_the_model_server_of_the_policy_does_not_see_the_secrets_of_an_agent(monkeypatch):
    monkeypatch.setenv("SHOP_TOKEN", "x")
    start = START | {"agent": "simple_agent", "env": ["SHOP_TOKEN"]}
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


def test_the_settings_of_a_server_come_from_its_yaml_and_from_global_config(tmp_path):
    (tmp_path / "shop" / "configs").mkdir(parents=True)
    (tmp_path / "shop" / "app.py").touch()
    text = "any: {resources_servers: {shop: {depth: 3, key: '${shop_key}'}}}"
    (tmp_path / "shop" / "configs" / "any.yaml").write_text(text)

    def build(entries):
        start = START | {"path": str(tmp_path / "shop"), "global_config": entries}
        (spec,) = process_specs.plan_processes("x", start, None)
        return OmegaConf.create(server_process.build_gym_config(spec, [spec], tmp_path))

    shop = build({"shop_key": "k"}).x.resources_servers.shop
    assert (shop.depth, shop.key) == (3, "k")
    with pytest.raises(SystemExit, match=r"does not set key\. Set it in gym\.servers\.x"):
        build({"other": "k"})
    with pytest.raises(SystemExit, match=r"start\.global_config\.dry_run of x: the run sets"):
        build({"shop_key": "k", "dry_run": True})


# --- real servers of nemo-gym --------------------------------------------------------------------


def test_a_head_server_lists_servers_and_agents():
    address = {"host": "0.0.0.0", "port": 8001}
    # Environment Servers of Gym 0.7: of an agent with a resources server, and of one without
    one_turn = {"single_agent_turn": {**address, "agent_server": {"name": "some_agent"}}}
    relay = {"legacy_agent": {**address, "agent_server": {"name": "whole_agent"}}}
    config = {
        "puzzles": {"resources_servers": {"reasoning_gym": address}},
        "some_agent": {
            "responses_api_agents": {"simple_agent": {"resources_server": {"name": "puzzles"}}}
        },
        "one_turn": {"environment_servers": one_turn},
        "relay": {"environment_servers": relay},
        "whole_agent": {"responses_api_agents": {"swe_agents": {"entrypoint": "app.py"}}},
        "not_started": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}},
        "policy_base_url": "http://127.0.0.1:1/v1",
    }
    servers, agents = network.read_discovery(config, "http://10.0.0.7:11000")
    assert agents == {"some_agent": "puzzles", "whole_agent": "relay"}
    assert servers == dict.fromkeys(("puzzles", "one_turn", "relay"), "http://10.0.0.7:8001")


async def verify_with_two_servers(urls):
    """Return the rewards of four responses."""
    math_row = row("What is 1/2 + 1/4?", expected_answer="\\frac{3}{4}")
    cases = [
        ("reasoning_gym", row(), "7"),
        ("reasoning_gym", row(), "it is 7"),
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
    start_server = gym_servers.start_server
    processes = []

    def record_start(*args):
        processes.append(start_server(*args))
        return processes[-1]

    monkeypatch.setattr(gym_servers, "start_server", record_start)
    servers = {
        "reasoning_gym": {"start": START},
        "math": {"start": START | {"server": "math_with_judge"}},
    }
    with running_servers(servers, tmp_path) as urls:
        for _ in range(2):
            rewards = asyncio.run(verify_with_two_servers(urls))
            assert rewards == [1.0, pytest.approx(1 / 7), 1.0, 0.0]
            processes[0].kill()
    assert len(processes) == 3
    assert all(process.poll() is not None for process in processes)
    for name, url in urls.items():
        with pytest.raises(GymStartError, match="does not answer"):
            wait_ready(name, url)


# --- restarts ------------------------------------------------------------------------------------


def test_a_server_that_dies_is_restarted_after_an_interval(tmp_path, monkeypatch, caplog):
    caplog.set_level("WARNING", "kit")  # an import of vLLM changes the levels of all loggers
    port = find_free_port()
    broken = tmp_path / "broken"  # while it exists, the server exits immediately
    processes = []
    restarts = queue.Queue()
    start_server = gym_servers.start_server
    serve = f"{sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} {port}"
    (tmp_path / "openapi.json").write_text('{"paths": {}}')
    script = f"#!/bin/sh\necho begins\ntest -e {broken} && exit 3\n{serve} & wait\n"
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)

    def record_start(*args):
        processes.append(start_server(*args))
        return processes[-1]

    def fail_on_restart(name):
        restarts.put(time.monotonic())
        raise AttributeError(name)

    monkeypatch.setattr(gym_servers, "start_server", record_start)
    servers = {"a": {"start": {"python": str(tmp_path / "python"), "port": port}}}
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
