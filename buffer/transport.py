"""The server's socket, in a thread of its own: what comes in is decoded while the store commits.

Invariant: requests are taken in the order in which they came from a peer; what waits is bounded, and beyond
the bound peers wait in ZeroMQ. A failure of the thread comes out of `take`. Called by `buffer.server`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from buffer.codec import CodecError, decode
from configs.run_folder import CurveKeys

MAX_FRAMES_AT_ONCE = 512
MAX_BYTES_WAITING = 64 * 2**20  # decoded and not taken yet
ENOUGH = 16  # requests that are worth a commit
GATHER_S = 1e-3  # fewer wait so long for others: a commit costs as much as handling several of them
PEER_WAITING = 64  # requests of one peer that wait in ZeroMQ
MAX_POLL_S = 0.5
MAX_REQUEST_ID = 64  # bytes
HARD_LIMIT = 4  # times max_message_mb: beyond it ZeroMQ drops the connection instead of a polite refusal
BIND_S = 10.0  # as long as that, an address in use is tried again
BIND_AGAIN_S = 0.1
_CLOSE_S = 10.0


@dataclass(frozen=True)
class Request:
    """One request as it came in. `message` is the CodecError if it could not be read."""

    peer: bytes
    request_id: bytes
    message: Any
    num_bytes: int
    received_at: float  # monotonic seconds


@dataclass(frozen=True)
class Reply:
    to: Request
    body: bytes


class Transport:
    def __init__(self, endpoint: str, keys: CurveKeys, max_message_mb: int) -> None:
        self._router = _Router(endpoint, keys, max_message_mb)
        self._max_bytes = max_message_mb * 2**20
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._bytes_in = self._bytes_taken = 0  # each written by one thread
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="buffer-socket", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> list[Request]:
        """Wait for a request, a moment for others, and take all that are there. Empty after `timeout_s`."""
        found: list[Request] = []
        try:
            first = self._requests.get(timeout=max(0.0, timeout_s))
            if self._requests.qsize() < ENOUGH:
                time.sleep(GATHER_S)
            self._take_to(found, first)
        except queue.Empty:
            pass
        if self._error is not None:
            raise self._error
        return found

    def _take_to(self, found: list[Request], request: Request | None) -> None:
        """`request` and those behind it. None only wakes: the thread has failed."""
        while request is not None:
            found.append(request)
            self._bytes_taken += request.num_bytes
            request = self._requests.get_nowait() if len(found) < MAX_FRAMES_AT_ONCE else None

    def send(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._replies.put(reply)
        self._router.wake()

    def close(self) -> None:
        """End the thread; replies handed over before are sent."""
        self._closing = True
        self._router.wake()
        self._thread.join(_CLOSE_S)
        self._router.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                for parts in self._router.receive(MAX_POLL_S, self._has_room()):
                    self._accept(parts)
                    if not self._has_room():
                        break
                self._send_replies()
            self._send_replies()
        except BaseException as error:  # noqa: BLE001 - `take` raises it in the server's thread
            self._error = error
            self._requests.put(None)

    def _has_room(self) -> bool:
        return self._bytes_in - self._bytes_taken < MAX_BYTES_WAITING

    def _accept(self, parts: list[bytes]) -> None:
        request = _request(parts, self._max_bytes)
        self._bytes_in += request.num_bytes
        self._requests.put(request)

    def _send_replies(self) -> None:
        while True:
            try:
                reply = self._replies.get_nowait()
            except queue.Empty:
                return
            self._router.send(reply)


def _request(parts: list[bytes], max_bytes: int) -> Request:
    received_at = time.monotonic()
    peer, request_id = parts[0], parts[1][:MAX_REQUEST_ID] if len(parts) > 1 else b""
    try:
        if len(parts) != 3 or len(parts[1]) > MAX_REQUEST_ID:
            raise CodecError("frames", "a request has two parts: its id (at most 64 bytes) and its body")
        message = decode(parts[2], max_bytes)
    except CodecError as error:
        message = error
    return Request(peer, request_id, message, sum(map(len, parts)), received_at)


class _Router:
    """The ROUTER with CURVE; lets in the run's client key alone (ZAP is ZeroMQ's authentication hook)."""

    def __init__(self, endpoint: str, keys: CurveKeys, max_message_mb: int) -> None:
        self._allowed = z85.decode(keys.client_public)
        self._context = zmq.Context()  # of its own: the ZAP address is one per context
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret
        self._socket.curve_publickey = keys.server_public
        self._socket.zap_domain = b"slipstream"
        self._socket.rcvhwm = PEER_WAITING
        self._socket.maxmsgsize = HARD_LIMIT * max_message_mb * 2**20
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._zap, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._bind(endpoint)

    def _bind(self, endpoint: str) -> None:
        """A buffer that was killed may take a moment to let go of its address."""
        deadline = time.monotonic() + BIND_S
        while True:
            try:
                self._socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(BIND_AGAIN_S)
                    continue
                self.close()
                raise RuntimeError(
                    f"the buffer cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}; stop the process "
                    "that uses it, or set buffer.host and buffer.port"
                ) from error

    def wake(self) -> None:
        """Make `receive` return. The only method for other threads."""
        os.eventfd_write(self._wake, 1)

    def receive(self, timeout_s: float, has_room: bool) -> Iterator[list[bytes]]:
        """Wait for something; then the requests that are there, if there is room for them."""
        self._poller.register(self._socket, zmq.POLLIN if has_room else 0)
        events = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake in events:
            os.eventfd_read(self._wake)
        if self._zap in events:
            self._authenticate()
        for _ in range(MAX_FRAMES_AT_ONCE if self._socket in events else 0):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _authenticate(self) -> None:
        parts = self._zap.recv_multipart()
        mechanism, key = parts[5], parts[6] if len(parts) > 6 else b""
        ok = mechanism == b"CURVE" and key == self._allowed
        verdict = [b"200", b"OK", b"run"] if ok else [b"400", b"this key is not the run's", b""]
        self._zap.send_multipart([b"1.0", parts[1], *verdict, b""])

    def send(self, reply: Reply) -> None:
        """A peer that is gone is not an error: it will ask again if it still cares."""
        parts = [reply.to.peer, reply.to.request_id, reply.body]
        self._socket.send_multipart(parts, copy=len(reply.body) < 65_536)

    def close(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._wake)
