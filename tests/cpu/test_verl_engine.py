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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

import training
from kit.run.workers import make_value_model_config
from tests.helpers.architectures import VARIABLES
from tests.helpers.engine_steps import (
    Step,
    compare_steps,
    load_recipe,
    make_groups,
    record_gradients,
    run_actor,
)

PADDED = [
    f"{section}.model.use_remove_padding=false" for section in ("actor_rollout_ref", "critic")
]


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


def compare_engines(_: int, workspace: Path) -> None:
    """Compare the steps of verl's engines, on padded and packed rows, with those of kit/cpu.

    Runs in its own process.
    """
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    # torch's own function: the one of kit/cpu/platform.py imports cpu_engine.py
    torch.distributed.distributed_c10d.init_process_group("gloo", store=store, rank=0, world_size=1)
    sdpa = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    # the estimator that needs all outputs of the forward pass
    load = functools.partial(load_recipe, workspace, "optimal_token_baseline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_ENGINE_DEVICE", "cuda")  # verl's engines are registered for GPUs only
        actors = [run_actor(load(changes)) for changes in ([sdpa, *PADDED], [sdpa])]
        critics = [run_critic(workspace, changes) for changes in ([sdpa, *PADDED], [sdpa])]
    assert "kit.cpu.cpu_engine" not in sys.modules
    importlib.import_module("kit.cpu.cpu_engine")
    kit = run_actor(load([]))
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
