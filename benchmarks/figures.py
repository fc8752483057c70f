"""Save a picture of the documentation twice: for light pages, and for dark ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
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
