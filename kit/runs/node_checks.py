"""Check what a run needs from this machine before it starts anything, and provide what it can."""

from __future__ import annotations

import resource

from kit.errors import RunError
from kit.runs import isolation

# Open files. Ray's GCS and raylet, and vLLM, each need hundreds. Linux's default is 1024.
MIN_OPEN_FILES = 1024
MAX_OPEN_FILES = 65536  # as in Ray; with more, programs that close every possible file take long


def check_limits() -> None:
    """Raise RunError for a limit of this machine with which no run can start."""
    isolation.check_tmpdir_length()
    raise_file_limit()


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which its children inherit. Raises RunError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # in Python, "no limit" is -1
    if soft < 0 or soft >= MAX_OPEN_FILES:
        return
    limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < MIN_OPEN_FILES:
        raise RunError(
            f"This process may open {limit} files (ulimit -n), and a run needs {MIN_OPEN_FILES}. "
            f"Run `ulimit -n {MIN_OPEN_FILES}` in a new shell. If the shell refuses it, raise the "
            "hard limit: nofile in /etc/security/limits.conf, or `docker run --ulimit nofile`."
        )
