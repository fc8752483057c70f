"""Reward functions that misuse their process. The tests copy them to `my.py`."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import time
from pathlib import Path


def show_environment(**_):
    return {"score": 1.0, "names": " ".join(sorted(os.environ))}


def write_to_pipes(data):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, data)


def announce_long_answer(**_):
    """Write the header of an answer of 2**60 bytes, with the number of no request."""
    write_to_pipes(struct.pack("!QQQ", 1, 2**60, 0))
    time.sleep(60)


def write_a_reward():
    """Write a complete answer with a reward of a million, and the number of no request."""
    text = json.dumps({"reward": 1e6, "reward_components": {}}).encode()
    write_to_pipes(struct.pack("!QQQ", 0, len(text), 0) + text)


def answer_in_advance(**_):
    write_a_reward()
    return 0.25


def leave_children(**_):
    """Start a process in another session, and fork one that writes an answer."""
    subprocess.Popen(["sleep", "1000.25"], start_new_session=True)
    if os.fork() == 0:
        write_a_reward()
    time.sleep(60)


def can_write(folder):
    try:
        Path(folder, "written").write_text("x")
    except OSError:
        return False
    return True


def can_connect(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def look_around(solution_str, **_):
    host, port, secret, folder = solution_str.split()
    visible = {
        "secret": Path(secret).exists(),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
        "writes": can_write(folder),
        "network": can_connect(host, port),
    }
    return {"score": 1.0, "visible": json.dumps(visible)}
