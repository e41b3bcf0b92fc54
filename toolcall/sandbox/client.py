"""The caller's side: start the fork server, run code in boxes, never wait past a deadline.

Invariant: `run` returns a `RunResult` within `wall_s` plus `GRACE_S`, or raises SandboxUnavailable; when it
has returned, raised or been cancelled, every process that the code started is dead or being killed by the
kernel. A fork server that died is replaced at the next run. Used by `toolcall.tools.python` and by rewards
that score code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from toolcall.sandbox import wire
from toolcall.sandbox.server import ForkServer
from toolcall.sandbox.types import Ended, Limits, RunResult, SandboxUnavailable

GRACE_S = 5.0  # beyond wall_s, for a starved machine to deliver the answer
FORKS_AT_ONCE = 8


class Sandbox:
    """Runs Python code in throw-away boxes.

        async with Sandbox(Limits(wall_s=5)) as sandbox:
            result = await sandbox.run("print(input()[::-1])", stdin="abc")

    limits: of every run without its own. preload: modules that code often imports, imported once, ahead.
    Belongs to the event loop that first uses it.
    """

    def __init__(self, limits: Limits | None = None, *, preload: Sequence[str] = ()) -> None:
        self._limits = limits or Limits()
        self._preload = tuple(preload)
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._forks = asyncio.Semaphore(FORKS_AT_ONCE)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the fork server, if there is none. Raises SandboxUnavailable with the reason."""
        async with self._starting:
            if self._server is None or not self._server.alive():
                await self.close()
                self._server = await ForkServer.start(self._preload, self._limits)

    async def close(self) -> None:
        """End the fork server and every box."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        echo: bool = False,
        limits: Limits | None = None,
    ) -> RunResult:
        """Run `code` as a script in a new box, with `files` in its working folder.

        echo: also print the value of a last line that is an expression, as a notebook does.
        """
        async with self._box(session=False, limits=limits or self._limits) as box:
            return await box.run(code, stdin=stdin, files=files, echo=echo)

    @asynccontextmanager
    async def session(self, *, limits: Limits | None = None) -> AsyncIterator[Session]:
        """One box that keeps its variables and files from run to run, until the block ends."""
        async with self._box(session=True, limits=limits or self._limits) as box:
            yield box

    @asynccontextmanager
    async def _box(self, session: bool, limits: Limits) -> AsyncIterator[Session]:
        await self.start()
        server = self._server
        if server is None:
            raise SandboxUnavailable("the sandbox was closed")
        async with self._forks:
            ours, pidfd = await server.take_box(limits)
        box = Session(ours, pidfd, limits, session)
        try:
            yield box
        finally:
            box.kill()


class Session:
    """A box in use. Once a run has ended it (see `alive`), further runs raise SandboxUnavailable."""

    def __init__(self, sock: socket.socket, pidfd: int, limits: Limits, session: bool) -> None:
        self._sock = sock
        self._pidfd = pidfd
        self._limits = limits
        self._session = session
        self.alive = True

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        echo: bool = False,
    ) -> RunResult:
        if not self.alive:
            raise SandboxUnavailable("this sandbox session has ended; open a new one")
        request = {
            "session": self._session,
            "code": code,
            "stdin": stdin,
            "files": {name: _base64(content) for name, content in (files or {}).items()},
            "echo": echo,
        }
        self.alive = False  # until an answer says otherwise: a run that was cancelled leaves nothing usable
        try:
            async with asyncio.timeout(self._limits.wall_s + GRACE_S):
                await asyncio.get_running_loop().sock_sendall(self._sock, wire.pack(request))
                return self._result(await self._receive())
        except TimeoutError:
            return RunResult(Ended.TIMEOUT, None, "", "", self._limits.wall_s + GRACE_S, 0.0)
        except (OSError, wire.BadFrame) as error:
            raise SandboxUnavailable(f"the sandbox broke off: {error}") from error
        finally:
            if not self.alive:
                self.kill()

    def _result(self, answer: dict[str, Any]) -> RunResult:
        if "error" in answer:
            raise SandboxUnavailable(f"the sandbox failed: {answer['error']}")
        self.alive = answer.pop("alive")
        return RunResult(**{**answer, "ended": Ended(answer["ended"])})

    def kill(self) -> None:
        """End everything in the box, now. Idempotent."""
        self.alive = False
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._pidfd = -1
        self._sock.close()

    async def _receive(self) -> dict[str, Any]:
        header = await self._exactly(wire.HEADER.size)
        return wire.parse(await self._exactly(wire.body_length(header)))

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._sock, min(size - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("it ended without an answer")
            parts += part
        return bytes(parts)


def _base64(content: str | bytes) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode("ascii")
