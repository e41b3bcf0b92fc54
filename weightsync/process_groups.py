"""The gloo and nccl backends: a process group of its own that broadcasts a version bucket by bucket.

The group stands beside torch's default group (the backend's ProcessGroup is made directly over a store), so
neither the learner's collectives nor vLLM's are touched and the learner needs no vLLM. Rank 0 sends.
Opened by `weightsync.transport`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.rendezvous import Store, Wanted, local_address_towards
from weightsync.version import Checksum, Manifest
from weightsync.wire import GroupSpec

_c10d: Any = dist  # torch's stubs leave these classes out


class BroadcastGroup:
    """What gloo and nccl share. Closing the group ends the peers' waits; else the group's timeout does."""

    def start(self, chunk: torch.Tensor) -> Callable[[], None]:
        """Begin the broadcast of a host uint8 chunk; the result waits until the chunk may be used."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def send(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        """The checksum is computed while the bytes travel."""
        checksum = Checksum()
        for chunk in flat.split(bucket_bytes):
            wait = self.start(chunk)
            checksum.add(chunk)
            wait()
        return checksum.value()

    def receive(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        """The checksum is one bucket behind the wire."""
        checksum = Checksum()
        arrived: torch.Tensor | None = None
        for chunk in flat.split(bucket_bytes):
            wait = self.start(chunk)
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


class GlooGroup(BroadcastGroup):
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


class NcclGroup(BroadcastGroup):
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
