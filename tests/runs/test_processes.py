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


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOENT])
def test_wait_for_a_process_that_is_just_ending(monkeypatch, process, code):
    """pidfd_open answers so in the moment in which a process ends. psutil does not expect it."""
    real = os.pidfd_open
    answers = []

    def pidfd_open(pid, flags=0):
        if pid == process.pid and not answers:
            answers.append(code)
            raise OSError(code, os.strerror(code))
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    process.kill()
    wait_until_gone([process], timeout_s=10.0)
    assert answers == [code]
    assert not process.is_running()


def test_other_errors_of_the_system_are_raised(monkeypatch, process):
    def pidfd_open(pid, flags=0):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    # psutil tries it first, and would wait in another way if it failed.
    monkeypatch.setattr("psutil._psposix.can_use_pidfd_open", lambda: True)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        wait_until_gone([process], timeout_s=1.0)


def test_the_wait_ends(process):
    wait_until_gone([process], timeout_s=0.1)
    assert process.is_running()
