"""The fork server as its caller sees it: a process, an order for a box, a box made ahead.

Invariant: closing it, or the end of this process in any way, ends the fork server and every box with it.
Used by `toolcall.sandbox.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from toolcall.sandbox.mends import mend
from toolcall.sandbox.types import Limits, SandboxUnavailable

START_S = 60.0  # for the fork server to be ready
BOX_S = 20.0  # for a box to exist
CLOSE_S = 5.0  # for the fork server to go by itself
SPARES = 4  # boxes made ahead, so that a run need not wait for one
PACKAGE = Path(__file__).parents[1]
# The fork server's own modules without the packages' __init__, which would import half of Slipstream.
BOOT = """
import sys, types
for name, path in (("toolcall", sys.argv[1]), ("toolcall.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
"""
_MAIN = "from toolcall.sandbox.forkserver import main\nmain(int(sys.argv[2]), sys.argv[3:])\n"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "box",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets of strings have the same order in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ForkServer:
    """The fork server's process and the socket on which it takes orders.

    usual: the limits of boxes made ahead.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, usual: Limits) -> None:
        self._process = process
        self._control = control
        self._usual = usual
        self._spares: deque[tuple[socket.socket, int]] = deque()
        self._refill: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, preload: Sequence[str], usual: Limits) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-s", "-S", "-P", "-B", "-c", BOOT + _MAIN]
            command += [str(PACKAGE), str(theirs.fileno()), *preload]
            process = _launch(command, theirs.fileno())
        ours.setblocking(False)
        server = cls(process, ours, usual)
        try:
            async with asyncio.timeout(START_S):
                answer = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        except BaseException as error:
            await server.close()
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable(f"the sandbox was not ready within {START_S:g} s") from None
            raise
        said = json.loads(answer or b'{"error": "its first process died"}')
        if "error" in said:
            await server.close()
            raise SandboxUnavailable(f"no sandbox on this machine: {said['error']}{mend(said['error'])}")
        return server

    def alive(self) -> bool:
        return self._process.poll() is None

    async def close(self) -> None:
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait({self._refill})
        while self._spares:
            sock, pidfd = self._spares.popleft()
            sock.close()
            os.close(pidfd)
        self._control.close()  # ends it
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def take_box(self, limits: Limits) -> tuple[socket.socket, int]:
        """A box made ahead if there is one of these limits, or a new one; makes the next ahead."""
        if limits != self._usual:
            return await self._new_box(limits)
        box = self._spares.popleft() if self._spares else await self._new_box(limits)
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._make_spares())
        return box

    async def _make_spares(self) -> None:
        with contextlib.suppress(SandboxUnavailable):  # who needs the box next is told
            while len(self._spares) < SPARES:
                self._spares.append(await self._new_box(self._usual))

    async def _new_box(self, limits: Limits) -> tuple[socket.socket, int]:
        """A socket to a new box, and a descriptor of its first process."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # this process has too many files open
            raise SandboxUnavailable(f"no socket for a box: {error}") from error
        ours.setblocking(False)
        try:
            with theirs:
                order = json.dumps(vars(limits)).encode()
                socket.send_fds(self._control, [order], [theirs.fileno()])
            async with asyncio.timeout(BOX_S):
                await _readable(ours)
            said, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise SandboxUnavailable(f"the sandbox's fork server gave no box: {error!r}") from error
        except BaseException:
            ours.close()
            raise
        if said != b"+" or not descriptors:
            ours.close()
            why = said[1:].decode("utf-8", "replace") or "it died"
            raise SandboxUnavailable(f"no box could be made: {why}{mend(why)}")
        return ours, descriptors[0]


def _launch(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
    """Milliseconds: only the fork and exec are waited for."""
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, pass_fds=[descriptor], cwd="/"
    )


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock)
