"""The system calls that code in a box cannot make, compiled by libseccomp.

Invariant: what is refused fails with EPERM, so that the code sees an exception and not a dead process.
Sockets are refused although the box has no network anyway; so is memory that no limit counts (memfd, System
V segments, message queues) and whatever reaches into other processes, mounts, namespaces or kernel features
that a script does not need. Called once by the fork server; workers load the compiled program.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os

from toolcall.sandbox.kernel import NAMESPACE_FLAGS

REFUSED = (
    # network; socketpair stays, multiprocessing and asyncio use it
    "socket",
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    # memory outside every limit
    *("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "msgget", "msgsnd", "semget", "mq_open"),
    # mounts and namespaces
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount"),
    *("fspick", "mount_setattr", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    # parts of the kernel with a history of holes
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "perf_event_open", "bpf"),
    *("keyctl", "add_key", "request_key", "fanotify_init", "modify_ldt", "personality", "vmsplice"),
    # the machine
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog"),
    *("swapon", "swapoff", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "acct", "quotactl"),
    *("iopl", "ioperm", "sethostname", "setdomainname", "vhangup"),
)

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def compile_filter() -> bytes:
    """The BPF program. Raises OSError if libseccomp is missing."""
    library = _library()
    context = library.seccomp_init(_ALLOW)
    if not context:
        raise OSError("libseccomp: seccomp_init failed")
    try:
        for name in REFUSED:
            _refuse(library, context, name, errno.EPERM)
        _refuse(library, context, "clone3", errno.ENOSYS)  # its flags are out of reach; libc falls back
        for bit in (1 << shift for shift in range(32) if NAMESPACE_FLAGS >> shift & 1):
            flag = _Comparison(0, _MASKED_EQUAL, bit, bit)
            _refuse(library, context, "clone", errno.EPERM, flag)
        _refuse(library, context, "prlimit64", errno.EPERM, _Comparison(0, _NOT_EQUAL, 0, 0))
        return _export(library, context)
    finally:
        library.seccomp_release(context)


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        raise OSError(
            "libseccomp.so.2 is not installed (Debian and Ubuntu: apt install libseccomp2)"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    ]
    return library


def _refuse(
    library: ctypes.CDLL, context: int, name: str, error: int, comparison: _Comparison | None = None
) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # not on this architecture, or newer than the library
        return
    pointer = None if comparison is None else ctypes.byref(comparison)
    result = library.seccomp_rule_add_array(
        context, _ERRNO | error, number, int(pointer is not None), pointer
    )
    if result < 0:
        raise OSError(-result, f"libseccomp: a rule for {name}: {os.strerror(-result)}")


def _export(library: ctypes.CDLL, context: int) -> bytes:
    descriptor = os.memfd_create("filter")
    try:
        if (result := library.seccomp_export_bpf(context, descriptor)) < 0:
            raise OSError(-result, f"libseccomp: export: {os.strerror(-result)}")
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
