"""The real stack: FSDP actor, vLLM server and Gym server of one session, with the tiny tied model."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import ACTIONS, END, GYM_PYTHON, counting, row

import env
import inference
import training
from gym_client import Gym, ServerDownError
from kit.data.metrics import compute_rollout_metrics
from kit.data.selection import check_failures, select_trainable
from kit.errors import RunError
from kit.extras import convert
from kit.gym.network import find_free_port
from kit.rollout.sampler import build_sampling_params, repeat_per_group

# Bound on the mean |log-prob difference| of a sampled token: rounding, as both sides compute in float32.
AGREE = 4e-5


@pytest.fixture(scope="module")
def session(stack):
    """The session with its actor and its sampler as they began, and the loss of the tiny recipe."""
    with stack.trainer("session", "env.val_files=[]") as trainer:
        yield trainer


def sample(trainer, n=4, servers=None, **changes):
    sampling = build_sampling_params(trainer.config, is_validation=False) | changes
    return (servers or trainer.servers).rollout(
        repeat_per_group(trainer.inputs.train, n, "a"), sampling
    )


def disagreement(trainer, episodes) -> float:
    """Mean |trainer - sampler| log-prob of the sampled tokens."""
    batch = training.build_batch(episodes, trainer.inputs.tokenizer.pad_token_id, 1.0)
    ours = training.compute_log_probs(trainer.workers.actor, batch, trainer.config)["log_probs"]
    mask = batch.batch["response_mask"]
    return float(((ours - batch.batch["rollout_log_probs"]).abs() * mask).sum() / mask.sum())


def with_advantages(trainer, episodes):
    batch = training.build_batch(episodes, trainer.inputs.tokenizer.pad_token_id, 1.0)
    batch.batch["old_log_probs"] = training.compute_log_probs(trainer.workers.actor, batch, trainer.config)[
        "log_probs"
    ]
    signs = torch.tensor([1.0, -1.0]).repeat(len(episodes) // 2)[:, None]
    batch.batch["advantages"] = signs * batch.batch["response_mask"]
    return batch


def test_tokens_in_tokens_out(session):
    episodes = sample(session)
    assert len(episodes) == 32 and all(e.status == "ok" for e in episodes)
    assert len({e.group_id for e in episodes}) == 8
    for e in episodes:
        assert len(e.response_ids) == len(e.log_probs) == len(e.response_mask) <= 12
        assert e.ended == (
            "stop" if e.response_ids[-1] == 1 else "length"
        )  # 1 is <end>, sampled and kept
        assert len(e.response_ids) == 12 or e.ended == "stop"
        assert e.response == session.data.tokenizer.decode(e.response_ids, skip_special_tokens=True)
        assert e.turns == [(0, len(e.response_ids), 1)]
        # the verifier's rule (chain_sum, which leaves commas out): 1 for the answer, in part for what contains it
        text = e.response.strip().replace(",", "")
        expected = 1.0 if text == "7" else 1 / len(text) if "7" in text else 0.0
        assert e.reward == pytest.approx(expected), e.response
        assert {"generate", "verify", "verify_call"} <= set(e.timings)


def test_the_samplers_weights_are_the_trainers(session):
    assert disagreement(session, sample(session)) < AGREE
    training.update_actor(
        session.workers.actor, with_advantages(session, sample(session)), session.config
    )
    stale = disagreement(session, sample(session))
    assert stale > 1000 * AGREE  # without a sync the two are far apart, so this test can fail
    session.servers.update_weights(1)
    assert disagreement(session, sample(session)) < AGREE


def test_a_server_with_old_weights_ends_the_run(session):
    """A sync that did not reach a server: it still says the step of the one before."""
    session.servers.update_weights(2)
    assert {e.status for e in sample(session, n=1)} == {"ok"}
    session.servers.context.policy_version = 3  # as after an update whose sync was lost
    with pytest.raises(
        RunError, match="samples from the weights of step 2, the trainer's are of step 3"
    ):
        sample(session, n=1)
    session.servers.context.policy_version = 2


def test_an_empty_answer_is_verified_like_any_other(session):
    episodes = sample(session, n=2, allowed_token_ids=[1])  # <end> at once
    assert {e.response for e in episodes} == {""} and {tuple(e.response_ids) for e in episodes} == {
        (1,)
    }
    assert all(e.status == "ok" and e.reward == 0.0 and e.ended == "stop" for e in episodes)
    batch = training.build_batch(episodes, 1, 1.0)
    assert batch.batch["response_mask"].sum() == 16
    log_probs = training.compute_log_probs(session.workers.actor, batch, session.config)["log_probs"]
    assert torch.isfinite(log_probs).all()


def test_an_answer_cut_off_is_marked(session):
    episodes = sample(session, n=1, allowed_token_ids=[9])  # the digit 7, for ever
    assert all(e.ended == "length" and len(e.response_ids) == 12 for e in episodes)
    assert all(e.reward == pytest.approx(1 / 12) for e in episodes)


def with_gym(session, gym, n=2):
    """Episodes with other Gym servers than the run's."""
    was = session.servers
    servers = inference.Servers(session.config, was.manager, None, was.context, gym, was.loop)
    was.loop.run(gym.__aenter__())
    try:
        return sample(session, n, servers)
    finally:
        was.loop.run(gym.__aexit__())


def test_a_dead_verifier_ends_the_run_after_its_budget(session):
    dead = {"reasoning_gym": f"http://127.0.0.1:{find_free_port()}"}
    with pytest.raises(ServerDownError, match="reasoning_gym"):
        with_gym(session, Gym(dead, attempts=1, outage_budget_s=2.0))


def test_no_verdicts_are_failures_and_no_reward(session):
    episodes = with_gym(session, Gym({}))
    assert {e.status for e in episodes} == {"no_server"} and {e.reward for e in episodes} == {None}
    assert select_trainable(episodes) == ([], {})
    metrics = compute_rollout_metrics(episodes, [])
    assert metrics["rollout/failed/no_server"] == 16 and metrics["rollout/failed_frac"] == 1.0
    assert metrics["rollout/groups_dropped"] == 8 and "reward/reasoning_gym/mean" not in metrics
    with pytest.raises(RunError, match=r"16 of 16 episodes failed \(16 no_server\)"):
        check_failures(episodes, 0.5)


# --- tools, games, agents: real Gym servers, the random model, actions forced by allowed_token_ids ---


@pytest.fixture(scope="module")
def worlds(stack, session):
    """The session's policy, with room for conversations; it is what the agent's server asks."""
    session.workers.actor.load_checkpoint(
        str(stack.fresh)
    )  # says all actions; a trained one may never say some
    session.servers.update_weights(0)
    policy = stack.servers.context
    policy.max_prompt_length, policy.max_response_length, policy.timeout_s = 500, 500, 60.0
    policy.version = None
    return inference.Servers(
        session.config, stack.servers.manager, None, policy, stack.servers.gym, stack.servers.loop
    )


def play(session, worlds, row, server, n, *actions, **changes):
    """n episodes of one row, in which the policy can do nothing but `actions` and end its turn."""
    tokenizer = session.data.tokenizer
    allowed = [END, *(tokenizer.convert_tokens_to_ids(ACTIONS[name]) for name in actions)]
    sampling = (
        build_sampling_params(session.config, is_validation=False)
        | {"allowed_token_ids": allowed}
        | changes
    )
    messages, tools = env.render_row(row, "x:1")
    task = env.Task(
        "x:1", row, server, messages, env.encode_messages(messages, tools, tokenizer), tools=tools
    )
    return worlds.rollout([(task, str(i)) for i in range(n)], sampling)


def test_trainer_and_sampler_agree_around_observations(session, worlds):
    """Unforced conversations of several turns: the trainer's log-probs of what was sampled are the sampler's."""
    episodes = play(session, worlds, counting(steps=2), "counter", 64, allowed_token_ids=None)
    assert [e.status for e in episodes] == ["ok"] * 64, episodes[0].error
    several = [e for e in episodes if len(e.turns) > 1]
    assert len(several) > 3 and all(0 in e.response_mask for e in several)
    assert disagreement(session, several) < AGREE


def test_a_real_tool_counts_what_the_policy_calls(session, worlds):
    episodes = play(session, worlds, counting(steps=2), "counter", 96, "increment", "unknown")
    assert [e.status for e in episodes] == ["ok"] * 96, episodes[0].error
    for e in episodes:
        calls = [item["name"] for item in e.output if item["type"] == "function_call"]
        answers = [item["output"] for item in e.output if item["type"] == "function_call_output"]
        ran = calls[: len(answers)]
        assert e.reward == float(ran.count("increment_counter") == 2), (calls, answers)  # 3 + 2 = 5
        for name, answer in zip(
            ran, answers, strict=True
        ):  # a name that the row does not offer reaches no server
            assert json.loads(answer) == (
                {"success": True} if name != "verify" else {"error": "Unknown tool: verify"}
            )
    assert {e.reward for e in episodes} == {0.0, 1.0} and max(len(e.turns) for e in episodes) > 1
    assert any(0 in e.response_mask for e in episodes)


def test_a_real_game_is_played_to_its_end(session, worlds):
    row = {"responses_create_params": {"input": "play"}}
    episodes = play(session, worlds, row, "blackjack", 32, "hit", "stand")
    assert [e.status for e in episodes] == ["ok"] * 32, episodes[0].error
    assert {e.ended for e in episodes} == {"terminated"} and {e.reward for e in episodes} <= {
        -1.0,
        0.0,
        1.0,
    }
    assert len({tuple(e.prompt_ids) for e in episodes}) > 1  # each was dealt a hand of its own
    assert len({e.reward for e in episodes}) > 1


def test_gyms_own_agent_plays_against_our_sampler(session, worlds):
    """nemo-gym's simple_agent, vllm_model and workplace_assistant; the ids come back as vLLM sampled them."""
    row = next(convert.read_examples("workplace_assistant", str(GYM_PYTHON)))
    episodes = play(session, worlds, row, "office", 16, "directory")
    assert [e.status for e in episodes] == ["ok"] * 16, episodes[0].error
    end = session.data.tokenizer.convert_tokens_to_ids(ACTIONS["directory"])
    assert all(
        {ids for ids, m in zip(e.response_ids, e.response_mask, strict=True) if m} <= {END, end}
        for e in episodes
    )
    assert all(e.reward in (0.0, 1.0) for e in episodes)
    assert max(len(e.turns) for e in episodes) > 1 and any(0 in e.response_mask for e in episodes)


def test_the_policy_judges_and_what_it_says_is_no_verdict(session, worlds):
    """Gym's abstention asks genrm_model, which is the policy, which can say nothing but its move, or nothing: not 0."""
    episodes = play(session, worlds, row(), "judged", 16, "hit")
    assert [e.status for e in episodes] == ["masked"] * 16 and {e.reward for e in episodes} == {
        None
    }
    told = [e.error for e in episodes]
    assert all("genrm_model" in text for text in told), told
    assert any(f"no verdict in its reply: '{ACTIONS['hit']}'" in text for text in told), told
