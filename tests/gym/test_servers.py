"""Gym servers and strangers: what a server sees, whose answers count, how long a check may take."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import GYM_PYTHON
from omegaconf import OmegaConf

from kit.config.load import public
from kit.errors import ConfigError
from kit.extras import monitor
from kit.extras.judges import judge_proxy
from kit.gym import servers as gym_servers
from kit.gym.servers import FetchError, GymStartError, fetch

# --- what a server sees --------------------------------------------------------------------------

LOOKING = """
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
        read = sys.stdin.read()
        return {"environment": dict(os.environ), "arguments": sys.argv, "config": config, "stdin": read}

    async def verify(self, body: gym.BaseVerifyRequest) -> gym.BaseVerifyResponse:
        return gym.BaseVerifyResponse(**body.model_dump(), reward=0.0)


if __name__ == "__main__":
    Server.run_webserver()
"""
SECRETS = {  # variable -> value, in the environment of the run
    "HF_TOKEN": "hidden-1",
    "WANDB_API_KEY": "hidden-2",
    "MY_PASSWORD": "hidden-3",
    "aws_secret_access": "hidden-4",
    "A_CREDENTIALS_FILE": "hidden-5",
    "JUDGE_WORD": "hidden-6",  # named by api_key_env alone
}


class Endpoint:
    """An HTTP server that answers with `handle(handler)` and keeps (path, headers) of each request in `log`."""

    def __init__(self, handle, port=0):
        self.log = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                endpoint.log.append((self.path, dict(self.headers)))
                self.close_connection = True
                with contextlib.suppress(OSError):
                    handle(self)

            def do_POST(self):
                self.do_GET()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def say(status, body, **headers):
    """A `handle` that answers a body: JSON, or bytes."""

    def handle(handler):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(data)

    return handle


def of_process(pid):
    """Everything that another process of this user reads of a process in /proc."""
    folder = Path("/proc") / str(pid)
    return (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()


def test_a_server_sees_its_own_settings_and_no_secret_that_its_recipe_does_not_name(
    tmp_path, monkeypatch
):
    """Real servers: one of a folder, Gym's agent before it, the policy's model server, and a judge's."""
    for name, value in {**SECRETS, "SHOP_TOKEN": "shown-1", "PLAIN": "shown-2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "app.py").write_text(LOOKING)
    start = {"python": str(GYM_PYTHON), "path": str(tmp_path / "shop"), "agent": "simple_agent"}
    start |= {"config": {"shop_key": "own-key"}, "env": ["SHOP_TOKEN"]}
    endpoint = Endpoint(say(500, {}))
    policy = {"base_url": f"{endpoint.url}/v1", "api_key": "policy-key", "model": "policy"}
    judges = judge_proxy.judges(
        {"judge": {"base_url": endpoint.url, "model": "m", "api_key_env": "JUDGE_WORD"}}, 60.0
    )
    with judge_proxy.Proxy(judges) as proxy:
        blocks = list(proxy.blocks())
        running = gym_servers.running_servers(
            {"shop": {"start": start}}, tmp_path, policy=policy, models=blocks
        )
        with running as urls:
            children = psutil.Process().children(recursive=True)
            outside = {child.pid: of_process(child.pid) for child in children}
            own = httpx.get(f"{urls['shop']}/openapi.json").json()["paths"]
            assert "/run" in own, own  # the agent's
            looked = look(tmp_path)
            model = address(looked["config"]["policy_model"]["responses_api_models"]["vllm_model"])
            httpx.post(
                f"{model}/v1/chat/completions", json={"messages": [], "model": "x"}, timeout=60.0
            )
        key = proxy.key
    assert len(outside) >= 4
    for pid, text in outside.items():
        for secret in [*SECRETS.values(), "policy-key", "own-key", key]:
            assert secret.encode() not in text, (pid, secret)
    inside = json.dumps(looked)
    for secret in [*SECRETS.values(), "policy-key", key]:
        assert secret not in inside, secret
    environment, config = looked["environment"], looked["config"]
    assert environment["SHOP_TOKEN"] == "shown-1" and environment["PLAIN"] == "shown-2"
    assert config["shop"]["resources_servers"]["shop"]["shop_key"] == "own-key"
    assert config["judge"]["responses_api_models"]["vllm_model"].keys() == {
        "entrypoint",
        "host",
        "port",
    }
    assert looked["stdin"] == "" and len(looked["arguments"]) == 1
    # and the one that needs it has it
    assert (
        endpoint.log[0][0] == "/v1/chat/completions"
        and endpoint.log[0][1]["Authorization"] == "Bearer policy-key"
    )


def address(settings):
    return f"http://{settings['host']}:{settings['port']}"


def look(folder):
    """What the server in `folder`/shop answers of itself: its port is that of the child that has /look."""
    for child in psutil.Process().children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                answer = httpx.get(f"http://127.0.0.1:{connection.laddr.port}/look")
                if answer.status_code == 200:
                    return answer.json()
    raise AssertionError((folder / "gym_shop.log").read_text())


def test_the_policys_model_server_is_shown_no_secret_of_one_agent(monkeypatch):
    monkeypatch.setenv("SHOP_TOKEN", "x")
    start = {"python": str(GYM_PYTHON), "agent": "simple_agent", "env": ["SHOP_TOKEN"]}
    blocks = gym_servers.plan(
        "mcqa", start, {"base_url": "http://x/v1", "api_key": "k", "model": "m"}
    )
    assert {block["name"]: block["shown"] for block in blocks} == {
        "mcqa": ["SHOP_TOKEN"],
        "policy_model": [],
        "mcqa_simple_agent": ["SHOP_TOKEN"],
    }


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("HF_TOKEN", "is 'HF_TOKEN'; set a list"),
        ({"A": "b"}, "set a list"),
        (["NO_SUCH"], "variable NO_SUCH is not set"),
    ],
)
def test_variables_of_a_recipe_that_are_none_are_told(names, told):
    with pytest.raises(GymStartError, match=rf"gym\.servers\.mcqa\.start\.env.*{told}"):
        gym_servers.check_server("mcqa", {"start": {"python": str(GYM_PYTHON), "env": names}})


@pytest.mark.parametrize(
    "name",
    ["A_KEY", "hf_token", "My_Secret", "DB_PASSWORD", "CREDENTIALS", "KEYS", "A_NAME", "PATH"],
)
def test_a_recipe_and_a_server_agree_on_what_a_secret_is_called(name, monkeypatch):
    monkeypatch.setenv(name, "a-long-value")
    is_written = "a-long-value" in OmegaConf.to_yaml(
        public(OmegaConf.create({"x": "a-long-value"}))
    )
    is_shown = name in gym_servers.environment({}, ())
    assert is_written == is_shown == (name in ("A_NAME", "PATH"))


# --- whose answers count -------------------------------------------------------------------------

SERVER = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, flag, how = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if how == "parent":  # whose child listens
    sys.exit(subprocess.run([sys.executable, __file__, str(port), str(flag), "child"]).returncode)
if flag.exists():
    time.sleep(20.0)  # imports


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"paths": {}}).encode())

    def log_message(self, *_):
        pass


HTTPServer.allow_reuse_address = True
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def block_of(folder, how="child"):
    (folder / "server.py").write_text(SERVER)
    port = gym_servers.free_port()
    command = [sys.executable, str(folder / "server.py"), str(port), str(folder / "flag"), how]
    log = str(folder / "log")
    return {
        "name": "s",
        "kind": "command",
        "command": command,
        "host": "127.0.0.1",
        "port": port,
        "log": log,
    }


@pytest.mark.parametrize("how", ["child", "parent"])
def test_a_server_that_listens_itself_or_by_a_child_is_ready(tmp_path, how):
    block = block_of(tmp_path, how)
    process = gym_servers.start_server(block, [block])
    try:
        gym_servers.wait_ready(
            "s", f"http://127.0.0.1:{block['port']}", process, tmp_path / "log", 30.0
        )
    finally:
        gym_servers.stop_servers([process])


def test_a_strangers_answer_is_not_taken_for_a_servers():
    """The port was free when it was chosen; the stranger is quicker than the server."""
    stranger = Endpoint(say(200, {"paths": {}}))
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        with pytest.raises(
            GymStartError, match=rf"port {stranger.port} belongs to another process; stop that"
        ):
            gym_servers.wait_ready("s", stranger.url, process, deadline_s=2.0)
        gym_servers.wait_ready(
            "s", stranger.url
        )  # a url of the recipe's, which nobody started here
    finally:
        gym_servers.stop_servers([process])
        stranger.close()


@pytest.mark.parametrize("moment", ["before the restart", "after the restart"])
def test_a_stranger_on_the_port_of_a_server_that_died_is_told(tmp_path, moment):
    block, restarts, lost = block_of(tmp_path), [], []
    started = {"s": gym_servers.start_server(block, [block])}
    gym_servers.wait_ready(
        "s", f"http://127.0.0.1:{block['port']}", started["s"], tmp_path / "log", 30.0
    )
    (tmp_path / "flag").write_text("")  # the next one takes long to start
    ended = threading.Event()
    arguments = ({"s": block}, started, restarts.append, lost.append, ended)
    keeper = threading.Thread(target=gym_servers.keep_up, args=arguments)
    stranger = None
    try:
        if moment == "before the restart":
            os.killpg(started["s"].pid, signal.SIGKILL)
            started["s"].wait()
            stranger = Endpoint(say(200, {"paths": {}}), block["port"])
            keeper.start()
        else:
            keeper.start()
            os.killpg(started["s"].pid, signal.SIGKILL)
            wait_until(lambda: restarts)
            stranger = Endpoint(say(200, {"paths": {}}), block["port"])
        wait_until(lambda: lost)
        time.sleep(2.5)
    finally:
        ended.set()
        keeper.join()
        gym_servers.stop_servers(started.values())
        if stranger:
            stranger.close()
    assert (
        len(lost) == 1
        and f"server s ended, and another process has its port {block['port']}" in lost[0]
    )
    assert restarts == ([] if moment == "before the restart" else ["s"])


def test_a_server_that_died_is_started_again_and_is_no_stranger(tmp_path):
    """Nor is one that leaves the port soon, as a fork of the server's that takes a moment to end."""
    block, restarts, lost = block_of(tmp_path), [], []
    started = {"s": gym_servers.start_server(block, [block])}
    url = f"http://127.0.0.1:{block['port']}"
    gym_servers.wait_ready("s", url, started["s"], tmp_path / "log", 30.0)
    ended = threading.Event()
    keeper = threading.Thread(
        target=gym_servers.keep_up,
        args=({"s": block}, started, restarts.append, lost.append, ended),
    )
    try:
        os.killpg(started["s"].pid, signal.SIGKILL)
        started["s"].wait()
        brief = Endpoint(say(200, {"paths": {}}), block["port"])
        keeper.start()
        time.sleep(1.5)
        brief.close()
        wait_until(lambda: restarts)
        gym_servers.wait_ready("s", url, started["s"], tmp_path / "log", 30.0)
        time.sleep(2.5)  # looked at again, twice
    finally:
        ended.set()
        keeper.join()
        gym_servers.stop_servers(started.values())
    assert restarts == ["s"] and lost == []


def wait_until(happened, patience=15.0):
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- how long a check may take -------------------------------------------------------------------


def trickle_headers(handler):
    for _ in range(200):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" if not _ else b"X-A: b\r\n")
        handler.wfile.flush()
        time.sleep(0.1)


def trickle_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(4096):  # 4 GiB
        handler.wfile.write(b" " * 2**20)


BAD = {
    "headers that trickle": (trickle_headers, "no complete answer within 1.0 s"),
    "a body that trickles": (trickle_body, "no complete answer within 1.0 s"),
    "an endless body": (endless, "longer than 16,777,216 bytes"),
}


def ask_head(url):
    gym_servers.discover(url)


def ask_url(url):
    gym_servers.wait_ready("s", url)


def ask_judge(url):
    judge_proxy.reach(judge_proxy.Judge("j", f"{url}/v1", "m", timeout_s=1.0))


def ask_page(url):
    monitor.ask(f"{url}/metrics")


@pytest.mark.parametrize("ask", [fetch, ask_head, ask_url, ask_judge, ask_page])
@pytest.mark.parametrize("name", BAD)
def test_a_check_ends_by_its_deadline_and_its_size_limit(name, ask, monkeypatch):
    for module, constant in (
        (gym_servers, "ASK_S"),
        (gym_servers, "HEAD_S"),
        (judge_proxy, "LIST_S"),
        (monitor, "ASK_S"),
    ):
        monkeypatch.setattr(module, constant, 1.0)
    handle, why = BAD[name]
    endpoint, began = Endpoint(handle), time.monotonic()
    ask = partial(fetch, deadline_s=1.0) if ask is fetch else ask
    with pytest.raises((FetchError, GymStartError, ConfigError)) as caught:
        ask(endpoint.url)
    assert why in str(caught.value)
    assert time.monotonic() - began < 6.0
    endpoint.server.server_close()


def test_a_short_body_does_not_become_a_long_one():
    bomb = Endpoint(say(200, gzip.compress(b"0" * 2**28), Content_Encoding="gzip"))
    assert len(fetch(bomb.url).content) < 2**20
    assert bomb.log[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("ask", [fetch, ask_head, ask_url, ask_judge, ask_page])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(ask, status, monkeypatch):
    monkeypatch.setattr(gym_servers, "ASK_S", 1.0)
    other = Endpoint(say(200, {"paths": {}, "data": [{"id": "m"}]}))
    endpoint = Endpoint(say(status, {}, Location=f"{other.url}/x"))
    with pytest.raises(
        (FetchError, GymStartError, ConfigError), match=f"HTTP {status} redirects to {other.url}/x"
    ):
        ask(endpoint.url)
    assert other.log == [] and endpoint.log


# --- Prometheus ----------------------------------------------------------------------------------


def test_the_prometheus_that_a_run_names_listens_on_this_machine_alone(tmp_path):
    said, port = [], gym_servers.free_port()
    settings = {"file": str(tmp_path / "prometheus.yml"), "port": port}
    config = {
        "actor_rollout_ref": {"rollout": {"prometheus": settings}},
        "trainer": {"experiment_name": "x"},
    }

    class Run:
        def __init__(self):
            self.config, self.say = OmegaConf.create(config), said.append

    with contextlib.ExitStack() as stack:
        monitor.serve(Run(), "127.0.0.1", ["127.0.0.1:1"], stack)
        assert f"--web.listen-address=127.0.0.1:{port}" in said[0]
        reloaded = Endpoint(say(200, b""), port)
        monitor.serve(Run(), "127.0.0.1", ["127.0.0.1:1"], stack)
        assert "was told to read its file again" in said[1] and reloaded.log[0][0] == "/-/reload"
    docs = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
    assert "--web.listen-address=127.0.0.1:9090" in docs.read_text()
