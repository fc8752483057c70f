"""Bounds and a loop for tests that train the tiny model until its reward is high."""

from __future__ import annotations

AGREE = 1e-3  # bound on the difference of vLLM's and the trainer's probabilities, in float32
UNTRAINED = 0.1  # a mean reward above that of a random model
PATIENCE = 100  # steps; most tests need fewer than 40
COUNTING = "env.train_files=[{path: tools.jsonl, server: counter}]"
NO_EVALUATION = "env.val_files=[]"


def train_until(trainer, bound: float, over: int = 3) -> list[float]:
    """Train until the mean reward of the last `over` steps reaches `bound` -> all mean rewards."""
    rewards: list[float] = []
    while len(rewards) < PATIENCE:
        if len(rewards) >= over and sum(rewards[-over:]) / over >= bound:
            break
        metrics = trainer.step_or_skip()
        assert metrics["training/rollout_probs_diff_max"] < AGREE
        assert metrics["rollout/failed_frac"] == 0
        rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    return rewards
