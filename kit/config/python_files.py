"""Import Python files by their path, and modules of a package without its `__init__.py`.

The processes of Python verifiers use this file, too, so it imports nothing that takes time.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from kit.errors import UserFunctionError

KIT = Path(__file__).resolve().parents[2]  # the folder of the repository
KIT_FILES = ("algorithm.py", "env.py", "gym_client.py", "inference.py", "training.py")
STANDARD_LIBRARY = Path(os.__file__).parent
NEIGHBORS: dict[str, str] = {}  # {module next to a user's file that imports it: its folder}


# --- import a file -------------------------------------------------------------------------------


@functools.cache
def import_file(path: Path) -> ModuleType:
    """Import the file at `path` and return its module. A second call returns the same module.

    Its import statements find the files and packages of its folder. Raises every exception that the
    file raises, and UserFunctionError if a statement would find another module of the name.
    """
    importlib.invalidate_caches()
    enter_neighbors(path)
    name = f"{path.stem.replace('.', '-')}_{zlib.crc32(bytes(path)):08x}"  # as of no other module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a later import would get a module without its last lines
        raise
    return module


def enter_neighbors(path: Path) -> None:
    """Enter the modules next to a file that it and they import into NEIGHBORS.

    Only these names are entered, so that no other file of the folder is taken for a package. Raises
    UserFunctionError if a library or another folder has a module of the name, since Python would
    import that one without an error.
    """
    if NeighborFinder not in sys.meta_path:
        sys.meta_path.append(NeighborFinder)
    folder = str(path.parent)
    files = [path]
    for file in files:  # the list grows
        for name in list_imports(file):
            own = PathFinder.find_spec(name, [folder])
            if own is None:
                continue
            other = importlib.util.find_spec(name)
            if other is None:
                NEIGHBORS[name] = folder
                inner = [Path(each) for each in own.submodule_search_locations or []]
                files += inner[0].rglob("*.py") if inner else [Path(str(own.origin))]
            elif own.origin and own.origin != os.path.realpath(str(other.origin)):
                raise UserFunctionError(
                    f"{file}: `import {name}` would get {other.origin} instead of {own.origin}. "
                    "Rename the second file."
                )


def list_imports(file: Path) -> set[str]:
    """Return the first parts of the names that a file imports anywhere, without relative ones."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


class NeighborFinder:
    """Finds the modules of NEIGHBORS. The last entry of sys.meta_path."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None if it is not in NEIGHBORS."""
        return PathFinder.find_spec(name, [NEIGHBORS[name]]) if name in NEIGHBORS else None


def list_neighbors(module: ModuleType) -> list[ModuleType]:
    """Return the imported modules of the folder of a module from `import_file`."""
    folder = str(Path(str(module.__file__)).parent)
    names = [name for name, other in NEIGHBORS.items() if other == folder]
    return [sys.modules[name] for name in names if name in sys.modules]


# --- the files of users --------------------------------------------------------------------------


def import_callable(
    reference: str, key: str = ""
) -> Callable[..., Any]:  # the caller decides what it returns
    """Import a function or class by path.py:name. Raises UserFunctionError.

    key: of the recipe, for messages.
    """
    module = import_user_file(reference, key)
    name = reference.rpartition(":")[2]
    member = getattr(module, name, None)
    if callable(member):
        return member
    own = []
    for other, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", "") == module.__name__:
            own.append(other)
    kind = "function" if key else "function or class"
    raise UserFunctionError(
        f"{begin(reference, key)}{module.__file__} has no {kind} {name}. It has "
        f"{', '.join(own) or 'none'}."
    )


def import_user_file(reference: str, key: str = "") -> ModuleType:
    """Import the file of path.py:name. Raises UserFunctionError for any exception of the file."""
    path = find_user_file(reference, key)
    try:
        return import_file(path.resolve())
    except UserFunctionError:
        raise
    except (Exception, SystemExit) as error:  # a script may parse arguments that are not its own
        place = describe_place(error, str(path.resolve()))
        raise UserFunctionError(
            f"{begin(reference, key)}{path} cannot be imported:{place} {type(error).__name__}: "
            f"{error}. {suggest_fix(error, path)}"
        ) from error


def find_user_file(reference: str, key: str = "") -> Path:
    """Find the file of path.py:name, in this folder or the kit's. Raises UserFunctionError."""
    file = reference.rpartition(":")[0]
    if not file.endswith(".py"):
        raise UserFunctionError(
            f"{begin(reference, key)}{reference!r} names no function. Write path.py:function."
        )
    for path in (Path(file).expanduser(), KIT / file):
        if path.is_file():
            return path
    raise UserFunctionError(
        f"{begin(reference, key)}no file {file} in the current folder ({Path.cwd()}) or the "
        "kit's. Give its path from one of these."
    )


def begin(reference: str, key: str) -> str:
    """Return the beginning of a message about a function that a key of a recipe names."""
    return f"{key}={reference}: " if key else ""


def is_user_file(file: str) -> bool:
    """Whether a file of a traceback is a user's: of no library, and not of the kit.

    The kit's templates are no user's files, because they call the functions of users.
    """
    path = Path(file)
    libraries = {"site-packages", "dist-packages"}
    if file.startswith("<") or libraries & set(path.parts) or STANDARD_LIBRARY in path.parents:
        return False
    if path.parent == KIT:
        return path.name not in KIT_FILES
    return not {KIT / "kit", KIT / "templates"} & set(path.parents)


def describe_place(error: BaseException, path: str) -> str:
    """Return " failed at FILE:LINE in FUNCTION:" for the deepest line of a user's file.

    path: of the file that the recipe names, which may be one of the kit's templates. Returns "" if
    the traceback has no such line.
    """
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    files = [code.co_filename for code, _ in frames]
    called = frames[files.index(path) :] if path in files else []
    own = [place for place in called if is_user_file(place[0].co_filename)]
    for code, line in own[-1:] or called[:1]:
        name = code.co_qualname.partition(".<locals>")[0]
        function = "" if code.co_filename == path else f" in {name}"
        return f" failed at {code.co_filename}:{line}{function}:"
    return ""


def suggest_fix(error: BaseException, path: Path) -> str:
    """Return one sentence that says how to repair a file that cannot be imported."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"Run `python {shlex.quote(str(path))}` to see where."
    folder = path.resolve().parent
    return (
        f"Install it for {sys.executable}, or save it in {folder} and import it with an import "
        "statement."
    )


# --- import a part of a package ------------------------------------------------------------------


def skip_package_init(name: str) -> None:
    """Let this process import the modules of a package without running its `__init__.py`.

    The package itself stays empty, so this is for processes that use only some of its modules.
    Raises RuntimeError if it was imported before: an empty copy would replace it for everybody.
    """
    if name in sys.modules:
        raise RuntimeError(f"{name} was imported before its __init__.py could be skipped")
    spec = importlib.util.find_spec(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
