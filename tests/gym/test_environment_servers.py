"""Environment Servers of Gym 0.7 and agents: requests, episode indices, failures."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from gym_client import EpisodeIndex, Gym, GymError
from inference import record_failure
from kit.data import rollout_files
from kit.data.episode import Episode
from tests.helpers.fault_server import ENVIRONMENT_SCHEMA
from tests.helpers.http import MESSAGE, ScriptedServer
from tests.helpers.rollouts import FixedRewards, RecordingClient, run_rollout

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
    schema = {"$ref": "#/components/schemas/Request"}
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    components = {"schemas": {"Request": ENVIRONMENT_SCHEMA}}
    server.openapi = {"paths": {"/run": {"post": operation}}, "components": components}
    return server


def run_row(server, row=ROW, kind="environment", **settings):
    """Call /run for the second member of group 41, and return the result."""

    async def run():
        async with Gym({"e": server.url}, **settings) as gym:
            assert await gym.kind("e") == kind
            return await gym.run("e", row, 5.0, index=EpisodeIndex(41, 1))

    return asyncio.run(run())


def run_and_catch(answer, **settings) -> GymError:
    """Call /run of a server with this answer, and return the error that it causes."""
    with pytest.raises(GymError) as caught:
        run_row(make_environment_server(answer), **settings)
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


@pytest.mark.parametrize("key", ["task_id", "problem_id", "instance_id"])
def test_a_task_keeps_the_id_of_its_row(key):
    server = make_environment_server(SUCCESS)
    run_row(server, {**ROW, key: 5})
    task = server.log[0][1]["task"]
    assert task["task_id"]["task_id"] == "5"
    assert task["task_input"][key] == 5


def test_a_materialized_task_keeps_its_id():
    server = make_environment_server(SUCCESS)
    task_id = {"taskset": "env:math", "task_id": "12"}
    run_row(server, {**ROW, "_ng_task_id": task_id})
    task = server.log[0][1]["task"]
    assert task["task_id"] == task_id
    assert "_ng_task_id" not in task["task_input"]


def test_an_agent_gets_the_row_with_the_index_of_the_episode():
    server = ScriptedServer(run=[(200, RESULT)])
    run_row(server, kind="agent")
    assert server.log[0][1] == {**ROW, "_ng_task_index": 41, "_ng_rollout_index": 1}


def test_the_members_of_a_group_share_a_task_index_and_have_rollout_indices_from_0():
    gyms = [FixedRewards(*[1.0] * 6) for _ in range(2)]
    for gym in gyms:
        run_rollout(RecordingClient(), gym, count=2, n=3)
    first = gyms[0].numbers[0].task
    second = gyms[0].numbers[3].task
    first_group = [(first, 0), (first, 1), (first, 2)]
    second_group = [(second, 0), (second, 1), (second, 2)]
    assert gyms[0].numbers == first_group + second_group
    tasks = {numbers.task for numbers in gyms[0].numbers + gyms[1].numbers}
    assert len(tasks) == 4  # a server may remember the groups of an earlier rollout


def test_an_agent_is_called_with_the_index_of_the_episode():
    gym = FixedRewards(kind="environment")
    run_rollout(RecordingClient(), gym, n=2)
    indices = [arguments[4] for arguments in gym.runs]
    assert [index.rollout for index in indices] == [0, 1]
    assert len({index.task for index in indices}) == 1


# --- failures ------------------------------------------------------------------------------------


def test_a_failure_is_an_error_with_the_stage_and_the_fields_of_the_server():
    error = run_and_catch(FAILED)
    assert error.reason == "environment_agent"
    assert "at its stage 'agent': the agent crashed" in str(error)
    message = {key: value for key, value in MESSAGE.items() if "token" not in key}
    message.pop("generation_log_probs")
    partial_response = {"id": "resp_1", "output": [message]}
    assert error.details == {**FAILURE, "partial_response": partial_response}


@pytest.mark.parametrize("stage", [None, "somewhere", "agent\n"])
def test_failures_at_an_unknown_stage_have_the_same_status(stage):
    failure = {"failure_reason": "x", "terminal": True, "stage": stage}
    error = run_and_catch({"result": None, "failure": failure})
    assert error.reason == "environment_failed"


def test_a_failure_with_a_result_is_a_failure():
    assert run_and_catch({**SUCCESS, "failure": FAILURE}).reason == "environment_agent"


@pytest.mark.parametrize(
    "changes",
    [
        {"failure": {}},
        {"failure": "x"},
        {"failure": {**FAILURE, "terminal": None}},
        {"failure": {**FAILURE, "failure_reason": None}},
        {"failure": {**FAILURE, "stage": 1}},
        {"result": None},
        {"result": []},
        {"result": {"reward": 1.0}},
        {"result": {**RESULT, "reward": None}},
    ],
    ids="-".join,
)
def test_an_answer_without_a_valid_result_and_failure_is_no_reward(changes):
    assert run_and_catch({**SUCCESS, **changes}).reason == "bad_answer"


def test_a_masked_result_of_an_environment_server_is_no_reward():
    assert run_and_catch({**SUCCESS, "result": {**RESULT, "mask_sample": True}}).reason == "masked"


def test_only_a_failure_that_is_not_terminal_is_retried_with_the_next_attempt_number():
    failed = {**FAILED, "failure": {**FAILURE, "terminal": False}}
    server = make_environment_server(failed, failed, SUCCESS)
    assert run_row(server).result.reward == 0.5
    ids = [body["episode_id"] for _, body, _ in server.log]
    assert [each["attempt"] for each in ids] == [0, 1, 2]
    assert len({each["rollout_id"] for each in ids}) == 1
    for failure, calls in ((failed, 2), (FAILED, 1)):
        server = make_environment_server(failure)
        with pytest.raises(GymError, match="the agent crashed"):
            run_row(server, attempts=2)
        assert len(server.log) == calls


def test_a_failure_is_in_the_record_of_its_episode_and_survives_a_replay():
    episode = Episode("rows:1", "4/0", "e", [], row=ROW)
    record_failure(episode, run_and_catch(FAILED))
    file = io.BytesIO()
    rollout_files.write_record(file, rollout_files.to_record(episode, 0, 0))
    record = json.loads(file.getvalue())
    assert record["_episode"]["status"] == "environment_agent"
    assert record["_episode"]["reward"] is None
    assert record["_episode"]["failure"] == episode.failure != {}
    assert rollout_files.from_record(record, ROW).failure == episode.failure


def test_a_long_partial_response_is_cut():
    item = {**MESSAGE, "content": [{"type": "output_text", "text": "x" * 200_000}]}
    failure = {**FAILURE, "partial_response": {"output": [item]}}
    error = run_and_catch({**FAILED, "failure": failure})
    assert len(json.dumps(error.details)) < 70_000
    assert error.details["failure_reason"] == "the agent crashed"


def test_the_reason_of_an_agents_failure_is_in_the_error():
    """The fields are those of single_agent_turn_legacy."""
    answer = {
        "_ng_failure_class": "environment_server_failed",
        "_ng_failure_terminal": True,
        "_ng_failure_message": "no model",
        "_ng_failure_stage": "agent",
        "agent_ref": {"name": "a"},
    }
    with pytest.raises(GymError, match="by _ng_failure_class: no model") as caught:
        run_row(ScriptedServer(run=[(200, answer)]), kind="agent")
    assert caught.value.reason == "masked"
    fields = {k: v for k, v in answer.items() if k.startswith("_ng_failure")}
    assert caught.value.details == fields
