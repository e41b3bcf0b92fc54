"""A circuit breaker: stop asking what keeps failing, try again after a while.

Closed → open after `threshold` failures in a row → half-open after `cooldown_s`: one trial call decides
between closed and open. Pure state; the clock is passed in. Called by `toolcall.lane`, one for each tool.
Invariant: at most one trial is out at a time, and every trial permitted ends in `succeeded`, `failed` or
`undecided`.
"""

from __future__ import annotations


class Breaker:
    def __init__(self, threshold: int, cooldown_s: float) -> None:
        self.threshold = threshold
        self.cooldown_s = cooldown_s
        self.failures = 0  # in a row
        self._retry_at = 0.0
        self._trial_out = False

    def permits(self, now: float) -> bool:
        """May a call run? Half-open, the first to ask becomes the trial. `now`: monotonic seconds."""
        if self.failures < self.threshold:
            return True
        if self._trial_out or now < self._retry_at:
            return False
        self._trial_out = True
        return True

    def succeeded(self) -> None:
        self.failures = 0
        self._trial_out = False

    def failed(self, now: float) -> None:
        self.failures += 1
        self._trial_out = False
        self._retry_at = now + self.cooldown_s

    def undecided(self) -> None:
        """The call was cancelled before it showed anything."""
        self._trial_out = False
