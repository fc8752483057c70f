"""kit/engine/vllm_routes.py: only some routes of vLLM's HTTP servers answer.

A route of a judge's server may need an API key. No model is loaded.
"""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from kit.recipe.keys import select_nested
from kit.recipe.load import read_source

KEY = "judge-key"
ORIGIN = {"Origin": "https://example.com"}


def list_routes(app):
    """Return the (method, path) of every route of an app."""
    routes = set()
    for route in app.routes:
        path = route.path.replace("{", "").replace("}", "")
        routes |= {(method, path) for method in getattr(route, "methods", None) or ["GET"]}
    return routes


def build_server_app(arguments, supported=("generate",)):
    """Build vLLM's app for these parsed arguments, as its server does."""
    from vllm.entrypoints.openai.api_server import build_app

    app = build_app(arguments, supported_tasks=supported, model_config=None)

    async def healthy(_request):
        return PlainTextResponse("healthy")

    # vLLM's route would call an engine, and this app has none
    app.router.routes.insert(0, Route("/health", healthy))
    return app


def parse_policy_arguments():
    """Parse the policy server's arguments, which verl makes from rollout.engine_kwargs.vllm."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    source = read_source([], [])
    settings = select_nested(source.resolved, "actor_rollout_ref.rollout.engine_kwargs.vllm")
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    return parser.parse_args(["serve", "folder", *build_cli_args_from_config(settings)])


def parse_judge_arguments(judge):
    """Parse the arguments of a judge's server, as its process does."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from extras.judges import judge_processes

    command = judge_processes.vllm_process_spec(judge).command
    return make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])


@pytest.fixture(scope="module")
def policy():
    return build_server_app(parse_policy_arguments())


@pytest.fixture(scope="module")
def judge():
    from extras.judges import judge_processes, judge_settings

    settings = {"j": {"start": {"model": "a/b"}}}
    judge = judge_settings.build_judges(settings, 60.0, cpu_dtype="float32")["j"]
    judge.key = KEY
    environment = judge_processes.vllm_process_spec(judge).env
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", environment["VLLM_API_KEY"])
        return build_server_app(parse_judge_arguments(judge))


def call_routes(app, **headers):
    """Call every route of an app, and some that it does not have: {(method, path): status}."""
    others = {
        ("GET", "/"),
        ("POST", "/no/such"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/docs"),
    }
    http = TestClient(app, raise_server_exceptions=False)
    return {
        (method, path): http.request(method, path, headers=headers, json={}).status_code
        for method, path in list_routes(app) | others
    }


def select_routes(results, status):
    """Return the routes that answered with this status."""
    return {route for route, answer in results.items() if answer == status}


def test_the_policys_server_answers_health_and_metrics_only(policy):
    results = call_routes(policy, **ORIGIN)
    assert len(results) > 25
    answered = results.keys() - select_routes(results, 403)
    assert answered == {("GET", "/health"), ("GET", "/metrics")}
    assert results["GET", "/health"] == results["GET", "/metrics"] == 200
    assert results["POST", "/invocations"] == results["POST", "/v1/completions"] == 403


@pytest.mark.parametrize("path", ["/metrics/%2e%2e/v1/completions", "//v1/completions"])
def test_no_variant_of_an_allowed_path_reaches_another_route(policy, path):
    http = TestClient(policy)
    assert http.post(path, json={}).status_code == http.get(path).status_code == 403


@pytest.mark.parametrize("server", ["policy", "judge"])
def test_no_web_page_may_call_a_server(server, request):
    http = TestClient(request.getfixturevalue(server))
    for path in ("/health", "/metrics", "/v1/completions"):
        assert "access-control-allow-origin" not in http.get(path, headers=ORIGIN).headers
        preflight = {**ORIGIN, "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in http.options(path, headers=preflight).headers


def test_no_websocket_of_the_policys_server_opens(policy):
    http = TestClient(policy)
    with pytest.raises(WebSocketDisconnect) as caught, http.websocket_connect("/v1/realtime"):
        pass
    assert caught.value.code == 1008


def test_a_judges_server_answers_completions_only_with_its_key(judge):
    allowed = {("GET", "/openapi.json"), ("GET", "/health"), ("GET", "/metrics")}
    protected = {("POST", "/v1/chat/completions"), ("POST", "/v1/responses")}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        results = call_routes(judge, **headers)
        assert select_routes(results, 200) == allowed
        assert select_routes(results, 401) == protected
        assert set(results.values()) == {200, 401, 403}
    results = call_routes(judge, Authorization=f"Bearer {KEY}")
    assert select_routes(results, 403) == results.keys() - allowed - protected
    # The key is accepted. The call then fails, since there is no engine.
    assert not {results[route] for route in protected} & {401, 403, 404}
    assert results["POST", "/invocations"] == 403
