"""The report page in a browser: the table, the charts, the tokens, and the size of the screen.

`make soak` runs this file. test_report_page.py needs no browser.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from lab.report import report_page
from lab.run_folder import RunFolder
from tests.helpers.models import make_model
from tests.helpers.runs import write_synthetic_run

pytestmark = pytest.mark.soak
COUNT_ROWS = "document.querySelectorAll('#episodes > tbody > tr').length"  # JavaScript
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


# --- the page in a browser -----------------------------------------------------------------------


def test_an_episode_opens_with_its_tokens_colored(chromium, large_page):
    with open_page(chromium, large_page, viewport={"width": 1400, "height": 1000}) as page:
        search = page.locator("#episodes_wrapper input[type=search]")
        search.fill("what is 11 plus 611 in step_7")
        row = page.locator("#episodes > tbody > tr")
        page.wait_for_function(f"{COUNT_ROWS} == 1")  # the table searches some time after the input
        row.click()
        episode = page.locator(".open")
        text = episode.inner_text()
        assert "look(" in text
        assert "seen <b>611</b>" in text
        assert "the answer to 611" in text

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
