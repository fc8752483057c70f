"""Tests that the tiny model learns: from three kinds of verifiers, a tool, and a teacher."""

from __future__ import annotations

import pandas
import pytest

from kit.recipe import user_functions
from kit.run.workers import optional_roles, start_roles
from tests.helpers.models import make_pretrained
from tests.helpers.recipes import metrics_of, write_rows
from tests.helpers.stack import (
    AGREE,
    COUNTING,
    NO_EVALUATION,
    UNTRAINED,
    kill_workers,
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


def test_distillation_learns_only_from_the_teachers_log_probs(stack):
    """The teacher is the session's model, trained to answer 7. It scores the policy's responses.

    The estimate of the reverse KL decreases.
    """
    make_pretrained(stack.workspace / "teacher", stack.workspace / "untied", FOUR_WORDS, "7")
    teacher = f"{user_functions.TEACHER}=teacher"
    with stack.trainer("distill", NO_EVALUATION, teacher, overlays=["distill"]) as trainer:
        groups = start_roles(trainer.recipe, optional_roles(trainer.recipe))
        trainer.workers = trainer.workers._replace(ref=groups.ref)
        try:
            steps = [dict(trainer.step_or_skip()) for _ in range(10)]
        finally:
            kill_workers([trainer.workers.ref])
    kl = [-m["critic/advantages/mean"] for m in steps]  # nats a token
    print("reverse KL", [round(k, 2) for k in kl])
    print("rewards", [round(m["rollout/reward/mean"], 2) for m in steps])
    # Without training, the KL would not change. If the teacher were the policy, it would be 0.
    assert kl[0] > 2
    assert kl[-1] < 0.75 * kl[0]
    for m in steps:
        assert m["actor/grad_norm"] > 0
        assert m["training/rollout_probs_diff_max"] < AGREE
