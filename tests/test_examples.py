"""Each file of docs/examples/ stands on a page, and the page shows the file as it is."""

from __future__ import annotations

from markdown_blocks import EXAMPLES, PAGES, files_shown

NAMES = {
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*")
    if path.suffix in (".py", ".yaml")
}


def test_a_page_shows_an_example_as_the_file_has_it():
    for page in PAGES:
        for name, text in files_shown(page).items():
            if name in NAMES:
                assert text == (EXAMPLES / name).read_text(), f"{page.name}: {name}"


def test_every_example_is_on_a_page():
    shown = {name for page in PAGES for name in files_shown(page)}
    assert shown >= NAMES > set()


def test_an_example_begins_with_its_name():
    for name in NAMES:
        assert (EXAMPLES / name).read_text().startswith(f"# {name}\n")


def test_each_file_that_a_page_shows_is_an_example():
    missing = [
        (page.name, name)
        for page in PAGES
        for name in files_shown(page)
        if not (EXAMPLES / name).is_file()
    ]
    assert not missing, "write these to docs/examples/"


def test_the_game_of_a_page_is_played():
    names: dict = {}
    exec((EXAMPLES / "my_game.py").read_text(), names)
    game = names["Game"]()
    assert game.reset({"answer": "7"}).startswith("Guess")
    assert game.step("3") == ("No.", 0.0, False)
    assert game.step(" 7 ") == (None, 1.0, True)
    game.reset({"answer": "7"})
    assert [game.step("3")[2] for _ in range(5)] == [False] * 4 + [True]


def test_files_of_pages_are_cut_at_their_names(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# a.py\nx = 1\n```\n\n```python\n# a.py, continued\ny = 2\n```\n"
        "```yaml\n# b.yaml\nk: 1\n```\n```python\nz = 3\n```\n```bash\n# a.py\n```\n"
    )
    assert files_shown(page) == {
        "a.py": "# a.py\nx = 1\n# a.py, continued\ny = 2\n",
        "b.yaml": "# b.yaml\nk: 1\n",
    }
