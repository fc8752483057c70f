"""Take the pictures of a run's report.html for the documentation, with Debian's Chromium.

    python benchmarks/pictures.py runs/math_cpu [--out docs] [--chromium PATH]

report.png and report_episodes.png also have a version for dark pages, with the suffix _dark.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SCHEMES = {"": "light", "_dark": "dark"}  # suffix of the file's name: color scheme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder, with report.html")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the pictures")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="path of Chromium")
    args = parser.parse_args()
    if not args.chromium:
        sys.exit("Chromium is not installed. On Debian: apt-get install chromium")
    address = (args.run / "report.html").resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=CHROMIUM)
        for suffix, scheme in SCHEMES.items():
            page = open_page(browser, address, color_scheme=scheme, width=1280, height=900)
            page.screenshot(path=args.out / f"report{suffix}.png")
            open_worst_episode(page)
            page.locator("#episodes").screenshot(path=args.out / f"report_episodes{suffix}.png")
        phone = open_page(
            browser, address, color_scheme="dark", width=390, height=780, device_scale_factor=1.5
        )
        phone.screenshot(path=args.out / "report_phone.png")
        browser.close()


def open_page(browser: Browser, address: str, width: int, height: int, **settings: Any) -> Page:
    """Open the page, and wait until what is visible is drawn."""
    page = browser.new_page(viewport={"width": width, "height": height}, **settings)
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(2000)
    return page


def open_worst_episode(page: Page) -> None:
    """Open the first of the worst training episodes, with its tokens colored by their log-prob."""
    page.get_by_role("button", name="worst of each step").click()
    page.locator("#episodes > tbody > tr", has_text="step_").first.click()
    page.locator(".open").get_by_role("button", name="log-prob").click()


if __name__ == "__main__":
    main()
