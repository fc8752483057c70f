"""Hooks of the documentation site (mkdocs.yml).

The pages are plain Markdown for a code host. These functions adapt them to Python-Markdown and to
the site, and write a copy of all pages for language models: llms.txt and llms-full.txt.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"  # excluded in mkdocs.yml: pages show these files
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
COPIES = "files"  # folder of the site for linked files from outside docs/
MERMAID = ROOT / ".venv-docs" / "mermaid.min.js"  # `make site` downloads it if npm is installed
FENCE = re.compile(r"^```.*?^```[^\n]*$\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FOLDER = "folder"  # a link to a folder, of which the site has no page: its text stays
FOLDER_LINK = re.compile(rf"\[(?P<text>[^\[\]]*)\]\({FOLDER}\)")
TABS = re.compile(r"^<!-- tabs -->\n(?P<body>.*?)^<!-- /tabs -->$\n?", re.MULTILINE | re.DOTALL)
API = re.compile(r"^<!-- api: (?P<module>\w+) -->$", re.MULTILINE)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)"\s*/?>'
    r'\s*<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)"[^>]*>\s*</picture>'
)
ALERT = re.compile(
    r"^> \[!(?P<kind>NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n(?P<body>(?:^>.*\n?)+)", re.M
)
ALERT_KINDS = {"IMPORTANT": "info", "CAUTION": "danger"}
LIST_ITEM = re.compile(r"^(?P<indent> *)(?:[-*]|\d+\.) ")

pages: dict[str, str] = {}  # Markdown of each page, as the site has it


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Use the local copy of Mermaid, if there is one. Otherwise the theme loads it from a CDN."""
    if MERMAID.is_file():
        config.extra_javascript.append("assets/mermaid.min.js")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand in the root of the repository, and files that pages link."""
    for name, uri in ROOT_PAGES.items():
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, uri, content=text))
    for page in files.documentation_pages():
        for link in LINK.finditer(outside_fences(page.content_string)):
            target = find_target(page.src_uri, link["target"])
            if target and target.is_file() and needs_copy(target):
                add_copy(files, config, target)
    if MERMAID.is_file():
        file = File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID))
        files.append(file)
    return files


def outside_fences(markdown: str) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", markdown)


def find_target(page: str, link: str) -> Path | None:
    """The file or folder of the repository that a page links; None for an address."""
    if "://" in link or link.startswith("mailto:"):
        return None
    folder = ROOT if page in ROOT_PAGES.values() else (DOCS / page).parent
    return Path(os.path.normpath(folder / link))


def needs_copy(target: Path) -> bool:
    """Whether a file is not a part of the site, so that a link to it needs a copy."""
    return not target.is_relative_to(DOCS) or target.is_relative_to(EXAMPLES)


def add_copy(files: Files, config: MkDocsConfig, target: Path) -> None:
    """Add a file from outside docs/ to the site, once."""
    uri = f"{COPIES}/{target.relative_to(ROOT).as_posix()}"
    is_page = target.relative_to(ROOT).as_posix() in ROOT_PAGES
    if not is_page and not files.get_file_from_path(uri):
        files.append(File.generated(config, uri, abs_src_path=str(target)))


# --- one page ------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page of the repository to the site."""
    uri = page.file.src_uri
    text = change_outside_fences(markdown, PICTURE.sub, write_pictures)
    text = change_outside_fences(text, LINK.sub, lambda link: write_link(uri, link))
    text = change_outside_fences(text, FOLDER_LINK.sub, lambda link: link["text"])
    pages[uri] = API.sub(lambda match: describe_module(match["module"]), text)
    text = change_outside_fences(text, ALERT.sub, write_alert)
    text = change_outside_fences(text, lambda _, part: separate_lists(part), None)
    text = TABS.sub(write_tabs, text)
    return API.sub(lambda match: f"::: {match['module']}", text)


def change_outside_fences(
    markdown: str, substitute: Callable[..., str], write: Callable[[re.Match], str] | None
) -> str:
    """Apply a substitution to all that is not in a code block."""
    parts = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts.append(substitute(write, markdown[end : fence.start()]))
        parts.append(fence[0])
        end = fence.end()
    parts.append(substitute(write, markdown[end:]))
    return "".join(parts)


def write_link(page: str, link: re.Match) -> str:
    """A link of a page, as the site has it."""
    target = find_target(page, link["target"])
    if target is None or not target.exists():
        return link[0]  # `mkdocs build --strict` reports it
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return f"]({FOLDER})"
    if name in ROOT_PAGES:
        uri = ROOT_PAGES[name]
    elif not needs_copy(target):
        uri = target.relative_to(DOCS).as_posix()
    else:
        uri = f"{COPIES}/{name}"
    relative = posixpath.relpath(uri, posixpath.dirname(page) or ".")
    return f"]({relative}{link['anchor'] or ''})"


def write_pictures(picture: re.Match) -> str:
    """Two pictures, of which the theme shows the one for its mode."""
    light = f"![{picture['alt']}]({picture['light']}#only-light)"
    return f"{light}\n![{picture['alt']}]({picture['dark']}#only-dark)"


def write_alert(alert: re.Match) -> str:
    """A note of the code host as a note of the theme."""
    lines = [line.removeprefix(">").removeprefix(" ") for line in alert["body"].splitlines()]
    kind = ALERT_KINDS.get(alert["kind"], alert["kind"].lower())
    return f"!!! {kind}\n\n" + "".join(f"    {line}\n" for line in lines)


def separate_lists(markdown: str) -> str:
    """Put an empty line before lists and tables, and indent nested items by four spaces.

    Python-Markdown requires both; GitHub requires neither.
    """
    lines: list[str] = []
    for line in markdown.split("\n"):
        item = LIST_ITEM.match(line)
        starts = bool(item and not item["indent"]) or line.startswith("| ")
        if starts and lines and lines[-1].strip() and not continues(lines[-1], line):
            lines.append("")
        if item and 0 < len(item["indent"]) < 4:
            line = f"    {line.lstrip()}"
        lines.append(line)
    return "\n".join(lines)


def continues(earlier: str, line: str) -> bool:
    """Whether a line belongs to the list or table of the line before it."""
    if line.startswith("|"):
        return earlier.startswith("|")
    return bool(LIST_ITEM.match(earlier)) or earlier.startswith(" ")


def write_tabs(tabs: re.Match) -> str:
    """Sections with `####` headings as tabs."""
    lines = []
    for line in tabs["body"].splitlines():
        if line.startswith("#### "):
            lines += [f'=== "{line.removeprefix("#### ")}"', ""]
        else:
            lines.append(f"    {line}" if line else "")
    return "\n".join(lines) + "\n"


# --- for language models -------------------------------------------------------------------------


def describe_module(name: str) -> str:
    """The public signatures and docstrings of a file, as Markdown."""
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    return "\n".join([ast.get_docstring(tree) or "", "", *describe_members(tree.body)])


def describe_members(body: list[ast.stmt]) -> Iterator[str]:
    """The lines for the functions and classes of a module or a class."""
    for node in body:
        is_class = isinstance(node, ast.ClassDef)
        if not is_class and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        signature = node.name if is_class else f"{node.name}({ast.unparse(node.args)})"
        yield f"- `{signature}`: {' '.join((ast.get_docstring(node) or '').split())}"
        if is_class:
            yield from describe_members(node.body)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, llms-full.txt, and the Markdown of each page next to the site's page."""
    site = Path(config.site_dir)
    for uri, text in pages.items():
        path = site / uri
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    index = [head]
    full = [head]
    for section in config.nav:
        for title, entries in section.items():
            index.append(f"\n## {title}\n")
            for name, uri in list_pages(entries):
                link = f"[{name}]({config.site_url or ''}{uri})"
                index.append(f"- {link}: {summarize(pages[uri])}")
                full.append(f"\n<!-- {uri} -->\n\n{pages[uri].strip()}\n")
    (site / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(full), encoding="utf-8")


def list_pages(entries: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """(title, page) of the pages of a section."""
    for entry in entries:
        yield from entry.items()


def summarize(markdown: str) -> str:
    """The first sentence of a page."""
    for paragraph in outside_fences(markdown).split("\n\n"):
        text = " ".join(paragraph.split())
        if text and not text.startswith(("#", "|", "!", "<", "-", ">")):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
            return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0]
    return ""
