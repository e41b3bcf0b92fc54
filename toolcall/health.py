"""Is a tool there at all? Judged by how its last calls ended.

Invariant: `down` is True from the moment at which `share` of the last `WINDOW` calls had failed because
what is behind the tool is gone, until one succeeds. Pure state. Fed by the executor; the actor leases
nothing while a tool is down, rather than train on what a dead tool says.
"""

from __future__ import annotations

from collections import deque

from toolcall.types import Outcome

WINDOW = 20  # calls
NOT_THERE = (Outcome.INFRASTRUCTURE, Outcome.BREAKER_OPEN)  # such a call says nothing about the policy
_ANSWERED = (Outcome.OK, Outcome.TOOL_ERROR)  # the others never reached the tool, or prove nothing


class Health:
    def __init__(self, share: float) -> None:
        self._share = share
        self._last: deque[bool] = deque(maxlen=WINDOW)  # was it not there?
        self.down = False
        self.reason = ""  # the last failure's words

    def add(self, outcome: Outcome, text: str) -> None:
        if outcome in NOT_THERE:
            self._last.append(True)
            if outcome is Outcome.INFRASTRUCTURE or not self.reason:
                self.reason = text
            if len(self._last) == WINDOW and sum(self._last) >= self._share * WINDOW:
                self.down = True
        elif outcome in _ANSWERED:
            self._last.append(False)
            if self.down:
                self.recovered()

    def recovered(self) -> None:
        self.down = False
        self.reason = ""
        self._last.clear()
