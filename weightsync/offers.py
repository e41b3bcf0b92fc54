"""Backends in which rank 0 says where a version lies and the others fetch it: shared memory, files.

Connections go from the engines to the learner's store only. Invariant: what was offered stays as it is until
every rank has said that it has it. `weightsync.shared_memory` and `weightsync.files` say what a place is.
"""

from __future__ import annotations

import torch

from weightsync.rendezvous import Store, Wanted, wait_for
from weightsync.version import Checksum, Manifest
from weightsync.wire import GroupSpec


class OfferGroup:
    def __init__(self, store: Store, spec: GroupSpec) -> None:
        self._store = store
        self._spec = spec
        self._transfers = 0

    def offer(self, manifest: Manifest, flat: torch.Tensor, number: int) -> str:
        """Make `flat` available to other processes; where it is."""
        raise NotImplementedError

    def fetch(self, place: str, manifest: Manifest, flat: torch.Tensor) -> int:
        """Fill `flat` with what lies at `place`; its checksum."""
        raise NotImplementedError

    def withdraw(self, place: str) -> None:
        """Nobody reads `place` any more."""

    def send(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        offered, fetched = self._next_keys()
        place = self.offer(manifest, flat, self._transfers)
        try:
            self._store.set(offered, place)
            checksum = Checksum()
            checksum.add(flat)
            wait_for(self._store, fetched, self._spec.timeout_s, wanted, "did not fetch the weights")
        finally:
            self.withdraw(place)
        for key in (offered, *fetched):
            self._store.delete_key(key)
        return checksum.value()

    def receive(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        offered, fetched = self._next_keys()
        wait_for(self._store, [offered], self._spec.timeout_s, wanted, "did not offer its weights")
        checksum = self.fetch(self._store.get(offered).decode(), manifest, flat)
        self._store.set(fetched[self._spec.rank - 1], "1")
        return checksum

    def close(self) -> None:
        """Peers find out by asking whether the transfer is still wanted."""

    def _next_keys(self) -> tuple[str, list[str]]:
        self._transfers += 1
        prefix = f"{self._transfers}/"
        return f"{prefix}offered/0", [f"{prefix}fetched/{rank}" for rank in range(1, self._spec.world)]
