"""The launcher's side of the terminal, and its files: events.jsonl and the metric sinks.

A live picture where there is a terminal, one plain line a step elsewhere. Called by `launcher.train`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from buffer.messages import StatusReply
from configs.run_folder import RunFolder
from launcher.interfaces import Event
from launcher.progress import evaluated, picture, plain_line
from launcher.run_view import RunView
from metrics import names
from metrics.sinks import Report, Sink

_SHOWN = (
    "ready",
    "restart",
    "pause",
    "resume",
    "scale",
    "finish",
    "stop",
    "warn",
    "eval",
)  # kinds of events that get a line; a failure is said at the end
_STEPS_BETWEEN_ADVICE = 10  # where there is no picture


class Display:
    """Takes the supervisor's events and statuses to the terminal and to the run folder."""

    def __init__(self, console: Console, view: RunView, folder: RunFolder, sinks: Sequence[Sink]) -> None:
        self._console = console
        self._view = view
        self._sinks = sinks
        self._events = folder.events.open("a", encoding="utf-8", buffering=1)
        self._live: Live | None = None
        self._disagrees = False  # the last learner report said that engine and learner disagree

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw while the block runs, if the console is a terminal; close the files after it."""
        try:
            if self._console.is_terminal:
                # Not redirecting: the launcher's stdout is a log file by now.
                with Live(
                    picture(self._view),
                    console=self._console,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                ) as self._live:
                    yield
            else:
                yield
        finally:
            self._live = None
            self._events.close()
            for sink in self._sinks:
                sink.close()

    def event(self, event: Event) -> None:
        line = {"time": round(time.time(), 3), "event": event.kind, "role": event.role, "text": event.text}
        self._events.write(json.dumps(line) + "\n")
        text = f"{time.strftime('%H:%M:%S')} {event.text}"
        self._view.last_event = text
        if event.kind in _SHOWN:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._draw()

    def status(self, status: StatusReply) -> None:
        before = self._view.states
        rows = self._view.take(status, time.time())
        self._say_pauses(before)
        for _, role, name, when, metrics in status.reports:
            for sink in self._sinks:
                sink.write(Report(when, status.step, role, name, metrics))
            self._say_warnings(name, metrics)
            if role == "eval":
                self.event(Event("eval", name, evaluated(metrics)))
        if self._live is None:
            for row in rows:
                self._console.print(
                    plain_line(self._view, row), highlight=False, markup=False, soft_wrap=True
                )
                if row.step % _STEPS_BETWEEN_ADVICE == 0 and self._view.balance:
                    self._console.print(self._view.balance.words, highlight=False, soft_wrap=True)
        self._draw()

    def _say_pauses(self, before: Mapping[str, str]) -> None:
        """A role that begins or ends to hold still says why in its state."""
        for name, state in self._view.states.items():
            was = before.get(name, "")
            if state.startswith("paused") and not was.startswith("paused"):
                self.event(Event("pause", name, f"{name} {state}"))
            elif was.startswith("paused") and state == "running":
                self.event(Event("resume", name, f"{name} goes on"))

    def _say_warnings(self, name: str, metrics: Mapping[str, float]) -> None:
        """What a learner's step tells that nobody should miss; the whole story is in its log."""
        if metrics.get(names.SKIPPED_STEPS):
            text = f"{name} skipped an update: NaN or Inf; its groups are in skipped_batches.jsonl"
            self.event(Event("warn", name, text))
        disagrees = bool(metrics.get(names.DISAGREE, self._disagrees))
        if disagrees and not self._disagrees:
            gap = metrics.get(names.LOGPROB_GAP_MEAN, 0.0)
            text = (
                f"engine and learner disagree: the mean gap of their logprobs is {gap:.2f}; see {name}'s log"
            )
            self.event(Event("warn", name, text))
        self._disagrees = disagrees

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(picture(self._view), refresh=True)
