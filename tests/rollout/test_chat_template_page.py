"""The table of docs/chat_templates.md is that of the templates in the installed packages."""

from __future__ import annotations

import sys

from tests.helpers.recipes import ROOT


def test_the_table_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import chat_templates

    del sys.modules["chat_templates"]
    page = chat_templates.PAGE.read_text(encoding="utf-8")
    assert page == chat_templates.render_page(), "run .venv/bin/python benchmarks/chat_templates.py"
    rows = [
        line for line in page.splitlines() if line.startswith(("| trl/", "| axolotl/", "| vllm/"))
    ]
    assert len(rows) >= 100
