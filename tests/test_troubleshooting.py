"""Tests that docs/messages.md has each message of the source code, and that pages show no others.

docs/messages.md is generated from the source code. A new message must be added to it.
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
# Code in headings that is a message of another program, or a setting.
FOREIGN_MESSAGES = (
    "operator torchvision::nms does not exist",
    "CUDA out of memory",
    "Watchdog caught collective operation timeout",
    "connectFullMesh failed",
    "corrupted compilation artifact",
    'Specified attn_implementation="cpu_packed" is not supported',
    "max_num_gen_batches",
    "the chat template fails for PART: REASON.",  # ChatTemplate.describe_failure
    "KEY=X (tried on row ROW with the response X)",  # verifier_trial.py
)
PAGE_NAME = re.compile(r'See (docs/[\w/]+\.md)(?:, "([^"]+)")?\.$')  # the end of a message
NO_MESSAGE = "has no attribute"  # an AttributeError that users never see
# Their errors are reasons within other messages, or answers of the policy endpoint.
FILES_OF_REASONS = {
    "kit/config/python_files.py",
    "kit/extras/python_verifiers/ground_truths.py",
    "kit/data/ground_truths.py",
    "kit/extras/python_verifiers/math_answers.py",
    "kit/extras/python_verifiers/verl_scorer.py",
    "kit/rollout/openai_requests.py",
}


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return message_docs.list_messages()


# --- the generated page --------------------------------------------------------------------------


def test_the_page_of_messages_is_current():
    path = ROOT / "docs" / "messages.md"
    assert path.read_text() == message_docs.render_page(), (
        "run python -m kit.extras.report.message_docs > docs/messages.md"
    )


def list_raised_texts(tree: ast.Module) -> list[str]:
    """The constant parts of three words or more in the `raise` statements of a file."""
    texts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not node.exc:
            continue
        for part in ast.walk(node.exc):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                words = part.value.split()
                if len(words) > 2:
                    texts.append(" ".join(words))
    return texts


def test_the_page_has_the_text_of_each_raise_statement():
    """This does not depend on the kinds of calls that message_docs knows."""
    page = (ROOT / "docs" / "messages.md").read_text().replace("\\|", "|")
    missing = []
    count = 0
    for module in message_docs.read_modules():
        texts = list_raised_texts(module.tree)
        count += len(texts)
        if module.file not in FILES_OF_REASONS:
            missing += [(module.file, text) for text in texts if text not in page]
    assert count > 300
    assert [entry for entry in missing if NO_MESSAGE not in entry[1]] == []


def list_messages_of(source: str) -> list[tuple[str, str, str]]:
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
    assert list_messages_of(source) == [expected]


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
    texts = [text for text, *_ in list_messages_of(source)]
    assert texts == ["<x>: it is cold.", "<x>: it is hot.", "<x>: it is wet.", "<x>: it is dry!"]


def test_code_that_prints_no_message_has_none():
    source = (
        "def f(x) -> list[str]:\n    print('a table of x')\n    yield x\n    return f'{x} is'\n"
    )
    assert list_messages_of(source) == []


# --- the manual page -----------------------------------------------------------------------------


def read_headings() -> list[str]:
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def test_the_symptoms_are_in_groups():
    assert re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE) == GROUPS


def test_headings_show_messages_that_the_code_can_print(messages):
    """Code in a heading is a message. A heading without code is a symptom without a message."""
    shown = re.findall(r"`([^`\n]+)`", "\n".join(read_headings()))
    assert len(shown) > 40
    unknown = []
    for text in shown:
        is_known = text in STATUSES or find_metric(text) or text in FOREIGN_MESSAGES
        if not is_known and not any(is_same(text, m.text) for m in messages):
            unknown.append(text)
    assert unknown == []
    assert [text for text in FOREIGN_MESSAGES if text not in shown] == []


def test_is_same_compares_a_heading_with_a_message():
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


def list_texts_with_pages() -> list[str]:
    """The strings of the source code that name a page of docs/, without docstrings."""
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
    """A message names its page at the end, always in the same form."""
    texts = list_texts_with_pages()
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
    """The reference has each status of an episode under its name in the code."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    table = reference.partition("## How an episode fails")[2].partition("## ")[0]
    assert [name for name in STATUSES if f"| `{name}` |" not in table] == []
    raised = {m.status for m in messages if re.fullmatch(r"\w+", m.status)}
    assert len(raised) > 15
    assert [name for name in raised if name not in STATUSES] == []
    exit_section = reference.partition("## Exit status")[2]
    assert [code for code in DOCS["exits"] if f"| `{code}` |" not in exit_section] == []
    page = PAGE.read_text()
    assert "reference.md#how-an-episode-fails" in page and "reference.md#exit-status" in page


def test_entries_about_gpu_memory_are_marked_as_not_observed():
    """The runs on a GPU were small, so this advice is untested."""
    section = PAGE.read_text().partition("\n## Memory\n")[2].partition("\n## ")[0]
    assert "On one H100, no run with a small model ran out of memory" in section
    entries = section.split("\n### ")[1:]
    on_gpus = [text for text in entries if "CUDA" in text or "needs N GiB" in text]
    assert len(on_gpus) == 4
    assert [text[:60] for text in on_gpus if "Not observed" not in text] == []
