"""Draw the pictures of the documentation: curves with a range, for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLES = {"": "default", "_dark": "dark_background"}  # suffix of the file's name: matplotlib style


def save_light_and_dark(draw: Callable[[], Figure], out: Path) -> None:
    """Draw a figure in two styles, and save it as `out` and as `out` with the suffix _dark.

    The dark picture is transparent, because the backgrounds of dark pages differ.
    """
    matplotlib.use("Agg")
    for suffix, style in STYLES.items():
        with plt.style.context(style):
            figure = draw()
            path = out.with_stem(f"{out.stem}{suffix}")
            figure.savefig(path, dpi=110, transparent=bool(suffix))
            plt.close(figure)


def draw_range(axis: Axes, curves: list[pd.Series], color: str) -> pd.Series:
    """Draw the mean and the range of some curves, at the steps that all of them have -> the mean.

    curves: values by step.
    """
    table = pd.concat(curves, axis=1).dropna()
    mean = table.mean(axis=1)
    axis.fill_between(
        table.index, table.min(axis=1), table.max(axis=1), alpha=0.25, color=color, lw=0
    )
    axis.plot(table.index, mean, color=color, lw=1.5)
    return mean
