"""Where the two ends of a transfer meet: a TCPStore on the learner, and waiting in it with a deadline.

Invariant: every wait ends at its deadline, and soon after nobody wants the transfer any more.
Used by `weightsync.transport` and the backends beneath it; the store is `weightsync.publisher`'s.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weightsync.wire import GroupSpec

_c10d: Any = dist  # torch's stubs leave these classes out
Store = Any  # a torch.distributed.Store
Wanted = Callable[[], bool]  # False: the transfer was given up

POLL_S = 0.01


def local_address_towards(host: str) -> str:
    """The address of this machine's interface from which `host` is reached. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def serve_store(host: str, timeout_s: float) -> Store:
    """A TCPStore server on `host` only (torch alone would listen on every interface) and a free port."""
    listener = socket.create_server((host, 0), backlog=1024)
    return _c10d.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns the socket from here
    )


def meet(spec: GroupSpec, wanted: Wanted) -> Store:
    """The group's part of the store, once all ranks are there. Raises RuntimeError when one does not come."""
    timeout = timedelta(seconds=spec.timeout_s)
    # A connection of its own even for rank 0: waiting on a shared one would lock everybody else out.
    client = _c10d.TCPStore(spec.host, spec.port, timeout=timeout, wait_for_workers=False)
    store = _c10d.PrefixStore(spec.name, client)
    store.set(f"here/{spec.rank}", "1")
    # A rank that never comes must end the wait here: nccl's own initialisation has no deadline.
    everyone = [f"here/{rank}" for rank in range(spec.world)]
    wait_for(store, everyone, spec.timeout_s, wanted, "did not come to the transfer")
    return store


def wait_for(store: Store, keys: Sequence[str], timeout_s: float, wanted: Wanted, what: str) -> None:
    """Until all keys, which end in their ranks, are set. Raises RuntimeError: "ranks … `what` …"."""
    keys = list(keys)
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if not wanted():
            raise RuntimeError("the transfer was given up")
        if time.monotonic() > deadline:
            missing = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
            raise RuntimeError(f"ranks {missing} {what} within {timeout_s:g} s")
        time.sleep(POLL_S)
