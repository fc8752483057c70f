"""Tests of the learning rate of each training step, with verl's optimizer and scheduler."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.workers.config import FSDPOptimizerConfig, McoreOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from kit.config.schedule import compute_factor, compute_learning_rate
from kit.rollout.worker_patches import POSITION, make_train_batch
from tests.helpers.recipes import metrics_of
from tests.helpers.runs import LiveRun

pytestmark = [  # of torch: these steps have no gradient; of verl: warmup_style is an old name
    pytest.mark.filterwarnings("ignore:Detected call of:UserWarning"),
    pytest.mark.filterwarnings("ignore:.warmup_style:DeprecationWarning"),
]
LR = 0.25
OPTIM = "actor_rollout_ref.actor.optim"
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant, warm-up": {"lr_warmup_steps": 3},
    "constant, warm-up by ratio": {"lr_warmup_steps_ratio": 0.5},
    "constant, longer warm-up than run": {"lr_warmup_steps": 50},
    "negative warm-up": {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.3},
    "cosine": {"lr_scheduler_type": "cosine"},
    "cosine, warm-up": {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2},
    "cosine, warm-up by ratio": {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.25},
    "cosine to a tenth": {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
    "cosine, min_lr_ratio of null": {"lr_scheduler_type": "cosine", "min_lr_ratio": None},
    "two cycles": {"lr_scheduler_type": "cosine", "num_cycles": 2.0, "lr_warmup_steps": 1},
    "steps from 1": {
        "lr_scheduler_type": "cosine",
        "zero_indexed_step": False,
        "lr_warmup_steps": 3,
    },
    "warmup_style": {"warmup_style": "cosine", "min_lr_ratio": 0.2},
}
# (steps of the first run, steps that it trains, steps of the resumed run)
RESUMES = {
    "fresh": (8, 8, 8),
    "resumed": (8, 3, 8),
    "resumed in the warm-up": (8, 1, 8),
    "resumed longer": (8, 3, 14),
    "resumed shorter": (14, 4, 8),
    "finished, then longer": (8, 8, 16),
}


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
        """Take the optimizer steps of a training step -> the rate that verl reports for it."""
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
        """The state that verl's FSDPCheckpointManager saves."""
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


def expected_factor(total: int, settings: dict[str, Any], position: int) -> float:
    """The schedule, written from verl's documentation: position 0 is the first step."""
    warmup = settings.get("lr_warmup_steps", -1)
    if warmup <= 0:
        warmup = int(settings.get("lr_warmup_steps_ratio", 0.0) * total)
    if position < warmup:
        return (position + 1) / warmup
    kind = settings.get("warmup_style") or settings.get("lr_scheduler_type", "constant")
    if kind == "constant":
        return 1.0
    offset = 0 if settings.get("zero_indexed_step", True) else 1
    progress = (position + offset - warmup) / max(1, total - warmup)
    low = settings.get("min_lr_ratio") or 0.0
    wave = 0.5 * (1 + math.cos(2 * math.pi * settings.get("num_cycles", 0.5) * progress))
    return max(low, low + (1 - low) * wave)


@pytest.mark.parametrize("sends_position", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("resume", RESUMES)
def test_each_step_has_the_rate_of_its_schedule_and_reports_it(schedule, resume, sends_position):
    settings = SCHEDULES[schedule]
    first_total, trained, total = RESUMES[resume]
    first = Worker(first_total, settings)
    reported = [first.train_step(k if sends_position else None) for k in range(trained)]
    second = Worker(total, settings)
    second.load(first.save())
    resumed = range(trained, total)
    reported += [second.train_step(k if sends_position else None) for k in resumed]
    expected = [LR * expected_factor(first_total, settings, k) for k in range(trained)]
    expected += [LR * expected_factor(total, settings, k) for k in resumed]
    assert reported == pytest.approx(expected, abs=1e-12)
    # both optimizer steps of a training step have its rate
    used = [*first.rates, *second.rates]
    assert used == pytest.approx([rate for rate in expected for _ in range(2)], abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("contents", [[], ["optimizer"], ["lr_scheduler"]])
def test_the_rate_does_not_depend_on_what_a_checkpoint_restores(schedule, contents):
    """load_contents may leave out the optimizer or the scheduler. The recipe's lr may change."""
    settings = SCHEDULES[schedule]
    first = Worker(8, settings)
    for k in range(3):
        first.train_step(k)
    second = Worker(8, settings)
    second.optimizer_config = FSDPOptimizerConfig(lr=1.0, total_training_steps=8, **settings)
    second.load({name: first.save()[name] for name in contents})
    assert second.train_step(3) == pytest.approx(expected_factor(8, settings, 3), abs=1e-12)


def test_a_step_without_an_update_does_not_delay_the_schedule():
    worker = Worker(8, SCHEDULES["cosine"])
    worker.train_step(0)
    assert worker.train_step(5) == pytest.approx(LR * expected_factor(8, SCHEDULES["cosine"], 5))


def test_the_rate_of_another_training_engine_stays_as_verl_sets_it():
    worker = SimpleNamespace(optimizer_config=McoreOptimizerConfig(lr=LR))
    output = tu.get_tensordict({}, {"metrics": {"lr": 7.0}})
    result = make_train_batch(lambda self, data: output)(worker, TensorDict({}, []))
    assert tu.get(result, "metrics") == {"lr": 7.0}


def test_a_rank_that_returns_nothing_has_the_rate_too():
    worker = Worker(8, SCHEDULES["cosine"])
    data = tu.get_tensordict({}, {POSITION: 4})
    assert make_train_batch(lambda self, data: None)(worker, data) is None
    rate = worker.engine.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(LR * expected_factor(8, SCHEDULES["cosine"], 4))


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


@pytest.mark.soak
def test_a_run_that_is_trained_longer_has_the_rates_of_the_new_schedule(workspace):
    """The run ends after three steps. Then it is resumed with seven. It has a critic, too."""
    changes = [
        f"{OPTIM}.lr={LR}",
        f"{OPTIM}.lr_scheduler_type=cosine",
        f"{OPTIM}.lr_warmup_steps=2",
    ]
    changes += ["critic.optim.lr=0.125", "critic.optim.lr_warmup_steps_ratio=0.5"]
    changes += ["trainer.critic_warmup=1", "env.val_files=[]"]
    for steps in (3, 7):
        total = f"trainer.total_training_steps={steps}"
        with LiveRun(workspace, "rates", *changes, total, files=("--config", "ppo")) as run:
            run.process.wait(timeout=300)
            run.end(0)
    lines = {m["step"]: m for m in metrics_of(run.folder) if "critic/lr" in m}
    cosine = SCHEDULES["cosine, warm-up"]
    for step in range(1, 8):
        total = 3 if step <= 3 else 7
        factor = expected_factor(total, {"lr_warmup_steps_ratio": 0.5}, step - 1)
        assert lines[step]["critic/lr"] == pytest.approx(0.125 * factor)
        if step > 1:
            factor = expected_factor(total, cosine, step - 2)
            assert lines[step]["actor/lr"] == pytest.approx(LR * factor)
