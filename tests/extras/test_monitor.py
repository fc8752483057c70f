"""The command of Prometheus that a run prints."""

from __future__ import annotations

import contextlib
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

from omegaconf import OmegaConf

from extras import monitor
from kit.gym.network import find_free_port
from tests.helpers.http import start_server


def test_the_printed_command_of_prometheus_listens_on_this_machine_only(tmp_path, monkeypatch):
    lines = []
    requests = []

    class Prometheus(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

    port = find_free_port()
    settings = {"file": str(tmp_path / "prometheus.yml"), "port": port}
    recipe = SimpleNamespace(
        rollout=OmegaConf.create({"prometheus": settings}),
        trainer=OmegaConf.create({"experiment_name": "x"}),
    )
    run = SimpleNamespace(recipe=recipe, log=SimpleNamespace(readers=[]))
    monkeypatch.setattr(monitor, "say", lines.append)
    with contextlib.ExitStack() as stack:
        monitor.serve_metrics(run, "127.0.0.1", ["127.0.0.1:1"], stack)
        assert f"--web.listen-address=127.0.0.1:{port}" in lines[0]
        start_server(Prometheus, port)
        monitor.serve_metrics(run, "127.0.0.1", ["127.0.0.1:1"], stack)
        assert "reloaded its configuration" in lines[1]
        assert requests == ["/-/reload"]
