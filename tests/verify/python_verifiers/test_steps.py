"""Training steps with Python verifiers, over Ray, FSDP and vLLM."""

from __future__ import annotations

import json

from tests.helpers.stack import with_verifiers
from tests.helpers.verifiers import EXAMPLE_SOURCE


def test_a_step_with_a_function_and_no_server(stack):
    """The function gives the reward of each response. If a call raises, its episode fails."""
    (stack.workspace / "my.py").write_text(EXAMPLE_SOURCE)
    changes = ["env.train_files=[train.jsonl]", "env.val_files=[]"]
    changes += ["env.verifier=my.py:count_sevens", "gym.max_failed_frac=1"]
    with (
        with_verifiers(stack, *changes) as gym,
        stack.trainer("function", *changes, gym=gym) as trainer,
    ):
        metrics = dict(trainer.step_or_skip())
        decode = trainer.inputs.tokenizer.decode
        rollouts = (trainer.run.folder / "rollouts" / "step_1.jsonl").read_text()
        failures = (trainer.run.folder / "failures.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in rollouts.splitlines()]
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
