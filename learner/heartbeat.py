"""Tells the buffer, in the background, that this learner is alive, whatever the main thread does.

Invariant: one thread owns the socket; an error in it reaches the main thread at the next `check`.
Called by `learner.learner`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from buffer.messages import Heartbeat
from learner.feed import Client


class HeartbeatThread:
    """Beats every `interval_s` with the state and version last set; metrics go out with the next beat."""

    def __init__(self, connect: Callable[[], Client], name: str, interval_s: float, timeout_s: float) -> None:
        self._connect, self._name = connect, name
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._state, self._version = "starting", -1
        self._metrics: list[dict[str, float]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def report(self, version: int, metrics: dict[str, float], state: str = "running") -> None:
        """Send these now: the version published, the step's metrics and the state."""
        self.check()
        with self._lock:
            self._state, self._version = state, version
            self._metrics.append(metrics)
        self._wake.set()

    def check(self) -> None:
        """Raise the thread's error, if it ended with one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Send what is left and end the thread (within `timeout_s`)."""
        self._stop = True
        self._wake.set()
        self._thread.join(self._timeout_s + self._interval_s)

    def _run(self) -> None:
        try:
            client = self._connect()
            try:
                while True:
                    stopping = self._stop
                    self._beat(client)
                    if stopping:
                        return
                    self._wake.wait(self._interval_s)
                    self._wake.clear()
            finally:
                client.close()
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._error = error

    def _beat(self, client: Client) -> None:
        with self._lock:
            reports, self._metrics = self._metrics or [{}], []
            state, version = self._state, self._version
        for metrics in reports:
            beat = Heartbeat(role="learner", name=self._name, version=version, state=state, metrics=metrics)
            client.call(beat, timeout_s=self._timeout_s)
