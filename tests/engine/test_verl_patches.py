"""Tests of the patches of verl and torch that each process of verl imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.distributed import initialize_global_process_group_ray

from kit.engine.verl_patches import TIMEOUT_VARIABLE

CPU = torch.device("cpu")


@pytest.fixture
def start_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that creates the group of one rank, as verl's TrainingWorker does."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/store")
    yield lambda: initialize_global_process_group_ray(timeout_second=None)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def read_timeout(group: distributed.ProcessGroup) -> float:
    """The timeout of a group's collective operations on CPU tensors, in seconds."""
    return group._get_backend(CPU).options._timeout.total_seconds()


@pytest.mark.parametrize(("seconds", "expected"), [("5400", 5400), (None, 1800)])
def test_each_group_of_a_rank_has_the_timeout_of_the_recipe(
    start_group, monkeypatch, seconds, expected
):
    """That is the group that verl creates, and those of FSDP and Ulysses."""
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    if seconds:
        monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    start_group()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
    groups = [distributed.group.WORLD, distributed.new_group([0]), mesh["sp"].get_group()]
    assert [read_timeout(group) for group in groups] == [expected] * 3
