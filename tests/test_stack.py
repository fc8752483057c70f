"""Tests with an FSDP actor, a vLLM server and Gym servers, and the tiny untied model."""

from __future__ import annotations

import json

import httpx
import pytest
import ray
import torch

import env
import inference
import training
from kit.data.episode import Episode
from kit.engine.endpoint.server import serve
from kit.engine.endpoint.sessions import Sessions
from kit.engine.sampling import build_sampling_params, repeat_per_group
from kit.errors import RunError
from kit.verify.network import find_free_port
from tests.helpers.models import ACTIONS, END
from tests.helpers.recipes import GYM_PYTHON, make_counter_row, row
from tests.helpers.rollouts import make_limits

# Bound on the mean |log-prob difference| of sampled tokens. Both sides compute in float32, so only
# rounding differs.
AGREE = 4e-5


@pytest.fixture(scope="module")
def session(stack):
    """Start a trainer over the session, with its first weights and the loss of the tiny recipe."""
    with stack.trainer("session", "env.val_files=[]") as trainer:
        yield trainer


def sample(trainer, n=4, servers=None, **changes):
    sampling = build_sampling_params(trainer.recipe, is_validation=False) | changes
    requests = repeat_per_group(trainer.inputs.train, n, "a")
    return (servers or trainer.servers).rollout(requests, sampling)


def compute_log_probs(trainer, batch):
    """Return the trainer's log-probs of a batch, [B, R]."""
    actor = trainer.workers.actor
    return training.compute_log_probs(actor, batch, trainer.recipe)["log_probs"]


def build_batch(trainer, episodes):
    return training.build_batch(episodes, trainer.inputs.tokenizer.pad_token_id, 1.0)


def compute_disagreement(trainer, episodes) -> float:
    """Mean |trainer - vLLM| log-prob of the sampled tokens."""
    batch = build_batch(trainer, episodes)
    mask = batch.batch["response_mask"]
    difference = compute_log_probs(trainer, batch) - batch.batch["rollout_log_probs"]
    return float((difference.abs() * mask).sum() / mask.sum())


def build_batch_with_advantages(trainer, episodes):
    """Return a batch whose advantages alternate between 1 and -1."""
    batch = build_batch(trainer, episodes)
    batch.batch["old_log_probs"] = compute_log_probs(trainer, batch)
    signs = torch.tensor([1.0, -1.0]).repeat(len(episodes) // 2)[:, None]
    batch.batch["advantages"] = signs * batch.batch["response_mask"]
    return batch


def test_responses_are_token_ids_with_log_probs_and_a_reward(session):
    episodes = sample(session)
    assert len(episodes) == 32
    assert all(e.status == "ok" for e in episodes)
    assert len({e.group_id for e in episodes}) == 8
    for e in episodes:
        assert len(e.response_ids) == len(e.log_probs) == len(e.response_mask) <= 12
        # <end> is sampled and kept
        assert e.ended == ("stop" if e.response_ids[-1] == END else "length")
        assert len(e.response_ids) == 12 or e.ended == "stop"
        assert e.response == session.inputs.tokenizer.decode(
            e.response_ids, skip_special_tokens=True
        )
        assert e.turns == [(0, len(e.response_ids), 1)]
        # The verifier (chain_sum) removes commas. The reward is 1 for the answer, and less for a
        # text that contains the answer.
        text = e.response.strip().replace(",", "")
        expected = 1 / len(text) if "7" in text else 0.0
        assert e.reward == pytest.approx(expected), e.response
        assert {"generate", "verify", "verify_call"} <= set(e.timings)


def test_vllm_has_the_weights_of_the_trainer_after_a_sync(session):
    assert compute_disagreement(session, sample(session)) < AGREE
    batch = build_batch_with_advantages(session, sample(session))
    training.update_actor(session.workers.actor, batch, session.recipe)
    stale = compute_disagreement(session, sample(session))
    assert stale > 1000 * AGREE  # without a sync, the difference is large
    session.servers.update_weights(1)
    assert compute_disagreement(session, sample(session)) < AGREE


def test_a_tensor_that_is_lost_on_the_way_ends_the_run_before_a_token_is_sampled(session):
    """The next sync is whole again."""

    def lose_a_tensor(worker):
        role = getattr(worker, "worker_dict", {"actor": worker})["actor"]
        engine = role.actor.engine
        send = engine.get_per_tensor_param

        def get_per_tensor_param(**options):
            weights, adapter = send(**options)
            engine.get_per_tensor_param = send
            lost = "model.layers.0.mlp.down_proj.weight"
            return ((name, tensor) for name, tensor in weights if name != lost), adapter

        engine.get_per_tensor_param = get_per_tensor_param

    actor = session.workers.actor
    ray.get([worker.__ray_call__.remote(lose_a_tensor) for worker in actor.workers])
    message = r"Step 5: replica 0 .*layers\.0\.mlp\.down_proj\.weight was sent and did not arrive"
    with pytest.raises(RunError, match=message):
        session.servers.update_weights(5)
    assert session.servers.update_weights(6) == {"training/weights_proved": 1.0}
    session.servers.update_weights(0)


def test_an_empty_answer_is_verified_like_any_other(session):
    episodes = sample(session, n=2, allowed_token_ids=[END])
    assert {e.response for e in episodes} == {""}
    assert {tuple(e.response_ids) for e in episodes} == {(END,)}
    assert all(e.status == "ok" and e.reward == 0.0 and e.ended == "stop" for e in episodes)
    batch = training.build_batch(episodes, 1, 1.0)
    assert batch.batch["response_mask"].sum() == 16
    assert torch.isfinite(compute_log_probs(session, batch)).all()


# --- tools, games and agents of real Gym servers -------------------------------------------------
# The model is random. allowed_token_ids restricts it to some actions.


@pytest.fixture(scope="module")
def multi_turn_servers(stack, session):
    """Make the session's servers with long limits for conversations. Gym's agent calls them too."""
    # the initial weights sample every action; trained weights may not
    session.workers.actor.load_checkpoint(str(stack.fresh))
    session.servers.update_weights(0)
    context = stack.servers.context
    context.max_prompt_length = 500
    context.max_response_length = 500
    context.timeout_s = 60.0
    context.policy_version = None
    return inference.Servers(
        session.recipe, stack.servers.manager, None, context, stack.servers.gym, stack.servers.loop
    )


def play(session, servers, row, server, n, *actions, **changes):
    """Run n episodes of one row, in which the policy samples only `actions` and <end>."""
    tokenizer = session.inputs.tokenizer
    allowed = [END, *(tokenizer.convert_tokens_to_ids(ACTIONS[name]) for name in actions)]
    sampling = build_sampling_params(session.recipe, is_validation=False)
    sampling |= {"allowed_token_ids": allowed, **changes}
    messages, tools = env.render_row(row, "x:1")
    prompt_ids = env.encode_messages(messages, tools, tokenizer)
    task = env.Task("x:1", row, server, messages, prompt_ids, tools=tools)
    return servers.rollout(repeat_per_group([task] * n, 1, "x"), sampling)


def test_a_response_ends_at_a_stop_text_of_its_request(stack, session, multi_turn_servers):
    """The text ends before it. All its tokens are in the row, which the next request continues."""
    context = multi_turn_servers.context
    ids = session.inputs.tokenizer.convert_tokens_to_ids(["a", "b"])
    sampling = build_sampling_params(session.recipe, is_validation=False)
    sampling |= {"allowed_token_ids": ids}
    sessions = Sessions()
    agent = sessions.open(context, sampling, make_limits())
    port = find_free_port()

    async def ask_twice():
        replies = []
        messages = [{"role": "user", "content": "say a"}]
        url = f"http://127.0.0.1:{port}/s/{agent.key}/v1/messages"
        serving = serve(context, "127.0.0.1", port, "own key", sessions)
        async with serving, httpx.AsyncClient(timeout=60) as client:
            for _ in range(2):
                body = {"max_tokens": 200, "messages": messages, "stop_sequences": ["ba"]}
                replies.append((await client.post(url, json=body)).json())
                answer = {"role": "assistant", "content": replies[-1]["content"]}
                messages = [*messages, answer, {"role": "user", "content": "again"}]
        return replies

    replies = stack.servers.loop.run(ask_twice())
    episode = Episode("x:1", "x/1", "reasoning_gym", [])
    agent.fill(episode)
    for reply, (start, end, _) in zip(replies, episode.turns, strict=True):
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "ba")
        written = session.inputs.tokenizer.decode(episode.response_ids[start:end])
        assert written == reply["content"][0]["text"] + "ba"
    assert not episode.branches


def test_trainer_and_vllm_agree_around_observations(session, multi_turn_servers):
    """In conversations of several turns, both compute the same log-probs of sampled tokens."""
    row = make_counter_row(steps=2)
    episodes = play(session, multi_turn_servers, row, "counter", 64, allowed_token_ids=None)
    assert [e.status for e in episodes] == ["ok"] * 64, episodes[0].error
    several = [e for e in episodes if len(e.turns) > 1]
    assert len(several) > 3
    assert all(0 in e.response_mask for e in several)
    assert compute_disagreement(session, several) < AGREE


def test_a_real_tool_counts_the_calls_of_the_policy(session, multi_turn_servers):
    row = make_counter_row(steps=2)
    episodes = play(session, multi_turn_servers, row, "counter", 96, "increment", "unknown")
    assert [e.status for e in episodes] == ["ok"] * 96, episodes[0].error
    for e in episodes:
        calls = [item["name"] for item in e.output if item["type"] == "function_call"]
        answers = [item["output"] for item in e.output if item["type"] == "function_call_output"]
        ran = calls[: len(answers)]
        assert e.reward == float(ran.count("increment_counter") == 2), (calls, answers)  # 3 + 2 = 5
        for name, answer in zip(ran, answers, strict=True):
            # a name that the row does not offer reaches no server
            is_unknown = name == "verify"
            expected = {"error": "Unknown tool: verify"} if is_unknown else {"success": True}
            assert json.loads(answer) == expected
    assert {e.reward for e in episodes} == {0.0, 1.0}
    assert max(len(e.turns) for e in episodes) > 1
    assert any(0 in e.response_mask for e in episodes)


def test_a_real_game_is_played_to_its_end(session, multi_turn_servers):
    row = {"responses_create_params": {"input": "play"}}
    episodes = play(session, multi_turn_servers, row, "blackjack", 32, "hit", "stand")
    assert [e.status for e in episodes] == ["ok"] * 32, episodes[0].error
    assert {e.ended for e in episodes} == {"terminated"}
    assert {e.reward for e in episodes} <= {-1.0, 0.0, 1.0}
    assert len({tuple(e.prompt_ids) for e in episodes}) > 1  # each episode has another hand
    assert len({e.reward for e in episodes}) > 1


def test_an_agent_of_gym_samples_from_the_policy_endpoint(session, multi_turn_servers):
    """nemo-gym's simple_agent, vllm_model and workplace_assistant return the ids vLLM sampled."""
    from lab import convert

    row = next(convert.read_examples("workplace_assistant", str(GYM_PYTHON)))
    episodes = play(session, multi_turn_servers, row, "office", 16, "directory")
    assert [e.status for e in episodes] == ["ok"] * 16, episodes[0].error
    action = session.inputs.tokenizer.convert_tokens_to_ids(ACTIONS["directory"])
    for e in episodes:
        sampled = {i for i, mask in zip(e.response_ids, e.response_mask, strict=True) if mask}
        assert sampled <= {END, action}
    assert all(e.reward in (0.0, 1.0) for e in episodes)
    assert max(len(e.turns) for e in episodes) > 1
    assert any(0 in e.response_mask for e in episodes)


def test_the_policy_as_a_judge_gives_a_reward_only_if_it_replies(session, multi_turn_servers):
    """Gym's abstention calls genrm_model, which is the policy. It samples a move or <end>."""
    episodes = play(session, multi_turn_servers, row(), "judged", 16, "hit")
    assert {e.status for e in episodes} <= {"ok", "masked"}, episodes[0].error
    for e in episodes:
        assert (e.reward is None) == (e.status == "masked")
