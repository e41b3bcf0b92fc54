"""Who blocks the event loop? One tool that computes or waits without `await` stops every episode.

Invariant: a task that keeps the loop for longer than `limit_s` is reported once, while it does so, with its
name and the line that it is at, and again with the seconds that it took. Time in which the loop's thread
only waited for a core is not counted. Started by the actor.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

_MEND = "; await there, or make it a plain def, which runs in a thread"
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


class LoopWatchdog:
    """Around the life of a loop, entered in it. note(task name, seconds): after each time it was blocked."""

    def __init__(self, note: Callable[[str, float], None], limit_s: float = 1.0) -> None:
        self._note = note
        self._limit_s = limit_s
        self._stopped = threading.Event()

    def __enter__(self) -> LoopWatchdog:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._beat()
        threading.Thread(target=self._watch, name="loop watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._last = time.monotonic(), self._waited_for_a_core()
        self._timer = self._loop.call_later(self._limit_s / 4, self._beat)

    def _watch(self) -> None:
        culprit = ""  # who is being watched now
        since = 0.0  # the beat before it got the loop
        while not self._stopped.wait(self._limit_s / 4):
            beaten, waited = self._last  # once: the loop may beat at any moment
            if culprit and beaten != since:
                logger.warning("%s blocked the event loop for %.1f s", culprit, beaten - since)
                self._note(culprit, beaten - since)
                culprit = ""
            elif not culprit:
                late_s = time.monotonic() - beaten - (self._waited_for_a_core() - waited)
                if late_s > self._limit_s:
                    culprit, since = self._report(late_s), beaten

    def _waited_for_a_core(self) -> float:
        """Seconds that the loop's thread was ready to run and did not, since it began. 0 where unknown."""
        try:
            return int(self._schedstat.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _report(self, seconds: float) -> str:
        """The name of the task that has the loop; empty if none has."""
        task = asyncio.current_task(self._loop)
        if task is None:
            return ""
        logger.warning(
            "%s has blocked the event loop for %.1f s, and with it every episode, at %s%s",
            task.get_name(),
            seconds,
            _where(sys._current_frames().get(self._loop_thread)),
            _MEND if task.get_name().startswith("tool ") else "",
        )
        return task.get_name()


def _where(frame: FrameType | None) -> str:
    """The innermost line that is not a library's."""
    place = "an unknown place"
    while frame is not None:
        code = frame.f_code
        found = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if not code.co_filename.startswith(_LIBRARIES):
            return found
        place = found if place == "an unknown place" else place
        frame = frame.f_back
    return place
