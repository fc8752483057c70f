"""Say what something is by its content: a row, a function, a model, a template, a recipe.

A name may stand for something else tomorrow: rows move in their file, functions are edited, weights
are replaced in their folder. So what is saved about them has a digest of their content.

    digest_row              a row: all of its fields, or what the model sees and the ground truth
    hash_contents           the functions, files and models that a value of a recipe names
    Fingerprint             a run: the values of its recipe, these digests, and its rows

Protects: resumes, comparisons and replays, from content that has changed under the same name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from env import Json, Task, drop_nulls
from kit.data.ground_truths import find_ground_truth, is_empty
from kit.recipe.keys import ROOT
from kit.recipe.python_files import KIT_FILES
from kit.recipe.user_functions import is_user_function

ENCODER = json.JSONEncoder(sort_keys=True, default=str)
PROMPT = "responses_create_params"
ROUTES = ("agent_ref", "task_source")  # fields of a row that name its server
# of the folder of a model or a server
SUFFIXES = (".safetensors", ".bin", ".py", ".yaml", ".yml", ".json", ".txt", ".jinja", ".model")
# modules that are no user's
OF_KIT = {"kit", "extras", "lab", *(name.removesuffix(".py") for name in KIT_FILES)}
PART = 2**20  # bytes
PARTS = 64  # of a file that are read; a smaller file is read as a whole
TEMPLATE = "the chat template"
TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"
ROW_KEYS = ("env.train_files", "env.val_files")


# --- rows ----------------------------------------------------------------------------------------


def hash_json(value: object) -> str:
    """Return the digest of plain data."""
    return hash_text(write_json(value))


def write_json(value: object) -> str:
    """Write plain data as JSON in which equal values have one text."""
    return ENCODER.encode(value)


def hash_text(text: str) -> str:
    """Return the digest of a text of JSON, which is ASCII."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class RowDigests(NamedTuple):
    """The digests of a row, of one text of its fields."""

    row: str  # of all fields, without those that name its server
    problem: str  # of what the model sees and the ground truth


def digest_row(row: Json) -> RowDigests:
    """Return the digests of a row.

    Scripts give the copies of a problem different ids, and a row another id when its file changes.
    If a row has no truth, or the environment writes its prompt, all of its fields count.
    """
    kept: Any = drop_nulls({key: row[key] for key in row if key not in ROUTES})
    texts = {key: write_json(value) for key, value in kept.items()}
    fields = [f"{write_json(key)}: {texts[key]}" for key in sorted(texts)]
    of_row = hash_text(f"{{{', '.join(fields)}}}")
    prompt = row.get(PROMPT) or {}
    truth = find_ground_truth(row)
    if is_empty(truth) or not prompt.get("input"):
        return RowDigests(of_row, of_row)
    return RowDigests(of_row, hash_text(f"[{texts[PROMPT]}, {write_json(drop_nulls(truth))}]"))


def hash_row(row: Json) -> str:
    """Return the digest of the fields of a row, without those that name its server."""
    return digest_row(row).row


def hash_problem(row: Json) -> str:
    """Return the digest of what the model sees of a row and of its ground truth."""
    return digest_row(row).problem


def name_row(problem: str, copies: Counter[str]) -> str:
    """Return the name of a row in any file: the digest of its problem, and the number of a copy.

    copies: of the rows before it, which are counted here.
    """
    copies[problem] += 1
    number = copies[problem]
    return problem if number == 1 else f"{problem}-{number}"


def name_rates(rates: Mapping[str, float], tasks: Sequence[Task], functions: str) -> Json:
    """Return pass rates by the content of the rows, for a checkpoint. rates: by row id.

    functions: the digest of those that generate rows: after an edit, they generate others.
    """
    keys = {task.row_id: task.key for task in tasks}
    return {keys.get(row_id) or f"{row_id}@{functions}": rate for row_id, rate in rates.items()}


def place_rates(saved: Mapping[str, float], tasks: Sequence[Task], functions: str) -> Json:
    """Return the pass rates of `name_rates` by the present row ids. Those of other rows stay."""
    row_ids = {task.key: task.row_id for task in tasks}
    return {row_ids.get(k) or k.removesuffix(f"@{functions}"): rate for k, rate in saved.items()}


def name_problem(row: Json, place: str) -> str:
    """Return the name of a problem, which copies of a row share. place: of the row, in its file.

    If the environment writes the prompt, copies may get others, so each row is a problem.
    """
    prompt = row.get(PROMPT) or {}
    return hash_problem(row) if prompt.get("input") else place


# --- functions, files and models -----------------------------------------------------------------


def hash_file(path: Path) -> str:
    """Return the digest of a file: of its size and, if it is large, of PARTS of it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for start in range(0, size, max(PART, size // PARTS)):
            file.seek(start)
            digest.update(file.read(PART))
    return digest.hexdigest()


def list_sources(path: Path) -> list[Path]:
    """List a Python file, and the modules and files that it names, from its folder or the kit's."""
    found = [path.resolve()]
    for source in found:  # it grows
        if source.suffix == ".py":
            folders = (source.parent, found[0].parent, ROOT)
            named = dict.fromkeys(list_named(source, folders))
            found += [other for other in named if other not in found]
    return found


def list_named(source: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that a module names by imports and texts. folders: where they may be."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):  # its import reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [folder / node.value for folder in (source.parent, Path.cwd())]
            yield from [path.resolve() for path in names if os.path.isfile(path)][:1]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            text = ".".join([module, *(alias.name for alias in node.names)])
            words = [] if module.partition(".")[0] in OF_KIT else text.split(".")
            for word in dict.fromkeys(words):
                yield from find_module(word, folders)


def find_module(word: str, folders: Sequence[Path]) -> list[Path]:
    """Return the file of a module, or those of a package, in the first folder that has it."""
    for folder in folders:
        if not word or (word in OF_KIT and folder == ROOT):
            continue
        file = folder / f"{word}.py"
        found = [file] if file.is_file() else sorted((folder / word).rglob("*.py"))
        if found:
            return found
    return []


def hash_named(name: str) -> str:
    """Return the digest of what a value of a recipe names; the value itself if that is nothing."""
    if is_user_function(name):
        file, _, function = name.rpartition(":")
        for path in (Path(file), ROOT / file):
            if path.is_file():
                return hash_json([function, [hash_file(one) for one in list_sources(path)]])
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        return hash_file(path)
    if not name or not os.path.isdir(path):
        return name
    is_model = any(path.glob("*config.json"))  # its folder may have checkpoints, too
    files = [one.relative_to(path) for one in (path.glob("*") if is_model else path.rglob("*"))]
    # a server has its packages in a hidden folder
    kept = [one for one in sorted(files) if one.suffix in SUFFIXES and "/." not in f"/{one}"]
    return hash_json([[str(one), hash_file(path / one)] for one in kept if (path / one).is_file()])


def hash_contents(value: object, key: str) -> str:
    """Return the digest of a value of a recipe with what it names; "" if it names nothing."""

    def replace(part: object) -> object:
        if isinstance(part, Mapping):
            return {name: replace(member) for name, member in part.items()}
        if isinstance(part, list):
            return [replace(member) for member in part]
        return hash_named(part) if isinstance(part, str) else part

    if key in ROW_KEYS:  # the rows themselves have digests
        entries = value if isinstance(value, list) else []
        value = [entry for entry in entries if isinstance(entry, dict) and "function" in entry]
    replaced = replace(value)
    return "" if replaced == value else hash_json(replaced)


# --- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """What a run is: its recipe, what the recipe names, and its rows.

    What an earlier version did not write is missing, and counts as equal.
    """

    values: Json = field(default_factory=dict)  # {key of the recipe: value}
    contents: Mapping[str, str] = field(default_factory=dict)  # {key: hash_contents of its value}
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)  # {key: hash_row of each row}

    def select(self, is_kept: Callable[[str], bool]) -> Fingerprint:
        """Select the keys that decide something."""
        values = {key: value for key, value in self.values.items() if is_kept(key)}
        contents = {key: value for key, value in self.contents.items() if is_kept(key)}
        return Fingerprint(values, contents, {})

    def list_changes(self, before: Fingerprint) -> dict[str, str]:
        """Return {key: what changed} since another fingerprint, without its rows.

        A value that names the same content by another path is no change.
        """
        changes = {}
        for key in dict.fromkeys([*self.values, *before.values, *self.contents]):
            old = before.values.get(key)
            new = self.values.get(key)
            digests = {before.contents.get(key), self.contents.get(key)}
            is_known = len({None, ""} & digests) == 0
            if is_known and len(digests) == 1:
                continue
            if old != new:
                changes[key] = f"{key} {old!s:.100} -> {new!s:.100}"
            elif is_known:
                changes[key] = f"the content of {key}={new!s:.100}" if new else key
        if TEMPLATE in self.contents and TEMPLATE in before.contents:
            changes.pop(TEMPLATE_KEY, None)  # the templates themselves are compared
        return changes

    def list_row_changes(self, before: Fingerprint) -> list[str]:
        """Return a text about each key whose rows are others than before, or in another order."""
        texts = []
        for key in self.rows.keys() & before.rows.keys():
            old = Counter(before.rows[key])
            new = Counter(self.rows[key])
            if old != new:
                counts = f"{(new - old).total()} added, {(old - new).total()} removed"
                texts.append(f"{key} has other rows: {counts} (an edited row counts as both)")
            elif list(before.rows[key]) != list(self.rows[key]):
                texts.append(f"{key} has the same rows in another order")
        return sorted(texts)
