"""What one weight version is made of: a manifest that lays tensors out in one flat buffer, and a checksum.

Invariant: learner and engine derive the same layout from the same metadata, so only raw bytes travel.
Pure; used by `weightsync.snapshot` on the learner's side and `weightsync.staging` on the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash

from weightsync.wire import TensorMeta

ALIGNMENT = 64  # bytes; every dtype's view needs its own size, a cache line makes copies fast


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the flat buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    slots: tuple[Slot, ...]
    nbytes: int  # of the flat buffer, padding included

    @classmethod
    def of(cls, tensors: Iterable[TensorMeta]) -> Manifest:
        """Lay the tensors out in order. Raises ValueError on an unknown dtype or a repeated name."""
        slots: list[Slot] = []
        names: set[str] = set()
        offset = 0
        for name, dtype_name, shape in tensors:
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(
                    f"tensor {name!r} has dtype {dtype_name!r}; use torch's name, e.g. 'bfloat16'"
                )
            if name in names:
                raise ValueError(f"tensor {name!r} is listed twice; send tied weights once")
            names.add(name)
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            slots.append(Slot(name, dtype, tuple(shape), offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(slots), offset)

    def view(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The slot's bytes of `flat` (uint8 [nbytes]) as its tensor, without a copy."""
        return flat[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)

    def views(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(slot.name, self.view(flat, slot)) for slot in self.slots]


def host_buffer(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on the host, zeroed (padding is sent too); page-locked where CUDA copies from it."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class Checksum:
    """XXH3-64 of the bytes so far. It guards against lost, swapped or torn bytes, not against an attacker;
    at 9 GB/s it is a fraction of what moving the bytes costs."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, chunk: torch.Tensor) -> None:
        """`chunk`: uint8 on the host. The GIL is not held meanwhile."""
        self._hash.update(chunk.numpy().data)

    def value(self) -> int:
        return self._hash.intdigest()
