"""Tests of rollouts with doubles that record each request: episodes, failures and baselines.

test_turns.py tests the turns of an episode, and test_inference_servers.py tests the vLLM servers.
test_stack.py and test_steps.py test the same code with vLLM and Gym.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import ray

import env
import gym_client
import inference
from gym_client import GymError
from kit.data.episode import append_tokens
from kit.errors import RunError
from kit.rollout.sampling import sample
from tests.helpers.rollouts import STOP, FixedRewards, RecordingClient, run_rollout, verify_session


def test_each_episode_has_its_task_its_group_its_request_and_its_result():
    client = RecordingClient()
    gym = FixedRewards(0.0, 0.25, 0.5, 0.75)
    done = []
    episodes = run_rollout(
        client, gym, count=2, n=2, on_done=lambda *both: done.append(both), policy_version=3
    )
    assert [e.group_id for e in episodes] == ["4/0", "4/0", "4/1", "4/1"]
    assert [(e.row_id, e.server, e.row) for e in episodes[1:3]] == [
        ("rows:0", "server 0", {"row": 0}),
        ("rows:1", "server 1", {"row": 1}),
    ]
    prompts = {request.id: request.prompt_ids for request in client.requests}
    assert len(client.requests) == len(prompts)
    assert sorted(prompts) == ["4/0-0", "4/0-1", "4/1-0", "4/1-1"]
    assert (prompts["4/0-1"], prompts["4/1-0"]) == ([10, 20], [11, 21])
    assert gym.opened[1:3] == [("server 0", {"row": 0}), ("server 1", {"row": 1})]
    assert sorted(index for index, _ in done) == [0, 1, 2, 3]
    assert all(episodes[index] is e for index, e in done)
    for number, e in enumerate(episodes):
        assert (e.status, e.error, e.ended, e.reward) == ("ok", "", "stop", 0.25 * number)
        assert (e.reward_components, e.verify_result) == ({"part": 0.5}, {"extracted": number})
        assert e.timings["verify_call"] == 0.25 and e.policy_versions == [(2, 3)]
    assert gym.open_count == 0
    assert gym.responses[0]["output"][0]["content"][0]["text"] == "five"


def test_no_more_episodes_run_than_there_are_slots():
    client = RecordingClient(pause=0.02)
    slots = asyncio.Semaphore(2)
    run_rollout(client, FixedRewards(*[1.0] * 6), count=3, n=2, episode_slots=slots)
    assert client.max_running == 2 and len(client.requests) == 6


def test_an_episode_is_verified_after_the_next_one_has_its_slot():
    client = RecordingClient()
    gym = FixedRewards(1.0, 1.0)
    both_sampled = asyncio.Event()
    generate_one = client.generate

    async def generate(*arguments, **named):
        if len(client.requests) == 1:
            both_sampled.set()
        return await generate_one(*arguments, **named)

    client.generate = generate

    @contextlib.asynccontextmanager
    async def session(*_):
        async def verify(*_):
            await asyncio.wait_for(both_sampled.wait(), 2)
            return gym_client.VerifyResult(1.0)

        yield verify_session(verify)

    gym.session = session
    episodes = run_rollout(client, gym, n=2, episode_slots=asyncio.Semaphore(1))
    assert [e.status for e in episodes] == ["ok", "ok"]


def test_an_episode_that_lost_its_session_is_repeated_under_new_request_ids():
    request_ids: list[str] = []

    def change(output, request):
        request_ids.append(request.id)
        raise GymError("session_lost", "the server was started again", session_lost=True)

    done = []
    (episode,) = run_rollout(
        RecordingClient(change), FixedRewards(*[1.0] * 9), on_done=lambda *both: done.append(both)
    )
    again = ["4/0-0-again-1", "4/0-0-again-2", "4/0-0-again-3"]
    assert request_ids == ["4/0-0", *again]
    assert (episode.status, episode.reward) == ("session_lost", None)
    assert episode.session_lost is True
    assert episode.error == "the server was started again" and done == [(0, episode)]


def test_an_episode_that_lost_its_session_once_has_the_reward_of_the_second_try():
    def change(output, request):
        if request.id == "4/0-0":
            raise GymError("session_lost", "the server was started again", session_lost=True)

    (episode,) = run_rollout(RecordingClient(change), FixedRewards(1.0, 1.0))
    assert (episode.status, episode.reward, episode.response_ids) == ("ok", 1.0, [5, STOP])


def run_with_turns(run_turns) -> inference.Episode:
    """Run a rollout with another function for its turns -> its episode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "run_turns", run_turns)
        (episode,) = run_rollout(RecordingClient(), FixedRewards(1.0))
    return episode


@pytest.mark.parametrize(
    ("error", "status"),
    [(GymError("http_500", "broken"), "http_500"), (env.DataError("odd"), "template")],
)
def test_an_episode_that_fails_has_no_reward(error, status):
    async def run_turns(episode, *_):
        episode.reward = 1.0
        raise error

    episode = run_with_turns(run_turns)
    assert (episode.status, episode.reward, episode.error) == (status, None, str(error))


@pytest.mark.parametrize(
    ("ids", "mask", "log_probs", "message"),
    [
        ([5], [1, 1], [0.0], "lists differ in length: 1 ids, 2 of mask, 1 log-probs"),
        ([5], [1], [0.0] * 2, "lists differ in length: 1 ids, 1 of mask, 2 log-probs"),
        ([], [1], [0.0], "lists differ in length: 0 ids"),
        ([5, 6], [1, 1], [0.0] * 2, "1 sampled tokens, 2 in the mask"),
    ],
)
def test_an_episode_with_inconsistent_lists_fails(ids, mask, log_probs, message):
    async def run_turns(episode, *_):
        append_tokens(episode, [5], [0.0])
        episode.response_ids = ids
        episode.response_mask = mask
        episode.log_probs = log_probs

    episode = run_with_turns(run_turns)
    assert (episode.status, episode.reward) == ("bad_ids", None) and message in episode.error


def test_an_unforeseen_failure_has_no_reward_and_names_its_line():
    def raise_odd():
        raise ValueError("odd")

    async def run_turns(*_):
        raise_odd()

    episode = run_with_turns(run_turns)
    assert (episode.status, episode.reward) == ("unforeseen", None)
    line = raise_odd.__code__.co_firstlineno + 1  # the line of `raise`
    assert f"ValueError('odd') at {__file__}:{line}. " in episode.error


FATAL = [
    ray.exceptions.RayActorError(),
    RunError("stale weights"),
    gym_client.ServerDownError("server_down", "for 90 s"),
]


@pytest.mark.parametrize("error", FATAL)
def test_a_dead_engine_or_server_ends_the_run(error):
    def change(*_):
        raise error

    with pytest.raises(type(error)):
        run_rollout(RecordingClient(change), FixedRewards(1.0))


# --- agents --------------------------------------------------------------------------------------


def test_an_agent_runs_the_row_with_the_log_probs_and_versions_of_the_endpoint():
    gym = FixedRewards(kind="agent")
    (episode,) = run_rollout(RecordingClient(), gym, policy_version=7, vocab_size=1000)
    (arguments,) = gym.runs
    assert arguments[:4] == ("server 0", {"row": 0}, 5.0, 1000) and not gym.opened
    assert (episode.prompt_ids, episode.response_ids, episode.ended) == ([2, 3], [5, STOP], "stop")
    assert (episode.reward, episode.reward_components) == (0.75, {"part": 0.5})
    assert episode.verify_result == {"extracted": 5}
    assert episode.log_probs == [-1.0, -2.0] and episode.policy_versions == [(2, 6)]
    assert episode.timings["verify_call"] == 0.25


def test_an_agent_also_needs_an_episode_slot():
    gym = FixedRewards(kind="agent")
    running = []
    counts = []
    run_one = gym.run

    async def run(*arguments):
        running.append(1)
        counts.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return await run_one(*arguments)

    gym.run = run
    run_rollout(RecordingClient(), gym, n=4, episode_slots=asyncio.Semaphore(2))
    assert max(counts) == 2


# --- baselines -----------------------------------------------------------------------------------


def test_each_group_gets_the_reward_of_one_greedy_response(monkeypatch):
    rewards = {
        "4/0-0": 0.0,
        "4/0-1": 0.25,
        "4/1-0": 0.5,
        "4/1-1": 0.75,
        "greedy-4/0-0": 2.0,
        "greedy-4/1-0": 3.0,
    }
    client = RecordingClient()
    done = []

    async def verify(episode, session):
        episode.reward = rewards[episode.verify_result["request"]]

    async def run_turns(episode, task, session, context, sampling, request_id):
        response = await sample(context, sampling, request_id, task.prompt_ids, 9)
        append_tokens(episode, *response)
        episode.verify_result["request"] = request_id

    monkeypatch.setattr(inference, "run_turns", run_turns)
    monkeypatch.setattr(inference, "verify", verify)
    episodes = run_rollout(
        client,
        FixedRewards(),
        count=2,
        n=2,
        baselines=True,
        on_done=lambda *both: done.append(both),
    )
    assert [(e.reward, e.baseline) for e in episodes] == [
        (0.0, 2.0),
        (0.25, 2.0),
        (0.5, 3.0),
        (0.75, 3.0),
    ]
    temperatures = {request.id: request.params["temperature"] for request in client.requests}
    assert temperatures == {name: 0.0 if name.startswith("greedy-") else 0.7 for name in rewards}
    assert all(request.params["top_p"] == 0.9 for request in client.requests)
    for _, episode in done:
        is_greedy = episode.verify_result["request"].startswith("greedy-")
        assert is_greedy or any(episode is returned for returned in episodes)


def test_a_group_without_a_greedy_response_fails_and_keeps_its_other_failures():
    def change(output, request):
        if request.id == "greedy-4/0-0":
            output.stop_reason = "aborted"
        if request.id == "4/0-1":
            output.log_probs = None

    client = RecordingClient(change)
    episodes = run_rollout(client, FixedRewards(*[1.0] * 9), count=2, n=2, baselines=True)
    assert [(e.status, e.reward, e.baseline) for e in episodes] == [
        ("no_baseline", None, None),
        ("no_log_probs", None, None),
        *[("ok", 1.0, 1.0)] * 2,
    ]
    error = "the greedy answer failed: vLLM ended the request without an answer (aborted)"
    assert episodes[0].error == error and "without a log-prob" in episodes[1].error


def test_an_agent_cannot_give_greedy_responses():
    with pytest.raises(GymError, match="the agent of server 0 cannot give") as caught:
        run_rollout(RecordingClient(), FixedRewards(kind="agent"), baselines=True)
    assert caught.value.reason == "no_greedy"
