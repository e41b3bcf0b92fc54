"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends the process at once.

Invariant: whatever the launcher started ends with it, so that ending at once leaves nothing behind
(see `launcher.guard`).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STOPPED = 130  # of a command that ended because it was asked to
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Inside the block, signals set `requested` instead of raising."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        self.install()
        return self

    def install(self) -> None:
        """Take the signals; again after a library (Ray) has taken them."""
        for number in _SIGNALS:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            return
        if sys.__stderr__ is not None and sys.__stderr__.isatty():
            os.write(sys.__stderr__.fileno(), _SHOW_CURSOR.encode())
        os._exit(128 + number)
