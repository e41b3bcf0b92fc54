"""The learner's sending threads: one per transfer, with the process groups they use.

A broadcast to a peer that died or hangs can block until the group's timeout, and so can closing its
group. So each transfer has a thread, which alone touches its group; what blocks is left to that thread
and the publisher goes on with another group. Used by `weightsync.publisher`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightsync import transport
from weightsync.coordinator import StartSending
from weightsync.snapshot import SnapshotStore
from weightsync.wire import GroupSpec, Probe


@dataclass(frozen=True)
class Sent:
    transfer: int
    version: int
    checksum: int
    probe: Probe


@dataclass(frozen=True)
class SendFailed:
    transfer: int
    reason: str


@dataclass(frozen=True)
class Crashed:
    """A bug, not a peer's failure."""

    error: BaseException


Outcome = Sent | SendFailed | Crashed


class Sender:
    def __init__(
        self,
        snapshots: SnapshotStore,
        device: torch.device,
        bucket_bytes: int,
        report: Callable[[Outcome], None],
    ) -> None:
        """`report` is called once per transfer, from its thread."""
        self._snapshots = snapshots
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._report = report
        self._lock = threading.Lock()
        self._wanted: set[str] = set()  # groups that were not closed
        self._waiting: dict[str, transport.Group] = {}  # open, between two transfers
        self._threads: set[threading.Thread] = set()

    def start(self, action: StartSending) -> None:
        with self._lock:
            self._wanted.add(action.group.name)
        name = f"weightsync-transfer-{action.transfer}"
        thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
        self._threads = {other for other in self._threads if other.is_alive()} | {thread}
        thread.start()

    def close_group(self, name: str) -> None:
        """A group in use is closed by its thread."""
        with self._lock:
            self._wanted.discard(name)
            group = self._waiting.pop(name, None)
        if group is not None:
            group.close()

    def close(self, timeout_s: float) -> None:
        """Close every group and wait for the threads: torch ends a process that exits under them."""
        with self._lock:
            self._wanted.clear()
            groups, self._waiting = self._waiting, {}
        for group in groups.values():
            group.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, action: StartSending) -> None:
        try:
            self._report(self._send(action))
        except BaseException as error:  # noqa: BLE001 - reported; the publisher raises it to the learner
            self._report(Crashed(error))

    def _send(self, action: StartSending) -> Outcome:
        group: transport.Group | None = None
        try:
            group = self._open(action.group)
            with self._snapshots.reading(action.group.timeout_s) as snapshot:
                checksum = group.send(
                    self._snapshots.manifest,
                    snapshot.flat,
                    self._bucket_bytes,
                    lambda: action.group.name in self._wanted,
                )
                version, probe = snapshot.version, snapshot.probe
        except transport.TransportError as error:
            self._close_aside(group)
            return SendFailed(action.transfer, f"{type(error).__name__}: {error}")
        self._put_back(action.group.name, group)
        return Sent(action.transfer, version, checksum, probe)

    def _open(self, spec: GroupSpec) -> transport.Group:
        with self._lock:
            group = self._waiting.pop(spec.name, None)
        if group is not None:
            return group
        return transport.open_group(spec, self._device, lambda: spec.name in self._wanted)

    def _put_back(self, name: str, group: transport.Group) -> None:
        with self._lock:
            if name in self._wanted:
                self._waiting[name] = group
                return
        group.close()

    def _close_aside(self, group: transport.Group | None) -> None:
        """Closing waits for the broken broadcast's timeout; the failure is reported before that."""
        if group is not None:
            threading.Thread(target=group.close, name="weightsync-close", daemon=True).start()
