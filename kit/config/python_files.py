"""Import Python files by their path, and modules of a package without its `__init__.py`.

The processes of Python verifiers use this file, too, so it imports nothing that takes time.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


@functools.cache
def import_file(path: Path) -> ModuleType:
    """Import the file at `path` and return its module. A second call returns the same module.

    The module name contains a checksum of the path, so that it cannot collide with an installed
    module of the same name. Raises every exception that the file raises.
    """
    name = f"{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses and pickle look the module up here
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def skip_package_init(name: str) -> None:
    """Let this process import the modules of a package without running its `__init__.py`.

    The package itself stays empty, so this is for processes that use only some of its modules.
    Raises RuntimeError if it was imported before: an empty copy would replace it for everybody.
    """
    if name in sys.modules:
        raise RuntimeError(f"{name} was imported before its __init__.py could be skipped")
    spec = importlib.util.find_spec(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
