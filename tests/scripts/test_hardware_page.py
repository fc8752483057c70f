"""The tables of docs/hardware.md."""

from __future__ import annotations

import pytest

from extras.preflight import memory
from scripts import hardware_page


def test_the_page_has_the_tables_that_the_command_writes():
    page = hardware_page.PAGE.read_text()
    assert hardware_page.replace_tables(page) == page, "run python -m scripts.hardware_page"


def test_the_shapes_have_the_published_numbers_of_parameters():
    counts = [0.1345e9, 0.494e9, 1.544e9, 4.022e9, 8.191e9]  # of the model cards
    for name, count in zip(hardware_page.MODELS, counts, strict=True):
        config = hardware_page.make_config(name)
        assert memory.count_parameters(config) == pytest.approx(count, rel=2e-3)
