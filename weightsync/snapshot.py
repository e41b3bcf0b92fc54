"""The learner's newest weights, copied to the host, where a transfer may read them while training goes on.

Invariant: a snapshot that is being read is never written, and the newest one is always kept for those
who join later. One buffer does while transfers keep up, two when a version comes during a transfer.
`write` is called by the learner's loop, `reading` by the publisher's sending threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync.version import Manifest, host_buffer
from weightsync.wire import NO_PROBE, Probe


@dataclass
class Snapshot:
    version: int
    flat: torch.Tensor  # uint8 on the host, laid out by the manifest
    probe: Probe
    readers: int = 0
    was_read: bool = False


class SnapshotStore:
    def __init__(self, manifest: Manifest, new_buffer: Callable[[int], torch.Tensor] = host_buffer) -> None:
        """`new_buffer`: of so many bytes, zeroed."""
        self.manifest = manifest
        self._new_buffer = new_buffer
        self._latest: Snapshot | None = None
        self._free: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._skipped = 0  # versions that were replaced before anyone read them

    def write(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], probe: Probe = NO_PROBE
    ) -> None:
        """Copy the tensors, which must come in the manifest's order; about a memcpy.

        Raises ValueError naming the first tensor that is not the one announced.
        """
        flat = self._take_buffer()
        self._copy(tensors, flat)
        with self._changed:
            self._retire()
            self._latest = Snapshot(version, flat, probe)
            self._changed.notify_all()

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[Snapshot]:
        """The newest snapshot, held still while the block runs."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._latest is not None, timeout_s):
                raise RuntimeError(f"no weights were published within {timeout_s:g} s")
            snapshot = self._latest
            assert snapshot is not None
            snapshot.readers += 1
            snapshot.was_read = True
        try:
            yield snapshot
        finally:
            with self._changed:
                snapshot.readers -= 1
                if not snapshot.readers and snapshot is not self._latest:
                    self._free.append(snapshot.flat)

    def take_skipped(self) -> int:
        """Versions that were replaced before anyone read them, since the last call."""
        with self._changed:
            skipped, self._skipped = self._skipped, 0
        return skipped

    def _take_buffer(self) -> torch.Tensor:
        with self._changed:
            latest = self._latest
            if latest is not None and not latest.readers:
                self._retire()
                self._latest = None  # readers wait for the copy that follows
            if self._free:
                return self._free.pop()
        return self._new_buffer(self.manifest.nbytes)

    def _retire(self) -> None:
        """Let go of the latest; its buffer is free now or when its last reader ends."""
        if self._latest is not None:
            self._skipped += not self._latest.was_read
            if not self._latest.readers:
                self._free.append(self._latest.flat)

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]], flat: torch.Tensor) -> None:
        slots = iter(self.manifest.slots)
        on_device = False
        with torch.no_grad():
            for name, tensor in tensors:
                slot = next(slots, None)
                if slot is None:
                    raise ValueError(f"tensor {name!r} comes after the last one announced to the publisher")
                if name != slot.name or tuple(tensor.shape) != slot.shape:
                    raise ValueError(
                        f"expected tensor {slot.name!r} of shape {slot.shape}, got {name!r} of shape "
                        f"{tuple(tensor.shape)}; publish in the order of the publisher's metadata"
                    )
                self.manifest.view(flat, slot).copy_(tensor, non_blocking=True)
                on_device = on_device or tensor.is_cuda
        missing = next(slots, None)
        if missing is not None:
            raise ValueError(f"tensor {missing.name!r} is missing from the published weights")
        if on_device:
            torch.cuda.current_stream().synchronize()
