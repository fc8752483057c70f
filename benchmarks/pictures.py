"""Make the pictures of report.html in docs/: screenshots of a run's report in Chromium.

    python benchmarks/pictures.py runs/math_cpu --out docs

The run must have a report.html. Playwright starts the Chromium of the system.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="path of Chromium")
    args = parser.parse_args()
    address = (args.run / "report.html").resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=CHROMIUM)
        wide = open_report(browser.new_page(viewport={"width": 1280, "height": 900}), address)
        wide.screenshot(path=args.out / "report.png")
        wide.get_by_role("button", name="worst of each step").click()
        wide.locator("#episodes > tbody > tr").first.click()
        wide.locator(".open").get_by_role("button", name="log-prob").click()
        wide.locator("#episodes").screenshot(path=args.out / "report_episodes.png")
        size = {"width": 390, "height": 780}
        phone = open_report(
            browser.new_page(viewport=size, color_scheme="dark", device_scale_factor=1.5), address
        )
        phone.screenshot(path=args.out / "report_phone.png")
        browser.close()


def open_report(page: Page, address: str) -> Page:
    """Load a report, and wait until its visible charts are drawn. Return the page."""
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(2000)
    return page


if __name__ == "__main__":
    main()
