"""Clients of the buffer: one for asyncio (actors), one that blocks (learner, launcher).

A request that gets no reply in time is sent again, with the same id, on a fresh socket, until the caller's
deadline: so a client rides out a restart of the server. Requests are idempotent, see `buffer.messages`.

Invariant: `call` returns the reply to its own request or raises, by its deadline. Used by every role.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from dataclasses import dataclass
from typing import Any

import zmq

from buffer.codec import decode, encode
from buffer.messages import GetBatch, Refused
from configs.run_folder import CurveKeys

FIRST_ATTEMPT_S = 2.0  # without a reply before the request is sent again
LONGEST_ATTEMPT_S = 10.0


class BufferUnreachable(TimeoutError):
    """No reply by the deadline."""


class BufferRefused(RuntimeError):
    """The buffer cannot serve the request; its sentence says why and what to do."""


def _attempt_s(attempt: int, message: Any) -> float:
    """Patience with one sending; longer each time, for the server may be slow and not dead."""
    waits = message.wait_s if isinstance(message, GetBatch) else 0.0
    return min(FIRST_ATTEMPT_S * 2**attempt, LONGEST_ATTEMPT_S) + waits


def _open(context: zmq.Context, endpoint: str, keys: CurveKeys) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # bounded by the caller: one reply for each request
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret
    socket.connect(endpoint)
    return socket


def _unreachable(endpoint: str, who: str, message: Any, timeout_s: float) -> BufferUnreachable:
    return BufferUnreachable(
        f"{who} got no reply to {type(message).__name__} from the buffer at {endpoint} within {timeout_s:g} s"
        "; see logs/buffer.log, and check that this process uses the keys of the same run folder"
    )


def _unwrap(body: bytes, message: Any) -> Any:
    reply = decode(body)
    if isinstance(reply, Refused):
        raise BufferRefused(f"the buffer refused {type(message).__name__}: {reply.reason}")
    return reply


class BufferClient:
    """Blocking; one call at a time, so one client for each thread."""

    def __init__(self, endpoint: str, keys: CurveKeys, role: str, name: str) -> None:
        self._endpoint, self._keys, self._who = endpoint, keys, f"{role} {name}"
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._ids = _request_ids()

    def call(self, message: Any, timeout_s: float) -> Any:
        """The reply to `message`. Raises BufferUnreachable after `timeout_s`, or BufferRefused."""
        deadline = time.monotonic() + timeout_s
        request_id, body = next(self._ids), encode(message)
        for attempt in itertools.count():
            socket = self._socket = self._socket or _open(self._context, self._endpoint, self._keys)
            socket.send_multipart([request_id, body])
            patience_s = _attempt_s(attempt, message)
            reply = _reply(socket, request_id, min(deadline, time.monotonic() + patience_s))
            if reply is not None:
                return _unwrap(reply, message)
            socket.close()
            self._socket = None
            if time.monotonic() >= deadline:
                break
        raise _unreachable(self._endpoint, self._who, message, timeout_s)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _reply(socket: zmq.Socket, request_id: bytes, until: float) -> bytes | None:
    """The reply to this request, or None; late ones to earlier requests are thrown away."""
    while socket.poll(max(0, int((until - time.monotonic()) * 1000))):
        got, body = socket.recv_multipart()
        if got == request_id:
            return body
    return None


@dataclass
class _Pending:
    """A request in flight."""

    message: Any
    request_id: bytes
    body: bytes
    reply: asyncio.Future[bytes]
    attempt: int = 0
    due: float = 0.0  # when it is sent again


class AsyncBufferClient:
    """For asyncio; any number of calls at once, all in one event loop.

    The socket is a plain one that the loop watches: pyzmq's futures for each message cost more than the
    message.
    """

    def __init__(self, endpoint: str, keys: CurveKeys, role: str, name: str) -> None:
        self._endpoint, self._keys, self._who = endpoint, keys, f"{role} {name}"
        self._context = zmq.Context()
        self._socket: Any = None
        self._pending: dict[bytes, _Pending] = {}
        self._ids = _request_ids()
        self._resender: asyncio.TimerHandle | None = None

    async def call(self, message: Any, timeout_s: float) -> Any:
        """The reply to `message`. Raises BufferUnreachable after `timeout_s`, or BufferRefused."""
        loop = asyncio.get_running_loop()
        pending = _Pending(message, next(self._ids), encode(message), loop.create_future())
        self._pending[pending.request_id] = pending
        try:
            async with asyncio.timeout(timeout_s):
                if self._socket is None:
                    self._reopen()
                else:
                    self._send(pending)
                return _unwrap(await pending.reply, message)
        except TimeoutError:
            raise _unreachable(self._endpoint, self._who, message, timeout_s) from None
        finally:
            del self._pending[pending.request_id]

    def _send(self, pending: _Pending) -> None:
        loop = asyncio.get_running_loop()
        patience_s = _attempt_s(pending.attempt, pending.message)
        pending.due, pending.attempt = loop.time() + patience_s, pending.attempt + 1
        self._socket.send_multipart([pending.request_id, pending.body])  # never blocks: no high-water mark
        # Sending may have taken the edge that announces a reply, so look for one.
        loop.call_soon(self._receive)
        if self._resender is None or pending.due < self._resender.when():
            self._look_again_at(pending.due)

    def _look_again_at(self, due: float) -> None:
        if self._resender is not None:
            self._resender.cancel()
        self._resender = asyncio.get_running_loop().call_at(due, self._resend)

    def _resend(self) -> None:
        """Open a fresh socket if a request has waited too long; look again when the next one will have."""
        loop = asyncio.get_running_loop()
        self._resender = None
        waiting = [pending for pending in self._pending.values() if not pending.reply.done()]
        next_due = min((pending.due for pending in waiting), default=None)
        if next_due is None:
            return
        if next_due <= loop.time():
            self._reopen()
        else:
            self._look_again_at(next_due)

    def _reopen(self) -> None:
        """A fresh socket, on which everything unanswered is sent again."""
        self._close_socket()
        self._socket = _open(self._context, self._endpoint, self._keys)
        asyncio.get_running_loop().add_reader(self._socket.fd, self._receive)
        for pending in self._pending.values():
            if not pending.reply.done():
                self._send(pending)

    def _receive(self) -> None:
        """Take every reply that is there: the socket announces an edge, not a level."""
        socket = self._socket
        while socket is not None:
            try:
                request_id, body = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            pending = self._pending.get(request_id)
            if pending is not None and not pending.reply.done():
                pending.reply.set_result(body)

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fd)
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Calls still in flight end by their own deadlines, without an answer."""
        if self._resender is not None:
            self._resender.cancel()
        self._close_socket()
        self._context.destroy(linger=0)


def _request_ids() -> Any:
    """Unique over all clients of the run, also over restarts of their processes."""
    client = uuid.uuid4().bytes
    return (client + number.to_bytes(8, "big") for number in itertools.count())
