"""The buffer's process: one thread, one socket, one store. All decisions are `buffer.broker`'s.

Each turn of the loop takes what is waiting on the socket, handles it inside one transaction, commits, and
only then replies (group commit: the fsync is shared by everyone who waited).

Invariant: nothing is acked before it is in the store; no frame from the outside ends the process.
Started by Ray through `main`, in any thread.
"""

from __future__ import annotations

import signal
import statistics
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from buffer.broker import Broker
from buffer.codec import CodecError, decode, encode
from buffer.messages import BatchReply, GetBatch, PutTrajectory, Refused, StatusReply
from buffer.store import Store, open_store
from configs.roles import RoleSpec
from configs.run_folder import CurveKeys, RunFolder
from metrics import names

MAX_FRAMES_PER_TURN = 512
MAX_BYTES_PER_TURN = 32 * 2**20
MAX_POLL_S = 0.5  # so long until a stop or an expired lease is noticed when nobody talks
MAX_WAIT_S = 60.0  # of a GetBatch, whatever it asks for
MAX_REQUEST_ID = 64  # bytes
ANSWERS_KEPT = 4096
LINGER_S = 10.0  # after the end, without a word from anyone, the process leaves
HARD_LIMIT = 4  # times max_message_mb: beyond it ZeroMQ drops the connection instead of a polite refusal


def main(spec: RoleSpec) -> None:
    """Serve until the run is finished and everyone has heard it, or until SIGTERM."""
    stop = threading.Event()
    with _stop_on_sigterm(stop):
        serve(spec, stop)


def serve(spec: RoleSpec, stop: threading.Event) -> None:
    """Serve until the run is finished, or `stop` is set. RuntimeError if the ledger does not balance."""
    folder = RunFolder(spec.run_dir)
    with (
        closing(open_store(folder.store, spec.run_id)) as store,
        closing(
            Socket(spec.buffer_endpoint, folder.read_keys(), spec.config.buffer.max_message_mb)
        ) as socket,
    ):
        broker = Broker(spec.config, store, spec.num_prompts, spec.run_id, time.monotonic())
        print(f"buffer: serving {spec.buffer_endpoint}, {broker.ledger_counts()}", flush=True)
        server = Server(broker, store, socket, spec)
        while not stop.is_set() and not server.is_over():
            server.turn()
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
class Frame:
    """One request as it came in. `body` is None if the parts were not those of a request."""

    peer: bytes
    request_id: bytes
    body: bytes | None


class Socket:
    """The ROUTER with CURVE; lets in the run's client key alone (ZAP is ZeroMQ's authentication hook)."""

    def __init__(self, endpoint: str, keys: CurveKeys, max_message_mb: int) -> None:
        self._allowed = z85.decode(keys.client_public)
        self._context = zmq.Context()  # of its own: the ZAP address is one per context
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.curve_server = True
        self._router.curve_secretkey = keys.server_secret
        self._router.curve_publickey = keys.server_public
        self._router.zap_domain = b"slipstream"
        self._router.maxmsgsize = HARD_LIMIT * max_message_mb * 2**20
        self._poller = zmq.Poller()
        self._poller.register(self._zap, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise RuntimeError(
                f"the buffer cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}; stop the process "
                "that uses it, or set buffer.host and buffer.port"
            ) from error

    def receive(self, timeout_s: float) -> list[Frame]:
        """Wait for something and take all that is there, up to a limit. Empty after `timeout_s`."""
        events = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._zap in events:
            self._authenticate()
        frames: list[Frame] = []
        size = 0
        while len(frames) < MAX_FRAMES_PER_TURN and size < MAX_BYTES_PER_TURN:
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames.append(_frame(parts))
            size += sum(map(len, parts))
        return frames

    def _authenticate(self) -> None:
        parts = self._zap.recv_multipart()
        mechanism, key = parts[5], parts[6] if len(parts) > 6 else b""
        ok = mechanism == b"CURVE" and key == self._allowed
        verdict = [b"200", b"OK", b"run"] if ok else [b"400", b"this key is not the run's", b""]
        self._zap.send_multipart([b"1.0", parts[1], *verdict, b""])

    def send(self, frame: Frame, body: bytes) -> None:
        """Reply. A peer that is gone is not an error: it will ask again if it still cares."""
        self._router.send_multipart([frame.peer, frame.request_id, body], copy=len(body) < 65_536)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _frame(parts: list[bytes]) -> Frame:
    good = len(parts) == 3 and len(parts[1]) <= MAX_REQUEST_ID
    return Frame(parts[0], parts[1][:MAX_REQUEST_ID] if len(parts) > 1 else b"", parts[2] if good else None)


@dataclass(frozen=True)
class Parked:
    """A GetBatch that waits for its batch."""

    frame: Frame
    request: GetBatch
    until: float


class Server:
    def __init__(self, broker: Broker, store: Store, socket: Socket, spec: RoleSpec) -> None:
        self._broker, self._store, self._socket = broker, store, socket
        self._learner_silence_s = spec.config.learner.timeout_s
        self._heartbeat_s = spec.config.buffer.heartbeat_s
        self._max_bytes = spec.config.buffer.max_message_mb * 2**20
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

    def turn(self) -> None:
        """Take what is waiting, handle it in one transaction, commit, reply."""
        frames = self._socket.receive(self._patience())
        now = time.monotonic()
        if frames:
            self._heard_at = now
        self._store.begin()
        self._broker.tick(now)
        puts = 0
        replies: list[tuple[Frame, bytes]] = []
        for frame in frames:
            message, reply = self._answer(frame, now)
            puts += isinstance(message, PutTrajectory)
            if reply is not None:
                replies.append((frame, reply))
        replies += self._unpark(now)
        self._store.commit()
        for frame, reply in replies:
            self._socket.send(frame, reply)
        self._put_ms += [(time.monotonic() - now) * 1000] * puts
        if now >= self._report_at:
            self._report()
            self._report_at = now + self._heartbeat_s

    def _patience(self) -> float:
        """Seconds until something has to be done without being asked."""
        now = time.monotonic()
        due = min((parked.until for parked in self._parked.values()), default=now + MAX_POLL_S)
        return min(due, self._report_at, now + MAX_POLL_S) - now

    def _answer(self, frame: Frame, now: float) -> tuple[Any, bytes | None]:
        """(request if it could be read, encoded reply or None if it has to wait)."""
        kept = self._answers.get(frame.request_id)
        if kept is not None:
            return None, kept
        try:
            if frame.body is None:
                raise CodecError("frames", "a request has two parts: its id (at most 64 bytes) and its body")
            message = decode(frame.body, self._max_bytes)
        except CodecError as error:
            self._refused[error.reason] += 1
            return None, encode(Refused(str(error)))
        reply = self._broker.handle(message, now)
        if isinstance(message, GetBatch) and isinstance(reply, BatchReply) and reply.batch is None:
            until = now + max(0.0, min(MAX_WAIT_S, message.wait_s))
            self._parked[frame.request_id] = Parked(frame, message, until)
            return message, None
        if isinstance(reply, Refused):
            self._refused["request"] += 1
        body = encode(reply)
        if not isinstance(reply, BatchReply | StatusReply):
            self._keep_answer(frame.request_id, body)
        return message, body

    def _keep_answer(self, request_id: bytes, body: bytes) -> None:
        self._answers[request_id] = body
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)

    def _unpark(self, now: float) -> list[tuple[Frame, bytes]]:
        """Replies to those whose batch is ready, or whose time is up."""
        replies = []
        for request_id, parked in list(self._parked.items()):
            reply = self._broker.handle(parked.request, now)
            waiting = isinstance(reply, BatchReply) and reply.batch is None
            if not waiting or now >= parked.until:
                del self._parked[request_id]
                replies.append((parked.frame, encode(reply)))
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
