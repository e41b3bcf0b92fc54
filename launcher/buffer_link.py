"""The launcher's connection to the buffer: status and drain, with short deadlines.

No answer is not an error here: the buffer may be starting or restarting, and the supervisor keeps
the deadline. Used by `launcher.train` and `launch.py status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from buffer.client import BufferClient
from buffer.messages import Drain, Gone, Scale, Status, StatusReply
from configs.run_folder import CurveKeys

_STATUS_TIMEOUT_S = 2.0
_DRAIN_TIMEOUT_S = 3.0


class BufferLink:
    """`launcher.interfaces.Buffer` over the wire."""

    def __init__(self, endpoint: str, keys: CurveKeys, name: str = "launcher") -> None:
        self._client = BufferClient(endpoint, keys, "launcher", name)

    def status(self, since: int) -> StatusReply | None:
        try:
            reply = self._client.call(Status(since), _STATUS_TIMEOUT_S)
        except TimeoutError:
            return None
        assert isinstance(reply, StatusReply)
        return reply

    def drain(self, actors: Sequence[str]) -> None:
        try:
            self._client.call(Drain(tuple(actors)), _DRAIN_TIMEOUT_S)
        except TimeoutError:
            return  # the stop's own deadline ends the actors

    def scale(self, actors: int) -> bool:
        try:
            self._client.call(Scale(actors), _STATUS_TIMEOUT_S)
        except TimeoutError:
            return False
        return True

    def release(self, actor: str) -> None:
        with suppress(TimeoutError):  # they expire in time
            self._client.call(Gone((actor,)), _STATUS_TIMEOUT_S)

    def close(self) -> None:
        self._client.close()
