"""Weight bytes over a process group of their own: one interface, gloo and nccl thin beneath it.

The group stands beside torch's default group (a TCPStore with a prefix, the backend's ProcessGroup made
directly), so neither the learner's collectives nor vLLM's are touched and the learner needs no vLLM.
Buffers are always on the host: nccl bounces each bucket through the device. Rank 0 sends.
Called by `weightsync.publisher` (rank 0) and `weightsync.staging`; every call blocks for at most the
group's timeout and is made in a thread that nothing else depends on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weightsync.version import Checksum
from weightsync.wire import GroupSpec

_c10d: Any = dist  # torch's stubs leave these classes out
Store = Any  # a torch.distributed.Store

MEETING_POLL_S = 0.01

TransportError = (RuntimeError, OSError)  # torch.distributed raises RuntimeErrors; sockets OSErrors


class Group(Protocol):
    def start(self, chunk: torch.Tensor) -> Callable[[], None]:
        """Begin the broadcast of a host uint8 chunk; the result waits until the chunk may be used."""
        ...

    def close(self) -> None: ...


def current_device(kind: str) -> torch.device:
    """The device of this process, by a role's `device` ("cpu" or "cuda")."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Tells devices apart across processes and machines: "cpu" or "cuda:<uuid>"."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"


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


def open_group(spec: GroupSpec, device: torch.device, wanted: Callable[[], bool] = lambda: True) -> Group:
    """Meet the other ranks. Raises RuntimeError when one does not come within the timeout, or soon after
    the group is no longer `wanted`."""
    timeout = timedelta(seconds=spec.timeout_s)
    # A connection of its own even for rank 0: waiting on a shared one would lock everybody else out.
    client = _c10d.TCPStore(spec.host, spec.port, timeout=timeout, wait_for_workers=False)
    store = _c10d.PrefixStore(spec.name, client)
    store.set(f"here/{spec.rank}", "1")
    _wait_for_all(store, spec, wanted)
    return _NcclGroup(store, spec, device) if spec.backend == "nccl" else _GlooGroup(store, spec)


def _wait_for_all(store: Store, spec: GroupSpec, wanted: Callable[[], bool]) -> None:
    """A rank that never comes must end the wait here: nccl's own initialisation has no deadline."""
    everyone = [f"here/{rank}" for rank in range(spec.world)]
    deadline = time.monotonic() + spec.timeout_s
    while not store.check(everyone):
        if not wanted():
            raise RuntimeError("the transfer was given up")
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(everyone) if not store.check([key])]
            raise RuntimeError(f"ranks {missing} of the transfer did not come within {spec.timeout_s:g} s")
        time.sleep(MEETING_POLL_S)


def send(group: Group, flat: torch.Tensor, bucket_bytes: int) -> int:
    """Broadcast `flat` bucket by bucket; its checksum, computed while the bytes travel."""
    checksum = Checksum()
    for chunk in flat.split(bucket_bytes):
        wait = group.start(chunk)
        checksum.add(chunk)
        wait()
    return checksum.value()


def receive(group: Group, flat: torch.Tensor, bucket_bytes: int) -> int:
    """Fill `flat` bucket by bucket; the checksum of what came, one bucket behind the wire."""
    checksum = Checksum()
    arrived: torch.Tensor | None = None
    for chunk in flat.split(bucket_bytes):
        wait = group.start(chunk)
        if arrived is not None:
            checksum.add(arrived)
        wait()
        arrived = chunk
    if arrived is not None:
        checksum.add(arrived)
    return checksum.value()


def _from_rank_0() -> Any:
    options = _c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


class _GlooGroup:
    def __init__(self, store: Store, spec: GroupSpec) -> None:
        options = _c10d.ProcessGroupGloo._Options()
        address = local_address_towards(spec.host)
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=spec.timeout_s)
        options._threads = 2
        self._group = _c10d.ProcessGroupGloo(store, spec.rank, spec.world, options)

    def start(self, chunk: torch.Tensor) -> Callable[[], None]:
        return self._group.broadcast([chunk], _from_rank_0()).wait

    def close(self) -> None:
        # Dropping the last reference closes the sockets, which ends the peers' waits too.
        del self._group


class _NcclGroup:
    """Each bucket goes host → device → nccl → device → host, on a stream of its own.

    The stream keeps generation's and training's from waiting. A chunk's waiter polls its event, so that it
    has a deadline; torch's own watchdog is off, as it would end the whole process when a peer dies.
    docs/weightsync.md compares this with vLLM's nccl engine.
    """

    def __init__(self, store: Store, spec: GroupSpec, device: torch.device) -> None:
        self._device = device
        self._sends = spec.rank == 0
        self._timeout_s = spec.timeout_s
        torch.cuda.set_device(device)  # per thread
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=spec.timeout_s)
        with _without_nccl_watchdog():
            self._group = _c10d.ProcessGroupNCCL(store, spec.rank, spec.world, options)

    def start(self, chunk: torch.Tensor) -> Callable[[], None]:
        buffer = self._room_for(chunk.numel())
        with torch.cuda.stream(self._stream):
            if self._sends:
                buffer.copy_(chunk, non_blocking=True)
            self._group.broadcast([buffer], _from_rank_0()).wait()  # orders the stream, does not block
            if not self._sends:
                chunk.copy_(buffer, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return lambda: self._wait(done)

    def _room_for(self, nbytes: int) -> torch.Tensor:
        """The device buffer; one does, since every chunk is waited for before the next is started."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:nbytes]

    def _wait(self, done: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError(f"nccl broadcast did not end within {self._timeout_s:g} s")
            time.sleep(0.001)

    def close(self) -> None:
        self._group.abort()
        del self._group


@contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """torch reads this setting when a group is made; other groups keep their own."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
