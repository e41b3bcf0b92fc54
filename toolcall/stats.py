"""Counters of tool calls: per tool since the start, and sums since the last report.

Called by the executor for every result; read by the actor's heartbeat and by `launch.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from metrics.names import TOOL_CALLS, TOOL_FAILURES, TOOL_SECONDS
from toolcall.types import CallSpan, Outcome


@dataclass
class ToolStats:
    """One tool's calls since the executor was made. Seconds run from a call's start to its end, retries
    included, waiting for a slot not."""

    calls: int = 0
    cached: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> int:
        return self.calls - self.outcomes[Outcome.OK]


class CallCounter:
    def __init__(self) -> None:
        self.by_tool: dict[str, ToolStats] = {}
        self._window: Counter[str] = Counter()

    def add(self, name: str, span: CallSpan) -> None:
        """Count one call under `name`, which must come from a bounded set: models invent tool names."""
        tool = self.by_tool.setdefault(name, ToolStats())
        seconds = span.ended - span.started
        tool.calls += 1
        tool.cached += span.cached
        tool.seconds += seconds
        tool.slowest_s = max(tool.slowest_s, seconds)
        tool.outcomes[span.outcome] += 1
        self._window[TOOL_CALLS] += 1
        self._window[TOOL_FAILURES] += span.outcome is not Outcome.OK
        self._window[TOOL_SECONDS] += seconds  # pyright: ignore[reportArgumentType] - a Counter of floats

    def take_window(self) -> dict[str, float]:
        """Sums since the last call of this, under the names of `metrics.names`."""
        window = {name: float(self._window[name]) for name in (TOOL_CALLS, TOOL_FAILURES, TOOL_SECONDS)}
        self._window.clear()
        return window
