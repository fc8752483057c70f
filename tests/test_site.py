"""Tests the documentation site of `make site`, also in a browser. `make docs` runs this file.

MkDocs checks links, anchors and the navigation when it builds the site.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urljoin

import pytest
from markdown_it import MarkdownIt

from tests.helpers.recipes import ROOT

pytestmark = pytest.mark.docs
PHONE = {"width": 390, "height": 844}
# {token of markdown-it: HTML tag}. A page must have equal numbers of both.
BLOCKS = {"table_open": "<table", "list_item_open": "<li", "tr_open": "<tr"}


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site, and return its folder."""
    done = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return ROOT / "site"


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def open_page(browser, url: str, **settings):
    """Open a page. An error or a request to another host fails the test."""
    page = browser.new_page(**settings)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))

    def check_request(request) -> None:
        is_local = request.url.startswith(("http://127.0.0.1", "data:", "blob:"))
        if not is_local:
            faults.append(request.url)

    page.on("request", check_request)
    page.goto(url)
    page.wait_for_load_state("networkidle")
    yield page
    page.close()
    assert faults == []


def list_pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def page_url(address: str, site: Path, path: Path) -> str:
    return urljoin(address, path.relative_to(site).as_posix().removesuffix("index.html"))


def test_lists_and_tables_are_the_same_as_on_github(site):
    """Python-Markdown needs an empty line before a list, so docs/site_hooks.py adds it."""
    parser = MarkdownIt("commonmark").enable("table")
    different = []
    for path in list_pages(site):
        name = path.parent.relative_to(site).as_posix()
        source = ROOT / "docs" / f"{name}.md"
        if not source.is_file() or name == "api":  # made from docstrings
            continue
        expected = Counter(token.type for token in parser.parse(source.read_text()))
        html = path.read_text()
        article = html[html.index("<article") : html.index("</article")]
        for token, tag in BLOCKS.items():
            count = len(re.findall(rf"{tag}\b", article))
            if count != expected[token]:
                different.append(f"{name}: {expected[token]} {token}, {count} {tag}>")
    assert different == []


def test_llms_txt_lists_all_pages(site):
    index = (site / "llms.txt").read_text()
    full = (site / "llms-full.txt").read_text()
    pages = re.findall(r"^- \[.+?\]\((.+?)\)", index, re.MULTILINE)
    assert len(pages) == len(list_pages(site))
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if f"<!-- {page} -->" not in full] == []
    assert "`compute_advantages(" in full  # the API page has the docstrings


def test_a_phone_has_the_navigation_and_no_wide_page(chromium, site, address):
    wide = []
    with open_page(chromium, address, viewport=PHONE) as page:
        for path in list_pages(site):
            page.goto(page_url(address, site, path))
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                wide.append(f"{path.parent.name}: {width}")
        page.goto(address)
        page.locator("label[for=__drawer].md-header__button").click()
        drawer = page.locator(".md-nav--primary")
        drawer.locator(".md-nav__title:visible", has_text="Start").click()  # back to all sections
        drawer.get_by_text("Train and operate", exact=True).first.click()
        drawer.get_by_role("link", name="Troubleshooting", exact=True).click()
        page.wait_for_url("**/troubleshooting/")
    assert wide == []
