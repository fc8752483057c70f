"""What Prometheus reads (rollout.prometheus.enable, docs/monitoring.md): the run's own page beside vLLM's, both in the
scrape file that verl writes; and what vLLM's pages say of draft tokens.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from kit.config.load import ROOT
from kit.errors import RunError
from kit.gym.servers import HOST as LOCAL
from kit.gym.servers import FetchError, fetch
from kit.runs.run_dir import Run

# metrics of which the last part of the name becomes a label; the others keep their name, with _ in the place of /
LABELLED = {
    "timing_s/": ("stage_seconds", "stage"),
    "verify/concurrency/": ("verify_concurrency", "server"),
}
FAILED = "rollout/failed/"
DRAFTS = {f"vllm:spec_decode_num_{kind}_tokens_total": kind for kind in ("draft", "accepted")}
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
ASK_S = 5.0  # seconds for one page


class Page:
    """The run's numbers as Prometheus takes them: the last of each metric, what was counted, and what is under way."""

    def __init__(self, run: Run):
        self.run = run
        self.latest: dict[str, float] = {}
        self.failures: dict[str, float] = {}  # by reason, since this process began
        run.on_log = self.take

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of metrics.jsonl."""
        for name, count in metrics.items():
            if name.startswith(FAILED):
                reason = name.removeprefix(FAILED)
                self.failures[reason] = self.failures.get(reason, 0.0) + count
        self.latest |= {
            name: value for name, value in metrics.items() if not name.startswith(FAILED)
        }
        self.latest["step"] = step

    def collect(self) -> Iterator[Any]:
        """For prometheus_client, in its own thread."""
        yield labelled(
            CounterMetricFamily, "failures", "episodes that failed", "reason", dict(self.failures)
        )
        under_way = {self.run.guard.current or "none": time.monotonic() - self.run.guard.begun}
        yield labelled(
            GaugeMetricFamily, "stage_running_seconds", "the stage under way", "stage", under_way
        )
        yield GaugeMetricFamily("kit_damaged_steps", "in a row", self.run.damaged)
        yield GaugeMetricFamily(
            "kit_episodes_open", "those of the batch under way that have not ended", self.run.open
        )
        parts: dict[str, dict[str, float]] = {start: {} for start in LABELLED}
        for name, value in self.latest.copy().items():
            start = next((start for start in LABELLED if name.startswith(start)), None)
            if start:
                parts[start][name.removeprefix(start)] = value
            else:
                yield GaugeMetricFamily(f"kit_{re.sub('[^a-zA-Z0-9_]', '_', name)}", name, value)
        for start, values in parts.items():
            yield labelled(
                GaugeMetricFamily, LABELLED[start][0], f"{start}*", LABELLED[start][1], values
            )


def labelled(kind: Any, name: str, told: str, label: str, values: Mapping[str, float]) -> Any:
    """A metric with a value for each of a label's."""
    family = kind(f"kit_{name}", told, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


def serve(run: Run, host: str, servers: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Open the run's page on `host`, add it to the file that verl has written (rollout.prometheus.file), and have a
    Prometheus at rollout.prometheus.port here read that again. servers: addresses of vLLM's pages, or none.

    Raises RunError where the file cannot be written.
    """
    settings, registry = run.config.actor_rollout_ref.rollout.prometheus, CollectorRegistry()
    registry.register(Page(run))
    server, thread = start_http_server(0, host, registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    address = f"{host}:{server.server_port}"
    file, label = Path(settings.file), {"run": run.config.trainer.experiment_name}
    jobs = {"kit": [address], "rollout": list(servers)}
    scraped = [
        {"job_name": job, "static_configs": [{"targets": targets, "labels": label}]}
        for job, targets in jobs.items()
        if targets
    ]
    every = {"scrape_interval": "10s", "evaluation_interval": "10s"}  # verl's
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        told = {"global": every, "rule_files": [str(ALERTS)], "scrape_configs": scraped}
        file.write_text(yaml.safe_dump(told, sort_keys=False))
    except OSError as error:
        raise RunError(
            f"actor_rollout_ref.rollout.prometheus.file={file}: {error.strerror}; give another"
        ) from None
    try:
        ask(f"http://{LOCAL}:{settings.port}/-/reload", "POST")
        how = f"the Prometheus on port {settings.port} was told to read its file again; let that be {file}"
    except FetchError:
        # on this machine alone: whoever reaches a Prometheus with this option can stop it
        listen = f"--web.enable-lifecycle --web.listen-address={LOCAL}:{settings.port}"
        how = f"prometheus --config.file={file} {listen}"
    run.say(f"metrics at http://{address}/metrics; {how}")


def ask(url: str, method: str = "GET") -> str:
    """The text of a page. Raises FetchError for every status but 200."""
    answer = fetch(url, method, ASK_S)
    if answer.status_code != 200:
        raise FetchError(f"HTTP {answer.status_code} from {url}")
    return answer.text


def acceptance(servers: Sequence[str]) -> Callable[[], dict[str, float]]:
    """A function that asks vLLM's pages which part of the draft tokens since the last call was accepted, as the metric
    `rollout/drafts_accepted_frac`; nothing where there were none, or a page does not answer."""
    before = dict.fromkeys(DRAFTS.values(), 0.0)

    def measure() -> dict[str, float]:
        now = dict.fromkeys(DRAFTS.values(), 0.0)
        try:
            pages = [ask(f"http://{server}/metrics") for server in servers]
        except FetchError:
            return {}
        for page in pages:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if sample.name in DRAFTS:
                        now[DRAFTS[sample.name]] += sample.value
        drafted, accepted = (now[kind] - before[kind] for kind in ("draft", "accepted"))
        before.update(now)
        return {"rollout/drafts_accepted_frac": accepted / drafted} if drafted else {}

    return measure
