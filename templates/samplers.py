"""Samplers: which rows make the next batch. A recipe names one:

    env: {sampler: templates/samplers.py:by_pass_rate}

Copy one into a file of your own, change it, name that. function(tasks, size, batch, seed, pass_rates) -> `size` tasks;
of its arguments alone, so that a resumed run draws what it would have drawn.
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
    """A curriculum: rows by chance, without repetition, as p (1 - p) + floor of their recent pass rate p, so what is
    solved half of the time comes most often. Rows not seen yet count as half solved. Files with weights keep them.

    pass_rates: row_id -> p, an average over the row's last groups in which each counts twice the one before.
    """
    quotas = env.quotas(tasks, size) if any(t.weight for t in tasks) else {None: size}
    random, picked = np.random.default_rng([seed, batch]), []
    for file, quota in quotas.items():
        rows = [t for t in tasks if file is None or t.file == file]
        rates = np.array([pass_rates.get(t.row_id, 0.5) for t in rows])
        chances = rates * (1 - rates) + floor
        whole, rest = divmod(
            quota, len(rows)
        )  # a quota of more rows than there are takes all, and then some
        some = random.choice(len(rows), rest, replace=False, p=chances / chances.sum())
        picked += rows * whole + [rows[i] for i in some]
    return picked
