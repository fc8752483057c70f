"""kit/engine/sampling.py: make a context from a recipe, and sample one response."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from gym_client import GymError
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data.reward_scale import RewardScale
from kit.engine import sampling
from kit.errors import RunError
from tests.helpers.rollouts import SAMPLING, STOP, RecordingClient, make_context, make_recipe


def test_a_context_has_the_limits_of_the_recipe():
    template = ChatTemplate(TextProcessor("tokenizer"), {3, 4})
    model = SimpleNamespace(vocab_size=1000)
    scales = {("server", "None"): RewardScale(0.1, 0.9)}
    inputs = SimpleNamespace(template=template, model=model, scales=scales)
    context = sampling.make_rollout_context(make_recipe(), "client", inputs, 77.0)
    assert (context.client, context.tokenizer, context.stop_ids) == ("client", "tokenizer", {3, 4})
    assert context.scales is scales
    assert context.template is template and context.processor is template.processor
    assert (context.max_prompt_length, context.max_response_length) == (123, 456)
    assert (context.max_turns, context.max_tool_chars) == (6, 99)
    assert (context.timeout_s, context.vocab_size) == (77.0, 1000)
    assert context.episode_timeout_s == 45.0
    assert (context.seed, context.max_staleness) == (11, 1)
    # three nodes of four GPUs, engines of two GPUs, 7 sequences for each engine
    assert context.episode_slots._value == 3 * 4 // 2 * 7
    recipe = make_recipe(full_determinism=False)
    assert sampling.make_rollout_context(recipe, "client", inputs, 77.0).seed is None


def test_sampling_follows_the_recipe_in_training_and_in_validation():
    training = sampling.build_sampling_params(make_recipe(), False)
    validation = sampling.build_sampling_params(make_recipe(), True)
    common = {"logprobs": True, "detokenize": False}
    assert training == {"temperature": 0.7, "top_p": 0.8, "top_k": 40, **common}
    assert validation == {"temperature": 0.3, "top_p": 0.4, "top_k": 5, **common}
    greedy = {"do_sample": False, "temperature": 0.3, "top_p": 0.4, "top_k": 5}
    recipe = make_recipe(val_kwargs=greedy)
    assert sampling.build_sampling_params(recipe, True)["temperature"] == 0.0
    for other in ("hf", "sglang"):
        assert "detokenize" not in sampling.build_sampling_params(make_recipe(name=other), False)


def test_a_response_can_be_taken_once_and_only_in_its_batch():
    store = sampling.SampleStore()
    sampled = sampling.SampledResponse([5, STOP], [-1.0, -2.0], [])
    store.begin_batch({})
    store.add([1, 2], sampled)
    assert store.take([1, 2], [5, STOP]) is sampled
    store.add([1, 2], sampled)
    store.begin_batch({})
    with pytest.raises(GymError, match="2 token ids after a prompt of 2") as caught:
        store.take([1, 2], [5, STOP])
    assert caught.value.reason == "not_sampled"


def sample(client, request_id="4/0-1#2", max_tokens=9, image_inputs=None, **changes):
    context = make_context(client, **changes)
    inputs = image_inputs or {}
    work = sampling.sample(context, SAMPLING, request_id, [1, 2, 3], max_tokens, **inputs)
    return asyncio.run(work)


def test_a_request_has_the_token_limit_and_the_sampling_parameters_of_its_turn():
    client = RecordingClient()
    response = sample(client, image_inputs={"image_data": ["picture"]}, policy_version=3)
    assert response == ([5, STOP], [-1.0, -2.0], [(2, 3)])
    (request,) = client.requests
    # The id omits the turn, so all turns of an episode go to the replica that caches their prefix.
    assert request.id == "4/0-1"
    assert request.prompt_ids == [1, 2, 3] and request.more == {"image_data": ["picture"]}
    assert request.params == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 9}


@pytest.mark.parametrize(
    ("fields", "max_staleness", "bad_step"),
    [
        ({"global_steps": 7}, 0, None),
        ({"global_steps": 6}, 0, 6),
        ({"global_steps": None}, 2, None),
        ({"versions": [(1, 6), (1, 7)]}, 1, None),
        ({"versions": [(1, 7), (1, 5)], "global_steps": 7}, 1, 5),
        ({"versions": [(1, 8), (1, 9)]}, 1, 9),
    ],
)
def test_weights_of_a_step_far_from_the_trainers_end_the_run(fields, max_staleness, bad_step):
    def change(output, _):
        output.extra_fields = fields

    client = RecordingClient(change)
    if bad_step is None and None not in fields.values():
        expected = fields.get("versions", [(2, fields.get("global_steps"))])
        response = sample(client, policy_version=7, max_staleness=max_staleness)
        assert response.policy_versions == expected
    else:
        message = f"samples from the weights of step {bad_step}, the trainer's are of step 7"
        with pytest.raises(RunError, match=message):
            sample(client, policy_version=7, max_staleness=max_staleness)
    # before the first weight update, any version is accepted
    sample(client, policy_version=None, max_staleness=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop_reason": "aborted"}, "aborted"),
        ({"token_ids": [], "log_probs": []}, "aborted"),
        ({"log_probs": None}, "no_log_probs"),
        ({"log_probs": [-1.0]}, "no_log_probs"),
    ],
)
def test_an_incomplete_response_is_a_failure(changes, reason):
    def change(output, _):
        vars(output).update(changes)

    with pytest.raises(GymError) as caught:
        sample(RecordingClient(change))
    assert caught.value.reason == reason


def test_a_response_after_the_timeout_is_a_failure():
    context = make_context(RecordingClient(pause=5.0))
    context.timeout_s = 0.05
    begin = time.monotonic()
    with pytest.raises(GymError, match=r"vLLM gave no answer within 0\.05 s") as caught:
        asyncio.run(sampling.sample(context, SAMPLING, "r#0", [1], 9))
    assert caught.value.reason == "generate_timeout" and time.monotonic() - begin < 2


def test_an_episode_has_one_identity_for_the_engine_and_for_gym():
    task = SimpleNamespace(row_id="r:0")
    group = sampling.request_group(task, "7/3", 2)
    assert [request.id.request_id for request in group] == ["7/3-0", "7/3-1"]
    first, second = (request.id.gym_index for request in group)
    assert first.task == second.task == group[0].id.task_index
    assert [first.rollout, second.rollout] == [0, 1]
    other = sampling.request_group(task, "7/3", 1, is_baseline=True)[0].id
    assert other.task_index != first.task and other.request_id == "greedy-7/3-0"
    assert other._replace(attempt=2).request_id == "greedy-7/3-0-again-2"
