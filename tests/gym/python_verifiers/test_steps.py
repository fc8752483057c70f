"""Training steps with Python verifiers, over Ray, FSDP and vLLM."""

from __future__ import annotations

import json

from tests.helpers.stack import with_verifiers
from tests.helpers.verifiers import EXAMPLE_SOURCE


def train(stack, name, *changes):
    """Take a step of the tiny recipe with the verifiers of `changes`. Return its metrics, files."""
    (stack.workspace / "my.py").write_text(EXAMPLE_SOURCE)
    changes = ("env.train_files=[train.jsonl]", "env.val_files=[]", *changes)
    with with_verifiers(stack, *changes) as gym, stack.trainer(name, *changes, gym=gym) as trainer:
        metrics = dict(trainer.step_or_skip())
        files = []
        for path in ("rollouts/step_1.jsonl", "failures.jsonl"):
            file = trainer.run.folder / path
            lines = file.read_text().splitlines() if file.exists() else []
            files.append([json.loads(line) for line in lines])
        return metrics, *files, trainer.inputs.tokenizer.decode


def test_a_step_with_a_function_and_no_server(stack):
    """The function gives the reward of each response. If a call raises, its episode fails."""
    changes = ["env.verifier=my.py:count_sevens", "gym.max_failed_frac=1"]
    metrics, records, failures, decode = train(stack, "function", *changes)
    assert metrics["actor/grad_norm"] > 0 and metrics["training/rollout_probs_diff_max"] < 1e-3
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
    expected = {"reward/count_sevens/mean", "reward/count_sevens/length/mean"}
    assert expected | {"rollout/count_sevens/failed_frac", "verify/latency_s/p50"} <= set(metrics)


def test_a_step_with_an_environment_class(stack):
    changes = ["env.verifier=my.py:Sevens", "data.max_response_length=48"]
    metrics, records, _, _ = train(stack, "game", *changes)
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/failed_frac"] == 0
    assert all(sum(r["_episode"]["turn_rewards"]) == r["reward"] for r in records)
    assert metrics["rollout/turns/mean"] > 1 and "reward/Sevens/mean" in metrics
    ends = {(len(r["_episode"]["turn_rewards"]), r["_episode"]["ended"]) for r in records}
    assert (2, "terminated") in ends
    assert ends <= {(2, "terminated"), (1, "length"), (2, "length")}
