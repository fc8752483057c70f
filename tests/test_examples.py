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


def test_the_example_game_works():
    namespace: dict = {}
    exec((EXAMPLES / "my_game.py").read_text(), namespace)
    game = namespace["Game"]()
    assert game.reset({"answer": "7"}).startswith("Guess")
    assert game.step("3") == ("No.", 0.0, False)
    assert game.step(" 7 ") == (None, 1.0, True)
    game.reset({"answer": "7"})
    assert [game.step("3")[2] for _ in range(5)] == [False] * 4 + [True]
