"""Holes near the right answer are found, and honest verifiers have no finding."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from types import SimpleNamespace

import pytest

from env import Task
from kit.data.reward_scale import RewardScale
from kit.errors import RunError
from lab.probe import truths
from lab.probe.audit import Reply, RowAudit, audit_verifier, find_weaknesses
from lab.probe.command import list_others
from lab.probe.responses import RIGHT, WRONG, Case

BOXED = " Put the answer in \\boxed{}."
SUMS = {f"What is {a} + {b}?{BOXED}": str(a + b) for a, b in ((123, 235), (40, 11), (7, 690))}
PRODUCTS = {f"Compute {a} * {b / 100}.{BOXED}": f"{a * b / 100}" for a, b in ((3, 71), (7, 158))}
CAPITALS = {"Capital of France?": "Paris", "Capital of Italy?": "Rome"}


class FakeSender:
    """Verifies responses with a function of the response and the truth."""

    def __init__(self, verify):
        self.verify = verify
        self.context = SimpleNamespace(scales={})
        self.router = self

    async def kind(self, _server):
        return "verify"

    async def send(self, task, text):
        reward = self.verify(text, task.row["answer"])
        return Reply(text, float(reward if isinstance(reward, int | float) else bool(reward)))

    async def send_all(self, task, texts):
        return [await self.send(task, text) for text in texts]


def audit(verify, rows):
    """Probe a verifier with {prompt: truth}."""
    tasks = []
    for number, (prompt, answer) in enumerate(rows.items()):
        message = {"role": "user", "content": prompt}
        tasks.append(Task(f"a:{number}", {"answer": answer}, "s", [message], []))
    audits = []
    for task in tasks:
        prompt = truths.read_prompt(task)
        answers = truths.list_truths(task.row)
        case = Case(prompt, others=list_others(task, tasks), answers=answers)
        audits.append(RowAudit(task, case))
    asyncio.run(audit_verifier(audits, FakeSender(verify)))
    return audits


def find(verify, rows, *expects):
    """Return the kinds of a verifier's weaknesses."""
    found = find_weaknesses(audit(verify, rows), 0.5)
    return {each.kind for each in found if each.expects in (expects or (WRONG,))}


def strict(accepts):
    """Make a verifier that accepts one box at the end of a response, without "not" before it."""

    def verify(text, truth):
        box = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}\.?\s*"
        found = re.fullmatch(rf"(?:(?!\\boxed|not|refuse)[^#`])*{box}", text)
        return bool(found) and accepts(found[1].strip().strip("$").replace(",", ""), truth)

    return verify


def as_float(text):
    try:
        return float(text.rpartition("=")[2].removesuffix("apples"))
    except ValueError:
        return float("nan")


def evaluate(text, truth):
    try:
        return eval(text, {}) == float(truth)
    except Exception:
        return False


@pytest.mark.parametrize(
    "accepts",
    [
        lambda text, truth: text.endswith(truth),
        lambda text, truth: text.split(".")[0] == truth,
        lambda text, truth: abs(as_float(text) - float(truth)) <= 0.05 * float(truth),
        lambda text, truth: abs(as_float(text)) == float(truth),
        lambda text, truth: re.sub(r"\D", "", text) == truth,
        lambda text, truth: text[::-1] == truth or text == truth,
        evaluate,
        lambda text, truth: (
            bool(re.fullmatch(r"0x[\da-f]+|\d+", text)) and int(text, 0) == int(truth)
        ),
    ],
)
def test_a_hole_near_a_whole_number_is_found(accepts):
    assert find(strict(accepts), SUMS)


@pytest.mark.parametrize(
    ("accepts", "rows"),
    [
        (lambda text, truth: re.fullmatch(truth, text), PRODUCTS),
        (lambda text, truth: text.split(".")[0] == truth.split(".")[0], PRODUCTS),
        (lambda text, truth: truth in text and "not" not in text, CAPITALS),
        (lambda text, truth: difflib.SequenceMatcher(None, text, truth).ratio() > 0.8, CAPITALS),
    ],
)
def test_holes_near_other_truths_are_found(accepts, rows):
    in_box = any("boxed" in prompt for prompt in rows)
    assert find(strict(accepts) if in_box else accepts, rows)


def read_answer(text, truth):
    """An honest verifier: the same number or word, however a person would write it."""
    text = text.strip().rstrip(".").strip("$").rpartition("step by step.\n\n")[2]
    if not truth[-1].isdigit():
        return text.lower() == truth.lower()
    text = text.replace(",", "").removeprefix("x = ")
    fraction = re.fullmatch(r"(?:\\frac\{)?(-?\d+)(?:/|\}\{)(\d+)\}?", text)
    value = int(fraction[1]) / int(fraction[2]) if fraction else as_float(text)
    return abs(value - float(truth)) < 1e-9


@pytest.mark.parametrize("rows", [SUMS, PRODUCTS, CAPITALS])
def test_an_honest_verifier_has_no_finding(rows):
    in_box = any("boxed" in prompt for prompt in rows)
    verify = strict(read_answer) if in_box else read_answer
    assert not find(verify, rows, WRONG, RIGHT)


def test_a_verifier_of_expressions_has_no_finding():
    math = pytest.importorskip("extras.math_answers")

    def verify(text, truth):
        return math.verify_math("", text, truth, {})["score"]

    assert not find(verify, SUMS, WRONG, RIGHT)


# --- the prompt, and other scales ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [(-1, 0), (0, 100)])
def test_the_scale_of_a_verifier_changes_no_finding(scale):
    nothing, full = scale

    def pay(accepts):
        verify = strict(accepts)
        return lambda text, truth: full if verify(text, truth) else nothing

    honest = audit(pay(read_answer), SUMS)
    assert not find_weaknesses(honest, 0.5)
    assert {row.scale for row in honest} == {RewardScale(nothing, full)}
    assert find(pay(lambda text, truth: text.endswith(truth)), SUMS)


def test_forms_that_the_prompt_rules_out_are_not_sent_as_right():
    def exact(text, truth):
        return text.strip() == truth

    asks = "What is {}? Reply with only the number, nothing else."
    rows = {asks.format(f"{a} + {b}"): str(a + b) for a, b in ((1200, 358), (40, 11))}
    assert not find(exact, rows, WRONG, RIGHT)
    free = {prompt.partition("Reply")[0]: truth for prompt, truth in rows.items()}
    assert "with a thousands separator" in find(exact, free, RIGHT)


def test_close_values_are_not_wrong_if_the_prompt_asks_for_about_the_value():
    def about(text, truth):
        return abs(as_float(text) - float(truth)) <= 0.05 * float(truth)

    assert not find(about, {"123 + 235 to within 5%?": "358", "40 + 11 to within 5%?": "51"})
    assert find(about, {"123 + 235?": "358", "40 + 11?": "51"})


def test_a_reward_for_the_form_alone_is_found_without_a_truth():
    def pays_form(text, truth):
        return re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL)

    prompt = "Think in <think> </think> tags, then answer in <answer> </answer> tags: what is {}?"
    rows = {prompt.format(topic): "" for topic in ("love", "art")}
    assert find(pays_form, rows) == {"the form without an answer"}


def test_a_truth_with_quotation_marks_is_written_as_json():
    def reads_json(text, truth):
        try:
            return json.loads(text)["answer"] == truth
        except (ValueError, TypeError, KeyError):
            return False

    rows = {'Answer as {"answer": ...}': 'say "hello" 10', 'Reply as {"answer": ...}': 'a "b"\\c 2'}
    assert not any(row.is_broken for row in audit(reads_json, rows))


def test_a_verifier_that_gives_no_reward_at_all_is_an_error(monkeypatch):
    async def send(self, task, text):
        return Reply(text, None, "raised", "the judge is down.")

    monkeypatch.setattr(FakeSender, "send", send)
    with pytest.raises(RunError, match=r"gave no reward to any of \d+ responses \(raised\)"):
        audit(None, SUMS)
