"""Import the Python files that a recipe names, each with the files next to it.

The processes of Python verifiers use this file, too, so it imports nothing that takes time.

Protects: a run from functions of another file that has the same name.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from kit.errors import UserFunctionError

KIT = Path(__file__).resolve().parents[2]  # the folder of the repository
KIT_FILES = ("algorithm.py", "env.py", "gym_client.py", "inference.py", "training.py")
KIT_FOLDERS = {KIT / name for name in ("kit", "extras", "lab", "templates")}
STANDARD_LIBRARY = Path(os.__file__).parent
IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)


@functools.cache
def import_file(path: Path) -> ModuleType:
    """Import the file at `path` and return its module. A second call returns the same module.

    The folder of a user's file is first in the search path meanwhile, and last afterwards, for
    import statements in functions. Raises every exception that the file raises, and
    UserFunctionError if a statement would get a module of the same name that was imported before.
    """
    folder = str(path.parent)
    for name in IMPORT.findall(path.read_text(encoding="utf-8")):
        other = getattr(sys.modules.get(name), "__file__", None) or folder
        own = path.parent / f"{name}.py"
        if own.is_file() and not Path(other).resolve().is_relative_to(folder):
            raise UserFunctionError(
                f"{path}: `import {name}` would get {other} instead of {own}. Rename this file."
            )
    name = f"{path.stem.replace('.', '-')}_{zlib.crc32(bytes(path)):08x}"  # as of no other module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up here
    is_users = is_user_file(str(path))  # templates/trl.py would hide TRL
    if is_users:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a later import would get a module without its last lines
        raise
    finally:
        if is_users:
            sys.path.remove(folder)
            sys.path.append(folder)
    return module


def list_neighbors(module: ModuleType) -> list[ModuleType]:
    """List the imported modules in the folder of a module from `import_file`."""
    folder = Path(str(module.__file__)).parent
    files = [(other, getattr(other, "__file__", None) or "") for other in sys.modules.values()]
    return [other for other, file in files if folder in Path(file).parents and is_user_file(file)]


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
    kind = "function" if key else "function or class"
    raise UserFunctionError(
        f"{begin(reference, key)}{module.__file__} has no {kind} {name}. Correct the name."
    )


def import_user_file(reference: str, key: str = "") -> ModuleType:
    """Import the file of path.py:name. Raises UserFunctionError for any exception of the file."""
    path = find_user_file(reference, key).resolve()
    try:
        return import_file(path)
    except UserFunctionError:
        raise
    except (Exception, SystemExit) as error:  # a script may parse arguments that are not its own
        place = describe_place(error, str(path))
        raise UserFunctionError(
            f"{begin(reference, key)}{path} cannot be imported:{place} {type(error).__name__}: "
            f"{error}. Correct it, or install for {sys.executable} what it imports."
        ) from error


def find_user_file(reference: str, key: str = "") -> Path:
    """Find the file of path.py:name, in this folder or the kit's. Raises UserFunctionError."""
    file = reference.rpartition(":")[0]
    for path in (Path(file).expanduser(), KIT / file):
        if file.endswith(".py") and path.is_file():
            return path
    raise UserFunctionError(
        f"{begin(reference, key)}no file {file} in the current folder ({Path.cwd()}) or in {KIT}. "
        "Write path.py:function, with a path from one of these."
    )


def begin(reference: str, key: str) -> str:
    """Return the beginning of a message about a function that a key of a recipe names."""
    return f"{key}={reference}: " if key else ""


def is_user_file(file: str) -> bool:
    """Return whether a file is a user's: of no library, and not of the kit.

    The kit's templates are no user's files, because they call the functions of users.
    """
    path = Path(file)
    libraries = {"site-packages", "dist-packages"}
    if file.startswith("<") or libraries & set(path.parts) or STANDARD_LIBRARY in path.parents:
        return False
    is_kits = path.name in KIT_FILES if path.parent == KIT else KIT_FOLDERS & set(path.parents)
    return not is_kits


def describe_place(error: BaseException, path: str) -> str:
    """Return " failed at FILE:LINE in FUNCTION:" for the deepest line of a user's file, or "".

    path: of the file that the recipe names, which may be one of the kit's templates.
    """
    code = None
    for frame, number in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == path or is_user_file(frame.f_code.co_filename):
            code = frame.f_code
            line = number
    if not code:
        return ""
    name = code.co_qualname.partition(".<locals>")[0]
    function = "" if code.co_filename == path else f" in {name}"
    return f" failed at {code.co_filename}:{line}{function}:"
