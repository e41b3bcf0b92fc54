"""Counters of tool calls: per tool since the start, and per tool since the last report.

Called by the executor for every result; read by the actor's heartbeat and by `launch.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from metrics import names
from toolcall.health import NOT_THERE
from toolcall.types import CallSpan, Outcome

MOST_SAMPLES = 4096  # latencies of one tool in one window; later ones are not in the percentiles


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


@dataclass
class _Window:
    counts: Counter[str] = field(default_factory=Counter)
    age_s: float = 0.0  # summed, of results served from the cache
    blocked_s: float = 0.0
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class CallCounter:
    def __init__(self) -> None:
        self.by_tool: dict[str, ToolStats] = {}
        self._windows: dict[str, _Window] = {}

    def add(self, name: str, span: CallSpan) -> None:
        """Count one call under `name`, which must come from a bounded set: models invent tool names."""
        tool = self.by_tool.setdefault(name, ToolStats())
        seconds = span.ended - span.started
        tool.calls += 1
        tool.cached += span.cached
        tool.seconds += seconds
        tool.slowest_s = max(tool.slowest_s, seconds)
        tool.outcomes[span.outcome] += 1
        self._add_to_window(self._windows.setdefault(name, _Window()), span, seconds)

    def _add_to_window(self, window: _Window, span: CallSpan, seconds: float) -> None:
        window.counts[names.TOOL_EACH_CALLS] += 1
        window.counts[names.TOOL_EACH_FAILURES] += span.outcome is not Outcome.OK
        window.counts[names.TOOL_EACH_INFRASTRUCTURE] += span.outcome in NOT_THERE
        window.counts[names.TOOL_EACH_TIMEOUTS] += span.outcome is Outcome.TIMEOUT
        if span.cache:
            window.counts[names.TOOL_EACH_CACHE_HITS] += span.cached
            window.age_s += span.cache_age_s
        if len(window.latencies) < MOST_SAMPLES and not span.cached:
            window.latencies.append(seconds)
            window.waits.append(span.started - span.queued)

    def add_blocked(self, name: str, seconds: float) -> None:
        self._windows.setdefault(name, _Window()).blocked_s += seconds

    def take_window(self) -> dict[str, float]:
        """Per tool since the last call of this, under the names of `metrics.names`."""
        taken: dict[str, float] = {}
        for tool, window in self._windows.items():
            of_tool = dict[str, float](window.counts)
            if hits := window.counts[names.TOOL_EACH_CACHE_HITS]:
                of_tool[names.TOOL_EACH_CACHE_AGE_S] = window.age_s / hits
            if window.blocked_s:
                of_tool[names.TOOL_EACH_BLOCKED_S] = window.blocked_s
            if window.latencies:
                for share, name in names.TOOL_EACH_LATENCY.items():
                    of_tool[name] = percentile(window.latencies, share)
                of_tool[names.TOOL_EACH_QUEUED_P95_S] = percentile(window.waits, 0.95)
            taken |= {f"{names.TOOL_PREFIX}{tool}/{name}": value for name, value in of_tool.items()}
        self._windows.clear()
        return taken


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
