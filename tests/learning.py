"""Bounds and a loop for tests that train the tiny model until its reward is high."""

from __future__ import annotations

AGREE = 1e-3  # bound on the difference of any probability, vLLM's to the trainer's, in float32
UNTRAINED = 0.1  # mean reward; chance is below
PATIENCE = 100  # steps; most learn within 40
COUNTING = "env.train_files=[{path: tools.jsonl, server: counter}]"
NO_EVALUATION = "env.val_files=[]"


def train_until(trainer, bound: float, over: int = 3) -> list[float]:
    """Mean rewards of the steps until the mean of the last `over` reaches `bound`."""
    rewards: list[float] = []
    while len(rewards) < PATIENCE and (len(rewards) < over or sum(rewards[-over:]) / over < bound):
        metrics = trainer.step_or_skip()
        assert metrics["training/rollout_probs_diff_max"] < AGREE
        assert metrics["rollout/failed_frac"] == 0
        rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    return rewards
