"""The checks of Gym servers before a run: messages, timeouts, size limits, redirects."""

from __future__ import annotations

import contextlib
import gzip
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from extras import judges, monitor
from kit.errors import ConfigError
from kit.gym import network, process_specs, server_process
from kit.gym.network import FetchError, GymStartError, discover_servers, fetch, find_free_port
from kit.gym.process_specs import check_server
from kit.gym.servers import running_servers
from tests.helpers.http import Endpoint, send
from tests.helpers.recipes import GYM_PYTHON, ROOT

START = {"python": str(GYM_PYTHON)}


# --- messages ------------------------------------------------------------------------------------


def test_a_server_that_cannot_start_is_an_error_with_its_cause(tmp_path):
    with pytest.raises(GymStartError, match=r"no interpreter at nowhere/python.*make .*gym`"):
        check_server("x", {"start": {"python": "nowhere/python"}})
    busy = Endpoint(send(200, {}))
    with pytest.raises(GymStartError, match=r"x\.start: .*port=\d+ \(Address already in use"):
        check_server("x", {"start": {**START, "port": busy.port}})
    busy.close()
    with pytest.raises(GymStartError, match=r"x\.start: .* host=192\.0\.2\.1, port=None \(Cannot"):
        check_server("x", {"start": {**START, "host": "192.0.2.1"}})
    servers = {"x": {"start": {**START, "server": "nosuch"}}}
    with (
        pytest.raises(GymStartError, match="no folder 'nosuch' in resources_servers"),
        running_servers(servers, tmp_path),
    ):
        pass


def test_a_url_without_a_server_is_an_error_with_the_command_that_starts_one():
    began = time.monotonic()
    port = find_free_port()
    command = f"`python -m kit.gym.servers reasoning_gym --port {port}`"
    with pytest.raises(GymStartError, match=command):
        check_server("reasoning_gym", {"url": f"http://127.0.0.1:{port}"})
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        ({"path": "nowhere"}, r"start\.path=nowhere: there is no app.py .*\. Copy templates/ver"),
        ({"path": "templates"}, r"start\.path=templates: there is no app\.py in .*\. Copy temp"),
        (
            {"path": "templates/verifier", "server": "mcqa"},
            r"start has path and server\. Remove server",
        ),
        (
            {"path": "templates/verifier", "install": True},
            r"start has path and install\. Remove install",
        ),
    ],
)
def test_an_invalid_folder_of_a_server_is_an_error_of_one_line(start, problem):
    with pytest.raises(GymStartError, match=problem) as caught:
        check_server("x", {"start": {**START, **start}})
    assert "\n" not in str(caught.value)


def test_a_server_in_a_folder_has_the_settings_of_its_yaml(tmp_path, monkeypatch):
    """It names a judge, although nemo-gym's server of the same name does not."""
    (tmp_path / "mcqa" / "configs").mkdir(parents=True)
    (tmp_path / "mcqa" / "app.py").touch()
    judge = "{type: responses_api_models, name: judge_model}"
    text = f"any: {{resources_servers: {{mcqa: {{depth: 3, judge_model_server: {judge}}}}}}}"
    (tmp_path / "mcqa" / "configs" / "any.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    start = {**START, "path": "mcqa"}
    models = judges.list_models("x", start)
    assert models == {"judge_model_server": "judge_model"}
    (message,) = judges.find_missing_judges("x", start, models, {})
    problem = r"/mcqa needs the model judge_model .*\. Set gym\.judges\.judge_model.* See docs/"
    assert re.search(problem, message)
    (spec,) = process_specs.plan_processes("x", start, None)
    assert spec.folder == str(tmp_path / "mcqa")
    assert server_process.build_settings(spec, tmp_path / "no package")["depth"] == 3


def test_a_variable_that_is_not_set_is_an_error():
    problem = r"gym\.servers\.mcqa\.start\.env.* variable NO_SUCH is not set"
    with pytest.raises(GymStartError, match=problem):
        check_server("mcqa", {"start": {**START, "env": ["NO_SUCH"]}})


def test_a_name_that_leaves_the_log_folder_is_an_error():
    names = ("../x", "a/b", ".x", "", "a b", "a\n", "x" * 101)
    cases = [(name, {}) for name in names] + [("x", {"start": {"agent": "../y"}})]
    problem = r"^gym.servers(.x.start.agent)?: '.* is not a valid name. Use letters"
    for name, server in cases:
        with pytest.raises(GymStartError, match=problem):
            check_server(name, server)


# --- timeouts, sizes and redirects ---------------------------------------------------------------


def send_body_slowly(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def send_endless_body(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(4096):  # 4 GiB
        handler.wfile.write(b" " * 2**20)


BAD_ANSWERS = {
    "a slow body": (send_body_slowly, "no complete answer within 1.0 s"),
    "an endless body": (send_endless_body, "longer than 4,194,304 bytes"),
}


def check_url(url):
    network.wait_ready("s", url)


CHECKS = [fetch, discover_servers, check_url]


@pytest.mark.parametrize(
    ("name", "check"),
    [*((name, fetch) for name in BAD_ANSWERS), *(("a slow body", each) for each in CHECKS[1:])],
)
def test_a_check_ends_at_its_timeout_and_its_size_limit(name, check, monkeypatch):
    for module, constant in (
        (network, "CHECK_TIMEOUT_S"),
        (network, "HEAD_SERVER_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, constant, 1.0)
    handle, problem = BAD_ANSWERS[name]
    endpoint = Endpoint(handle)
    began = time.monotonic()
    if check is fetch:
        check = partial(fetch, timeout_s=1.0)
    with pytest.raises((FetchError, GymStartError, ConfigError)) as caught:
        check(endpoint.url)
    assert problem in str(caught.value)
    assert time.monotonic() - began < 6.0
    endpoint.server.server_close()


def test_a_compressed_body_is_not_decompressed():
    endpoint = Endpoint(send(200, gzip.compress(b"0" * 2**28), Content_Encoding="gzip"))
    assert len(fetch(endpoint.url).content) < 2**20
    assert endpoint.log[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("check", "status"),
    [*((fetch, status) for status in (301, 302, 303, 307)), *((each, 308) for each in CHECKS)],
)
def test_a_redirect_is_reported_and_not_followed(check, status, monkeypatch):
    monkeypatch.setattr(network, "CHECK_TIMEOUT_S", 1.0)
    other = Endpoint(send(200, {"paths": {}, "data": [{"id": "m"}]}))
    endpoint = Endpoint(send(status, {}, Location=f"{other.url}/x"))
    problem = f"HTTP {status} redirects to {other.url}/x"
    with pytest.raises((FetchError, GymStartError, ConfigError), match=problem):
        check(endpoint.url)
    assert other.log == []
    assert endpoint.log


# --- Prometheus ----------------------------------------------------------------------------------


def test_the_printed_command_of_prometheus_listens_on_this_machine_only(tmp_path, monkeypatch):
    lines = []
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
        prometheus = Endpoint(send(200, b""), port)
        monitor.serve_metrics(run, "127.0.0.1", ["127.0.0.1:1"], stack)
        assert "reloaded its configuration" in lines[1]
        assert prometheus.log[0][0] == "/-/reload"
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert "--web.listen-address=127.0.0.1:9090" in page
