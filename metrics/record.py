"""Counters and gauges of one process between two reports.

Invariant: every counted amount is in exactly one window. Safe to use from several threads.
Used by the roles, which send what `take` returns with their heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable


class Recorder:
    """Collects metrics by the names of `metrics.names`."""

    def __init__(self, window_name: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`window_name`: the metric under which `take` reports the window's length in seconds."""
        self._window_name = window_name
        self._clock = clock
        self._lock = threading.Lock()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._opened = clock()

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a counter, which starts at 0 in every window."""
        with self._lock:
            self._counters[name] += value

    def set(self, name: str, value: float) -> None:
        """Set a gauge, which keeps its value from window to window."""
        with self._lock:
            self._gauges[name] = value

    def take(self) -> dict[str, float]:
        """Close the window: everything counted in it and all gauges."""
        with self._lock:
            window = dict(self._gauges) | dict(self._counters)
            now = self._clock()
            if self._window_name is not None:
                window[self._window_name] = now - self._opened
            self._counters.clear()
            self._opened = now
        return window
