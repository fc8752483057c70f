"""If another process listens on the port of a Gym server, its answers do not count."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kit.gym import servers as gym_servers
from kit.gym.network import GymStartError, find_free_port, wait_ready
from kit.gym.servers import GymServers
from tests.helpers.http import Endpoint, send

SERVER = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, flag, role = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if role == "parent":  # its child listens
    sys.exit(subprocess.run([sys.executable, __file__, str(port), str(flag), "child"]).returncode)
if flag.exists():
    time.sleep(20.0)  # as if it imported


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


def write_server(folder, role="child"):
    """Write SERVER to `folder` and return its spec. While folder/flag exists, it starts slowly."""
    (folder / "server.py").write_text(SERVER)
    port = find_free_port()
    command = [sys.executable, str(folder / "server.py"), str(port), str(folder / "flag"), role]
    return {
        "name": "s",
        "kind": "command",
        "command": command,
        "host": "127.0.0.1",
        "port": port,
        "log": str(folder / "log"),
    }


def wait_until(condition, timeout_s=15.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("role", ["child", "parent"])
def test_a_server_that_listens_itself_or_through_a_child_is_ready(tmp_path, role):
    spec = write_server(tmp_path, role)
    process = gym_servers.start_server(spec, [spec])
    try:
        wait_ready("s", f"http://127.0.0.1:{spec['port']}", process, tmp_path / "log", 30.0)
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


class WatchedServer:
    """A running server that GymServers watches. `restarts` and `lost` have the reports."""

    def __init__(self, folder):
        self.restarts = []
        self.lost = []
        self.spec = write_server(folder)
        self.url = f"http://127.0.0.1:{self.spec['port']}"
        self.log = folder / "log"
        self.group = GymServers(
            {}, folder, on_restart=self.restarts.append, on_lost=self.lost.append
        )
        self.group.specs["s"] = self.spec
        self.group.processes["s"] = gym_servers.start_server(self.spec, [self.spec])
        self.watch = threading.Thread(target=self.group.restart_loop)
        self.wait_ready()

    def wait_ready(self):
        wait_ready("s", self.url, self.group.processes["s"], self.log, 30.0)

    def kill(self):
        os.killpg(self.group.processes["s"].pid, signal.SIGKILL)

    def close(self):
        self.group.close()
        self.watch.join()


@pytest.mark.parametrize("moment", ["before the restart", "after the restart"])
def test_another_process_on_the_port_of_a_dead_server_is_reported(tmp_path, moment):
    with contextlib.closing(WatchedServer(tmp_path)) as server, contextlib.ExitStack() as stack:
        port = server.spec["port"]
        (tmp_path / "flag").write_text("")  # the next server starts slowly
        if moment == "before the restart":
            server.kill()
            server.group.processes["s"].wait()
            stack.callback(Endpoint(GYM_LIKE, port).close)
            server.watch.start()
        else:
            server.watch.start()
            server.kill()
            wait_until(lambda: server.restarts)
            stack.callback(Endpoint(GYM_LIKE, port).close)
        wait_until(lambda: server.lost)
        time.sleep(2.5)
    (message,) = server.lost
    assert f"server s exited, and another process has taken its port {port}" in message
    assert server.restarts == ([] if moment == "before the restart" else ["s"])


def test_a_server_that_died_is_restarted_if_the_port_is_free_again_soon(tmp_path):
    """For example, a child process of the server may need time to end."""
    with contextlib.closing(WatchedServer(tmp_path)) as server:
        server.kill()
        server.group.processes["s"].wait()
        brief = Endpoint(GYM_LIKE, server.spec["port"])
        server.watch.start()
        time.sleep(1.5)
        brief.close()
        wait_until(lambda: server.restarts)
        server.wait_ready()
        time.sleep(2.5)  # two more checks
    assert server.restarts == ["s"]
    assert server.lost == []
