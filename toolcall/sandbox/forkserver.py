"""The fork server: a small, warm interpreter in namespaces of its own that forks a box for each request.

Invariant: it never runs a model's code itself, and every box is a fresh fork with fresh namespaces, so
nothing passes from one to the next. It ends when its caller does, and with it every box. Started by
`toolcall.sandbox.server` as a process with an empty environment.

Layers: caller → this file's `main` (leaves the host: namespaces, file view, uid) → `_start_box` (namespaces
of the box) → `box.serve` (process id 1 of the box) → `worker` (the code).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from toolcall.sandbox import box, kernel, syscalls, view

NOBODY = 65534  # whom boxes run as where the caller is root
USER = 1000  # the same inside a box
BOX_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
OWN_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
)
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


def _serve(control: socket.socket, filter_: bytes) -> NoReturn:
    """One box for each descriptor that comes, until the caller is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # boxes are not waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            os._exit(0)
        caller = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            _start_box(caller, filter_)
        caller.close()


def _start_box(caller: socket.socket, filter_: bytes) -> NoReturn:
    """Make the box's namespaces and its process id 1, hand the caller a grip on it, and go."""
    try:
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(BOX_NAMESPACES)
        _map_ids(uid, gid)
        if (first := os.fork()) == 0:
            box.serve(caller, filter_)
        socket.send_fds(caller, [b"+"], [os.pidfd_open(first)])
    except BaseException as error:  # noqa: BLE001 - the caller reads it
        caller.sendall(f"-{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _map_ids(uid: int, gid: int) -> None:
    """In the namespace just made, user `USER` is the host's `uid`, and there are no others."""
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{USER} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{USER} {gid} 1", encoding="ascii")
