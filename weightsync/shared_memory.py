"""The shm backend: engines on the learner's machine copy a version straight out of its snapshot.

The snapshot is an anonymous file in memory (memfd), which other processes of the same user open through
/proc: nothing has a name, so nothing is left behind by a process that was killed.
Opened by `weightsync.transport`; the buffers are `weightsync.snapshot`'s.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

import torch

from weightsync.offers import OfferGroup
from weightsync.version import Checksum, Manifest

PIECE = 1 << 20  # bytes copied at once: their checksum finds them in the processor's cache

_files: dict[int, int] = {}  # address of a shared buffer → its file
_changing = threading.RLock()  # a finalizer may run wherever memory is allocated, here too


def shared_buffer(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on the host, zeroed, that other processes can read."""
    file = os.memfd_create("slipstream-weights")
    os.ftruncate(file, max(nbytes, 1))
    memory = mmap.mmap(file, max(nbytes, 1))
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    address = flat.untyped_storage().data_ptr()
    with _changing:
        _files[address] = file
    weakref.finalize(memory, _forget, address, file)
    return flat


def _forget(address: int, file: int) -> None:
    """The buffer is gone, and another thread's may stand at its address already."""
    with _changing:
        if _files.get(address) == file:
            del _files[address]
    os.close(file)


class SharedMemoryGroup(OfferGroup):
    def offer(self, manifest: Manifest, flat: torch.Tensor, number: int) -> str:
        return f"/proc/{os.getpid()}/fd/{_files[flat.untyped_storage().data_ptr()]}"

    def fetch(self, place: str, manifest: Manifest, flat: torch.Tensor) -> int:
        with open(place, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
        snapshot = torch.frombuffer(memory, dtype=torch.uint8, count=flat.numel())
        checksum = Checksum()
        for source, piece in zip(snapshot.split(PIECE), flat.split(PIECE), strict=True):
            checksum.add(piece.copy_(source))
        return checksum.value()
