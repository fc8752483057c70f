"""A server that a run starts is ready only if it listens on its port itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kit.gym import network
from kit.gym import servers as gym_servers
from kit.gym.network import GymStartError, find_free_port, wait_ready
from kit.gym.server_process import ProcessSpec
from tests.helpers.http import Endpoint, send

SERVER = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, role = int(sys.argv[1]), sys.argv[2]
if role == "parent":  # its child listens
    sys.exit(subprocess.run([sys.executable, __file__, str(port), "child"]).returncode)


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
GYM_LIKE = send(200, {"paths": {}})  # the answer of a process that is not the server


def write_server(folder, role):
    """Write SERVER to `folder` and return its spec."""
    (folder / "server.py").write_text(SERVER)
    port = find_free_port()
    command = [sys.executable, str(folder / "server.py"), str(port), role]
    return ProcessSpec("s", "127.0.0.1", port, command=command, log=str(folder / "log"))


@pytest.mark.parametrize("role", ["child", "parent"])
def test_a_server_that_listens_itself_or_through_a_child_is_ready(tmp_path, role):
    spec = write_server(tmp_path, role)
    process = gym_servers.start_server(spec, [spec])
    try:
        wait_ready("s", f"http://127.0.0.1:{spec.port}", process, tmp_path / "log", 30.0)
    finally:
        gym_servers.stop_servers([process])


def test_the_answer_of_another_process_does_not_count():
    """The port was free when it was chosen, but another process listens on it first."""
    other = Endpoint(GYM_LIKE)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, start_new_session=True)
    problem = rf"port {other.port} belongs to another process: stop that"
    try:
        with pytest.raises(GymStartError, match=problem):
            wait_ready("s", other.url, process, timeout_s=2.0)
        wait_ready("s", other.url)  # a URL of the recipe needs no process of this run
    finally:
        gym_servers.stop_servers([process])
        other.close()


def test_two_servers_that_do_not_listen_yet_have_different_ports(monkeypatch):
    numbers = iter([4000, 4000, 4001])
    monkeypatch.setattr(network, "chosen_ports", set())
    monkeypatch.setattr(network, "bind_once", lambda host, port: None)
    monkeypatch.setattr(network.secrets, "randbelow", lambda limit: next(numbers))
    assert [network.find_free_port(), network.find_free_port()] == [24000, 24001]
