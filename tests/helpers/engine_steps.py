"""A step of a worker of a run, whose outputs and gradients are compared with those of another way.

Runs in a process with verl's platform for a CPU (tests/helpers/architectures.py, VARIABLES).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

import training
from kit.data.episode import Episode
from kit.recipe.recipe import Recipe
from tests.helpers.recipes import load
from tests.helpers.workers import ACTOR, make_episode

# The relative error of a sum in fp32. One rounding has an error of at most EPS / 2. If those of n
# terms have random signs, the error of their sum grows as sqrt(n) (Higham and Mary 2019). On the
# way to the gradient of an embedding, the sums have TERMS terms: 550 in each of two layers and 170
# in the head, as many in the backward pass, and one for each of the 300 tokens of a mini-batch.
EPS = torch.finfo(torch.float32).eps
TERMS = 2 * (2 * 550 + 170) + 300
BOUND = EPS * TERMS**0.5  # 6.4e-6

SETTINGS = [
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.temperature=0.7",
    f"{ACTOR}.entropy_coeff=0.01",
]
for section in (ACTOR, "critic"):
    SETTINGS += [
        f"{section}.ppo_mini_batch_size=4",  # two optimizer steps
        f"{section}.ppo_max_token_len_per_gpu=64",  # many micro-batches
        f"{section}.optim.optimizer=SGD",
        f"{section}.optim.clip_grad=1e9",
    ]


class Step(NamedTuple):
    """What a step of a worker computed."""

    outputs: dict[str, torch.Tensor]  # of the forward pass before the update: [B, R]
    loss: float
    gradients: list[dict[str, torch.Tensor]]  # of each optimizer step: {name of a parameter: ...}


def make_groups() -> list[Episode]:
    """Eight prompts with four responses each, of different lengths. Some have observed tokens."""
    rng = random.Random(0)
    episodes = []
    for group in range(8):
        prompt = [rng.randrange(2, 40) for _ in range(rng.randint(2, 9))]
        for _ in range(4):
            response = [rng.randrange(1, 40) for _ in range(rng.randint(1, 24))]
            mask = [int(position not in (3, 4)) for position in range(len(response))]
            episodes.append(make_episode(prompt, response, mask, group=f"g{group}"))
    return episodes


def load_recipe(
    workspace: Path, estimator: str, changes: Sequence[str], model: str = "untied"
) -> Recipe:
    """Load the tiny recipe with an advantage. model: a folder of the workspace."""
    model = f"actor_rollout_ref.model.path={workspace / model}"
    name = f"algorithm.adv_estimator={estimator}"
    return load(workspace, model, name, *SETTINGS, *changes).recipe


def record_gradients(engine: Any) -> list[dict[str, torch.Tensor]]:
    """Return a list that gets the gradients of each optimizer step of an engine."""
    gradients: list[dict[str, torch.Tensor]] = []

    def record(*_: Any) -> None:
        parameters = engine.module.named_parameters()
        trained = {name: weight.grad for name, weight in parameters if weight.grad is not None}
        gradients.append({name: grad.full_tensor().clone() for name, grad in trained.items()})

    engine.optimizer.register_step_pre_hook(record)
    return gradients


def run_actor(recipe: Recipe, is_fused: bool = False) -> Step:
    """Run a step of a new actor. is_fused: value of model.use_fused_kernels."""
    config = recipe.for_verl().actor_rollout_ref
    config.model.use_fused_kernels = is_fused
    torch.manual_seed(0)  # of an adapter
    actor: Any = ActorRolloutRefWorker(config=config, role="actor")
    actor.init_model()
    training.set_policy_loss(actor, recipe)
    gradients = record_gradients(actor.actor.engine)
    batch = training.build_batch(make_groups(), 1, recipe.rollout.temperature)
    mask = batch.batch["response_mask"]  # [B, R]
    outputs = training.compute_log_probs(actor, batch, recipe)
    batch.batch["old_log_probs"] = outputs["log_probs"] - 0.1
    batch.batch["advantages"] = torch.linspace(-1, 1, len(mask))[:, None] * mask
    metrics = training.update_actor(actor, batch, recipe)
    masked = {name: values * mask for name, values in outputs.items()}
    return Step(masked, metrics["actor/loss"], gradients)


def compare_steps(kit: Step, verl: Step) -> None:
    """Check that two steps are equal up to rounding."""
    for name, values in kit.outputs.items():
        expected = verl.outputs[name]
        difference = float((values - expected).abs().max() / expected.abs().max())
        print(name, difference)
        assert difference < BOUND, name
    print("loss", kit.loss, verl.loss)
    assert abs(kit.loss - verl.loss) < BOUND  # the terms of its mean are about 1
    assert len(kit.gradients) == 2
    for gradients, expected_gradients in zip(kit.gradients, verl.gradients, strict=True):
        assert gradients.keys() == expected_gradients.keys() and len(gradients) >= 20
        for name, gradient in gradients.items():
            expected = expected_gradients[name]
            difference = float((gradient - expected).norm())
            print(name, difference, float(expected.norm()))
            assert difference <= BOUND * float(expected.norm()), name
