"""The engine's end of a transfer: a thread receives into a host buffer while generation goes on.

Invariant: the model is not touched here; what is staged is either complete or not handed out. A transfer
that was let go is forgotten with its thread and buffer, which a late byte can then no longer harm.
Used by `weightsync.worker` inside vLLM's worker process; needs no vLLM itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from weightsync import transport
from weightsync.version import Manifest, host_buffer
from weightsync.wire import GroupSpec

log = logging.getLogger(__name__)


Tensors = list[tuple[str, torch.Tensor]]
Prepare = Callable[[Tensors], Tensors]


class _Reception:
    """One transfer's thread and its result."""

    def __init__(self, manifest: Manifest, prepare: Prepare) -> None:
        self.manifest = manifest
        self.prepare = prepare
        self.tensors: Tensors = []
        self.flat: torch.Tensor | None = None  # once all ranks have met
        self.checksum: int | None = None
        self.error: str | None = None
        self.ended = threading.Event()


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: _Reception | None = None
        self._lock = threading.Lock()  # guards the two that follow
        self._spare: torch.Tensor | None = None  # the buffer of the last transfer, for the next
        self._group: tuple[str, transport.Group] | None = None  # open, between two transfers

    def begin(
        self,
        group: GroupSpec,
        manifest: Manifest,
        bucket_bytes: int,
        prepare: Prepare = lambda tensors: tensors,
    ) -> None:
        """Start to receive. A transfer still running is discarded. `prepare` makes of the tensors that came
        those to be loaded, in the transfer's thread."""
        self.discard()
        self._current = _Reception(manifest, prepare)
        threading.Thread(
            target=self._receive,
            args=(self._current, group, bucket_bytes),
            name=f"weightsync-{group.name}",
            daemon=True,
        ).start()

    def status(self) -> tuple[bool, int, str]:
        """(complete, checksum of the received bytes, error or "")."""
        current = self._current
        if current is None:
            return False, 0, "no transfer is running"
        if not current.ended.is_set():
            return False, 0, ""
        return current.error is None, current.checksum or 0, current.error or ""

    def tensors(self) -> Tensors:
        """What is to be loaded, in general views of the buffer: valid until the next `begin`. Raises
        RuntimeError if the transfer is not complete."""
        complete, _, error = self.status()
        if not complete or self._current is None:
            raise RuntimeError(f"the staged weights are not complete: {error or 'bytes are still coming'}")
        return self._current.tensors

    def discard(self) -> None:
        """Forget the current transfer. Its buffer is used again only if no thread can write to it."""
        current, self._current = self._current, None
        if current is not None and current.flat is not None and current.ended.is_set():
            with self._lock:
                self._spare = current.flat

    def close(self) -> None:
        self.discard()
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group[1].close()

    def _receive(self, reception: _Reception, spec: GroupSpec, bucket_bytes: int) -> None:
        group: transport.Group | None = None

        def wanted() -> bool:
            return reception is self._current

        try:
            group = self._open(spec, wanted)
            # Not before: the wait for ranks that never come would hold a model's size of memory.
            reception.flat = self._take_buffer(reception.manifest.nbytes)
            reception.checksum = group.receive(reception.manifest, reception.flat, bucket_bytes, wanted)
            reception.tensors = reception.prepare(reception.manifest.views(reception.flat))
            # Before `ended`: from then on the next transfer may look for it, and its peers are in it.
            group = self._keep(spec.name, group)
        except BaseException as error:  # noqa: BLE001 - read by `status`; the receiver reports it
            log.warning("weight transfer failed: %s", error)
            reception.error = f"{type(error).__name__}: {error}"
        reception.ended.set()
        if group is not None:
            group.close()  # after `ended`: closing a broken one may take its timeout, and hurts nobody here

    def _take_buffer(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            spare, self._spare = self._spare, None
        return spare if spare is not None and spare.numel() == nbytes else host_buffer(nbytes)

    def _open(self, spec: GroupSpec, wanted: Callable[[], bool]) -> transport.Group:
        with self._lock:
            held, self._group = self._group, None
        if held is not None:
            if held[0] == spec.name:
                return held[1]
            held[1].close()
        return transport.open_group(spec, self._device, wanted)

    def _keep(self, name: str, group: transport.Group) -> transport.Group | None:
        """Hold the group for the next transfer; gives it back if there is one already."""
        with self._lock:
            if self._group is None:
                self._group = (name, group)
                return None
        return group
