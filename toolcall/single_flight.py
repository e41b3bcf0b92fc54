"""A bounded cache in which equal requests share one run.

Invariant: while a key is being computed nobody starts it again; a waiter that is cancelled (its trajectory
ended) does not take the run from the others, and a run that nobody waits for is cancelled.
Called by the executor for tools with a cache.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Served(StrEnum):
    """Where a value came from."""

    MADE = "made"  # by this request
    SHARED = "shared"  # by another request that was running
    KEPT = "kept"  # by an earlier one


@dataclass
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """keep: whether a value may be served again. The least recently used of `max_entries` leaves first."""

    def __init__(self, max_entries: int, keep: Callable[[T], bool]) -> None:
        self._max_entries = max_entries
        self._keep = keep
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._flights: dict[str, _Flight[T]] = {}

    async def get(
        self, key: str, make: Callable[[], Coroutine[Any, Any, T]], fresh: Callable[[T], bool]
    ) -> tuple[T, Served]:
        """The value, and who made it. make: ends by its deadline. fresh: may a kept value be served?"""
        kept = self._kept.get(key)
        if kept is not None:
            if fresh(kept):
                self._kept.move_to_end(key)
                return kept, Served.KEPT
            del self._kept[key]
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._fly(key, make)))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task), Served.SHARED if shared else Served.MADE
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                flight.task.cancel()
                self._forget(key, flight.task)

    async def _fly(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            value = await make()
        finally:
            self._forget(key, asyncio.current_task())
        if self._keep(value):
            self._kept[key] = value
            if len(self._kept) > self._max_entries:
                self._kept.popitem(last=False)
        return value

    def _forget(self, key: str, task: asyncio.Task[Any] | None) -> None:
        """Unless another flight has taken the place of a cancelled one."""
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
