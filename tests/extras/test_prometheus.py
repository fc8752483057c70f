"""Prometheus reads the metrics of the run and of the rollout engine (configs/monitoring.yaml)."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from extras import monitor
from kit.gym.network import find_free_port
from tests.helpers.recipes import ROOT


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Path:
    """The path of Prometheus: the installed one, or Debian's package."""
    installed = shutil.which("prometheus")
    if installed:
        return Path(installed)
    folder = tmp_path_factory.mktemp("prometheus")
    fetch = "apt-get download -q prometheus && dpkg -x prometheus_*.deb ."
    done = subprocess.run(fetch, shell=True, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        error = done.stderr.strip()[-200:]
        pytest.skip(f"Prometheus is not installed and cannot be downloaded: {error}")
    return folder / "usr" / "bin" / "prometheus"


class Prometheus:
    """A running Prometheus."""

    def __init__(self, http: httpx.Client):
        self.http = http

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/-/ready").status_code == 200:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def get(self, path: str, **params: str) -> dict:
        return self.http.get(path, params=params).raise_for_status().json()["data"]

    def query(self, query: str) -> list[dict]:
        return self.get("/api/v1/query", query=query)["result"]

    def wait_for(self, query: str, count: int = 1) -> list[dict]:
        """Return the query's results as soon as there are `count`."""
        deadline = time.monotonic() + 40
        results = self.query(query)
        while len(results) < count:
            assert time.monotonic() < deadline, f"{query}: {results}"
            time.sleep(0.5)
            results = self.query(query)
        return results


@contextlib.contextmanager
def running_prometheus(path: Path, port: int, file: Path, folder: Path) -> Iterator[Prometheus]:
    """Start Prometheus. file: its configuration, which the run writes later."""
    command = [
        str(path),
        f"--config.file={file}",
        "--web.enable-lifecycle",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder}",  # Debian's default is shared by the whole machine
    ]
    with contextlib.ExitStack() as exits:
        process = exits.enter_context(
            subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
        )
        exits.callback(process.terminate)
        http = exits.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        server = Prometheus(http)
        server.wait_until_ready()
        yield server


def read_dashboard_queries(run: str) -> list[str]:
    """Read the queries of the Grafana dashboard, with the name of a run."""
    queries = []
    for panel in json.loads((ROOT / "docs/monitoring/grafana.json").read_text())["panels"]:
        queries += [target["expr"].replace("$run", run) for target in panel["targets"]]
    return queries


def find_metrics(query: str) -> list[str]:
    """Find the names of the metrics in a query."""
    return re.findall(r"\b(?:kit_|vllm:|up\b)\w*", query)


async def fail_some(rollout, requests, *settings):
    """Make the episodes of two groups fail, as if a server had answered 500."""
    episodes = await rollout(requests, *settings)
    if len(episodes) == 64:  # a training step, not an evaluation
        for episode in episodes[:16]:
            episode.status = "http_500"
            episode.reward = None
            episode.error = "for the test"
    return episodes


@pytest.mark.soak
def test_prometheus_reads_the_run_and_its_servers(stack, prometheus, tmp_path):
    """Every query of the dashboard and the alerts has a result, and an alert reports failures."""
    port = find_free_port("127.0.0.1")
    file = tmp_path / "prometheus.yml"
    file.write_text("")
    key = "actor_rollout_ref.rollout.prometheus"
    changes = [f"{key}.port={port}", f"{key}.file={file}", "gym.max_failed_frac=1"]
    with contextlib.ExitStack() as exits:
        server = exits.enter_context(running_prometheus(prometheus, port, file, tmp_path))
        trainer = exits.enter_context(stack.trainer("monitored", *changes, overlays=["monitoring"]))
        addresses = stack.servers.manager.server_addresses
        monitor.serve_metrics(trainer.run, "127.0.0.1", addresses, exits)
        trainer.servers.rollout_async = partial(fail_some, trainer.servers.rollout_async)
        # a run reads this gauge from its Gym client
        gauge = {"verify/concurrency/reasoning_gym": 64.0}
        trainer.run.log.gauges.append(lambda: gauge)
        metrics = trainer.step_or_skip()
        assert trainer.scores == {}
        assert metrics["rollout/failed/http_500"] == 16
        trainer.evaluate()
        with trainer.run.stage("gen"):
            [reward] = server.wait_for("kit_rollout_reward_mean")
            server.wait_for('kit_stage_running_seconds{stage="gen"}')
            server.wait_for("up == 1", 2)
        assert reward["metric"] == {
            "__name__": "kit_rollout_reward_mean",
            "job": "kit",
            "run": "monitored",
            "instance": reward["metric"]["instance"],
        }
        assert float(reward["value"][1]) == pytest.approx(metrics["rollout/reward/mean"])
        [failed] = server.query('kit_failures_total{reason="http_500"}')
        assert failed["value"][1] == "16"
        queries = read_dashboard_queries("monitored")
        assert len(queries) > 20
        # `rate` and `increase` need more samples than this run gives
        queries = [query for query in queries if "increase(" not in query and "rate(" not in query]
        missing = [query for query in queries if not server.query(query)]
        alerts = server.get("/api/v1/rules")["groups"][0]["rules"]
        assert len(alerts) > 10
        names = set()
        for alert in alerts:
            names.update(find_metrics(alert["query"]))
        missing += [name for name in names if not server.query(name)]
        assert not missing
        server.wait_for('ALERTS{alertname="EpisodesFail",alertstate="pending"}')
    file.unlink()
