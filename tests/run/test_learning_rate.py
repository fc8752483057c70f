"""Tests of the learning rate of each training step, with verl's optimizer and scheduler."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from kit.engine.worker_patches import POSITION, make_train_batch
from kit.recipe.schedule import compute_factor, compute_learning_rate

# of torch: these steps have no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
LR = 0.25
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant, warm-up by ratio": {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.5},
    "constant, longer warm-up than run": {"lr_warmup_steps": 50},
    "cosine": {"lr_scheduler_type": "cosine", "min_lr_ratio": None},
    "cosine, warm-up": {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1},
    "two cycles": {"lr_scheduler_type": "cosine", "num_cycles": 2.0, "zero_indexed_step": False},
}
# (steps of the first run, steps that it trains, steps of the resumed run)
RESUMES = [(8, 8, 8), (8, 3, 14), (14, 1, 8), (8, 8, 16)]


class Worker:
    """A TrainingWorker on a tiny module, with the methods of verl that set the learning rate."""

    def __init__(self, total: int, settings: dict[str, Any]):
        self.optimizer_config = FSDPOptimizerConfig(lr=LR, total_training_steps=total, **settings)
        self.engine = build_engine(self.optimizer_config)
        self.rates: list[float] = []  # of each optimizer step

    def train_batch(self, data: TensorDict) -> TensorDict:
        self.rates.append(self.engine.optimizer.param_groups[0]["lr"])
        metrics = {"grad_norm": 1.0}
        if tu.get(data, "update_lr_scheduler"):
            metrics["lr"] = FSDPEngine.lr_scheduler_step(self.engine)
        return tu.get_tensordict({}, {"metrics": metrics})

    def train_step(self, position: int | None, mini_batches: int = 2) -> float:
        """Take the optimizer steps of a training step, and return the rate that verl reports."""
        for index in range(mini_batches):
            data = tu.get_tensordict({}, {"update_lr_scheduler": index == mini_batches - 1})
            if position is not None:
                tu.assign_non_tensor(data, **{POSITION: position})
            train_batch: Any = make_train_batch(Worker.train_batch)  # type: ignore[arg-type]
            output = train_batch(self, data)
            metrics = tu.get(output, "metrics")
            assert ("lr" in metrics) == (index == mini_batches - 1)
        return float(metrics["lr"])

    def save(self) -> dict[str, Any]:
        """Return the state that verl's FSDPCheckpointManager saves."""
        return {
            "optimizer": self.engine.optimizer.state_dict(),
            "lr_scheduler": self.engine.lr_scheduler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            getattr(self.engine, name).load_state_dict(part)


def build_engine(optim: FSDPOptimizerConfig) -> Any:
    """Build the optimizer and the scheduler as verl's `reset` does."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2).parameters(), optim)
    builder: Any = SimpleNamespace(optimizer_config=optim, rank=1)
    scheduler = FSDPEngine._build_lr_scheduler(builder, optimizer)
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("resume", RESUMES)
def test_each_step_has_the_rate_of_its_schedule_and_reports_it(schedule, resume):
    """Also if nothing sends the position, as in the runs of eight steps."""
    settings = SCHEDULES[schedule]
    first_total, trained, total = resume
    first = Worker(first_total, settings)
    reported = [first.train_step(k) for k in range(trained)]
    second = Worker(total, settings)
    if total < 16:  # the longest starts a new optimizer
        second.load(first.save())
    resumed = range(trained, total)
    reported += [second.train_step(None if total == 8 else k) for k in resumed]
    expected = [LR * compute_factor(first.optimizer_config, k) for k in range(trained)]
    expected += [LR * compute_factor(second.optimizer_config, k) for k in resumed]
    assert reported == pytest.approx(expected, abs=1e-12)
    # both optimizer steps of a training step have its rate
    used = [*first.rates, *second.rates]
    assert used == pytest.approx([rate for rate in expected for _ in range(2)], abs=1e-12)


def test_an_optimizer_setting_of_lr_replaces_that_of_the_recipe():
    """verl passes override_optimizer_config to the optimizer after `lr`."""
    optim = FSDPOptimizerConfig(lr=LR, override_optimizer_config={"lr": 0.5})
    assert compute_learning_rate(optim, 0) == 0.5


@given(
    total=st.integers(1, 60),
    warmup=st.integers(0, 20),
    low=st.floats(0, 1),
    cycles=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    is_cosine=st.booleans(),
    is_zero_indexed=st.booleans(),
)
def test_after_the_warm_up_the_values_are_those_of_verls_functions(
    total, warmup, low, cycles, is_cosine, is_zero_indexed
):
    settings = {"lr_warmup_steps": warmup, "min_lr_ratio": low, "num_cycles": cycles}
    settings |= {"zero_indexed_step": is_zero_indexed}
    settings |= {"lr_scheduler_type": "cosine" if is_cosine else "constant"}
    optim = FSDPOptimizerConfig(lr=1.0, total_training_steps=total, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if is_cosine:
        scheduler = verl_F.get_cosine_schedule_with_warmup(
            optimizer, warmup, total, low, cycles, zero_indexed_step=is_zero_indexed
        )
    else:
        scheduler = verl_F.get_constant_schedule_with_warmup(optimizer, warmup)
    factors = [compute_factor(optim, position) for position in range(total)]
    [verl_factor] = scheduler.lr_lambdas
    for position in range(warmup, total):
        assert factors[position] == pytest.approx(verl_factor(position), abs=1e-9)
    ramp = factors[: min(warmup, total)]
    assert all(0 < a < b <= 1 for a, b in itertools.pairwise([*ramp])) and min(ramp, default=1) > 0
