"""Have torch's TCPStore, where processes meet, listen on one address and not on every interface.

torch is imported when a store is made: a run reads its recipe before it imports torch.
"""

from __future__ import annotations

import errno
import importlib
import ipaddress
import socket
from typing import Any


def listen_on(host: str, port: int = 0, **settings: Any) -> Any:
    """Return a TCPStore that listens on `host` alone. port: 0 for a free one."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    port = listener.getsockname()[1]
    listening = listener.detach()  # the store closes it
    return TCPStore(host, port, is_master=True, master_listen_fd=listening, **settings)


def is_loopback(host: str) -> bool:
    """Return whether a host is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_rendezvous_on_loopback() -> None:
    """Have torch's own rendezvous (`env://`, `tcp://`) on one machine listen on that machine alone.

    torch.distributed.rendezvous makes the store of rank 0 without a way to say where it listens.
    """
    # a function of torch.distributed has the name of this module
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make_store = rendezvous._create_c10d_store
    if getattr(make_store, "on_loopback", False):
        return

    def create(
        host: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
    ) -> Any:
        is_served_elsewhere = rank != 0 or rendezvous._torchelastic_use_agent_store()
        if not is_served_elsewhere and is_loopback(host):
            settings = {"multi_tenant": True, "use_libuv": use_libuv}
            try:
                return listen_on(host, port, world_size=world_size, timeout=timeout, **settings)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # else this process may serve it already
                    raise
        return make_store(host, port, rank, world_size, timeout, use_libuv)

    create.on_loopback = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = create
