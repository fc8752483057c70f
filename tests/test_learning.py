"""Tests that the tiny model learns: from three kinds of verifiers, and to use a tool."""

from __future__ import annotations

import pandas
import pytest

from tests.helpers.recipes import metrics_of, write_rows
from tests.helpers.stack import (
    COUNTING,
    NO_EVALUATION,
    UNTRAINED,
    train_until,
    with_verifiers,
)

pytestmark = pytest.mark.soak
FOUR_WORDS = ["say", "give", "write", "print"]


def test_the_policy_learns_from_three_kinds_of_verifiers_together(stack):
    """They are a Gym server, templates/verifier, and templates/reward.py for rows of verl.

    The reward from each of them increases.
    """
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{word} 7"}],
            "data_source": "mine",
            "reward_model": {"ground_truth": "7"},
        }
        for word in FOUR_WORDS
    ]
    pandas.DataFrame(rows).to_parquet(stack.workspace / "verl.parquet")
    shop_row = {"responses_create_params": {"input": "tea"}, "prices": {"tea": 7}, "answer": 7}
    write_rows(stack.workspace / "shop.jsonl", [shop_row])
    files = [
        "{path: train.jsonl, server: reasoning_gym, weight: 2}",
        "{path: shop.jsonl, server: shop, weight: 1}",
        "{path: verl.parquet, verifier: templates/reward.py:compute_score, weight: 1}",
    ]
    changes = [
        f"env.train_files=[{', '.join(files)}]",
        "actor_rollout_ref.rollout.n=16",
        # Some verifiers give a high reward to longer answers such as 77, and others do not. The
        # policy may sample such answers for a while.
        "data.max_response_length=6",
        NO_EVALUATION,
    ]
    with (
        with_verifiers(stack, *changes) as gym,
        stack.trainer("learn", *changes, gym=gym) as trainer,
    ):
        rewards = train_until(trainer, 0.4)
        steps = metrics_of(trainer.run.folder)
    assert rewards[0] < UNTRAINED < 0.4 <= sum(rewards[-3:]) / 3
    for name in ("reasoning_gym", "shop", "compute_score"):
        means = [m[f"reward/{name}/mean"] for m in steps]
        assert sum(means[:3]) / 3 + 0.1 < sum(means[-3:]) / 3, (name, means)


def test_the_policy_learns_to_use_a_real_tool(stack):
    """Each episode has a separate counter. Exactly one call gives the reward 1.

    With 8 responses to a prompt, some runs lose the call again before they have learned it.
    """
    changes = [COUNTING, NO_EVALUATION, "data.max_response_length=32"]
    changes.append("actor_rollout_ref.rollout.n=16")
    with stack.trainer("tools", *changes) as trainer:
        rewards = train_until(trainer, 0.6, over=5)
        assert sum(rewards[:3]) / 3 < 0.3
        assert sum(rewards[-5:]) / 5 >= 0.6
        assert trainer.metrics["rollout/turns/mean"] > 1  # some text after the call
