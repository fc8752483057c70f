"""Installed packages that cannot be used together."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import traceback

from kit.config.keys import ROOT

PROFILES = ("cpu", "gpu", "sglang")  # of the environments in which verl runs


def describe_import_error(error: ImportError) -> str:
    """Describe a failed import on one line: the package, its version, the fix.

    error: also one of a worker, as Ray raises it.
    """
    cause = getattr(error, "cause", None) or error
    reason = " ".join(str(cause).split()).rstrip(".")
    module = (getattr(cause, "name", None) or "").partition(".")[0]
    package, version = find_package(module)
    pins = "".join((ROOT / f"requirements-{name}.txt").read_text() for name in PROFILES)
    if not version or re.search(rf"(?m)^{package.lower().replace('_', '-')}==", pins):
        found = f" ({package} {version})" if version else ""
        return (
            f"a package cannot be imported: {reason}{found}. Install the packages again: "
            "requirements-gpu.txt, or requirements-cpu.txt for a CPU."
        )
    trace = "".join(traceback.format_exception(error))
    importers = [name for name in re.findall(r"-packages/(\w+)", trace) if name != module]
    importer = " ".join(find_package(importers[-1])) if importers else "the run"
    return (
        f"{importer} cannot use {package} {version}, which is installed too: {reason}. Uninstall "
        f"{package}, or use an environment without it."
    )


def find_package(module: str) -> tuple[str, str]:
    """(the package of a module, its version). The version is empty if it is not installed."""
    for package in importlib.metadata.packages_distributions().get(module, []):
        return package, importlib.metadata.version(package)
    return module, str(getattr(sys.modules.get(module), "__version__", ""))
