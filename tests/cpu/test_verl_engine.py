"""A step of actor and critic by the engines of kit/cpu and by verl's own, which nothing replaces.

They are the workers of a run (verl's ActorRolloutRefWorker and TrainingWorker, FSDP2, fp32), in a
process that imports kit/cpu/cpu_engine.py only after verl's engines have run. From
kit/cpu/platform.py they get a device "cpu". On a CPU, verl's engines compute:

    attention      torch's sdpa instead of flash attention: of padded rows with a mask
                   (use_remove_padding=false), and of packed rows, as on a GPU, where transformers
                   makes the mask of the position ids
    log-probs      verl's logsumexp of each row instead of flash-attn's kernel
    entropy        verl's function, which is not compiled (use_torch_compile=false)
    micro-batches  verl's, where each response has its own prompt

So this covers all that cpu_engine.py replaces. It does not cover the kernels of flash-attn, the
kernels of torch for a GPU, and bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

import training
from kit.data.episode import Episode
from kit.recipe.recipe import Recipe
from kit.run.workers import make_value_model_config
from tests.helpers.architectures import VARIABLES
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
PADDED = [
    f"{section}.model.use_remove_padding=false" for section in ("actor_rollout_ref", "critic")
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


def load_recipe(workspace: Path, estimator: str, changes: Sequence[str]) -> Recipe:
    """Load the tiny recipe with the model `untied` and an advantage."""
    model = f"actor_rollout_ref.model.path={workspace / 'untied'}"
    name = f"algorithm.adv_estimator={estimator}"
    return load(workspace, model, name, *SETTINGS, *changes).recipe


def record_gradients(engine: Any) -> list[dict[str, torch.Tensor]]:
    """Return a list that gets the gradients of each optimizer step of an engine."""
    gradients: list[dict[str, torch.Tensor]] = []

    def record(*_: Any) -> None:
        parameters = engine.module.named_parameters()
        gradients.append({name: weight.grad.full_tensor().clone() for name, weight in parameters})

    engine.optimizer.register_step_pre_hook(record)
    return gradients


def run_actor(workspace: Path, changes: Sequence[str]) -> Step:
    """Run a step of a new actor."""
    # the estimator that needs all outputs of the forward pass
    recipe = load_recipe(workspace, "optimal_token_baseline", changes)
    actor: Any = ActorRolloutRefWorker(config=recipe.for_verl().actor_rollout_ref, role="actor")
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


def run_critic(workspace: Path, changes: Sequence[str]) -> Step:
    """Run a step of a new critic."""
    recipe = load_recipe(workspace, "gae", [*changes, f"critic.model.path={workspace / 'scored'}"])
    settings = recipe.for_verl().critic
    critic: Any = TrainingWorker(config=make_value_model_config(recipe))
    critic.reset()
    critic.set_loss_fn(functools.partial(value_loss, config=omega_conf_to_dataclass(settings)))
    if changes:  # verl loads a critic with flash attention, kit/cpu/platform.py with its own
        critic.engine.module.set_attn_implementation("sdpa")
    gradients = record_gradients(critic.engine)
    batch = training.build_batch(make_groups(), 1, 1.0)
    mask = batch.batch["response_mask"]  # [B, R]
    values = training.compute_values(critic, batch, recipe)
    batch.batch["values"] = values + 0.1
    batch.batch["returns"] = torch.linspace(-1, 1, len(mask))[:, None] * mask
    metrics = training.update_critic(critic, batch, recipe)
    return Step({"values": values * mask}, metrics["critic/vf_loss"], gradients)


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
        assert gradients.keys() == expected_gradients.keys() and len(gradients) > 20
        for name, gradient in gradients.items():
            expected = expected_gradients[name]
            difference = float((gradient - expected).norm() / expected.norm())
            print(name, difference)
            assert difference < BOUND, name


def compare_engines(_: int, workspace: Path) -> None:
    """Compare the steps of verl's engines, on padded and packed rows, with those of kit/cpu.

    Runs in its own process.
    """
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    # torch's own function: the one of kit/cpu/platform.py imports cpu_engine.py
    torch.distributed.distributed_c10d.init_process_group("gloo", store=store, rank=0, world_size=1)
    sdpa = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_ENGINE_DEVICE", "cuda")  # verl's engines are registered for GPUs only
        actors = [run_actor(workspace, changes) for changes in ([sdpa, *PADDED], [sdpa])]
        critics = [run_critic(workspace, changes) for changes in ([sdpa, *PADDED], [sdpa])]
    assert "kit.cpu.cpu_engine" not in sys.modules
    importlib.import_module("kit.cpu.cpu_engine")
    kit = run_actor(workspace, [])
    assert set(kit.outputs) == {"log_probs", "entropy", "sum_pi_squared"}
    for step in actors:
        compare_steps(kit, step)
    kit = run_critic(workspace, [])
    for step in critics:
        compare_steps(kit, step)


@pytest.mark.timeout(600)  # a new process imports verl, and makes six workers
def test_the_engines_of_a_cpu_compute_the_step_of_verls_engines(workspace, monkeypatch):
    """Log-probs, entropies, sums of squared probabilities, values, losses and all gradients."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    torch.multiprocessing.spawn(compare_engines, (workspace,))
