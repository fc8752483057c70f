"""Gym servers of a run: their checks, secrets, start, restart and stop."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kit.recipe.schema import Server, ServerStart
from kit.verify import network, process_specs, server_process
from kit.verify import servers as gym_servers
from kit.verify.network import GymStartError, find_free_port, wait_ready
from kit.verify.process_specs import check_server
from kit.verify.server_process import MODELS, ProcessSpec
from kit.verify.servers import running_servers
from tests.helpers.recipes import GYM_PYTHON

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
        check_server("x", Server(start=START | start))
    assert "\n" not in str(caught.value)


def test_a_name_or_a_port_that_cannot_be_used_is_an_error(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(GymStartError, match=r"port=\d+ \(Address already in use"),
    ):
        check_server("x", Server(start=START | {"port": busy.getsockname()[1]}))
    for name in ("../x", "a/b", ".x", "", "a\n", "x" * 101):
        with pytest.raises(GymStartError, match="is not a valid name"):
            check_server(name, Server(start={}))
    servers = {"x": {"start": START | {"server": "nosuch"}}}
    with (
        pytest.raises(GymStartError, match="no folder 'nosuch' in resources_servers"),
        running_servers(servers, tmp_path),
    ):
        pass


def test_a_url_without_a_server_is_an_error_with_the_command_that_starts_one():
    port = find_free_port()
    with pytest.raises(GymStartError, match=f"`python -m kit.verify.servers mcqa --port {port}`"):
        check_server("mcqa", Server(url=f"http://127.0.0.1:{port}"))


# --- the settings and secrets of a server --------------------------------------------------------

# It stands for the interpreter of each server, and for a server that is not Gym's.
READER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

text = sys.stdin.read()
specs = json.loads(text)["specs"] if text else [{{"name": "other", "port": int(sys.argv[1])}}]
view = {{"environment": dict(os.environ), "text": text, "specs": specs}}
Path(__file__).with_name(specs[0]["name"] + ".json").write_text(json.dumps(view))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"paths": {{}}}}')


HTTPServer(("127.0.0.1", specs[0]["port"]), Handler).serve_forever()
"""
SECRETS = {  # {variable: value} in the environment of the run
    "HF_TOKEN": "hidden-1",
    "MY_PASSWORD": "hidden-2",
    "PLAIN": "hidden-3",
}


def test_a_process_sees_its_settings_and_no_secret_that_its_recipe_does_not_name(
    tmp_path, monkeypatch
):
    """The processes are one in a folder, an agent, the models of policy and judge, and vLLM."""
    for name, value in {**SECRETS, "SHOP_TOKEN": "shop-token"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "app.py").touch()
    reader = tmp_path / "reader"
    reader.write_text(READER.format(python=sys.executable))
    reader.chmod(0o755)
    start = {"python": str(reader), "path": str(tmp_path), "agent": "simple_agent"}
    start |= {"config": {"shop_key": "shop-key"}, "env": ["SHOP_TOKEN"]}
    start["global_config"] = {"sandbox": {"docker": {"key": "sandbox-key"}}}
    policy = {"base_url": "http://x", "api_key": "policy-key", "model": "policy"}
    judge = ProcessSpec("judge", MODELS, "vllm_model", {"api_key": "judge-key"})
    judge.python = str(reader)
    other = ProcessSpec("other", port=find_free_port())
    other.command = [str(reader), str(other.port)]
    judge.port = find_free_port()
    for spec in (judge, other):
        spec.log = str(tmp_path / "log")
    servers = {"shop": Server(start=start)}
    group = gym_servers.GymServers(servers, tmp_path, policy, other_specs=[judge, other])
    with contextlib.closing(group):
        group.start()
        group.wait_ready()
        for name, process in group.processes.items():
            folder = Path("/proc") / str(process.pid)  # other users read it, too
            shown = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            keys = b"(?:shop|policy|sandbox|judge)-key|hidden-"
            assert not re.search(keys, shown), name
    seen = {}
    for path in tmp_path.glob("*.json"):
        view = json.loads(path.read_text())
        seen[path.stem] = set(re.findall(r"[a-z]+-(?:key|token)|hidden-\d", json.dumps(view)))
    shop = {"shop-token", "sandbox-key"}
    assert seen == {
        "shop": {"shop-key"} | shop,
        "shop_simple_agent": shop,
        "policy_model": {"policy-key"},
        "judge": {"judge-key"},
        "other": set(),
    }
    assert json.loads((tmp_path / "other.json").read_text())["text"] == ""


def test_the_settings_of_a_server_come_from_its_yaml_and_from_global_config(tmp_path):
    (tmp_path / "shop" / "configs").mkdir(parents=True)
    (tmp_path / "shop" / "app.py").touch()
    text = "any: {resources_servers: {shop: {depth: 3, key: '${shop_key}'}}}"
    (tmp_path / "shop" / "configs" / "any.yaml").write_text(text)

    def build(entries):
        start = START | {"path": str(tmp_path / "shop"), "global_config": entries}
        (spec,) = process_specs.plan_processes("x", ServerStart(**start), None)
        return OmegaConf.create(server_process.build_gym_config(spec, [spec], tmp_path))

    shop = build({"shop_key": "k"}).x.resources_servers.shop
    assert (shop.depth, shop.key) == (3, "k")
    with pytest.raises(SystemExit, match=r"does not set key\. Set it in gym\.servers\.x"):
        build({"other": "k"})
    with pytest.raises(SystemExit, match=r"start\.global_config\.dry_run of x: the run sets"):
        build({"shop_key": "k", "dry_run": True})


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


# --- restarts ------------------------------------------------------------------------------------


def test_a_server_that_dies_is_restarted_after_an_interval(tmp_path, monkeypatch, caplog):
    """The last restart takes a second, in which the run stops its servers."""
    caplog.set_level("WARNING", "kit")  # an import of vLLM changes the levels of all loggers
    monkeypatch.setattr(gym_servers, "RESTART_INTERVAL_S", 2.0)
    port = find_free_port()
    broken = tmp_path / "broken"  # while it exists, the server exits immediately
    processes = []
    starts, restarts = queue.Queue(), queue.Queue()
    start_server = gym_servers.start_server
    serve = f"{sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} {port}"
    (tmp_path / "openapi.json").write_text('{"paths": {}}')
    script = f"#!/bin/sh\necho begins\ntest -e {broken} && exit 3\n{serve} & wait\n"
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)

    def start_slowly(*args):
        starts.put(len(processes))
        time.sleep(1.0 if len(processes) == 3 else 0.0)
        processes.append(start_server(*args))
        return processes[-1]

    def fail_on_restart(name):
        restarts.put(time.monotonic())
        raise AttributeError(name)

    monkeypatch.setattr(gym_servers, "start_server", start_slowly)
    servers = {"a": {"start": {"python": str(tmp_path / "python"), "port": port}}}
    with running_servers(servers, tmp_path, on_restart=fail_on_restart) as urls:
        broken.touch()
        processes[0].kill()
        first = restarts.get(timeout=60)
        processes[1].wait(60)
        broken.unlink()
        second = restarts.get(timeout=60)  # an error of on_restart does not end the watch
        wait_ready("a", urls["a"], processes[2])
        assert (tmp_path / "gym_a.log").read_text().count("begins") == 3
        processes[2].kill()  # its child still runs
        while starts.get(timeout=60) < 3:
            pass
    assert second - first > 1.9
    assert len(processes) == 4 and processes[3].poll() is not None
    network.check_address("a", "127.0.0.1", port)  # it is free
    for status in (-9, 3):
        message = f"a exited with status {status} and is restarted; log {tmp_path}/gym_a.log"
        assert message in caplog.text
