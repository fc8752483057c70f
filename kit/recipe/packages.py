"""Installed packages that cannot be used together.

Convenience: an error of an import names the package and its version.
"""

from __future__ import annotations

import importlib.metadata


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
