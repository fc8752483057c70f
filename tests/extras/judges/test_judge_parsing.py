"""Failed judge calls are detected inside the verifier, and the affected reward is removed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from types import SimpleNamespace

import pytest

from kit.extras.judges import judge_parsing
from kit.gym import server_process
from tests.helpers.http import completion
from tests.helpers.recipes import GYM_PYTHON, ROOT

JUDGE_PARSING = ROOT / "kit" / "extras" / "judges" / "judge_parsing.py"
SITE_PACKAGES = next(ROOT.glob(".venv-gym/lib/python3*/site-packages"))
TEXT_WITHOUT_VERDICT = "Lorem ipsum dolor sit amet."
# {server: a judge's reply with a verdict, in the form that the server's app.py parses}
VERDICTS = {
    "aalcr": "INCORRECT",
    "abstention": "The grade is\nC",
    "arena": "Both are bad: [[BB]]",
    "arena_judge": "Mine: [[B>>A]]",
    "browsecomp_advanced_harness": "reasoning: ...\ncorrect: no",
    "deepsearchqa": '{"Answer Correctness": {"Correctness Details": {"Paris": true}}}',
    "equivalence_llm_judge": "[[A!=B]]",
    "false_statement_judge": "It repairs it. <points>1</points>",
    "finance_sec_search": "[[1]]",
    "frontierscience_judge": "Judgement: NO",
    "gdpval": '{"criteria_scores": [{"score": 1}], "overall_score": 0.5}',
    "imo_proofbench_judge": "**Judgement**: No",
    "inverse_if": '```json\n{"result": "FAIL", "explanation": "no"}\n```',
    "jailbreak_detection": "[[UNSAFE]]",
    "labbench2_vlm": "[[A=B]]",
    "longmemeval": "Yes",
    "math_with_autograder": "\\boxed{Incorrect}",
    "math_with_judge": "They differ: [[A!=B]]",
    "multichallenge": "On the whole, no: [[NO]]",
    "omniscience": "D",
    "over_refusal_detection": "[[REFUSED]]",
    "physics_judge": "[Incorrect]",
    "polymath": "[[A=B]]",
    "proof_judge": "Score: \\boxed{0.5}",
    "proof_verification": "\\boxed{0}",
    "simpleqa": "A: CORRECT",
    "tavily_search": "correct: yes",
    "terminus_judge": "Final verdict: [[A=B]]",
    "text_to_sql": "[[A!=B]]",
    "ugphysics_judge": "## Equivalence Judgement\nFALSE",
    "widesearch": '```json\n{"idx_0": 1}\n```',
    "verifif": '{"verdict": "NO", "reasoning": "It does not."}',
}


# --- replies of judges ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, completion("[[A=B]]"), ""),
        (
            200,
            {"choices": [{"message": {"content": None}}, {"message": {"content": "[[A=B]]"}}]},
            "",
        ),
        (200, completion("<think>[[A=B]]</think>"), "its reply is empty"),
        (200, completion("<thinking>x</thinking> no"), "no verdict in its reply: 'no'"),
        (200, completion(""), "its reply is empty"),
        (200, completion(None), "its reply is empty"),
        (200, {"choices": []}, "its reply is empty"),
        (200, {"output": []}, "its reply is empty"),
        (200, {"error": "x"}, "its reply is not a completion"),
        (200, [], "its reply is not a completion"),
        (200, "text", "its reply is not a completion"),
        (201, completion("[[A=B]]"), "HTTP 201"),
        (204, completion("[[A=B]]"), "HTTP 204"),
        (400, completion("[[A=B]]"), "HTTP 400"),
        (500, completion("[[A=B]]"), "HTTP 500"),
    ],
    ids=str,
)
def test_only_a_text_with_a_verdict_is_a_valid_reply(status, body, problem):
    pattern = judge_parsing.VERDICT_PATTERNS["math_with_judge"]
    reason = judge_parsing.find_reply_problem(status, json.dumps(body).encode(), pattern)
    assert problem in reason
    assert bool(problem) == bool(reason)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"code": "judge_failed", "message": 'it\'s "down"'}}, 'it\'s "down"'),
        ({"error": {"code": 401, "message": "judge_failed"}}, ""),
        ({"error": {"message": "wrong or missing key"}}, ""),
        ({"error": "judge_failed"}, ""),
        ("judge_failed", ""),
        (["judge_failed"], ""),
        (None, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["from the proxy", "through Gym"])
def test_an_error_of_the_proxy_is_identified_by_its_code(body, message, is_wrapped):
    reply = json.dumps(body).encode()
    if is_wrapped:
        text = f"Hit an exception in VLLMModel___j calling an inner server: {reply!r}"
        reply = json.dumps(text).encode()
    assert judge_parsing.read_proxy_error(reply) == message


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"<html>",
        b"\xff",
        b'"Hit an exception calling an inner server: "',
        b'"Hit an exception calling an inner server: b\'{"',
        b'"Hit an exception calling an inner server: open(1)"',
        b'"Hit an exception calling an inner server: 7"',
    ],
    ids=str,
)
def test_other_replies_are_not_errors_of_the_proxy(reply):
    assert judge_parsing.read_proxy_error(reply) == ""


def test_every_verdict_pattern_belongs_to_an_existing_server():
    patterns = judge_parsing.VERDICT_PATTERNS
    assert VERDICTS.keys() == {name for name, pattern in patterns.items() if pattern}
    for name in patterns:
        assert (SITE_PACKAGES / "resources_servers" / name / "app.py").is_file(), name


@pytest.mark.parametrize("name", VERDICTS)
def test_a_text_without_a_verdict_does_not_match_the_servers_pattern(name):
    pattern = judge_parsing.VERDICT_PATTERNS[name]

    def find_problem(body):
        return judge_parsing.find_reply_problem(200, json.dumps(body).encode(), pattern)

    assert find_problem(completion(VERDICTS[name])) == ""
    for text in (
        TEXT_WITHOUT_VERDICT,
        "As an AI I Cannot Be Asked.",
        f"<think>{VERDICTS[name]}</think> {TEXT_WITHOUT_VERDICT}",
    ):
        assert "no verdict" in find_problem(completion(text)), text
    content = [{"type": "output_text", "text": VERDICTS[name]}]
    assert find_problem({"output": [{"type": "message", "content": content}]}) == ""


# --- settings of servers -------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["should_use_judge", "use_judge", "enable_llm_judge"])
def test_a_server_whose_settings_switch_its_judge_off_has_no_judge(key):
    settings = {"judge_model_server": {"type": "responses_api_models", "name": "j"}}
    assert server_process.find_judges({**settings, key: False}) == {}
    for value in (True, None, 0, "no"):  # Gym also switches a judge off only for `false`
        assert server_process.find_judges({**settings, key: value}) == {"judge_model_server": "j"}


def test_the_judges_of_a_server_are_the_models_in_its_settings():
    settings = {
        "one": {"type": "responses_api_models", "name": "j"},
        "two": {"type": "responses_api_models", "name": "k"},
        "other": {"type": "resources_servers", "name": "x"},
        "unnamed": {"type": "responses_api_models"},
        "judge_server_name": "v",
    }
    judges = {"one": "j", "two": "k", "judge_server_name": "v"}
    assert server_process.find_judges(settings) == judges


# --- responses of verifiers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        # aalcr, gdpval
        ({"invalid_judge_response": True}, "invalid_judge_response: True"),
        # arena_judge
        ({"invalid_gen_base": True}, "invalid_gen_base"),
        # imo_proofbench_judge
        ({"no_judge_score": 1.0}, "no_judge_score"),
        # frontierscience_judge
        ({"verdict": None, "judge_output": "hm"}, "verdict: None"),
        ({"judge_evaluation": {"verdict_label": None}}, "judge_evaluation: None"),
        ({"judge_evaluations": [{"verdict_label": "judge_parsing_error"}]}, "judge_parsing_error"),
        # finance_agent_v2, agentif, aegis_v4_safety
        ({"judge_error": "1/9 criteria unresolved"}, "judge_error: 1/9"),
        ({"n_error": 2}, "n_error: 2"),
        (
            {"resolved": False, "judge_evaluation": {"raw_output": "hm"}, "failure_reason": "why"},
            "resolved: False, why",
        ),
        # without a text there is nothing to judge
        ({"resolved": False, "judge_evaluation": None, "failure_reason": "no text"}, ""),
        # with a verdict
        ({"resolved": True, "judge_evaluation": {"raw_output": "safe"}}, ""),
        ({"judge_error": None, "n_error": 0}, ""),
        # jailbreak_detection
        ({"verifier_labels": {"safety_check": None}}, "safety_check: None"),
        (
            {"validation_results": [{"message": "Error parsing LLM Judge response: x"}]},
            "Error parsing",
        ),
        ({"invalid_judge_response": False, "no_judge_score": 0.0, "verdict": "NO"}, ""),
        (
            {
                "judge_evaluation": None,
                "judge_evaluations": None,
                "validation_results": None,
            },
            "",
        ),
    ],
    ids=str,
)
def test_a_verifier_that_reports_a_missing_verdict_fails(response, failure):
    reason = judge_parsing.judge_failure({"reward": 0.0, **response})
    assert failure in reason
    assert bool(failure) == bool(reason)


@pytest.mark.parametrize(
    "response",
    [
        {"reward": 1.0, "judge_evaluations": [{"verdict_label": "[[A=B]]"}, {"response": {}}]},
        [],
    ],
    ids=str,
)
def test_a_response_with_a_verdict_reports_no_failure(response):
    assert judge_parsing.judge_failure(response) == ""


# --- requests to a verifier ----------------------------------------------------------------------


async def call_app(app, scope, models):
    """Send one request to `app` behind the middleware, and return the ASGI messages."""
    messages = []

    async def send(message):
        messages.append(message)

    await judge_parsing.JudgeFailureMiddleware(app, models)(scope, None, send)
    return messages


async def app_with_judge(scope, receive, send):
    """A verifier that calls its judge. The query string sets the outcome of the call."""
    outcome = scope["query_string"].decode()
    failure = {"bad": "no", "good": "", "again": "no", "other": "no"}[outcome]

    async def call_judge():
        await asyncio.sleep(0.01)
        judge_parsing.record_call({"messages": [1], "temperature": 0}, failure)

    await asyncio.gather(asyncio.create_task(call_judge()))  # in another task, as verifiers do
    if outcome == "again":  # the same input, with a valid reply
        judge_parsing.record_call({"messages": [1], "temperature": 0.5}, "")
    if outcome == "other":  # other inputs, with valid replies
        judge_parsing.record_call({"messages": [2], "temperature": 0}, "")
        judge_parsing.record_call({"input": [1]}, "")
    headers = [(b"set-cookie", b"a=b")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"reward": 0.0}).encode()})


def test_a_failed_call_affects_only_the_request_that_made_it():
    """The requests are concurrent. One call fails, one succeeds, one succeeds when repeated."""

    async def call(outcome, path="/verify", method="POST"):
        scope = {"type": "http", "method": method, "path": path, "query_string": outcome.encode()}
        start, body = await call_app(app_with_judge, scope, "j")
        headers = dict(start["headers"])
        assert headers[b"set-cookie"] == b"a=b"
        assert int(headers.get(b"content-length", len(body["body"]))) == len(body["body"])
        return start["status"], json.loads(body["body"])

    async def call_all():
        responses = await asyncio.gather(
            call("bad"), call("good"), call("again"), call("bad", "/look")
        )
        assert await call("bad", "/step") == responses[0]
        assert await call("other") == responses[0]
        assert await call("bad", method="GET") == responses[1]
        return responses

    bad, good, again, tool = asyncio.run(call_all())
    failure = {
        "reward": None,
        "mask_sample": True,
        "failure_kind": "judge_failed",
        "failure_reason": "no",
        "_ng_failure_class": "judge_failed",
        "_ng_failure_judge_error": "no",
    }
    assert bad == (200, failure)
    assert good == again == (200, {"reward": 0.0})
    assert tool[0] == 429


@pytest.mark.parametrize("path", ["/verify", "/step", "/look"])
def test_a_reward_that_its_verifier_reports_as_invalid_is_removed(path):
    response = {"reward": 0.0, "invalid_judge_response": True}
    text = json.dumps(response)

    async def app(scope, receive, send):
        request = SimpleNamespace(model_dump=lambda **_: {"input": "x"})
        judge_parsing.record_call(request, "no")
        judge_parsing.record_call({"input": "x"}, "")  # the same input, with a valid reply
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (text[:5], text[5:]):
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})

    scope = {"type": "http", "method": "POST", "path": path}
    messages = asyncio.run(call_app(app, scope, "judge_model"))
    body = json.loads(b"".join(message.get("body", b"") for message in messages))
    if path == "/look":
        assert body == response
        assert messages[0]["status"] == 200
    else:
        assert body["reward"] is None
        assert body["_ng_failure_class"] == "judge_failed"
        reason = "the verifier reports no verdict (invalid_judge_response: True)"
        assert body["_ng_failure_judge_error"] == f"model judge_model: {reason}"
    judge_parsing.record_call({"input": "x"}, "outside of a request, where it has no effect")


@pytest.mark.parametrize(
    "mark",
    [
        {"mask_sample": True},
        {"instance_config": {"mask_sample": True}},
        {"_ng_failure_class": "judge_failed"},
    ],
    ids=str,
)
def test_a_response_that_its_verifier_marks_as_invalid_is_not_changed(mark):
    response = {"reward": 0.0, "no_judge_score": 1.0, "failure_reason": "the verifier's", **mark}

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(response).encode()})

    scope = {"type": "http", "method": "POST", "path": "/verify"}
    _, body = asyncio.run(call_app(app, scope, "j"))
    assert json.loads(body["body"]) == response


@pytest.mark.parametrize(("path", "reward"), [("/verify", None), ("/step", None), ("/look", 1.0)])
def test_a_text_without_a_verdict_fails_a_reward_but_not_a_tool(path, reward):
    """finance_sec_search calls one model both for a tool's output and for a verdict."""
    reply = json.dumps(completion("A summary.")).encode()

    async def app(scope, receive, send):
        async def read():
            return reply

        async def call():
            return SimpleNamespace(status=200, read=read)

        await judge_parsing._inspect_call("j", {"input": "x"}, call(), "read", r"\[\[[012]\]\]")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"reward": 1.0}'})

    scope = {"type": "http", "method": "POST", "path": path}
    start, body = asyncio.run(call_app(app, scope, "j"))
    assert (start["status"], json.loads(body["body"])["reward"]) == (200, reward)


# --- clients -------------------------------------------------------------------------------------

# A script that replaces the HTTP clients of Gym by doubles, and then calls judges through them.
WATCH_CALLS = """
import asyncio, importlib.util, json, sys
import httpx
from nemo_gym import openai_utils, server_utils

spec = importlib.util.spec_from_file_location("judge_parsing", sys.argv[1])
judge_parsing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge_parsing)
BAD = b'{"choices": [{"message": {"content": "nonsense"}}]}'


class Response:
    status = 200

    async def read(self):
        return BAD


sent = []


async def request(self, server_name, url_path, method, **rest):
    sent.append(rest)
    if server_name == "slow":
        await asyncio.sleep(60)
    return Response()


async def request_url(method, url, _internal=False, **rest):
    return Response()


async def send(self, request, **rest):
    return httpx.Response(200, content=BAD, request=request)


server_utils.ServerClient.request = request
openai_utils.request = request_url
httpx.AsyncClient.send = send
apps = []
server_utils.uvicorn.run = lambda app, **settings: apps.append(app)
judge_parsing.watch_judge_calls(["judge", "slow"], ["127.0.0.1:7"], "VERDICT")


class Client:
    global_config_dict = {name: {"responses_api_models": {}} for name in ("judge", "slow")}
    global_config_dict["other"] = {"resources_servers": {}}


async def call_by_name(name):
    client = server_utils.ServerClient.request
    body = {"input": name, "top_p": None}
    await asyncio.wait_for(client(Client(), name, "/v1/responses", "POST", json=body), 1.0)


async def call_by_url():
    await openai_utils.request("POST", "http://127.0.0.1:7/v1/responses", json={"input": "x"})


async def call_by_httpx(port):
    async with httpx.AsyncClient() as http:
        await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []})


async def find_failures(call):
    failures = {}
    judge_parsing._failed_calls.set(failures)
    try:
        await call
    except TimeoutError:
        pass
    return list(failures.values())


async def main():
    calls = {name: call_by_name(name) for name in ("judge", "other", "slow")}
    calls |= {"url": call_by_url(), "httpx": call_by_httpx(7), "elsewhere": call_by_httpx(8)}
    return {name: await find_failures(call) for name, call in calls.items()}


failures = asyncio.run(main())
if "workers" in sys.argv:
    server_utils.uvicorn.run("module:app", workers=2)
else:
    server_utils.uvicorn.run(print)
print(json.dumps({"failures": failures, "sent": sent, "wrapped": apps[0] is not print}))
"""


def test_calls_of_a_judge_are_inspected_in_every_client_and_other_calls_are_not(tmp_path):
    """The script runs in Gym's interpreter. Each reply has no verdict."""
    (tmp_path / "watch_calls.py").write_text(WATCH_CALLS)
    command = [GYM_PYTHON, tmp_path / "watch_calls.py", JUDGE_PARSING]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    output = json.loads(process.stdout.splitlines()[-1])
    problem = "no verdict in its reply: 'nonsense'"
    failures = output["failures"]
    assert failures["judge"] == [f"model judge: {problem}"]
    assert failures["url"] == [f"model http://127.0.0.1:7/v1/responses: {problem}"]
    assert failures["httpx"] == [f"model http://127.0.0.1:7/v1/chat/completions: {problem}"]
    assert failures["other"] == failures["elsewhere"] == []
    assert len(failures["slow"]) == 1
    assert failures["slow"][0].startswith("model slow: CancelledError")
    bodies = {rest["json"]["input"]: rest["json"] for rest in output["sent"]}
    assert bodies["judge"] == {"input": "judge"}  # the null is removed
    assert bodies["other"] == {"input": "other", "top_p": None}
    assert output["wrapped"]
    process = subprocess.run([*command, "workers"], capture_output=True, text=True, timeout=120)
    assert process.returncode == 1
    assert "judge calls can be checked in one process only" in process.stderr
