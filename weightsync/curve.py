"""CURVE on weightsync's sockets: encrypted, and only the run's own client key gets in.

Used by `weightsync.publisher` and `weightsync.receiver`.
"""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from configs.run_folder import CurveKeys
from weightsync.wire import MAX_MESSAGE_BYTES


class _OnlyTheRunsKey:
    def __init__(self, client_public: bytes) -> None:
        self._allowed = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._allowed


def authenticator(context: zmq.Context, keys: CurveKeys) -> ThreadAuthenticator:
    """Started; refuses every other client of this context's servers before a message of it is read."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", _OnlyTheRunsKey(keys.client_public))
    return guard


def secure_server(socket: zmq.Socket, keys: CurveKeys) -> None:
    socket.curve_server = True
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    _limit(socket)


def secure_client(socket: zmq.Socket, keys: CurveKeys) -> None:
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret
    _limit(socket)


def _limit(socket: zmq.Socket) -> None:
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.linger = 0
