"""Agents and Environment Servers of Gym 0.7, which run an episode: requests, results, failures."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest

from gym_client import EpisodeIndex, Gym, GymError
from inference import record_failure
from kit.data import rollout_files
from kit.data.episode import Episode
from tests.helpers.fault_server import ENVIRONMENT
from tests.helpers.http import MESSAGE, ScriptedServer, after, catch_reason

PARAMS = {"input": "x"}
ROW = {
    "responses_create_params": PARAMS,
    "answer": "7",
    "agent_ref": {"name": "a"},
    "task_source": "s",
    "skills_ref": {},
    "_ng_task_index": 3,
}
RESULT = {"reward": 0.5, "response": {"output": [MESSAGE]}, "extracted": 7, "mask_sample": False}
SUCCESS = {"episode_id": {}, "task_id": {}, "result": RESULT, "failure": None}
FAILURE = {
    "failure_reason": "the agent crashed",
    "terminal": True,
    "stage": "agent",
    "partial_response": {"id": "resp_1", "output": [MESSAGE]},
}
FAILED = {**SUCCESS, "result": None, "failure": FAILURE}


def make_environment_server(*answers):
    """Make an Environment Server with these answers of /run."""
    server = ScriptedServer(run=[(200, answer) for answer in answers])
    server.openapi = ENVIRONMENT
    return server


def run_row(server, row=ROW, limit_s=5.0, on_start=None, vocabulary=None, **settings):
    """Call /run for the second member of group 41, and return the result.

    limit_s: of /run. on_start: (seconds, function that is then called with the Gym).
    """

    async def run():
        async with Gym({"e": server.url}, **settings) as gym:
            if on_start:
                asyncio.get_running_loop().call_later(on_start[0], on_start[1], gym)
            index = EpisodeIndex(41, 1)
            return await gym.kind("e"), await gym.run("e", row, limit_s, vocabulary, index)

    kind, result = asyncio.run(run())
    assert kind == ("environment" if server.openapi is ENVIRONMENT else "agent")
    return result


def run_and_catch(server, **settings) -> GymError:
    """Call /run of a server, and return the error that it causes."""
    with pytest.raises(GymError) as caught:
        run_row(server, **settings)
    return caught.value


# --- requests ------------------------------------------------------------------------------------


def test_an_environment_server_gets_the_task_without_routing_and_returns_the_result():
    server = make_environment_server(SUCCESS)
    result, response = run_row(server)
    assert (result.reward, result.details) == (0.5, {"extracted": 7, "mask_sample": False})
    assert response == {"output": [MESSAGE]}
    ((_, body, _),) = server.log
    assert body.keys() == {"episode_id", "task"}
    assert body["task"] == {
        "task_id": {"taskset": "e", "task_id": "41"},
        "task_input": {"responses_create_params": PARAMS, "answer": "7"},
    }
    assert body["episode_id"]["attempt"] == 0
    assert body["episode_id"]["rollout_id"].endswith("-41-1")


def test_a_task_keeps_the_id_of_its_row():
    server = make_environment_server(SUCCESS)
    run_row(server, {**ROW, "problem_id": 5})
    task = server.log[0][1]["task"]
    assert (task["task_id"]["task_id"], task["task_input"]["problem_id"]) == ("5", 5)
    task_id = {"taskset": "env:math", "task_id": "12"}  # of a materialized task
    run_row(server, {**ROW, "_ng_task_id": task_id})
    task = server.log[1][1]["task"]
    assert task["task_id"] == task_id
    assert "_ng_task_id" not in task["task_input"]


def test_an_agent_gets_the_row_with_the_index_of_the_episode():
    server = ScriptedServer(run=[(200, RESULT)])
    run_row(server)
    assert server.log[0][1] == {**ROW, "_ng_task_index": 41, "_ng_rollout_index": 1}


# --- results -------------------------------------------------------------------------------------


def test_an_agents_run_is_retried_only_while_its_server_is_busy():
    server = ScriptedServer(run=[(503, ""), (200, {**RESULT, **ROW})])
    result, response = run_row(server)
    assert (result.reward, result.details) == (0.5, {"extracted": 7, "mask_sample": False})
    assert response == {"output": [MESSAGE]}
    for answer, reason in [((500, "boom"), "http_500"), ((200, {"reward": 1.0}), "bad_answer")]:
        server = ScriptedServer(run=[answer])
        assert run_and_catch(server).reason == reason
        assert server.paths() == ["/run"]


def test_an_agents_run_has_a_separate_timeout():
    server = ScriptedServer(run=[after(1.0, (200, RESULT))])
    began = time.monotonic()
    assert run_and_catch(server, limit_s=0.3).reason == "timeout"
    assert time.monotonic() - began < 0.9
    result, _ = run_row(server, timeout_s=0.5)  # of the other calls
    assert result.reward == 0.5
    assert result.latency_s > 0.9


def test_an_agents_run_does_not_count_if_its_server_restarted_during_it():
    server = ScriptedServer(run=[after(0.6, (200, RESULT))])
    error = run_and_catch(server, on_start=(0.2, lambda gym: gym.mark_restarted("e")), attempts=1)
    assert (error.reason, error.session_lost) == ("session_lost", True)
    result, _ = run_row(server, on_start=(0.2, lambda gym: gym.mark_restarted("another")))
    assert result.reward == 0.5


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "o"}


@pytest.mark.parametrize(
    "output",
    [
        None,
        ["x"],
        [{**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]}],
        [{**CALL, "arguments": {}}],
        [{**OUTPUT, "output": ["x"]}],
        [{**MESSAGE, "prompt_token_ids": [True]}],
        [{**MESSAGE, "generation_token_ids": [2**31]}],
    ],
    ids=lambda output: str(output)[-80:],
)
def test_the_items_of_an_agent_are_checked(output):
    def run(items, **limits):
        answer = {"reward": 1.0, "response": {"output": items}}
        return run_row(ScriptedServer(run=[(200, answer)]), **limits)

    user = {"type": "message", "role": "user", "content": "x"}
    parts = [{"type": "input_text", "text": "18 degrees"}, {"type": "input_image", "detail": "low"}]
    good = [{"type": "reasoning", "summary": []}, MESSAGE, CALL, {**OUTPUT, "output": parts}, user]
    assert run(good, vocabulary=4)[1]["output"] == good
    assert catch_reason(run, good, vocabulary=3) == "bad_answer"
    assert catch_reason(run, output) == "bad_answer"


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failure": {**FAILURE, "terminal": None}}, "bad_answer"),
        ({"failure": FAILURE}, "environment_agent"),  # with a result
        ({"result": None, "failure": {**FAILURE, "stage": "agent\n"}}, "environment_failed"),
        ({"result": None}, "bad_answer"),
        ({"result": {**RESULT, "reward": None}}, "bad_answer"),
        ({"result": {**RESULT, "mask_sample": True}}, "masked"),
    ],
)
def test_an_answer_without_a_valid_result_or_with_a_failure_is_no_reward(changes, reason):
    server = make_environment_server({**SUCCESS, **changes})
    assert catch_reason(run_row, server) == reason


def test_only_a_failure_that_is_not_terminal_is_retried_with_the_next_attempt_number():
    failed = {**FAILED, "failure": {**FAILURE, "terminal": False}}
    server = make_environment_server(failed, failed, SUCCESS)
    assert run_row(server).result.reward == 0.5
    ids = [body["episode_id"] for _, body, _ in server.log]
    assert [each["attempt"] for each in ids] == [0, 1, 2]
    assert len({each["rollout_id"] for each in ids}) == 1
    for failure, calls in ((failed, 2), (FAILED, 1)):
        server = make_environment_server(failure)
        assert "the agent crashed" in str(run_and_catch(server, attempts=2))
        assert len(server.log) == calls


def test_a_failure_is_in_the_record_of_its_episode_and_survives_a_replay():
    episode = Episode("rows:1", "4/0", "e", [], row=ROW)
    record_failure(episode, run_and_catch(make_environment_server(FAILED)))
    file = io.BytesIO()
    rollout_files.write_record(file, rollout_files.to_record(episode, 0, 0))
    record = json.loads(file.getvalue())
    assert record["_episode"]["status"] == "environment_agent"
    assert record["_episode"]["reward"] is None
    message = {key: value for key, value in MESSAGE.items() if "token" not in key}
    message.pop("generation_log_probs")
    partial_response = {"id": "resp_1", "output": [message]}
    assert record["_episode"]["failure"] == {**FAILURE, "partial_response": partial_response}
    assert rollout_files.from_record(record, ROW).failure == episode.failure
