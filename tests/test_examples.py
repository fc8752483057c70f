"""Tests that the pages show the files of docs/examples/ unchanged, and all of them."""

from __future__ import annotations

from tests.helpers.pages import EXAMPLES, PAGES, read_shown_files

EXAMPLE_NAMES = {
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*")
    if path.suffix in (".py", ".yaml")
}


def test_pages_show_the_text_of_the_example_files():
    for page in PAGES:
        for name, text in read_shown_files(page).items():
            if name in EXAMPLE_NAMES:
                assert text == (EXAMPLES / name).read_text(), f"{page.name}: {name}"


def test_every_example_is_on_a_page():
    shown = set()
    for page in PAGES:
        shown |= read_shown_files(page).keys()
    assert shown >= EXAMPLE_NAMES > set()


def test_an_example_begins_with_its_name():
    for name in EXAMPLE_NAMES:
        assert (EXAMPLES / name).read_text().startswith(f"# {name}\n")


def test_each_file_that_a_page_shows_is_an_example():
    missing = []
    for page in PAGES:
        for name in read_shown_files(page):
            if not (EXAMPLES / name).is_file():
                missing.append((page.name, name))
    assert not missing, "write these to docs/examples/"


def test_the_example_game_works():
    namespace: dict = {}
    exec((EXAMPLES / "my_game.py").read_text(), namespace)
    game = namespace["Game"]()
    assert game.reset({"answer": "7"}).startswith("Guess")
    assert game.step("3") == ("No.", 0.0, False)
    assert game.step(" 7 ") == (None, 1.0, True)
    game.reset({"answer": "7"})
    assert [game.step("3")[2] for _ in range(5)] == [False] * 4 + [True]


def test_read_shown_files_joins_the_blocks_of_a_file(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# a.py\nx = 1\n```\n\n```python\n# a.py, continued\ny = 2\n```\n"
        "```yaml\n# b.yaml\nk: 1\n```\n```python\nz = 3\n```\n```bash\n# a.py\n```\n"
    )
    assert read_shown_files(page) == {
        "a.py": "# a.py\nx = 1\n# a.py, continued\ny = 2\n",
        "b.yaml": "# b.yaml\nk: 1\n",
    }
