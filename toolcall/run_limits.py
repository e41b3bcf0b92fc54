"""Limits that all actors of a run share: calls running at once, and calls begun per second.

Invariant: at most `count` holders of `RunSlots` at a time, however actors die: a slot is a lock of the
kernel on a file of the run folder, which goes with its process. At most `rate` calls a second begin under
a `RunRate`, whose next free moment stands in such a file. Both hold between all processes that see the
folder's locks: those of one host, and of several where the file system has locks between hosts (NFS 4);
elsewhere each host has the limits to itself. Without a folder they hold in this process.
Called by `toolcall.lane`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.1  # between two looks for a free slot


class RunSlots:
    """`count` slots, one file each. In one process, those who wait are served in the order they came."""

    def __init__(self, folder: Path, tool: str, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._free = [_open(folder / f"{tool}.slot{number}") for number in range(count)]
        # the slots that this process does not hold; a lock on one says that no other process does
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """A slot for the block. The caller bounds the wait."""
        async with self._turn:
            held = await self._wait()
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)
            self._free.append(held)

    async def _wait(self) -> int:
        pause = FIRST_LOOK_S
        while (held := self._try_all()) is None:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_LOOK_S)
        return held

    def _try_all(self) -> int | None:
        for file in random.sample(self._free, len(self._free)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._free.remove(file)
                return file
        return None

    def close(self) -> None:
        """When no slot is held any more."""
        for file in self._free:
            os.close(file)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


class RunRate:
    """One call begins every 1 / `rate` seconds; nothing is saved up while none does."""

    def __init__(
        self, folder: Path | None, tool: str, rate: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._file = folder / f"{tool}.rate" if folder else None
        self._gap = 1.0 / rate
        self._next = 0.0  # without a folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def reserve(self, longest_wait_s: float) -> float | None:
        """Seconds until this call may begin, or None if that is too long, and nothing is reserved."""
        if self._file is None:
            wait, self._next = self._reserved(self._next, self._clock(), longest_wait_s)
            return wait
        file = _open(self._file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for microseconds
            text = os.read(file, 64)
            wait, following = self._reserved(float(text or 0), self._clock(), longest_wait_s)
            os.pwrite(file, f"{following:.6f}".ljust(32).encode(), 0)
        finally:
            os.close(file)
        return wait

    def _reserved(self, following: float, now: float, longest_wait_s: float) -> tuple[float | None, float]:
        begin = max(now, following)
        if begin - now > longest_wait_s:
            return None, following
        return begin - now, begin + self._gap
