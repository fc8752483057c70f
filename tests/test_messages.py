"""Error messages are part of the product: each names what failed, where, and the next thing to do. All are read here,
as the source has them; `pytest -s tests/test_messages.py` prints them for a person to read.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

AT_LEAST = 175  # messages; a refactor that hides some of them from this test fails it
LONGEST = 350  # characters of a message, without what is filled in
NAMES = ("Gym", "HTTP", "LoRA", "Ray", "WARNING")  # a message may begin with
EXCEPTIONS = {  # message -> why it need not be like the others
    "interrupted": "is what was asked for; the line before it says what is saved, and that a second signal ends it now",
    "the process that asked for this server is gone": "to the log of a server that nobody waits for any more",
    "host {} is not one of this machine's ({}); 127.0.0.1 is": "names the one that is",
    "module {} has no attribute {}": "Python's own words, which __getattr__ has to raise",
}

WHERE = re.compile(r"\{\}|(?<!\S)--\w+|\b[a-z_]\w+\.[a-z_]\w+")  # filled in, an option, a dotted key or a file
DO = (
    "add|change|choose|free|give|go|install|join|keep|leave|let|look|lower|make|mend|name|pass|put|raise|rename|return"
    "|run|save|see|set|start|take|try|use|write"
)
NEXT = re.compile(
    rf"(?:^|[;:,.(] |\b(?:or|and|then|so) )(?:{DO})\b"  # what to do, at the beginning of a clause
    r"|\b(?:did you mean|nor one of|takes|wants|needs|must|goes on from|begins again)\b"
    r"|(?:`make \w+`|ng_run) (?:makes|starts)\b"
    r"|; (?:one of|(?:(?:it|an episode|the episode of \{\}) has|there is|nearest are) \{\})"  # what there is
    r"|\blog \{\}",
    re.IGNORECASE,
)


# --- the messages of a file ----------------------------------------------------------------------


@dataclass
class Message:
    where: str  # file:line
    kind: str  # the error's class; stop, exit; warning, exception (of a logger); WARNING (printed)
    texts: list[str]  # one for each way in which it can be put together; ⟨source⟩ for what is filled in


LOGGERS = r"(logger|logging\.getLogger\(.*\))\.(warning|error|exception|critical)"
Scopes = tuple[ast.AST, ...]  # the functions around a place, innermost first, and the module


def plain(text: str) -> str:
    return re.sub("⟨.*?⟩", "{}", text)


def own_errors(trees: list[ast.Module]) -> dict[str, set[str]]:
    """{error class of the kit: it and those of the kit that it derives from}."""
    found: dict[str, set[str]] = {}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in classes:
        for node in classes:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if any(is_builtin_error(base) for base in bases) or bases & found.keys():
                found[node.name] = {node.name}.union(*(found.get(base, set()) for base in bases))
    return found


def is_builtin_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def own_nodes(scope: ast.AST) -> list[ast.AST]:
    """The nodes of a function or module, without those of functions in it."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        nodes.append(child)
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += own_nodes(child)
    return nodes


def builds_text(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left, ast.Add(), right):
            return builds_text(left) or builds_text(right)
        case ast.IfExp(body=body, orelse=orelse):
            return builds_text(body) or builds_text(orelse)
    return False


def values_of(name: ast.Name, scope: ast.AST) -> list[tuple[bool, ast.expr | None]]:
    """What a name is bound to before it is used: (whether that is added to what was there, the expression if known)."""
    nodes, known = own_nodes(scope), dict[int, tuple[bool, ast.expr]]()
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
                known |= {id(to): (False, value) for to, value in pairs}
        elif isinstance(node, ast.AugAssign):
            known[id(node.target)] = (True, node.value)
    bound = [n for n in nodes if getattr(n, "lineno", name.lineno) < name.lineno and binds(n, name.id)]
    return [known.get(id(n), (False, None)) for n in sorted(bound, key=lambda n: n.lineno)]


def binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.arg):
        return node.arg == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def texts_of(node: ast.expr | None, scopes: Scopes) -> list[str]:
    """All that an expression may say."""
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return [str(value)]
        case ast.JoinedStr(values):
            return joined([texts_of(value, scopes) for value in values])
        case ast.FormattedValue(value):
            return texts_of(value, scopes)
        case ast.BinOp(left, ast.Add(), right) if builds_text(node):
            return joined([texts_of(left, scopes), texts_of(right, scopes)])
        case ast.IfExp(body=body, orelse=orelse) if builds_text(node):
            return texts_of(body, scopes) + texts_of(orelse, scopes)
        case ast.Name():
            for i, scope in enumerate(scopes):
                if bound := values_of(node, scope):
                    texts: list[str] = []
                    for more, value in bound:
                        constant = isinstance(value, ast.Constant) and value.value is not None
                        known = constant or (value and builds_text(value))
                        new = texts_of(value, scopes[i:]) if known else [f"⟨{node.id}⟩"]
                        texts = joined([texts, new]) if more else texts + new
                    return list(dict.fromkeys(texts)) or [f"⟨{node.id}⟩"]
        case ast.Attribute(value=ast.Name(id=module), attr=name) if (ROOT / f"{module}.py").is_file():
            if name.isupper():  # a constant of another file
                tree = ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8"))
                return texts_of(ast.Name(name, ast.Load(), lineno=sys.maxsize), (tree,))
    return [f"⟨{ast.unparse(node)}⟩"] if node else [""]


def joined(parts: list[list[str]]) -> list[str]:
    return ["".join(choice) for choice in itertools.product(*parts)]


def messages_of(path: Path, errors: dict[str, set[str]]) -> list[Message]:
    """What a file says when something is wrong: own errors, built-in ones that are raised, stops, exits, warnings."""
    found: list[Message] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}

    def visit(node: ast.AST, scopes: Scopes) -> None:
        kind, texts = "", []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
                called = ast.unparse(node.func)
                ours = name in errors or called in ("self.stop", "sys.exit") or re.fullmatch(LOGGERS, called)
                if ours or (is_builtin_error(name) and id(node) in raised):
                    told = args[1:] if "GymError" in errors.get(name, ()) else args  # GymError(reason, message)
                    kind, texts = name, texts_of(told[0] if told else None, scopes)
                if re.fullmatch(LOGGERS, called):
                    filled = iter([f"⟨{ast.unparse(arg)}⟩" for arg in args[1:]])
                    texts = [re.sub(r"%[a-z]", lambda _: next(filled), texts[0])]
            case ast.JoinedStr() | ast.Constant(value=str()):
                texts = [t.removeprefix("WARNING").strip() for t in texts_of(node, scopes) if t.startswith("WARNING")]
                kind = "WARNING"
        texts = [text for text in texts if re.search("[A-Za-z]", plain(text).removeprefix("error: "))]
        if texts:  # else it is a status, or passes another message on
            found.append(Message(f"{path.name}:{node.lineno}", kind, texts))  # type: ignore[attr-defined]
        if kind != "WARNING" or not texts:
            inner = (node, *scopes) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else scopes
            for child in ast.iter_child_nodes(node):
                visit(child, inner)

    visit(tree, (tree,))
    return found


def all_messages() -> list[Message]:
    paths = sorted(ROOT.glob("*.py"))
    errors = own_errors([ast.parse(path.read_text(encoding="utf-8")) for path in paths])
    assert {"ConfigError", "RunError", "DataError", "OwnError", "GymError", "GymStartError", "Stop"} <= errors.keys()
    return [message for path in paths for message in messages_of(path, errors)]


# --- what is asked of them -----------------------------------------------------------------------


def problem(text: str, episode: bool = False) -> str:
    """What is wrong with a message; empty if nothing. episode: it is data about one, its reason."""
    told = plain(text)
    words = told.replace("{}", "")
    if "\n" in words:
        return "is more than one line"
    if told[0].isupper() and not told.startswith(NAMES):
        return "begins with a capital"
    if len(words) > LONGEST:
        return f"is longer than {LONGEST} characters"
    if told[-1] in ".,;: " or "  " in told or words.count("(") != words.count(")"):
        return "is badly put together"
    if not WHERE.search(told):
        return "names neither what failed nor where"
    if not episode and not NEXT.search(told):
        return "does not say what to do next"
    return ""


def test_every_message_names_what_failed_and_the_next_thing_to_do():
    messages, errors, twice, used = all_messages(), [], defaultdict(list), set()
    print()
    for message in messages:
        for text in message.texts:
            print(f"{message.where:22} {message.kind:13} {text.replace('⟨', '{').replace('⟩', '}')}")
            if plain(text) in EXCEPTIONS:
                used.add(plain(text))
                continue
            if why := problem(text, episode=message.kind == "GymError"):
                errors.append(f"{message.where} {why}: {text}")
            twice[plain(text)].append(message.where)
    errors += [f"{', '.join(places)} say the same: {text}" for text, places in twice.items() if len(set(places)) > 1]
    print(f"{len(messages)} messages, {sum(len(message.texts) for message in messages)} ways to put them")
    assert not errors, "\n" + "\n".join(errors)
    assert len(messages) >= AT_LEAST
    assert used == EXCEPTIONS.keys() and len(EXCEPTIONS) < 6


SOURCE = """
import logging, sys
from verl import VerlError
LIMIT, logger = 3, logging.getLogger(__name__)
class KitError(ValueError): pass
class GymError(Exception): pass
class Down(GymError): pass
def f(key, value, close):
    hint = f"; did you mean {close[0]}?" if close else ""
    said = f"{key}="
    said += f"{value}"
    if value:
        raise KitError(f"{said}: over {LIMIT}{hint}")
    for name in value:
        raise Down("reason", f"{name} is " + "down" + why)
    def g():
        raise ValueError("%s" % said)
    try: g()
    except KitError as error: sys.exit(f"error: {error}")
    logger.warning("%s is away; log %s", key, value)
    return [f"WARNING   {key} is odd", KitError(), VerlError("theirs")], sys.exit(3)
"""


def test_messages_are_found_and_put_together(tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    errors = own_errors([ast.parse(SOURCE)])
    assert errors["Down"] == {"Down", "GymError"} and set(errors) == {"KitError", "GymError", "Down"}
    found = [(m.kind, m.texts) for m in messages_of(tmp_path / "source.py", errors)]
    assert found == [
        ("KitError", ["⟨key⟩=⟨value⟩: over 3; did you mean ⟨close[0]⟩?", "⟨key⟩=⟨value⟩: over 3"]),
        ("Down", ["⟨name⟩ is down⟨why⟩"]),
        ("warning", ["⟨key⟩ is away; log ⟨value⟩"]),
        ("WARNING", ["⟨key⟩ is odd"]),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("⟨key⟩=⟨value⟩: verl has no such loss", "does not say what to do next"),
        ("⟨key⟩ is not set", "does not say what to do next"),
        ("the model has no chat template; set one", "names neither"),
        ("⟨path⟩: no such file\ngive another", "more than one line"),
        ("Cannot read ⟨path⟩; give another", "begins with a capital"),
        ("⟨path⟩: " + "give another " * 30, "is longer than"),
        ("⟨path⟩: no such file; give another.", "badly put together"),
        ("⟨path⟩: no such file (⟨error⟩; give another", "badly put together"),
        ("gym.servers is not set; name the servers of the rows there", ""),
        ("⟨key⟩: unknown; did you mean ⟨close⟩?", ""),
        ("--replay wants a file", ""),
        ("Ray has ⟨found⟩ GPUs, so lower it, or add nodes", ""),
    ],
)
def test_what_a_message_lacks_is_found(text, why):
    assert why in problem(text) if why else problem(text) == ""
    assert problem("⟨key⟩=⟨value⟩ is not a finite number", episode=True) == ""
