"""Test doubles of verl's worker groups, which record each batch, and episodes for them.

The outputs of RecordingGroup depend only on the token ids, so a test can compute each expected
number.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu

import training
from kit.data.episode import Episode, TurnSpan
from kit.recipe.recipe import Recipe
from tests.helpers.recipes import load

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
FUSED = [f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=1"]  # one optimizer step a batch
# The output of a token is this factor times its id.
FACTORS = {"log_probs": -0.01, "entropy": 0.02, "values": 0.03, "sum_pi_squared": 0.04}
REFERENCE_FACTOR = 10  # the outputs of the reference are larger by this factor


class Pending:
    """A result that is fetched by `get`, as verl's critic returns it."""

    def __init__(self, output: TensorDict):
        self.output = output

    def get(self) -> TensorDict:
        return self.output


class RecordingGroup:
    """A worker group that records each batch, with the name of the method."""

    def __init__(self, metrics: dict[str, Any] | None = None):
        self.calls: list[tuple[str, TensorDict]] = []
        self.metrics = metrics or {}

    @property
    def data(self) -> TensorDict:
        return self.calls[-1][1]

    def compute_log_prob(self, data):
        return self.infer("compute_log_prob", data, 1)

    def compute_ref_log_prob(self, data):
        return self.infer("compute_ref_log_prob", data, REFERENCE_FACTOR)

    def infer_batch(self, data):
        return Pending(self.infer("infer_batch", data, 1))

    def update_actor(self, data):
        return self.update("update_actor", data)

    def train_mini_batch(self, data):
        return Pending(self.update("train_mini_batch", data))

    def infer(self, method, data, times):
        self.calls.append((method, data))
        ids = data["input_ids"]
        outputs = {}
        for name, factor in FACTORS.items():
            numbers = times * factor * ids.values().double()
            outputs[name] = torch.nested.nested_tensor_from_jagged(numbers, offsets=ids.offsets())
        return TensorDict(outputs, batch_size=len(data))

    def update(self, method, data):
        self.calls.append((method, data))
        output = TensorDict({}, batch_size=[])
        tu.assign_non_tensor_data(output, "metrics", copy.copy(self.metrics))
        return output


def two_rank_recipe(workspace: Path) -> Recipe:
    """Return the tiny recipe on two ranks: 4 prompts per batch, 2 per mini-batch, 2 epochs."""
    changes = [
        "data.train_batch_size=4",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.data_loader_seed=7",
    ]
    return load(workspace, *changes).recipe


def make_episode(
    prompt, response, mask=None, turns=None, reward=1.0, group="a", **fields
) -> Episode:
    """Make an episode. By default it has one turn, and all of its tokens are sampled."""
    mask = mask or [1] * len(response)
    turns = [TurnSpan(0, len(response), 1)] if turns is None else turns
    log_probs = [-0.5] * len(response)
    return Episode(
        "r", group, "s", prompt, response, mask, log_probs, turns, reward=reward, **fields
    )


def seven_episodes() -> list[Episode]:
    """Make episodes of various lengths. The fourth, with ids from 40, has no token to train on."""
    return [
        make_episode([10], [11, 12, 13], group="a"),
        make_episode([20, 21], [22], group="a"),
        make_episode([30], [31, 32], group="b"),
        make_episode([40], [41, 42], mask=[0, 0], group="b"),
        make_episode([50, 51], [52, 53, 54, 55], group="c"),
        make_episode([60], [61], group="c"),
        make_episode([70], [71, 72], group="d"),
    ]


def make_batch(episodes) -> DataProto:
    """Build a batch of episodes with pad id 3 and temperature 0.7."""
    return training.build_batch(episodes, 3, 0.7)


def make_update_batch(episodes) -> DataProto:
    """Make a batch for an update. The advantage of a row is its position, counted from 1."""
    batch = make_batch(episodes)
    shape = batch.batch["responses"].shape
    batch.batch["advantages"] = torch.arange(1.0, len(episodes) + 1)[:, None].expand(shape).clone()
    batch.batch["old_log_probs"] = torch.full(shape, -0.25)
    return batch


def rows_of(data: TensorDict, name: str = "input_ids") -> list[list[int]]:
    """Return the rows of a packed tensor."""
    return [row.tolist() for row in data[name].unbind()]


def sent_rows(data: TensorDict) -> list[int]:
    """Return the row number of each row of an update, counted from 1; 0 for padding.

    make_update_batch writes it into the advantages.
    """
    return data["advantages"][:, 0].int().tolist()


def compute_outputs(episodes, factor: float) -> list[list[float]]:
    """Return what RecordingGroup outputs at the position before each response token, padded."""
    width = max(len(e.response_ids) for e in episodes)
    expected = []
    for e in episodes:
        before = [e.prompt_ids[-1], *e.response_ids[:-1]]
        expected.append([factor * i for i in before] + [0.0] * (width - len(before)))
    return expected


def is_close(actual: torch.Tensor, expected: Any) -> bool:
    """Return whether a float32 tensor has the expected shape and values, up to rounding."""
    expected = torch.as_tensor(expected, dtype=torch.float32)
    return (
        actual.dtype == torch.float32
        and actual.shape == expected.shape
        and torch.allclose(actual, expected, atol=1e-6)
    )
