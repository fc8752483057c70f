"""Samplers: choose the rows of the next batch.

    env: {sampler: templates/samplers.py:by_pass_rate}

To use your own: copy the function to your file, change it, and name it in the recipe. It is called
as function(tasks, size, batch, seed, pass_rates) -> a list of `size` of these tasks. The result
must depend on the arguments alone. Then a resumed run draws the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import env


def by_pass_rate(
    tasks: Sequence[env.Task],
    size: int,
    batch: int,
    seed: int,
    pass_rates: Mapping[str, float],
    floor: float = 0.05,
) -> list[env.Task]:
    """Draw rows with a probability that is highest if half of the responses are right.

    This is a curriculum: the probability of a row is proportional to p (1 - p) + floor, where p is
    its recent pass rate. A new row has p = 0.5. A row is in a batch twice only if there are fewer
    rows than `size`. If files have weights, each file gets its quota.

    pass_rates: {row_id: p}. In p, each batch counts twice as much as the batch before it.
    """
    rng = np.random.default_rng([seed, batch])
    if not any(task.weight for task in tasks):
        return draw(tasks, size, pass_rates, floor, rng)
    drawn: list[env.Task] = []
    for file, quota in env.compute_quotas(tasks, size, batch * size).items():
        file_tasks = [task for task in tasks if task.file == file]
        drawn += draw(file_tasks, quota, pass_rates, floor, rng)
    return drawn


def draw(
    tasks: Sequence[env.Task],
    size: int,
    pass_rates: Mapping[str, float],
    floor: float,
    rng: np.random.Generator,
) -> list[env.Task]:
    """Draw `size` tasks by their pass rates."""
    rates = np.array([pass_rates.get(task.row_id, 0.5) for task in tasks])
    scores = rates * (1 - rates) + floor
    # If there are fewer tasks than `size`, take all of them first.
    repeats, rest = divmod(size, len(tasks))
    indices = rng.choice(len(tasks), rest, replace=False, p=scores / scores.sum())
    return [*tasks] * repeats + [tasks[index] for index in indices]
