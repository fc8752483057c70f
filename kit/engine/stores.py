"""Make torch's TCPStore listen on one address only, not on every network interface.

Processes of torch.distributed find each other through this store. This module imports torch only
when it creates a store, because a run checks its recipe before it imports torch.

Protects: other runs and this one, from processes of other machines that join a store.
"""

from __future__ import annotations

import errno
import importlib
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store, TCPStore


def create_store(
    host: str,
    port: int = 0,
    **settings: Any,  # as for TCPStore
) -> TCPStore:
    """Return a TCPStore that listens on `host` only. port: 0 for a free one."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    port = listener.getsockname()[1]
    listen_fd = listener.detach()  # the store closes it
    return TCPStore(host, port, is_master=True, master_listen_fd=listen_fd, **settings)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def monkey_patch_rendezvous() -> None:
    """Make torch's rendezvous (`env://`, `tcp://`) of one machine listen on loopback only.

    torch.distributed.rendezvous creates the store of rank 0 and has no option for its address.
    https://github.com/pytorch/pytorch/issues/173909
    """
    # `torch.distributed.rendezvous` is also the name of a function, which `import` would return.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_torch_store = rendezvous._create_c10d_store
    if getattr(create_torch_store, "is_patched", False):
        return

    def create_c10d_store(
        host: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Store:
        is_served_elsewhere = rank != 0 or rendezvous._torchelastic_use_agent_store()
        if not is_served_elsewhere and is_loopback(host):
            settings = {"multi_tenant": True, "use_libuv": use_libuv}
            try:
                return create_store(host, port, world_size=world_size, timeout=timeout, **settings)
            except OSError as error:
                # This process may already have a store on that port. torch then shares it.
                if error.errno != errno.EADDRINUSE:
                    raise
        return create_torch_store(host, port, rank, world_size, timeout, use_libuv)

    create_c10d_store.is_patched = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = create_c10d_store
