"""Serve a run's metrics to Prometheus, and read vLLM's speculative-decoding metrics.

The recipe key `rollout.prometheus.enable` turns on the page of the run (docs/monitoring.md). verl
writes the scrape file for vLLM's pages. This module adds the page of the run to it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import yaml
from omegaconf import DictConfig
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from kit.config.keys import ROOT
from kit.config.load import ROLLOUT
from kit.errors import RunError
from kit.features import Feature
from kit.gym.network import HOST as LOCAL
from kit.gym.network import FetchError, fetch
from kit.runs.console import say

if TYPE_CHECKING:
    from kit.runs.launch import Launch
    from kit.runs.run import Run


class Label(NamedTuple):
    """A Prometheus metric with a label: its name, and the name of the label."""

    metric: str
    name: str


# If a metric's name begins with one of these prefixes, the rest of the name becomes a label. Other
# metrics keep their names, with _ for each /.
LABELS = {
    "timing_s/": Label("stage_seconds", "stage"),
    "verify/concurrency/": Label("verify_concurrency", "server"),
}
FAILED = "rollout/failed/"
DRAFT_COUNTERS = {
    "vllm:spec_decode_num_draft_tokens_total": "draft",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
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


class RunCollector:
    """Collects the run's metrics for prometheus_client.

    These are the last value of each metric, the failures since the process started, and the
    progress of the current stage.
    """

    def __init__(self, run: Run):
        self.run = run
        self.latest: dict[str, float] = {}
        self.failures: dict[str, float] = {}  # by reason
        run.log.readers.append(self.record)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line of metrics.jsonl."""
        for name, value in metrics.items():
            if name.startswith(FAILED):
                reason = name.removeprefix(FAILED)
                self.failures[reason] = self.failures.get(reason, 0.0) + value
            else:
                self.latest[name] = value
        self.latest["step"] = step

    def collect(self) -> Iterator[Any]:
        """Yield all metrics. prometheus_client calls this in its own thread."""
        failures = dict(self.failures)
        yield make_family(
            CounterMetricFamily, "failures", "failed episodes by reason", "reason", failures
        )
        stage = self.run.stages.current_stage or "none"
        seconds = time.monotonic() - self.run.stages.last_progress_at
        yield make_family(
            GaugeMetricFamily,
            "stage_running_seconds",
            "seconds since the current stage made progress",
            "stage",
            {stage: seconds},
        )
        yield GaugeMetricFamily(
            "kit_nonfinite_steps",
            "consecutive steps skipped for non-finite numbers",
            self.run.files.nonfinite_steps,
        )
        yield GaugeMetricFamily(
            "kit_episodes_open",
            "unfinished episodes of the current batch",
            self.run.stages.open_episodes,
        )
        yield from self._collect_latest()

    def _collect_latest(self) -> Iterator[Any]:
        """Yield the last value of each metric of metrics.jsonl."""
        labeled: dict[str, dict[str, float]] = {prefix: {} for prefix in LABELS}
        for name, value in self.latest.copy().items():
            prefix = next((prefix for prefix in LABELS if name.startswith(prefix)), None)
            if prefix:
                labeled[prefix][name.removeprefix(prefix)] = value
            else:
                yield GaugeMetricFamily(f"kit_{re.sub('[^a-zA-Z0-9_]', '_', name)}", name, value)
        for prefix, values in labeled.items():
            metric, label = LABELS[prefix]
            yield make_family(GaugeMetricFamily, metric, f"{prefix}*", label, values)


def make_family(
    kind: Any, name: str, description: str, label: str, values: Mapping[str, float]
) -> Any:
    """Make a Prometheus metric with one value for each value of a label."""
    family = kind(f"kit_{name}", description, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def serve_metrics(run: Run, host: str, servers: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Serve the run's metrics on `host`, and add the page to the scrape file that verl wrote.

    The file is rollout.prometheus.file. A Prometheus on this machine at rollout.prometheus.port
    then reloads it. `servers` are the addresses of vLLM's pages. `stack` stops the page.

    Raises RunError if the file cannot be written.
    """
    settings = run.recipe.rollout.prometheus
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    server, thread = start_http_server(0, host, registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    address = f"{host}:{server.server_port}"
    file = Path(settings.file)
    write_scrape_file(file, run.recipe.trainer.experiment_name, address, servers)
    say(f"Prometheus metrics: http://{address}/metrics. {reload_prometheus(settings, file)}")


def write_scrape_file(file: Path, run_name: str, address: str, servers: Sequence[str]) -> None:
    """Write Prometheus' configuration for one run. Raises RunError if that fails."""
    jobs = [scrape_job("kit", [address], run_name)]
    if servers:
        jobs.append(scrape_job("rollout", list(servers), run_name))
    configuration = {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},  # verl's intervals
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(configuration, sort_keys=False))
    except OSError as error:
        raise RunError(
            f"actor_rollout_ref.rollout.prometheus.file={file} cannot be written: "
            f"{error.strerror}. Set another file."
        ) from None


def scrape_job(name: str, addresses: list[str], run_name: str) -> dict[str, Any]:
    """Make a job of the scrape file."""
    targets = {"targets": addresses, "labels": {"run": run_name}}
    return {"job_name": name, "static_configs": [targets]}


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
    last = {"draft": 0.0, "accepted": 0.0}

    def measure_acceptance() -> dict[str, float]:
        try:
            now = count_drafts(servers)
        except FetchError:
            return {}
        drafted = now["draft"] - last["draft"]
        accepted = now["accepted"] - last["accepted"]
        last.update(now)
        return {"rollout/drafts_accepted_frac": accepted / drafted} if drafted else {}

    return measure_acceptance


def count_drafts(servers: Sequence[str]) -> Counter[str]:
    """Sum the draft tokens and the accepted ones over the pages of vLLM. Raises FetchError."""
    counts = Counter(draft=0, accepted=0)
    for server in servers:
        page = fetch_page(f"http://{server}/metrics")
        for family in text_string_to_metric_families(page):
            counts.update(sum_drafts(family.samples))
    return counts


def sum_drafts(samples: Sequence[Any]) -> Counter[str]:
    """Sum the counters of draft tokens among the samples of a metric."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if sample.name in DRAFT_COUNTERS:
            counts[DRAFT_COUNTERS[sample.name]] += sample.value
    return counts
