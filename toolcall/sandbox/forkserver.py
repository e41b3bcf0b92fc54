"""The fork server: a small, warm interpreter in namespaces of its own that forks a box for each request.

Invariant: it never runs a model's code itself, and every box is a fresh fork with fresh namespaces, so
nothing passes from one to the next. It ends when its caller does, and with it every box. Started by
`toolcall.sandbox.server` as a process with an empty environment.

Layers: caller → this file's `main` (leaves the host: namespaces, file view, uid) → `box` (process id 1 of
namespaces of its own) → `worker` (the code).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import NoReturn

from toolcall.sandbox import box, kernel, syscalls, view
from toolcall.sandbox.types import Limits

NOBODY = 65534  # whom boxes run as where the caller is root
USER = 1000  # the same inside a box
BOX_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
OWN_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
)
MAX_ORDER = 4096
_WARM = (
    *("ast", "bisect", "collections", "copy", "csv", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "random", "re", "statistics", "string", "textwrap", "typing"),
)


def main(descriptor: int, preload: list[str]) -> None:
    """Leave the host, say so, and serve. What fails on the way is told to the caller."""
    control = socket.socket(fileno=descriptor)
    try:
        paths = view.sources()
        packages = view.site_packages()
        filter_ = syscalls.compile_filter()
        as_root = os.geteuid() == 0
        _enter_namespaces(as_root)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    if (child := os.fork()) != 0:
        control.close()
        os.waitpid(child, 0)
        return
    try:
        _settle(paths, as_root)
        _warm_up(packages, preload)
    except Exception as error:  # noqa: BLE001 - the caller turns it into one sentence
        control.send(json.dumps({"error": f"{error}" or type(error).__name__}).encode())
        os._exit(1)
    control.send(json.dumps({"ready": True}).encode())
    _serve(control, filter_)


def _enter_namespaces(as_root: bool) -> None:
    """As root without a user namespace, so that the view may show what only root can reach."""
    if as_root:
        kernel.unshare(OWN_NAMESPACES)
        return
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(OWN_NAMESPACES | kernel.CLONE_NEWUSER)
    _map_ids(uid, gid)


def _settle(paths: list[str], as_root: bool) -> None:
    """Take the view as root directory and give up what the host's user could do."""
    view.build(paths)
    if as_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.set_dumpable(True)  # or its own /proc entries, the id maps of boxes, would be root's


def _warm_up(packages: list[str], preload: list[str]) -> None:
    """Import once what code often imports; boxes inherit it."""
    sys.path[:] = [box.worker.HOME, *[path for path in sys.path if path], *packages]
    for name in (*_WARM, *preload):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ImportError(f"preload {name!r}: {type(error).__name__}: {error}") from error
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"preload: one of {', '.join(preload)} starts threads, which no fork survives")
    gc.collect()
    gc.freeze()  # no collection of a box touches, and so copies, the pages it shares with this process


def _serve(control: socket.socket, filter_: bytes) -> NoReturn:
    """One box for each order (its limits, and a socket to who will use it), until the caller is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # boxes are not waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ids = os.getuid(), os.getgid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, MAX_ORDER, 1)
        if not descriptors:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as caller:
            try:
                if kernel.fork_into(BOX_NAMESPACES) == 0:
                    control.close()
                    _become_box(caller, ids, order, filter_)
            except OSError as error:
                _refuse(caller, error)


def _become_box(caller: socket.socket, ids: tuple[int, int], order: bytes, filter_: bytes) -> NoReturn:
    """As process id 1 of new namespaces: make the box, hand the caller a grip on it, and serve."""
    try:
        _map_ids(*ids)
        made = box.Box(caller, Limits(**json.loads(order)), filter_)
        made.start()
        socket.send_fds(caller, [b"+"], [os.pidfd_open(os.getpid())])
    except BaseException as error:  # noqa: BLE001 - the caller reads it
        _refuse(caller, error)
        os._exit(1)
    box.serve(made)


def _refuse(caller: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # it may have gone
        named = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        caller.sendall(f"-{named}".encode())


def _map_ids(uid: int, gid: int) -> None:
    """In the namespace just made, user `USER` is the host's `uid`, and there are no others."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {uid} 1"), ("gid_map", f"{USER} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
