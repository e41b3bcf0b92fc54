"""Runs a program so that it ends with the process that talks to it, however that ends.

    python -IS tether.py WATCHED_PID PROGRAM [ARGUMENT...]

The program has our stdin and stdout, so it sees the end of its input when the watched process is gone; what
then still runs of our process group is killed, its children too. Started by `toolcall.mcp.server`.
"""

import os
import select
import signal
import sys

_GRACE_MS = 2000  # from the end of its input to the kill


def _start(command: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _release_pipes() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)


def _wait_for_end(watched: int, program: int) -> None:
    """Until either process has ended; after the end of the watched one the program has a moment."""
    ends = select.poll()
    handles = {pid: os.pidfd_open(pid) for pid in (watched, program)}
    for handle in handles.values():
        ends.register(handle, select.POLLIN)
    ended = {handle for handle, _ in ends.poll()}
    if handles[program] not in ended:
        ends.unregister(handles[watched])
        ends.poll(_GRACE_MS)


if __name__ == "__main__":
    program = _start(sys.argv[2:])
    _release_pipes()
    try:
        _wait_for_end(int(sys.argv[1]), program)
    finally:
        os.killpg(0, signal.SIGKILL)
