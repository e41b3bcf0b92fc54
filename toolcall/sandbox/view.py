"""The file system that code in a box sees: an interpreter, system libraries, nothing else, all read-only.

Invariant: after `build` nothing of the host but `sources()` can be reached, and nothing can be written; each
box mounts a `/tmp` of its own over the empty one. Called once by the fork server, in a mount namespace of
its own, before any code runs.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from toolcall.sandbox import kernel

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PASSWD = "box:x:1000:1000::/tmp:/bin/sh\n"
OLD = "/.old"


def site_packages() -> list[str]:
    """Where the interpreter's installed packages are."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def sources() -> list[str]:
    """The host's paths that are shown: system libraries, this interpreter and its packages."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *site_packages()}
    return [path for path in (*_SYSTEM, *sorted(python)) if os.path.lexists(path)]


def build(paths: list[str]) -> None:
    """Make the view this process's root. Needs new mount and PID namespaces and CAP_SYS_ADMIN over them."""
    real = {path: os.path.realpath(path) for path in (*paths, *_DEVICES)}  # while links still lead there
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("view", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp" + OLD)
    kernel.pivot_root("/tmp", "/tmp" + OLD)  # what lies below the host's /tmp can still be shown
    os.chdir("/")
    for path in paths:
        _show(path, real[path])
    for path in _DEVICES:
        _bind(path, real[path], devices=True)
    for folder in ("/tmp", "/proc"):
        os.makedirs(folder, exist_ok=True)
    os.symlink("/tmp", "/dev/shm")
    os.makedirs("/etc", exist_ok=True)
    Path("/etc/passwd").write_text(_PASSWD, encoding="utf-8")
    kernel.mount_proc()  # while the host's is there: an ordinary user gets one only beside another
    kernel.umount(OLD)
    os.rmdir(OLD)
    kernel.make_read_only("/", recursive=False)


def _show(path: str, real: str) -> None:
    if os.path.exists(path):
        return  # below one that is shown already
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(OLD + path):
        os.symlink(os.readlink(OLD + path), path)
    else:
        _bind(path, real)


def _bind(path: str, real: str, *, devices: bool = False) -> None:
    if os.path.isdir(OLD + real):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    kernel.mount(OLD + real, path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path, devices=devices)
