"""The run card: README.md of an export, with what it takes to judge and to repeat the run."""

from __future__ import annotations

from pathlib import Path

from kit.config.recipe import Recipe
from kit.features import Feature


class RunCard(Feature):
    """README.md in the export of a run, in the form of Hugging Face's model cards."""

    def write_export(self, recipe: Recipe, folder: Path) -> None:
        """Write the card. folder: of the run."""
        from lab.run_card import card

        card.write_card(recipe, folder)
