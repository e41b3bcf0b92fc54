"""The process that runs a model's code, inside its box.

Invariant: before the first line of the code, every limit holds and every privilege is gone for good. A
single run ends as a script does (threads joined, exit functions run, output flushed); a session keeps its
variables and answers each request with its exit code on the control socket. Forked by `toolcall.sandbox.box`.
"""

from __future__ import annotations

import ast
import atexit
import base64
import contextlib
import io
import json
import linecache
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from toolcall.sandbox import kernel, view, wire
from toolcall.sandbox.types import Limits

EXIT_CODE = struct.Struct("<i")
WHERE = "<code>"
NICENESS = 5  # engines and learners on the same cores go first
HOME = "/tmp"


def main(control: socket.socket, out: int, err: int, limits: Limits, filter_: bytes) -> NoReturn:
    """Give up everything, and run what then comes on `control`: one request as a script, which ends the
    process with its exit code, or those of a session, one after another in one namespace."""
    try:
        _confine(limits, filter_, (os.open(os.devnull, os.O_RDONLY), out, err), keep=control.fileno())
    except BaseException as error:  # noqa: BLE001 - no code has run: the box tells it as its own failure
        control.sendall(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    main = _new_main()
    while (request := wire.receive(control)) is not None:
        if not request["session"]:
            control.close()
            _run_script(request)
        code = _execute(request, main)
        _flush()
        control.sendall(EXIT_CODE.pack(code))
    os._exit(0)


def run_unprotected() -> NoReturn:
    """Run the request on stdin as a script in the current folder, under rlimits alone."""
    request = json.load(sys.stdin)
    os.nice(NICENESS)
    _set_limits(Limits(**request["limits"]), processes=None)  # a count of all that this user runs
    sys.path[:] = [os.getcwd(), *[path for path in sys.path if path], *view.site_packages()]
    _run_script(request)


def _run_script(request: dict[str, Any]) -> NoReturn:
    code = _execute(request, _new_main())
    with contextlib.suppress(BaseException):
        _until_threads_end()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    os._exit(code & 0xFF)


def _confine(limits: Limits, filter_: bytes, streams: tuple[int, int, int], keep: int) -> None:
    """Give up everything. The standard streams and `keep` are the only open files afterwards."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.setsid()
    os.closerange(3, keep)
    os.closerange(keep + 1, 4096)
    os.chdir(HOME)
    os.umask(0o077)
    os.nice(NICENESS)
    _set_limits(limits, processes=limits.processes + 1)  # the box's first process counts too
    kernel.drop_capabilities()
    kernel.set_dumpable(True)  # its own /proc entries are its own again
    kernel.forbid_new_privileges()
    kernel.load_filter(filter_)
    for name in [name for name in sys.modules if name.partition(".")[0] == "toolcall"]:
        del sys.modules[name]


def _set_limits(limits: Limits, processes: int | None) -> None:
    memory, disk = limits.memory_mb << 20, limits.disk_mb << 20
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        if value is not None:
            resource.setrlimit(kind, (value, value))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a full disk is an OSError, not a dead process


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [WHERE]
    return main


def _execute(request: dict[str, Any], main: types.ModuleType) -> int:
    """Run one piece of code; what it raises is printed as a script's traceback. Returns the exit code."""
    try:
        _write_files(request["files"])
        _open_streams(request["stdin"])
        _run_source(request["code"], main.__dict__, request["echo"])
    except SystemExit as stop:
        return _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - the code's own exception is its output
        _print_traceback(error)
        return 1
    return 0


def _run_source(source: str, namespace: dict[str, Any], echo: bool) -> None:
    linecache.cache[WHERE] = (len(source), None, source.splitlines(keepends=True), WHERE)
    tree = ast.parse(source, WHERE)
    last = tree.body[-1] if echo and tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, WHERE, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), WHERE, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))


def _open_streams(stdin: str) -> None:
    """Fresh standard streams on the three descriptors; subprocesses of the code inherit them."""
    with tempfile.TemporaryFile() if stdin else open(os.devnull, "rb") as file:
        if stdin:
            file.write(stdin.encode("utf-8", "surrogatepass"))
            file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout, sys.stderr = _text_writer(1), _text_writer(2)


def _text_writer(descriptor: int) -> io.TextIOWrapper:
    """Flushed at each line: what a run that is killed has printed is not lost."""
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)


def _print_traceback(error: BaseException) -> None:
    """As the interpreter prints it, without this module's own frames."""
    _flush()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != WHERE:
        frames = frames.tb_next
    with contextlib.suppress(BaseException):
        print("".join(traceback.format_exception(type(error), error, frames)), end="", file=sys.stderr)


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    with contextlib.suppress(BaseException):
        print(value, file=sys.stderr)
    return 1


def _until_threads_end() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
