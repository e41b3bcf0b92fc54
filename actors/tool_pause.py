"""When an actor leases nothing because a tool is not there, and when it tries again.

Invariant: while a tool is down no group is leased, but for one every `PROBE_EVERY_S` where only a call can
show whether the tool is back; episodes in flight go on. Called by `actors.actor` before it asks for leases.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from toolcall.executor import Executor

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 30.0
MAX_REASON = 200  # characters of the line in the terminal


class Tools(Protocol):
    """What is needed of `toolcall.Executor`."""

    def down(self) -> Mapping[str, str]: ...
    async def probe(self) -> bool: ...


class AllTools:
    """The executors of all tasks of a run as one."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors

    def down(self) -> dict[str, str]:
        return {name: why for executor in self._executors for name, why in executor.down().items()}

    async def probe(self) -> bool:
        return all([await executor.probe() for executor in self._executors])

    def note_blocked(self, task: str, seconds: float) -> None:
        for executor in self._executors:
            executor.note_blocked(task, seconds)

    def take_metrics(self) -> dict[str, float]:
        """Counters of a tool that several tasks use are added up."""
        total: dict[str, float] = {}
        for executor in self._executors:
            for name, value in executor.take_metrics().items():
                total[name] = total.get(name, 0.0) + value
        return total

    async def close(self) -> None:
        for executor in self._executors:
            await executor.close()


class ToolPause:
    def __init__(self, tools: Tools, clock: Callable[[], float] = time.monotonic) -> None:
        self._tools = tools
        self._clock = clock
        self.reason = ""  # why nothing is leased now; empty when leasing
        self._probe_at = 0.0
        self._counted_to = 0.0

    async def allowed(self, free: int) -> int:
        """How many of `free` groups may be leased now."""
        if not self._tools.down():
            return self._resume(free)
        now = self._clock()
        if not self.reason:
            self._probe_at, self._counted_to = now + PROBE_EVERY_S, now
            logger.warning("no more leases: %s", "; ".join(self._tools.down().values()))
        self.reason = "; ".join(self._tools.down().values())[:MAX_REASON]
        if not free or now < self._probe_at:
            return 0
        self._probe_at = now + PROBE_EVERY_S
        if not await self._tools.probe():
            return 0
        return 1 if self._tools.down() else self._resume(free)

    def take_paused_s(self) -> float:
        """Seconds without leasing since the last call of this."""
        if not self.reason:
            return 0.0
        before, self._counted_to = self._counted_to, self._clock()
        return self._counted_to - before

    def _resume(self, free: int) -> int:
        if self.reason:
            logger.warning("leasing again, the tool is back after: %s", self.reason)
            self.reason = ""
        return free
