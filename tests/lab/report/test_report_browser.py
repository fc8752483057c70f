"""The report page in a browser: the table, the charts, the tokens, and the size of the screen.

`make soak` runs this file. test_report_page.py needs no browser.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from lab.report import report_page
from lab.run_folder import RunFolder
from tests.helpers.models import make_model
from tests.helpers.runs import write_synthetic_run

pytestmark = pytest.mark.soak
# JavaScript: the texts of the cells of each row in the table
ROWS = """[...document.querySelectorAll('#episodes > tbody > tr')].map(
    row => [...row.cells].map(cell => cell.innerText))"""
BACKGROUND = "node => getComputedStyle(node).backgroundColor"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


@pytest.fixture(scope="module")
def large_page(tmp_path_factory, model) -> Path:
    """The page of a synthetic run of 20,000 episodes."""
    folder = tmp_path_factory.mktemp("report") / "runs" / "large"
    write_synthetic_run(folder, 18, 1000, model)
    return report_page.write_page([RunFolder(folder)], folder / "report.html")


# --- a browser -----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_page(browser, path: Path, **settings):
    """Open a page from its file, and wait for it. An error or a network request fails the test."""
    page = browser.new_page(**settings)
    problems: list[str] = []

    def check_message(message) -> None:
        if message.type == "error":
            problems.append(message.text)

    def check_request(request) -> None:
        if request.url.startswith("http"):
            problems.append(request.url)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", check_message)
    page.on("request", check_request)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=30_000)
    yield page
    title = page.title()
    page.close()
    assert not problems and title != "1"  # SCRIPT would set the title to 1


def wait_for_rows(page, condition=lambda rows: True) -> list[list[str]]:
    """Wait until the rows of the table meet a condition, and return the texts of their cells.

    The table sorts and searches some time after the input.
    """
    deadline = time.monotonic() + 20
    rows = page.evaluate(ROWS)
    while not condition(rows):
        assert time.monotonic() < deadline, rows
        page.wait_for_timeout(50)
        rows = page.evaluate(ROWS)
    return rows


def wait_for_column(page, column: int, texts: list[str]) -> None:
    """Wait until a column of the table has these texts."""

    def has_texts(rows) -> bool:
        return [cells[column] for cells in rows] == texts

    wait_for_rows(page, has_texts)


def get_column_titles(page) -> list[str]:
    return page.locator("#episodes > thead .dt-column-title").all_inner_texts()


# --- the page in a browser -----------------------------------------------------------------------


def test_an_episode_opens_with_its_tokens_colored(chromium, large_page):
    with open_page(chromium, large_page, viewport={"width": 1400, "height": 1000}) as page:
        file = get_column_titles(page).index("file")
        search = page.locator("#episodes_wrapper input[type=search]")
        search.fill("what is 11 plus 611 in step_7")
        wait_for_column(page, file, ["step_7"])
        page.locator("#episodes > tbody > tr").first.click()
        episode = page.locator(".open")
        text = episode.inner_text()
        assert "look(" in text
        assert "seen <b>611</b>" in text
        assert "the answer to 611" in text
        assert "form" not in get_column_titles(page)

        def get_shades() -> set[str]:
            return {tokens.nth(i).evaluate(BACKGROUND) for i in range(24)}

        episode.get_by_role("button", name="log-prob").click()
        tokens = episode.locator(".token")
        titles = [tokens.nth(i).get_attribute("title") for i in range(24)]
        assert tokens.count() == 24
        assert all(re.match(r"log-prob -\d", title) for title in titles)
        assert "advantage 0.111" in titles[0]
        assert len(get_shades()) > 5
        episode.get_by_role("button", name="advantage").click()
        assert len(get_shades()) == 1
