"""kit/rollout/vllm_routes.py: which routes of vLLM's HTTP servers answer, and to whom.

No model is loaded.
"""

from __future__ import annotations

import argparse

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from kit.config.keys import to_plain
from kit.config.load import load_config
from kit.extras.judges import judge_processes, judge_settings

KEY = "judge-key"
ORIGIN = {"Origin": "https://example.com"}


def routes_of(app):
    """(method, path) of every route of the app."""
    routes = set()
    for route in app.routes:
        path = route.path.replace("{", "").replace("}", "")
        routes |= {(method, path) for method in getattr(route, "methods", None) or ["GET"]}
    return routes


def build(arguments, supported=("generate",)):
    """vLLM's own app for these parsed arguments, as its server builds it."""
    from vllm.entrypoints.openai.api_server import build_app

    app = build_app(arguments, supported_tasks=supported, model_config=None)

    async def healthy(_request):
        return PlainTextResponse("healthy")

    # vLLM's own route would call an engine, which does not exist here
    app.router.routes.insert(0, Route("/health", healthy))
    return app


def policy_arguments():
    """The arguments of the policy's server, as verl makes them from rollout.engine_kwargs.vllm."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config, _ = load_config([], [])
    settings = to_plain(config.actor_rollout_ref.rollout.engine_kwargs.vllm)
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    return parser.parse_args(["serve", "folder", *build_cli_args_from_config(settings)])


def judge_arguments(judge):
    """The arguments of a judge's server, as its process parses them."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = judge_processes.vllm_process_spec(judge)["command"]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])


@pytest.fixture(scope="module")
def policy():
    return build(policy_arguments())


@pytest.fixture(scope="module")
def judge():
    judge = judge_settings.build_judges(
        {"j": {"start": {"model": "a/b"}}}, 60.0, cpu_dtype="float32"
    )["j"]
    judge.key = KEY
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "VLLM_API_KEY", judge_processes.vllm_process_spec(judge)["env"]["VLLM_API_KEY"]
        )
        return build(judge_arguments(judge))


def statuses(app, **headers):
    """{(method, path): status} of every route of an app, and of some that it does not have."""
    others = {
        ("GET", "/"),
        ("POST", "/no/such"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/docs"),
    }
    http = TestClient(app, raise_server_exceptions=False)
    return {
        (method, path): http.request(method, path, headers=headers, json={}).status_code
        for method, path in routes_of(app) | others
    }


def routes_with(statuses, status):
    return {route for route, each in statuses.items() if each == status}


def test_the_policys_server_answers_health_and_metrics_only(policy):
    results = statuses(policy, **ORIGIN)
    assert len(results) > 25
    answered = results.keys() - routes_with(results, 403)
    assert answered == {("GET", "/health"), ("GET", "/metrics")}
    assert results["GET", "/health"] == results["GET", "/metrics"] == 200
    for path in (
        "/invocations",
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
    ):
        assert results["POST", path] == 403, path


@pytest.mark.parametrize(
    "path",
    ["/metrics/%2e%2e/v1/completions", "//v1/completions", "/metrics/", "/health/x", "/METRICS"],
)
def test_no_spelling_of_a_path_reaches_another_route(policy, path):
    http = TestClient(policy)
    assert http.post(path, json={}).status_code == 403
    assert http.get(path).status_code == 403


@pytest.mark.parametrize("server", ["policy", "judge"])
def test_no_web_page_may_call_a_server(server, request):
    http = TestClient(request.getfixturevalue(server))
    for path in ("/health", "/metrics", "/v1/completions"):
        assert "access-control-allow-origin" not in http.get(path, headers=ORIGIN).headers
        asks = {**ORIGIN, "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in http.options(path, headers=asks).headers


def test_no_websocket_of_the_policys_server_opens(policy):
    http = TestClient(policy)
    with pytest.raises(WebSocketDisconnect) as caught, http.websocket_connect("/v1/realtime"):
        pass
    assert caught.value.code == 1008


def test_a_judges_server_answers_its_run_only(judge):
    allowed = {("GET", "/openapi.json"), ("GET", "/health"), ("GET", "/metrics")}
    protected = {("POST", "/v1/chat/completions"), ("POST", "/v1/responses")}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        results = statuses(judge, **headers)
        assert routes_with(results, 200) == allowed
        assert routes_with(results, 401) == protected
        assert set(results.values()) == {200, 401, 403}
    results = statuses(judge, Authorization=f"Bearer {KEY}")
    assert routes_with(results, 403) == results.keys() - allowed - protected
    # the key is accepted; then the engine is missing
    assert not {results[route] for route in protected} & {401, 403, 404}
    assert results["POST", "/invocations"] == 403


def test_a_recipe_may_change_the_protection_of_its_judge():
    spec = {
        "start": {"model": "a/b", "args": {"allowed_origins": '["https://x"]', "max_model_len": 64}}
    }
    parsed = judge_arguments(judge_settings.build_judges({"j": spec}, 60.0)["j"])
    assert isinstance(parsed, argparse.Namespace) and parsed.allowed_origins == ["https://x"]
    assert parsed.middleware == ["kit.rollout.vllm_routes.JudgeRoutes"]
