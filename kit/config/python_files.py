"""Import Python files by their path, and modules of a package without its `__init__.py`.

The processes of Python verifiers use this file, too, so it imports nothing that takes time.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import importlib.util
import os
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from kit.errors import UserFunctionError

KIT = Path(__file__).resolve().parents[2]  # the folder of the repository
KIT_FILES = ("algorithm.py", "env.py", "gym_client.py", "inference.py", "training.py")
STANDARD_LIBRARY = Path(os.__file__).parent
FOLDERS: dict[str, Path] = {}  # {name of the package that stands for a folder: the folder}


# --- import a file -------------------------------------------------------------------------------


@functools.cache
def import_file(path: Path) -> ModuleType:
    """Import the file at `path` and return its module. A second call returns the same module.

    As after `python FILE`, its import statements find the files and packages of its folder, before
    installed modules of the same name. Only the modules of that folder import each other in this
    way: sys.path stays as it is, so a file random.py in the folder hides `random` from no library,
    and two folders may have a file of the same name. Raises every exception that the file raises.
    """
    package = make_folder_package(path.parent)
    stem = path.stem.replace(".", "-")  # a dot would separate modules
    name = f"{package}.{stem}"
    loader = FolderLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses and pickle look the module up here
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a later import would get a module without its last lines
        raise
    return module


def make_folder_package(folder: Path) -> str:
    """Enter a package whose modules are the files of a folder, and return its name.

    The name has a checksum of the path, so that it differs from the name of any other module.
    """
    name = f"{folder.name.replace('.', '_')}_{zlib.crc32(bytes(folder)):08x}"
    if name not in FOLDERS:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
        FOLDERS[name] = folder
    if FolderFinder not in sys.meta_path:
        sys.meta_path.insert(0, FolderFinder)
    return name


def folder_package(module: ModuleType) -> ModuleType:
    """Return the package that stands for the folder of a module from `import_file`."""
    return sys.modules[module.__name__.partition(".")[0]]


class FolderFinder:
    """Finds the modules of the packages in FOLDERS. An entry of sys.meta_path."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of a folder, whose imports begin in that folder."""
        if name.partition(".")[0] not in FOLDERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = FolderLoader(spec.loader.name, str(spec.loader.path))
        return spec


class FolderLoader(SourceFileLoader):
    """Loads a module of a folder. Its import statements call `import_from_folder`."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module. Its functions keep these builtins, also for imports in their bodies."""
        package = module.__name__.partition(".")[0]
        import_module = functools.partial(import_from_folder, package)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_module}
        super().exec_module(module)


def import_from_folder(
    package: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` for the modules of a folder. Raises every exception that the module raises."""
    first = name.partition(".")[0]
    if level > 0 or not is_in_folder(package, first):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    try:
        module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist or ())
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing.startswith(f"{package}."):
            raise
        missing = missing.removeprefix(f"{package}.")
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing) from None
    return module if fromlist else sys.modules[f"{package}.{first}"]


def is_in_folder(package: str, name: str) -> bool:
    """Return whether a module without a dot in its name is imported from a folder.

    Python decides in the same way if the folder is the first one in sys.path.
    """
    if f"{package}.{name}" in sys.modules:
        return True
    local = PathFinder.find_spec(name, [str(FOLDERS[package])])
    if local is None:
        return False
    other = find_other_spec(name)
    if other is None:
        return True
    if other.origin in ("built-in", "frozen"):  # these precede sys.path
        return False
    if set(list_locations(local)) & set(list_locations(other)):
        return False  # the same file, because the folder is in sys.path: no second copy of it
    is_plain_folder = local.origin is None  # without __init__.py: modules elsewhere precede it
    return not is_plain_folder or other.origin is None


def find_other_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module without a dot in its name that is not of a folder."""
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # it was imported, and has no spec, such as __main__
        return ModuleSpec(name, None, origin="built-in")


def list_locations(spec: ModuleSpec) -> list[str]:
    """Return the file of a module, or the folders of a package."""
    locations = spec.submodule_search_locations or [str(spec.origin)]
    return [os.path.realpath(location) for location in locations]


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
    names = []
    for other, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", "") == module.__name__:
            names.append(other)
    similar = difflib.get_close_matches(name, names, n=2, cutoff=0.8)
    hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
    kind = "function" if key else "function or class"
    raise UserFunctionError(
        f"{begin(reference, key)}{module.__file__} has no {kind} {name}.{hint} It has "
        f"{', '.join(names) or 'none'}."
    )


def import_user_file(reference: str, key: str = "") -> ModuleType:
    """Import the file of path.py:name. Raises UserFunctionError for any exception of the file."""
    path = find_user_file(reference, key)
    try:
        return import_file(path.resolve())
    except (Exception, SystemExit) as error:  # a script may parse arguments that are not its own
        place = describe_place(error, str(path.resolve()))
        raise UserFunctionError(
            f"{begin(reference, key)}{path} cannot be imported:{place} {type(error).__name__}: "
            f"{error}. {suggest_fix(error, path)}"
        ) from error


def find_user_file(reference: str, key: str = "") -> Path:
    """Find the file of path.py:name, in this folder or the kit's. Raises UserFunctionError."""
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        raise UserFunctionError(
            f"{begin(reference, key)}{reference!r} names no function. Write path.py:function."
        )
    for path in (Path(file).expanduser(), KIT / file):
        if path.is_file():
            return path
    hint = "Give its path from one of these."
    for template in (KIT / "templates").glob("*.py"):
        if f"\ndef {name}(" in template.read_text():
            file_of_kit = f"templates/{template.name}"
            hint = f"{name} is in {file_of_kit}: write {file_of_kit}:{name}."
    raise UserFunctionError(
        f"{begin(reference, key)}no file {file} in the current folder ({Path.cwd()}) or the "
        f"kit's. {hint}"
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
    """Return " failed at FILE:LINE:" for the deepest line of a user's file in a traceback.

    path: of the file that the recipe names. If the line is in another file, its function follows,
    and the function that the named file called. Returns "" if neither has a line.
    """
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    is_named = [code.co_filename == path for code, _ in frames]
    begin = len(frames) - is_named[::-1].index(True) if any(is_named) else 0
    called = [place for place in frames[begin:] if is_user_file(place[0].co_filename)]
    if not called:
        return f" failed at {path}:{frames[begin - 1][1]}:" if begin else ""
    ends = (called[0], called[-1])
    first, last = [code.co_qualname.partition(".<locals>")[0] for code, _ in ends]
    functions = last if first == last else f"{last}, called by {first}"
    code, line = called[-1]
    return f" failed at {code.co_filename}:{line} in {functions}:"


def suggest_fix(error: BaseException, path: Path) -> str:
    """Return one sentence that says how to repair a file that cannot be imported."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"Run `python {shlex.quote(str(path))}` to see where."
    folder = path.resolve().parent
    if "." not in error.name and PathFinder.find_spec(error.name, [str(folder)]):
        return f"It is in {folder}: import it with an import statement."
    return f"Install it for {sys.executable}, or save it in {folder}."


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
