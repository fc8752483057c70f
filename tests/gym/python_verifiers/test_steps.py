"""Training steps with Python verifiers, over Ray, FSDP and vLLM."""

from __future__ import annotations

import contextlib
import json

from tests.helpers.stack import with_verifiers
from tests.helpers.verifiers import EXAMPLE_SOURCE


@contextlib.contextmanager
def make_trainer(stack, name, *changes):
    """Yield a Trainer of the tiny recipe with the verifiers of `changes`."""
    (stack.workspace / "my.py").write_text(EXAMPLE_SOURCE)
    changes = ("env.train_files=[train.jsonl]", "env.val_files=[]", *changes)
    with with_verifiers(stack, *changes) as gym, stack.trainer(name, *changes, gym=gym) as trainer:
        yield trainer


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_with_a_function_and_no_server(stack):
    """The function gives the reward of each response. If a call raises, its episode fails."""
    changes = ["env.verifier=my.py:count_sevens", "gym.max_failed_frac=1"]
    with make_trainer(stack, "function", *changes) as trainer:
        metrics = dict(trainer.step_or_skip())
        records = read_lines(trainer.run.folder / "rollouts" / "step_1.jsonl")
        failures = read_lines(trainer.run.folder / "failures.jsonl")
    assert metrics["actor/grad_norm"] > 0 and metrics["training/rollout_probs_diff_max"] < 1e-3
    decode = trainer.inputs.tokenizer.decode
    for record in records:
        ids = record["response"]["output"][-1]["generation_token_ids"]
        text = decode(ids, skip_special_tokens=True)
        is_failed = record["_episode"]["status"] == "raised"
        assert is_failed == ("?" in text)
        assert record["reward"] == (None if is_failed else text.count("7"))
        assert is_failed or record["reward_components"] == {"length": len(text)}
    failed = [r for r in records if r["_episode"]["status"] != "ok"]
    assert len(records) == 64
    assert 0 < len(failed) == len(failures) == metrics["rollout/failed/raised"]
    assert {
        "reward/count_sevens/mean",
        "reward/count_sevens/length/mean",
        "rollout/count_sevens/failed_frac",
        "verify/latency_s/p50",
    } <= set(metrics)


def test_a_step_with_an_environment_class(stack):
    changes = ["env.verifier=my.py:Sevens", "data.max_response_length=48"]
    with make_trainer(stack, "game", *changes) as trainer:
        metrics = dict(trainer.step_or_skip())
        records = read_lines(trainer.run.folder / "rollouts" / "step_1.jsonl")
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/failed_frac"] == 0
    assert max(len(record["_episode"]["turn_rewards"]) for record in records) == 2
    assert all(sum(r["_episode"]["turn_rewards"]) == r["reward"] for r in records)
    assert metrics["rollout/turns/mean"] > 1 and "reward/Sevens/mean" in metrics
    ends = set()  # {(number of turns, reason of the end)}
    for record in records:
        episode = record["_episode"]
        ends.add((len(episode["turn_rewards"]), episode["ended"]))
    assert ends <= {(2, "terminated"), (1, "length"), (2, "length")} and (2, "terminated") in ends
