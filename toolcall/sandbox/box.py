"""A box: a process id 1 of its own that runs one piece of code, or a session, and ends with everything in it.

Invariant: when this process ends, for whatever reason, the kernel kills every process of its namespace; the
caller ends it by closing the socket. It trusts nothing that the worker says or does: limits are enforced from
here over all processes together, and a worker that breaks the control channel is killed.
A box is made with its worker, which has given up every privilege and waits, so that a run costs what its
code costs. Made by `toolcall.sandbox.forkserver`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from toolcall.sandbox import kernel, wire, worker
from toolcall.sandbox.types import Ended, Limits, RunResult

WATCH_S = 0.05  # between looks at the memory and CPU of all processes
CALLER_S = 10.0  # for the caller to take an answer
START_S = 15.0  # for the worker to be ready
EXIT_S = 0.5  # for a worker whose files are closed to have ended
_NOTHING = {"session": True, "code": "None", "stdin": "", "files": {}, "echo": True}
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def serve(box: Box) -> NoReturn:
    """Answer the caller's requests until it closes, or a run ends the worker. Never returns."""
    caller = box.caller
    try:
        while (request := wire.receive(caller)) is not None:  # a box made ahead waits here
            caller.settimeout(CALLER_S)
            result = box.run(request)
            wire.send(caller, {**vars(result), "alive": box.alive})
            if not box.alive:
                break
            box.freeze()
            caller.settimeout(None)
    except BaseException as error:  # noqa: BLE001 - an answer for the caller, who may have gone
        with contextlib.suppress(OSError):
            wire.send(caller, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


@dataclass
class _Usage:
    """What the box's processes have used up."""

    cpu_s: float
    memory: int  # bytes of their own, not of the fork server's


@dataclass
class Box:
    caller: socket.socket
    limits: Limits
    filter: bytes
    alive: bool = True
    control: socket.socket | None = None  # to the worker; a single run's closes it when it has the request
    fresh: bool = True  # no code has run yet
    worker: int = 0
    pidfd: int = -1  # of the worker; readable once it has ended, whoever reaped it
    status: int | None = None  # the worker's, once it has ended
    pipes: dict[int, bytearray] = field(default_factory=dict)  # of stdout and stderr: what came out
    reaped_cpu_s: float = 0.0
    cpu_before_s: float = 0.0
    base_memory: int = 0

    def start(self) -> None:
        """Mount what is the box's own and fork the worker. Raises what keeps either from being ready."""
        kernel.set_dumpable(False)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from inside, only signals with a handler arrive
        kernel.mount_proc("subset=pid")
        size = f"size={self.limits.disk_mb}m,nr_inodes=16384,mode=700"
        kernel.mount("box", worker.HOME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        self.base_memory = _memory(1)
        out, err = os.pipe(), os.pipe()
        self.control, theirs = socket.socketpair()
        self.worker = os.fork()
        if self.worker == 0:
            try:
                worker.main(theirs, out[1], err[1], self.limits, self.filter)
            except BaseException as error:  # noqa: BLE001 - reported as the run's own output
                os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        self.pidfd = os.pidfd_open(self.worker)
        for descriptor in (out[1], err[1]):
            os.close(descriptor)
        for descriptor in (out[0], err[0]):
            os.set_blocking(descriptor, False)
            self.pipes[descriptor] = bytearray()
        theirs.close()
        self._rehearse()

    def _rehearse(self) -> None:
        """Run nothing, once: it shows that the worker is ready, and what a run touches of the fork server's
        memory is copied now. Raises what went wrong."""
        assert self.control is not None
        self.control.settimeout(START_S)
        with contextlib.suppress(BrokenPipeError):  # it is dead; why, it has said
            wire.send(self.control, _NOTHING)
        if (said := self.control.recv(4096)) != worker.EXIT_CODE.pack(0):
            raise OSError(said.decode(errors="replace") or "the worker died")
        self._drain()
        self.cpu_before_s = self._usage().cpu_s
        self.control.settimeout(self.limits.wall_s)

    def run(self, request: dict[str, Any]) -> RunResult:
        """Run one request to its end, whoever ends it."""
        started = time.monotonic()
        self.pipes = {descriptor: bytearray() for descriptor in self.pipes}
        if not self.fresh:
            self.cpu_before_s = self._usage().cpu_s
        exit_code = None
        ended = self._hand_over(request)
        if ended is None:
            ended, exit_code = self._watch(started + self.limits.wall_s)
        if ended is not Ended.EXITED or self.control is None:
            self.alive = False
        self._drain()
        stdout, stderr = (self._text(output) for output in self.pipes.values())
        wall_s, cpu_s = time.monotonic() - started, self._usage().cpu_s - self.cpu_before_s
        return RunResult(ended, exit_code, stdout, stderr, wall_s, cpu_s)

    def freeze(self) -> None:
        """Stop all but this process, so that a session uses no CPU between calls."""
        _signal_all(signal.SIGSTOP)

    def _hand_over(self, request: dict[str, Any]) -> Ended | None:
        """Give the worker the request; first wake a session's, where code has already run."""
        assert self.control is not None
        if not self.fresh:
            _signal_all(signal.SIGCONT)
        try:
            wire.send(self.control, request)
        except OSError:  # it closed the channel, or does not read
            if self.fresh:
                raise  # not the code's doing
            return Ended.BROKEN
        self.fresh = False
        if not request["session"]:
            self.control.close()
            self.control = None
        return None

    def _watch(self, deadline: float) -> tuple[Ended, int | None]:
        """Until the run ends or breaks a limit. Also ends this process if the caller has gone."""
        poll = select.poll()
        for descriptor in self.pipes:
            poll.register(descriptor, select.POLLIN)
        poll.register(self.caller, select.POLLRDHUP)
        if self.control is not None:
            poll.register(self.control, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        look = time.monotonic() + WATCH_S
        while True:
            now = time.monotonic()
            for descriptor, _ in poll.poll(max(0, min(deadline, look) - now) * 1000):
                if descriptor == self.caller.fileno():
                    os._exit(0)
                if descriptor == self.pidfd:
                    return self._worker_ended()
                if self.control is not None and descriptor == self.control.fileno():
                    return self._answered()
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._written() > self.limits.output_bytes:
                return Ended.OUTPUT, None
            now = time.monotonic()
            if now >= deadline:
                return Ended.TIMEOUT, None
            if now >= look:
                look = now + WATCH_S
                if (broken := self._broken_limit()) is not None:
                    return broken, None

    def _worker_ended(self) -> tuple[Ended, int | None]:
        self._reap()
        if self.status is None:
            return Ended.BROKEN, None
        code = os.waitstatus_to_exitcode(self.status)
        self.alive = False
        return (Ended.SIGNALLED if code < 0 else Ended.EXITED), code

    def _answered(self) -> tuple[Ended, int | None]:
        """The worker says that the request is done: exactly one exit code, or the session is over."""
        assert self.control is not None
        try:
            answer = self.control.recv(64)
        except OSError:  # reset: it ended with a request unread
            answer = b""
        if len(answer) == worker.EXIT_CODE.size:
            return Ended.EXITED, worker.EXIT_CODE.unpack(answer)[0]
        if not answer and select.select([self.pidfd], [], [], EXIT_S)[0]:
            return self._worker_ended()
        return Ended.BROKEN, None

    def _broken_limit(self) -> Ended | None:
        usage = self._usage()
        if usage.memory > self.limits.memory_mb << 20:
            return Ended.MEMORY
        if usage.cpu_s - self.cpu_before_s > self.limits.cpu_s:
            return Ended.CPU
        return None

    def _usage(self) -> _Usage:
        self._reap()
        usage = _Usage(self.reaped_cpu_s, 0)
        for name in os.listdir("/proc"):
            if not name.isdigit() or name == "1":
                continue
            try:
                usage.cpu_s += _cpu_s(int(name))
                usage.memory += max(0, _memory(int(name)) - self.base_memory)
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
        return usage

    def _reap(self) -> None:
        """Collect what has ended: the worker, and orphans, which become this process's children."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.reaped_cpu_s += used.ru_utime + used.ru_stime
            if pid == self.worker:
                self.status = status

    def _read(self, descriptor: int) -> bool:
        """Take what a pipe holds now, one piece; False at its end."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        self.pipes[descriptor] += part
        return bool(part)

    def _drain(self) -> None:
        """What was written before the end and not yet read; who still holds a pipe open is not waited for."""
        for descriptor, output in self.pipes.items():
            while self._written() <= self.limits.output_bytes:
                before = len(output)
                if not self._read(descriptor) or len(output) == before:
                    break

    def _written(self) -> int:
        return sum(map(len, self.pipes.values()))

    def _text(self, output: bytearray) -> str:
        return output[: self.limits.output_bytes].decode("utf-8", "replace")


def _signal_all(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)  # every process of the namespace but this one


def _memory(pid: int) -> int:
    """Bytes of a process's own memory: resident and not shared with a file."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * _PAGE


def _cpu_s(pid: int) -> float:
    """Seconds of a process and of its children that it waited for."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # a process may have any name
    return sum(int(field) for field in fields[11:15]) / _TICK
