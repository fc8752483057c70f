"""Killing the processes of a run."""

import errno
import os
import subprocess
import sys

import psutil
import pytest

from kit.runs.processes import wait_until_gone


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield psutil.Process(child.pid)
        child.kill()


def test_wait_for_a_process_that_is_just_ending(monkeypatch, process):
    """pidfd_open answers so in the moment in which a process ends. psutil does not expect it."""
    real = os.pidfd_open
    answers = []

    def pidfd_open(pid, flags=0):
        if pid == process.pid and not answers:
            answers.append(errno.EINVAL)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    process.kill()
    wait_until_gone([process], timeout_s=10.0)
    assert answers
    assert not process.is_running()
