"""The buffer's process: a thread for the socket, one for the rest. All decisions are `buffer.broker`'s.

Each turn takes the requests that have come in since the last (`buffer.transport` decoded them meanwhile),
handles them inside one transaction, commits, and only then replies (group commit: the fsync is shared by
everyone who waited).

Invariant: nothing is acked before it is in the store; no frame from the outside ends the process.
Started by Ray through `main`, in any thread.
"""

from __future__ import annotations

import signal
import sqlite3
import statistics
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from buffer.broker import Broker
from buffer.codec import CodecError, encode
from buffer.messages import BatchReply, GetBatch, PutTrajectory, Refused, StatusReply
from buffer.store import Store, StoreError, open_store
from buffer.transport import Reply, Request, Transport
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from metrics import names

MAX_POLL_S = 0.5  # so long until a stop or an expired lease is noticed when nobody talks
MAX_WAIT_S = 60.0  # of a GetBatch, whatever it asks for
ANSWERS_KEPT = 4096
LINGER_S = 10.0  # after the end, without a word from anyone, the process leaves
# Python's default of 5 ms is how long the thread back from a commit may wait for the one that decodes.
SWITCH_S = 1e-4


def main(spec: RoleSpec) -> None:
    """Serve until the run is finished and everyone has heard it, or until SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()
    with _stop_on_sigterm(stop):
        serve(spec, stop)


def serve(spec: RoleSpec, stop: threading.Event) -> None:
    """Serve until the run is finished, or `stop` is set. RuntimeError if the ledger does not balance or the
    store fails."""
    try:
        _serve(spec, stop)
    except sqlite3.Error as error:
        path = RunFolder(spec.run_dir).store
        raise StoreError(
            f"the store {path} fails: {error}; see to its disk (space, permissions), then resume the run, "
            "which has lost nothing that was acked"
        ) from error


def _serve(spec: RoleSpec, stop: threading.Event) -> None:
    folder, limit_mb = RunFolder(spec.run_dir), spec.config.buffer.max_message_mb
    with closing(open_store(folder.store, spec.run_id)) as store:
        broker = Broker(
            spec.config,
            store,
            spec.num_prompts,
            spec.run_id,
            time.monotonic(),
            shares=spec.shares,
            num_held_out=spec.num_held_out,
        )
        with closing(Transport(spec.buffer_endpoint, folder.read_keys(), limit_mb)) as transport:
            print(f"buffer: serving {spec.buffer_endpoint}, {broker.ledger_counts()}", flush=True)
            server = Server(broker, store, spec)
            while not stop.is_set() and not server.is_over():
                requests = transport.take(server.patience())
                transport.send(server.turn(requests, time.monotonic()))
        differences = broker.audit()
    if differences:
        raise RuntimeError(f"the ledger does not balance: {'; '.join(differences)}")


@contextmanager
def _stop_on_sigterm(stop: threading.Event) -> Iterator[None]:
    """Python delivers signals to the main thread only; elsewhere the owner of the process ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Parked:
    """A GetBatch that waits for its batch."""

    request: Request
    until: float


class Server:
    """What happens in a turn: no socket, no thread."""

    def __init__(self, broker: Broker, store: Store, spec: RoleSpec) -> None:
        self._broker, self._store = broker, store
        self._learner_silence_s = spec.config.learner.timeout_s
        self._heartbeat_s = spec.config.buffer.heartbeat_s
        self._parked: dict[bytes, Parked] = {}  # by request id: asked again, it waits once
        # A request that is sent again because its reply was late must not be done twice.
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self._heard_at = self._report_at = time.monotonic()
        self._put_ms: list[float] = []
        self._refused: Counter[str] = Counter()

    def is_over(self) -> bool:
        """The run is finished, everyone said goodbye, and nobody has asked for anything in a while."""
        now = time.monotonic()
        return (
            self._broker.finished
            and now - self._heard_at > LINGER_S
            and self._broker.all_said_goodbye(now, self._learner_silence_s, 5 * self._heartbeat_s)
        )

    def patience(self) -> float:
        """Seconds until something has to be done without being asked."""
        now = time.monotonic()
        due = min((parked.until for parked in self._parked.values()), default=now + MAX_POLL_S)
        return min(due, self._report_at, now + MAX_POLL_S) - now

    def turn(self, requests: list[Request], now: float) -> list[Reply]:
        """Handle the requests in one transaction; the replies may be sent, for it is committed."""
        if requests:
            self._heard_at = now
        self._store.begin()
        self._broker.tick(now)
        bodies = [(request, self._answer(request, now)) for request in requests]
        replies = [Reply(request, body) for request, body in bodies if body is not None]
        replies += self._unpark(now)
        self._store.commit()
        committed = time.monotonic()
        self._put_ms += [
            (committed - request.received_at) * 1000
            for request in requests
            if isinstance(request.message, PutTrajectory)
        ]
        if now >= self._report_at:
            self._report()
            self._report_at = now + self._heartbeat_s
        return replies

    def _answer(self, request: Request, now: float) -> bytes | None:
        """The encoded reply, or None if it has to wait."""
        message = request.message
        kept = self._answers.get(request.request_id)
        if kept is not None:
            return kept
        if isinstance(message, CodecError):
            self._refused[message.reason] += 1
            return encode(Refused(str(message)))
        reply = self._broker.handle(message, now)
        if isinstance(message, GetBatch) and isinstance(reply, BatchReply) and reply.batch is None:
            until = now + max(0.0, min(MAX_WAIT_S, message.wait_s))
            self._parked[request.request_id] = Parked(request, until)
            return None
        if isinstance(reply, Refused):
            self._refused["request"] += 1
        body = encode(reply)
        if not isinstance(reply, BatchReply | StatusReply):
            self._keep_answer(request.request_id, body)
        return body

    def _keep_answer(self, request_id: bytes, body: bytes) -> None:
        self._answers[request_id] = body
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)

    def _unpark(self, now: float) -> list[Reply]:
        """Replies to those whose batch is ready, or whose time is up."""
        replies = []
        for request_id, parked in list(self._parked.items()):
            reply = self._broker.handle(parked.request.message, now)
            waiting = isinstance(reply, BatchReply) and reply.batch is None
            if not waiting or now >= parked.until:
                del self._parked[request_id]
                replies.append(Reply(parked.request, encode(reply)))
        return replies

    def _report(self) -> None:
        metrics = {names.BUFFER_REFUSED: float(self._refused.total())}
        metrics |= {f"{names.BUFFER_REFUSED}/{reason}": float(n) for reason, n in self._refused.items()}
        if self._put_ms:
            metrics[names.BUFFER_PUT_MS] = statistics.median(self._put_ms)
        if self._refused:
            print(f"buffer: refused {dict(self._refused)}", file=sys.stderr, flush=True)
        self._refused.clear()
        self._put_ms.clear()
        self._broker.report(metrics)
