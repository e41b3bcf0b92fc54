"""Weight bytes from the learner to the engines' workers: one interface, five lines to choose a backend.

Buffers are always on the host, and what is received has the sender's checksum or is not used. Rank 0 sends.
Called by `weightsync.sender` (rank 0) and `weightsync.staging`; every call blocks for at most the group's
timeout, and is made in a thread that nothing else depends on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from weightsync.files import FileGroup
from weightsync.process_groups import GlooGroup, NcclGroup
from weightsync.rendezvous import Wanted, meet
from weightsync.shared_memory import SharedMemoryGroup
from weightsync.version import Manifest
from weightsync.wire import GroupSpec

TransportError = (RuntimeError, OSError)  # torch.distributed raises RuntimeErrors; sockets OSErrors


class Group(Protocol):
    """The ranks of a transfer, for this and later ones. A group in which a transfer failed is closed."""

    def send(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        """From rank 0, until nobody reads `flat` (uint8 on the host) any more; its checksum."""
        ...

    def receive(self, manifest: Manifest, flat: torch.Tensor, bucket_bytes: int, wanted: Wanted) -> int:
        """Fill `flat`; the checksum of what came."""
        ...

    def close(self) -> None: ...


def open_group(spec: GroupSpec, device: torch.device, wanted: Wanted = lambda: True) -> Group:
    """Meet the other ranks. Raises RuntimeError when one does not come within the timeout, or soon after
    the group is no longer `wanted`."""
    store = meet(spec, wanted)
    match spec.backend:
        case "nccl":
            return NcclGroup(store, spec, device)
        case "gloo":
            return GlooGroup(store, spec)
        case "shm":
            return SharedMemoryGroup(store, spec)
        case "disk":
            return FileGroup(store, spec)
    raise RuntimeError(f"there is no weightsync backend {spec.backend!r}; are both sides the same release?")


def current_device(kind: str) -> torch.device:
    """The device of this process, by a role's `device` ("cpu" or "cuda")."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Tells devices apart across processes and machines: "cpu@<machine>" or "cuda:<uuid>@<machine>"."""
    kind = f"cuda:{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    return f"{kind}@{_machine()}"


def _machine() -> str:
    """The same for two processes if each can open what the other has open, through /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
