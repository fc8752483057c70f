"""Installed packages that cannot be used together.

Convenience: an error of an import names the package and its version.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

ENVIRONMENTS = (".venv", ".venv-gpu")  # folders that `make` installs the packages in


def describe_wrong_python(error: ModuleNotFoundError) -> str:
    """Describe that this Python lacks a package that each environment of this copy has."""
    made = [name for name in ENVIRONMENTS if Path(name, "bin", "python").is_file()]
    fix = f"Run: source {made[0]}/bin/activate" if made else "Run: make setup (GPUs: make gpu)"
    return f"{error} in {sys.executable}, which is not Quintet's environment. {fix}"


def describe_import_error(error: ImportError) -> str:
    """Describe a failed import on one line: the reason, the package with its version, the fix.

    error: also one of a worker, as Ray raises it.
    """
    cause = getattr(error, "cause", None) or error
    reason = " ".join(str(cause).split()).rstrip(".")
    module = (getattr(cause, "name", None) or "").partition(".")[0]
    packages = importlib.metadata.packages_distributions().get(module, [])[:1]
    found = "".join(f" ({name} {importlib.metadata.version(name)})" for name in packages)
    return (
        f"a package cannot be imported: {reason}{found}. Install the packages again in a new "
        "environment: requirements-gpu.txt, or requirements-cpu.txt for a CPU."
    )
