"""The attempts of `sandbox_escapes.py`: code that tries to get out of a box, or to hurt the machine.

Code that gets what it wants prints GOT. `$name` is a fact of the host (see `sandbox_escapes.Facts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from toolcall.sandbox import Ended

HEAD = """\
import ctypes, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, call):
    try:
        result = call()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}")
    else:
        refused = isinstance(result, int) and result < 0  # a C function's way
        print(f"{what}: {os.strerror(ctypes.get_errno())}" if refused else f"GOT {what}: {result!r:.200}")
"""


@dataclass(frozen=True)
class Attempt:
    """ends: the ways in which the run may end. says: what it must print, so that it was really tried."""

    name: str
    code: str
    ends: tuple[Ended, ...] = (Ended.EXITED,)
    says: str = ""
    session: bool = False


ATTEMPTS = (
    Attempt(
        "fork bomb",
        """
while True:
    try:
        os.fork()
    except OSError as error:
        print(error.strerror)
        time.sleep(0.05)
""",
        (Ended.CPU, Ended.TIMEOUT, Ended.OUTPUT),
        "temporarily unavailable",
    ),
    Attempt(
        "thread bomb",
        """
import threading
def start(): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
attempt("100 threads", lambda: [start() for _ in range(100)])
""",
        says="can't start new thread",
    ),
    Attempt(
        "memory bomb",
        """
blocks = []
while True:
    blocks.append(bytearray(1 << 20))
""",
        says="MemoryError",
    ),
    Attempt(
        "memory bomb of six processes, each below its limit",
        """
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(20 << 20)
        block[::4096] = b"x" * len(block[::4096])  # a page counts once it is written
        time.sleep(9)
        os._exit(0)
for _ in range(6):
    os.wait()
print("GOT it all")
""",
        (Ended.MEMORY,),
    ),
    Attempt(
        "memory that no limit counts",
        """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("System V memory", lambda: libc.shmget(0, 1 << 20, 0o1600))
attempt("locked memory", lambda: libc.mlockall(1))
""",
        says="System V memory: Operation not permitted",
    ),
    Attempt("infinite loop", "while True: pass", (Ended.CPU, Ended.TIMEOUT)),
    Attempt(
        "infinite loop that ignores every signal",
        """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
        (Ended.CPU, Ended.TIMEOUT),
    ),
    Attempt("sleeping for ever", "time.sleep(1e6)", (Ended.TIMEOUT,)),
    Attempt("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", (Ended.TIMEOUT,)),
    Attempt("huge output", "while True: print('x' * 10_000)", (Ended.OUTPUT,)),
    Attempt(
        "filling the disk",
        """
def write(number): open(f"f{number}", "wb").write(b"x" * (1 << 20))
attempt("100 MB", lambda: [write(number) for number in range(100)])
attempt("a file of 1 GB", lambda: os.truncate(os.open("f0", os.O_WRONLY), 1 << 30))
""",
        says="100 MB: OSError: [Errno 28] No space left on device",
    ),
    Attempt(
        "filling the disk with empty files",
        """
def touch(number): os.close(os.open(f"f{number}", os.O_CREAT))
attempt("10,000,000 files", lambda: [touch(number) for number in range(10_000_000)])
""",
        (Ended.EXITED, Ended.CPU, Ended.TIMEOUT),
    ),
    Attempt(
        "network: TCP to a server of this host",
        'attempt("connection", lambda: socket.create_connection(("127.0.0.1", $port), 1))',
        says="connection: PermissionError",
    ),
    Attempt(
        "network: other sockets",
        """
for name, family in (("UDP", 2), ("IPv6", 10), ("packet", 17), ("unix", 1), ("netlink", 16), ("vsock", 40)):
    attempt(name, lambda: socket.socket(family, socket.SOCK_DGRAM))
attempt("raw", lambda: socket.socket(2, socket.SOCK_RAW))
attempt("names", lambda: socket.getaddrinfo("example.com", 80))
""",
        says="UDP: PermissionError",
    ),
    Attempt(
        "network: a socket by the 32-bit system call",
        'attempt("socket", lambda: libc.syscall(0x40000000 + 41, 2, 1, 0))',
        (Ended.EXITED, Ended.SIGNALLED),
    ),
    Attempt(
        "reading the home folder", 'attempt("$home", lambda: os.listdir("$home/.cache"))', says="No such file"
    ),
    Attempt(
        "reading files of the host",
        """
for path in ("$secret_file", "/etc/shadow", "/etc/hostname", "/proc/1/root$secret_file", "/../$secret_file"):
    attempt(path, lambda: open(path).read())
""",
        says="/etc/shadow: FileNotFoundError",
    ),
    Attempt(
        "reading this repository",
        'attempt("it", lambda: os.listdir("$repository/tests"))',
        says="No such file",
    ),
    Attempt("writing outside", "attempt('it', lambda: open('$outside', 'w').write('x'))", says="it: "),
    Attempt(
        "writing to the interpreter and the system",
        """
for path in ("/x", "/usr/x", "/etc/passwd", "/dev/x", "/proc/sys/kernel/x", sys.prefix + "/x", os.__file__):
    attempt(path, lambda: open(path, "a"))
""",
        says="/usr/x: OSError: [Errno 30] Read-only file system",
    ),
    Attempt(
        "devices",
        """
attempt("mknod", lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)))
for path in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/nvidia0", "/dev/kvm"):
    attempt(path, lambda: open(path, "rb").read(1))
""",
        says="mknod: ",
    ),
    Attempt(
        "mounts, namespaces, chroot",
        """
attempt("mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
attempt("remount", lambda: libc.mount(None, b"/usr", None, 32 | 4096, None))
attempt("umount", lambda: libc.umount2(b"/proc", 2))
attempt("user namespace", lambda: libc.unshare(0x10000000))
attempt("user namespace by clone", lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
attempt("user namespace by clone3", lambda: libc.syscall(435, 0, 0))
attempt("chroot", lambda: os.chroot("/tmp"))
""",
        says="user namespace by clone: Operation not permitted",
    ),
    Attempt(
        "becoming root",
        """
attempt("setuid", lambda: os.setuid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("a set-uid program", lambda: {0: "root"}[int(subprocess.check_output(["su", "-c", "id -u"]))])
""",
        says="setuid: OSError",
    ),
    Attempt(
        "ptrace",
        """
attempt("its parent", lambda: libc.ptrace(16, os.getppid(), 0, 0))
attempt("a process of the host", lambda: libc.ptrace(16, $canary, 0, 0))
attempt("memory", lambda: libc.process_vm_readv(1, 0, 0, 0, 0, 0))
""",
        says="its parent: Operation not permitted",
    ),
    Attempt(
        "reading /proc of others",
        """
print("processes:", [name for name in os.listdir("/proc") if name.isdigit()])
for name in ("environ", "maps", "mem", "auxv"):
    attempt(name, lambda: open(f"/proc/1/{name}").read())
for name in ("1/fd", "1/root", "1/cwd", "$canary"):
    attempt(name, lambda: os.listdir(f"/proc/{name}"))
""",
        says="processes: ['1', '2']",
    ),
    Attempt(
        "secrets of the environment",
        """
print(dict(os.environ), open("/proc/self/environ").read())
attempt("of its parent", lambda: open("/proc/1/environ").read())
""",
        says="PATH",
    ),
    Attempt(
        "killing its parent, a process of the host, everything",
        """
for pid in (1, os.getppid(), $canary):
    for number in (9, 19, 15, 2, 1, 6):
        try:
            os.kill(pid, number)
        except OSError as error:
            print(pid, error.strerror)
try:
    os.kill(-1, 9)
finally:
    print("end")
""",
        says="end",
    ),
    Attempt(
        "limits of its parent, and its own",
        """
attempt("its parent's", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))
attempt("more processes", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (999, 999)))
attempt("more memory", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
""",
        says="its parent's: PermissionError",
    ),
    Attempt(
        "leaving a daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "$marker"])
    os._exit(0)
os.wait()
print("started")
""",
        says="started",
    ),
    Attempt(
        "leaving a daemon that holds the output open",
        """
subprocess.Popen(["/bin/sleep", "$marker"], start_new_session=True)
print("started")
""",
        says="started",
    ),
    Attempt(
        "open files of the sandbox",
        """
print(sorted(os.listdir("/proc/self/fd")))
attempt("4", lambda: os.fstat(4))
""",
        says="['0', '1', '2', '3']",  # 3 is the listing itself
    ),
    Attempt(
        "closing the control channel of a session",
        "os.closerange(3, 1000)\ntime.sleep(9)",
        (Ended.BROKEN,),
        session=True,
    ),
    Attempt(
        "garbage on the control channel",
        """
for descriptor in range(3, 32):
    try:
        os.write(descriptor, os.urandom(50))
    except OSError:
        pass
time.sleep(9)
""",
        (Ended.BROKEN,),
        session=True,
    ),
    Attempt(
        "flooding the control channel",
        """
while True:
    for descriptor in range(3, 32):
        try:
            os.write(descriptor, b"x" * 65536)
        except OSError:
            pass
""",
        (Ended.BROKEN,),
        session=True,
    ),
    Attempt(
        "io_uring, bpf, perf, keyrings, userfaultfd",
        """
for name, number in (("io_uring", 425), ("bpf", 321), ("perf", 298), ("keyring", 250), ("userfaultfd", 323)):
    attempt(name, lambda: libc.syscall(number, 0, 0, 0, 0, 0))
""",
        says="bpf: Operation not permitted",
    ),
)
