"""Check what a run needs from this machine before it starts anything, and provide what it can."""

from __future__ import annotations

import resource

from kit.runs import isolation

# As in Ray. Linux's default is 1024. With more, programs that close every possible file take long.
MAX_OPEN_FILES = 65536


def check_limits() -> None:
    """Raise RunError for a limit of this machine with which no run can start."""
    isolation.check_tmpdir_length()
    raise_file_limit()


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which its children inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # in Python, "no limit" is -1
    if soft < 0 or soft >= MAX_OPEN_FILES:
        return
    limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
