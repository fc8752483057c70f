"""Every message that Quintet can print is on docs/messages.md, and pages show no other message.

docs/messages.md is generated from the source code, so a new message without an entry fails here.
"""

from __future__ import annotations

import ast
import re

import pytest
from conftest import ROOT

from kit.extras.report import message_docs
from kit.extras.report.message_docs import Message, find_messages, index_repository, is_same
from kit.extras.report.metric_docs import DOCS, STATUSES, find_metric

PAGE = ROOT / "docs" / "troubleshooting.md"
GROUPS = ["Install", "Recipe", "Data", "Gym", "Ray", "vLLM", "Memory", "Learning", "Resume"]
# Headings that show messages of other programs, or a setting.
OTHERS = (
    "operator torchvision::nms does not exist",
    "CUDA out of memory",
    'Specified attn_implementation="cpu_packed" is not supported',
    "max_num_gen_batches",
)
PAGE_NAME = re.compile(r'See (docs/[\w/]+\.md)(?:, "([^"]+)")?\.$')  # the end of a message
NO_MESSAGE = "has no attribute"  # an AttributeError for Python, which nobody sees


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return message_docs.list_messages()


# --- the generated page --------------------------------------------------------------------------


def test_the_page_of_messages_is_current():
    path = ROOT / "docs" / "messages.md"
    assert path.read_text() == message_docs.render_page(), (
        "python -m kit.extras.report.message_docs > docs/messages.md"
    )


def list_raised_texts(tree: ast.Module) -> list[str]:
    """The constant parts, of three words or more, of all that a file raises."""
    parts = [
        part.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc
        for part in ast.walk(node.exc)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return [" ".join(part.split()) for part in parts if len(part.split()) > 2]


def test_all_that_the_code_raises_is_on_the_page():
    """The words of each `raise` are there, whether or not message_docs knows that kind of call."""
    page = (ROOT / "docs" / "messages.md").read_text().replace("\\|", "|")
    missing = []
    count = 0
    for module in message_docs.read_modules():
        texts = list_raised_texts(module.tree)
        count += len(texts)
        missing += [(module.file, text) for text in texts if text not in page]
    assert count > 300
    assert [entry for entry in missing if NO_MESSAGE not in entry[1]] == []


def find_in(source: str) -> list[tuple[str, str, str]]:
    """(text, kind, status) of the messages of a piece of code."""
    module = message_docs.parse_module(source, "file.py")
    repository = index_repository([module])
    return [(m.text, m.kind, m.status) for m in find_messages(module, repository)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raise MyError(f'{path}: bad. Fix it.')", ("<path>: bad. Fix it.", "error", "")),
        ("raise GymError('late', f'{a.b} is late')", ("<b> is late", "error", "late")),
        ("raise ValueError(f'{x[0]} is ' + KEY)", ("<...> is gym.key", "error", "")),
        ("sys.exit(f'error: {x} is bad')", ("<x> is bad", "error", "")),
        ("say(f'WARNING     {x} is bad')", ("<x> is bad", "warning", "")),
        ("logger.warning('%s is bad', x)", ("<...> is bad", "warning", "")),
        ("problems.append(f'{x} is bad')", ("<x> is bad", "error", "")),
        ("notes.append(f'{x} is moved')", ("<x> is moved", "note", "")),
        ("problems += [f'{x} is bad' for x in y]", ("<x> is bad", "error", "")),
        ("yield f'{x} is bad'", ("<x> is bad", "error", "")),
        ("yield Finding(f'{x} fell', [])", ("<x> fell", "report", "")),
        ("raise MyError(describe(x))", ("<x> cannot be written", "error", "")),
    ],
)
def test_each_way_to_make_a_message_is_found(line, expected):
    source = (
        "KEY = 'gym.key'\n"
        "class MyError(ValueError): pass\n"
        "class GymError(Exception): pass\n"
        "def describe(x):\n    return f'{x} cannot be written'\n"
        f"def f(x) -> Iterator[str]:\n    {line}\n"
    )
    assert find_in(source) == [expected]


def test_a_variable_has_the_texts_that_were_assigned_before_its_use():
    source = (
        "def f(x):\n"
        "    reason = 'it is cold' if x else 'it is hot'\n"
        "    raise ValueError(f'{x}: {reason}.')\n"
        "def g(x):\n"
        "    reason = 'it is wet'\n"
        "    raise ValueError(f'{x}: {reason}.')\n"
        "    reason = 'it is dry'\n"
        "    raise ValueError(f'{x}: {reason}!')\n"
    )
    texts = [text for text, *_ in find_in(source)]
    assert texts == ["<x>: it is cold.", "<x>: it is hot.", "<x>: it is wet.", "<x>: it is dry!"]


def test_code_that_prints_no_message_has_none():
    source = (
        "def f(x) -> list[str]:\n    print('a table of x')\n    yield x\n    return f'{x} is'\n"
    )
    assert find_in(source) == []


# --- the page that is written by hand ------------------------------------------------------------


def read_headings() -> list[str]:
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def test_the_symptoms_are_in_groups():
    assert re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE) == GROUPS


def test_headings_show_messages_that_the_code_can_print(messages):
    """A heading of code is a message; one without code is a symptom without a message."""
    shown = [text for heading in read_headings() for text in re.findall(r"`([^`]+)`", heading)]
    assert len(shown) > 40
    names = [text for text in shown if text in STATUSES or find_metric(text) or text in OTHERS]
    unknown = [
        text
        for text in shown
        if text not in names and not any(is_same(text, m.text) for m in messages)
    ]
    assert unknown == []
    assert [text for text in OTHERS if text not in shown] == []


def test_a_heading_of_another_message_is_noticed():
    message = "<path>: no such file. Check the path<...>."
    assert is_same("FILE: no such file. Check the path", message)
    assert not is_same("FILE: no such folder", message)
    assert not is_same("FILE: Check the path. no such file", message)
    message = "<stage> needs <...> GiB, <...>. Lower <key>."
    assert is_same("update needs N GiB", message) and is_same("NAME needs N GiB", message)
    assert not is_same("update takes N GiB", message)


def test_each_symptom_has_a_cause_and_one_fix():
    for part in PAGE.read_text().split("\n### ")[1:]:
        heading, _, text = part.partition("\n")
        assert "\n**Fix:** " in text, f"{heading}: no fix"
        assert text.count("**Fix:**") == 1, f"{heading}: more than one fix"
        cause = text.partition("**Fix:**")[0].strip()
        assert len(cause.split()) > 3, f"{heading}: no cause"


def list_page_names() -> list[str]:
    """The texts of the code that name a page of docs/, without docstrings."""
    texts = []
    for module in message_docs.read_modules():
        for node in ast.walk(module.tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and not isinstance(module.parents[node], ast.Expr) and "docs/" in node.value:
                texts.append(node.value)
    return texts


def list_headings(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def test_pages_and_headings_that_messages_name_exist(messages):
    """A message names its page at the end, in one form."""
    texts = list_page_names()
    assert len(texts) > 30
    assert [text for text in texts if text.count("docs/") != 1 or not PAGE_NAME.search(text)] == []
    in_the_middle = [m.text for m in messages if "docs/" in m.text and not PAGE_NAME.search(m.text)]
    assert in_the_middle == []
    for page, heading in {PAGE_NAME.search(text).groups() for text in texts}:
        assert (ROOT / page).is_file(), page
        assert heading is None or heading in list_headings(page), f"{page} has no {heading!r}"


def test_no_two_headings_have_the_same_anchor():
    anchors = [message_docs.make_anchor(heading) for heading in read_headings()]
    assert len(set(anchors)) == len(anchors)


def test_statuses_and_exit_statuses_are_explained(messages):
    """Each status of an episode, by its name in the code, is in the reference."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    table = reference.partition("## How an episode fails")[2].partition("## ")[0]
    assert [name for name in STATUSES if f"| `{name}` |" not in table] == []
    raised = {m.status for m in messages if re.fullmatch(r"\w+", m.status)}
    assert len(raised) > 15
    assert [name for name in raised if name not in STATUSES] == []
    exits = reference.partition("## Exit status")[2]
    assert [code for code in DOCS["exits"] if f"| `{code}` |" not in exits] == []
    page = PAGE.read_text()
    assert "reference.md#how-an-episode-fails" in page and "reference.md#exit-status" in page


def test_rows_about_memory_say_that_nobody_has_seen_them():
    """No run of the kit has used a GPU, so advice about GPU memory is untested."""
    section = PAGE.read_text().partition("\n## Memory\n")[2].partition("\n## ")[0]
    assert "has not run on a GPU" in section
    entries = section.split("\n### ")[1:]
    on_gpus = [text for text in entries if "CUDA" in text or "needs N GiB" in text]
    assert len(on_gpus) == 4
    assert [text[:60] for text in on_gpus if "Not observed" not in text] == []
