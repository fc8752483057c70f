"""Serve a run's metrics to Prometheus.

The recipe key `rollout.prometheus.enable` turns on the page of the run (docs/monitoring.md). verl
writes the scrape file for vLLM's pages. This module adds the page of the run to it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from kit.recipe.keys import ROLLOUT, ROOT
from kit.recipe.settings import Settings
from kit.run import files
from kit.run.console import say
from kit.run.features import RecipeCheck, RunPart
from kit.verify.network import HOST as LOCAL

if TYPE_CHECKING:
    from kit.run.launch import Launch
    from kit.run.run import Run

# {beginning of a metric's name: Prometheus' name and the label that has the rest}. Other metrics
# keep their names, with _ for each /.
LABELS = {
    "timing_s/": ("kit_stage_seconds", "stage"),
    "verify/concurrency/": ("kit_verify_concurrency", "server"),
}
FAILED = "rollout/failed/"
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"


class Monitor(RecipeCheck, RunPart):
    """The page with a run's metrics."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Yield a problem if vLLM does not publish the metrics that Prometheus reads."""
        if settings.rollout.disable_log_stats:
            yield (
                f"{ROLLOUT}.prometheus.enable needs {ROLLOUT}.disable_log_stats=false "
                "(configs/monitoring.yaml). Set it."
            )

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Serve the run's metrics. addresses: of vLLM's pages; empty if nothing is sampled."""
        pages = addresses if launch.recipe.rollout.name == "vllm" else []
        serve_metrics(launch.run, ray.util.get_node_ip_address(), pages, launch.stack)


class RunPage:
    """The run's metrics for prometheus_client, which calls `collect` in its own thread."""

    def __init__(self, run: Run):
        self.run = run
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.gauges: dict[str, Gauge] = {}  # by their name in Prometheus
        self.failures = Counter(
            "kit_failures", "failed episodes", ["reason"], registry=self.registry
        )
        run.log.readers.append(self.record)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line of metrics.jsonl."""
        for name, value in {**metrics, "step": step}.items():
            if name.startswith(FAILED):
                self.failures.labels(name.removeprefix(FAILED)).inc(value)
                continue
            prefix = next((prefix for prefix in LABELS if name.startswith(prefix)), "")
            metric, label = LABELS.get(prefix, (f"kit_{re.sub('[^a-zA-Z0-9_]', '_', name)}", ""))
            if metric not in self.gauges:
                labels = [label] if label else []
                self.gauges[metric] = Gauge(metric, prefix or name, labels, registry=self.registry)
            gauge = self.gauges[metric]
            (gauge.labels(name.removeprefix(prefix)) if label else gauge).set(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the progress of the current stage."""
        stages = self.run.stages
        seconds = time.monotonic() - stages.last_progress_at
        text = "seconds since the current stage made progress"
        running = GaugeMetricFamily("kit_stage_running_seconds", text, labels=["stage"])
        running.add_metric([stages.current_stage or "none"], seconds)
        yield running
        steps = self.run.files.nonfinite_steps
        yield GaugeMetricFamily("kit_nonfinite_steps", "non-finite steps in a row", value=steps)
        yield GaugeMetricFamily("kit_episodes_open", "episodes to end", value=stages.open_episodes)


def serve_metrics(run: Run, host: str, servers: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Serve the run's metrics on `host`, and add the page to the scrape file that verl wrote.

    The file is rollout.prometheus.file. `servers` are the addresses of vLLM's pages. `stack` stops
    the page. Raises RunError if the file cannot be written.
    """
    settings = run.recipe.rollout.prometheus
    server, thread = start_http_server(0, host, RunPage(run).registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    address = f"{host}:{server.server_port}"
    file = Path(settings.file)
    write_scrape_file(file, run.recipe.trainer.experiment_name, address, servers)
    # It listens only on this machine.
    command = f"prometheus --config.file={file} --web.listen-address={LOCAL}:{settings.port}"
    say(f"Prometheus metrics: http://{address}/metrics. Start Prometheus: {command}")


def write_scrape_file(file: Path, run_name: str, address: str, servers: Sequence[str]) -> None:
    """Write Prometheus' configuration for one run. Raises RunError if that fails."""
    pages = {"kit": [address], "rollout": list(servers)}
    jobs = [
        {
            "job_name": name,
            "static_configs": [{"targets": addresses, "labels": {"run": run_name}}],
        }
        for name, addresses in pages.items()
        if addresses
    ]
    configuration = {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},  # verl's intervals
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }
    with files.explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(configuration, sort_keys=False))
