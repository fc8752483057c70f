"""Serve a run's metrics to Prometheus, and read vLLM's speculative-decoding metrics.

The recipe key `rollout.prometheus.enable` turns on the page of the run (docs/monitoring.md). verl
writes the scrape file for vLLM's pages. This module adds the page of the run to it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import ray
import yaml
from omegaconf import DictConfig
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from kit.config.keys import ROOT
from kit.config.load import ROLLOUT
from kit.features import Feature
from kit.gym.network import HOST as LOCAL
from kit.gym.network import FetchError, fetch
from kit.runs import files
from kit.runs.console import say

if TYPE_CHECKING:
    from kit.runs.launch import Launch
    from kit.runs.run import Run

# {beginning of a metric's name: Prometheus' name and the label that has the rest}. Other metrics
# keep their names, with _ for each /.
LABELS = {
    "timing_s/": ("kit_stage_seconds", "stage"),
    "verify/concurrency/": ("kit_verify_concurrency", "server"),
}
FAILED = "rollout/failed/"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
PAGE_TIMEOUT_S = 5.0  # for one page


class Monitor(Feature):
    """The page with a run's metrics, and the metrics of speculative decoding."""

    def __init__(self, config: DictConfig, command: str):
        super().__init__(config, command)
        rollout = config.actor_rollout_ref.rollout
        self.serves_page = bool(rollout.prometheus.enable)
        engine_kwargs = rollout.engine_kwargs.get("vllm") or {}
        self.has_drafts = bool(engine_kwargs.get("speculative_config"))

    def check_recipe(self, config: DictConfig) -> Iterator[str]:
        """Yield a problem if vLLM does not publish the metrics that Prometheus reads."""
        if self.serves_page and config.actor_rollout_ref.rollout.disable_log_stats:
            yield (
                f"{ROLLOUT}.prometheus.enable needs {ROLLOUT}.disable_log_stats=false "
                "(configs/monitoring.yaml). Set it."
            )

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Serve the run's metrics, and read the draft tokens that vLLM accepted.

        addresses: of vLLM's pages; empty if nothing is sampled.
        """
        if addresses and self.has_drafts:
            launch.run.log.gauges.append(track_draft_acceptance(addresses))
        if self.serves_page:
            pages = addresses if launch.recipe.rollout.name == "vllm" else []
            serve_metrics(launch.run, ray.util.get_node_ip_address(), pages, launch.stack)


class RunPage:
    """The run's metrics for prometheus_client.

    These are the last value of each metric, the failures since the process started, and the
    progress of the current stage.
    """

    def __init__(self, run: Run):
        self.run = run
        self.registry = CollectorRegistry()
        self.gauges: dict[str, Gauge] = {}
        self.failures = prometheus_client.Counter(
            "kit_failures", "failed episodes by reason", ["reason"], registry=self.registry
        )
        self.registry.register(self)
        run.log.readers.append(self.record)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line of metrics.jsonl."""
        for name, value in {**metrics, "step": step}.items():
            prefix = next((prefix for prefix in LABELS if name.startswith(prefix)), None)
            if name.startswith(FAILED):
                self.failures.labels(name.removeprefix(FAILED)).inc(value)
            elif prefix:
                metric, label = LABELS[prefix]
                gauge = self._get_gauge(metric, f"{prefix}*", [label])
                gauge.labels(name.removeprefix(prefix)).set(value)
            else:
                metric = f"kit_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
                self._get_gauge(metric, name).set(value)

    def _get_gauge(self, metric: str, name: str, labels: Sequence[str] = ()) -> Gauge:
        """Return the gauge of a metric. Make it if there is none."""
        if metric not in self.gauges:
            self.gauges[metric] = Gauge(metric, name, labels, registry=self.registry)
        return self.gauges[metric]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield what changes between two lines. prometheus_client calls this in its own thread."""
        stages = self.run.stages
        running = GaugeMetricFamily(
            "kit_stage_running_seconds",
            "seconds since the current stage made progress",
            labels=["stage"],
        )
        seconds = time.monotonic() - stages.last_progress_at
        running.add_metric([stages.current_stage or "none"], seconds)
        yield running
        for name, text, value in (
            ("nonfinite_steps", "consecutive non-finite steps", self.run.files.nonfinite_steps),
            ("episodes_open", "unfinished episodes of the batch", stages.open_episodes),
        ):
            yield GaugeMetricFamily(f"kit_{name}", text, value)


def serve_metrics(run: Run, host: str, servers: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Serve the run's metrics on `host`, and add the page to the scrape file that verl wrote.

    The file is rollout.prometheus.file. A Prometheus on this machine at rollout.prometheus.port
    then reloads it. `servers` are the addresses of vLLM's pages. `stack` stops the page.

    Raises RunError if the file cannot be written.
    """
    settings = run.recipe.rollout.prometheus
    server, thread = start_http_server(0, host, RunPage(run).registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    address = f"{host}:{server.server_port}"
    file = Path(settings.file)
    write_scrape_file(file, run.recipe.trainer.experiment_name, address, servers)
    say(f"Prometheus metrics: http://{address}/metrics. {reload_prometheus(settings, file)}")


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


def reload_prometheus(settings: Any, file: Path) -> str:
    """Reload the Prometheus on this machine; return a message: the result, or how to start one."""
    try:
        fetch_page(f"http://{LOCAL}:{settings.port}/-/reload", "POST")
    except FetchError:
        # It listens only on this machine. With --web.enable-lifecycle, anyone who reaches it can
        # stop it.
        listen = f"--web.enable-lifecycle --web.listen-address={LOCAL}:{settings.port}"
        return f"Start Prometheus: prometheus --config.file={file} {listen}"
    return (
        f"The Prometheus on port {settings.port} reloaded its configuration. "
        f"It must be started with {file}."
    )


def fetch_page(url: str, method: str = "GET") -> str:
    """Fetch the text of a page. Raises FetchError for every status except 200."""
    response = fetch(url, method, PAGE_TIMEOUT_S)
    if response.status_code != 200:
        raise FetchError(f"HTTP {response.status_code} from {url}")
    return response.text


def track_draft_acceptance(servers: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Return a function that measures how many draft tokens vLLM accepted since its last call.

    The function returns the metric `rollout/drafts_accepted_frac`. It returns no metric if there
    were no draft tokens, or if a page of vLLM does not answer.
    """
    last: Counter[str] = Counter()

    def measure_acceptance() -> dict[str, float]:
        try:
            now = count_drafts(servers)
        except FetchError:
            return {}
        new = now - last
        last.update(new)
        return (
            {"rollout/drafts_accepted_frac": new[ACCEPTED] / new[DRAFTED]} if new[DRAFTED] else {}
        )

    return measure_acceptance


def count_drafts(servers: Sequence[str]) -> Counter[str]:
    """Sum the draft tokens and the accepted ones over the pages of vLLM. Raises FetchError."""
    counts: Counter[str] = Counter()
    for server in servers:
        families = text_string_to_metric_families(fetch_page(f"http://{server}/metrics"))
        for sample in itertools.chain.from_iterable(family.samples for family in families):
            if sample.name in (DRAFTED, ACCEPTED):
                counts[sample.name] += int(sample.value)
    return counts
