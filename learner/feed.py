"""Fetches the next batch while the current one trains.

Invariant: one thread owns the socket; `get` ends by the deadline `timeout_s` or with the first error of
that thread. Called by `learner.learner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from buffer.messages import Batch, BatchReply, GetBatch

_WAIT_S = 5.0  # the server's patience with one request; it also bounds how long closing takes


class Client(Protocol):
    def call(self, message: object, timeout_s: float) -> object: ...

    def close(self) -> None: ...


class BatchFeed:
    """Batches of steps `first` .. `last`, in order, each fetched before it is asked for."""

    def __init__(self, connect: Callable[[], Client], first: int, last: int, timeout_s: float) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._last, self._timeout_s = last, timeout_s
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-feed")
        self._next: Future[Batch] | None = None
        self._fetch_ahead(first)

    def get(self, step: int) -> Batch:
        """The batch of `step`; steps are asked in order. Raises TimeoutError after `timeout_s`."""
        if self._next is None:
            raise ValueError(f"step {step} lies beyond the last step {self._last}")
        # The thread ends by its own deadline; the margin only covers a thread that cannot run.
        batch = self._next.result(timeout=self._timeout_s + 2 * _WAIT_S)
        if batch.step != step:
            raise ValueError(f"asked for the batch of step {step}, got that of step {batch.step}")
        self._fetch_ahead(step + 1)
        return batch

    def close(self) -> None:
        self._closing = True
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=True)

    def _fetch_ahead(self, step: int) -> None:
        self._next = self._thread.submit(self._fetch, step) if step <= self._last else None

    def _fetch(self, step: int) -> Batch:
        if self._client is None:
            self._client = self._connect()
        deadline, waits_for = time.monotonic() + self._timeout_s, ""
        while time.monotonic() < deadline and not self._closing:
            reply = self._client.call(GetBatch(step=step, wait_s=_WAIT_S), timeout_s=self._timeout_s)
            if not isinstance(reply, BatchReply):
                raise TypeError(f"the buffer answered GetBatch with {type(reply).__name__}")
            if reply.batch is not None:
                return reply.batch
            waits_for = reply.waits_for
        raise TimeoutError(
            f"no batch for step {step} within learner.timeout_s = {self._timeout_s:.0f} s"
            f" ({waits_for or 'no reply'}); look at the actors' logs"
        )

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
