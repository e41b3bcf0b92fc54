"""Kills processes as soon as another one ends, however it ends.

A role's children (an engine's worker processes, for one) outlive a `kill -9` of the role; the
evaluator and Ray's agents outlive that of the launcher. So each of these is watched by a small process
that stands outside their process groups.

Run by `start_guard` as a plain script: `python -IS guard.py WATCHED VICTIM...`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

_START_TIMEOUT_S = 60.0


def start_guard(watched: int, victims: Sequence[int]) -> int:
    """When process `watched` is gone, SIGKILL the victims: processes, or process groups where
    negative, as in kill(2). Returns the pid of the guard, which ends with it."""
    command = [sys.executable, "-IS", __file__, str(watched), *map(str, victims)]
    started = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=_START_TIMEOUT_S,
        check=True,
    )
    return int(started.stdout)


def start_guarded(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO
) -> tuple[subprocess.Popen[bytes], int]:
    """A process in a session of its own and the guard that ends it with us: both, or neither."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        return process, start_guard(os.getpid(), [-process.pid])
    except BaseException:
        kill_group(process.pid)
        process.wait()
        raise


def stop_guard(guard: int) -> None:
    """End a guard that is not needed any more."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGTERM)


def kill_group(group: int) -> None:
    """SIGKILL to what is left of a process group; nothing left is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _watch(watched: int, victims: Sequence[int]) -> None:
    handles = {}  # pidfds: they stay right when a pid is used again
    for pid in (watched, *(victim for victim in victims if victim > 0)):
        with contextlib.suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    if watched in handles:
        select.select([handles.pop(watched)], [], [])
    for handle in handles.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    for victim in victims:
        if victim < 0:
            kill_group(-victim)


def _detach() -> None:
    """Leave the process that started us: Ray kills the children of a worker that ends."""
    guard = os.fork()
    if guard:
        print(guard, flush=True)
        os._exit(0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # or the starter would wait for our output to end
    os.dup2(null, 2)


if __name__ == "__main__":
    _detach()
    _watch(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
