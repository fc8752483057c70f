"""The page with a run's metrics has all that the dashboard and the alerts read."""

from __future__ import annotations

import contextlib
import re

import httpx
import yaml

from extras import monitor
from tests.helpers.recipes import ROOT

FOLDER = ROOT / "docs" / "monitoring"


def test_the_page_has_each_metric_of_the_dashboard_and_the_alerts(stack, tmp_path):
    file = tmp_path / "prometheus.yml"
    changes = [f"actor_rollout_ref.rollout.prometheus.file={file}"]
    with contextlib.ExitStack() as exits:
        trainer = exits.enter_context(stack.trainer("monitored", *changes, overlays=["monitoring"]))
        monitor.serve_metrics(trainer.run, "127.0.0.1", ["127.0.0.1:1"], exits)
        # a run reads this gauge from its Gym client
        gauge = {"verify/concurrency/reasoning_gym": 64.0}
        trainer.run.log.gauges.append(lambda: gauge)
        metrics = trainer.step_or_skip()
        trainer.evaluate()
        own, engine = yaml.safe_load(file.read_text())["scrape_configs"]
        (address,) = own["static_configs"][0]["targets"]
        page = httpx.get(f"http://{address}/metrics").text
    assert engine["static_configs"][0]["targets"] == ["127.0.0.1:1"]
    (reward,) = re.findall(r"^kit_rollout_reward_mean (.*)$", page, re.MULTILINE)
    assert float(reward) == metrics["rollout/reward/mean"]
    queries = (FOLDER / "grafana.json").read_text() + (FOLDER / "alerts.yml").read_text()
    names = set(re.findall(r"\bkit_\w+", queries))
    assert len(names) > 20
    assert [name for name in names if name not in page] == []
