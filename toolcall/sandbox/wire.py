"""Frames on a stream socket: a length, then JSON. Standard library only.

Invariant: a frame that is too long or not JSON raises BadFrame before anything is made of it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_FRAME = 64 << 20
HEADER = struct.Struct("<I")


class BadFrame(Exception):
    """The other side does not keep to the protocol."""


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME:
        raise BadFrame(f"a message of {len(body)} bytes is longer than the {MAX_FRAME} allowed")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise BadFrame(f"a frame says that {length} bytes follow")
    return length


def parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BadFrame(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame(f"{type(message).__name__}, not an object")
    return message


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(pack(message))


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next frame; None if the other side has closed."""
    header = _exactly(sock, HEADER.size)
    body = None if header is None else _exactly(sock, body_length(header))
    return None if body is None else parse(body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
