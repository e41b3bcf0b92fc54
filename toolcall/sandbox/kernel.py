"""The Linux calls that Python 3.11 has no function for, through libc.

Each raises OSError naming the call. Used by the fork server's processes only.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWCGROUP = 0x02000000
NAMESPACE_FLAGS = 0x7E020080  # every CLONE_NEW…, time included

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2

_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 24, 38, 22
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check("unshare", _libc.unshare(flags))


def fork_into(namespaces: int) -> int:
    """As os.fork, and the child is the first process of these new namespaces.

    One fork where unshare needs two, since the process that unshares a PID namespace is not in it. For a
    process of one thread: libc does not hear of it, the interpreter does.
    """
    call = _number(_SYS_CLONE, "clone")
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc_with_gil.syscall(call, namespaces | signal.SIGCHLD, 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid == -1:
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(f"mount of {target}", _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()))


def mount_proc(options: str = "") -> None:
    """The /proc of this process's PID namespace."""
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def umount(target: str) -> None:
    _check(f"umount of {target}", _libc.umount2(target.encode(), MNT_DETACH))


def make_read_only(target: str, *, recursive: bool = True, devices: bool = False) -> None:
    """No writes, no set-uid and (unless `devices`) no devices below `target`, submounts included."""
    wanted = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | (0 if devices else _MOUNT_ATTR_NODEV)
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, attributes, ctypes.c_size_t(32)
    )
    _check(f"making {target} read-only", result)


def pivot_root(new: str, old: str) -> None:
    number = _number(_SYS_PIVOT_ROOT, "pivot_root")
    _check("pivot_root", _libc.syscall(number, new.encode(), old.encode()))


def set_dumpable(value: bool) -> None:
    """Not dumpable: no process without privileges can trace this one or read its /proc entries."""
    _check("PR_SET_DUMPABLE", _libc.prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0))


def forbid_new_privileges() -> None:
    _check("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop_capabilities() -> None:
    """Every capability, also from the set that a later exec could take from."""
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(
            _PR_CAPBSET_DROP, capability, 0, 0, 0
        )  # EINVAL above the kernel's last, EPERM without any
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def load_filter(program: bytes) -> None:
    """Install a seccomp program (BPF instructions of 8 bytes). Needs no-new-privileges."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    pointer = ctypes.byref(Program(len(program) // 8, program))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0))


def _number(numbers: dict[str, int], what: str) -> int:
    """A system call's number on this machine."""
    machine = os.uname().machine
    if machine not in numbers:
        raise OSError(f"{what}: unknown machine {machine}")
    return numbers[machine]


def _check(what: str, result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
