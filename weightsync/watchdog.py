"""End an engine process whose actor is gone.

vLLM's EngineCore outlives a parent that was killed with SIGKILL: it would keep its memory, and on a GPU
the device, for ever. A thread waits for the actor's death instead. Started by `weightsync.worker` when
vLLM makes its transfer engine: in the child, after a fork or a spawn.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import threading

import psutil


def end_with_the_actor(*, in_engine_core: bool) -> None:
    """Watch the actor from vLLM's worker. `in_engine_core`: the worker has no process of its own below
    EngineCore, so that the actor is the parent; else it is the grandparent."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return  # the worker lives in the actor itself
    end_with(parent.pid if in_engine_core else psutil.Process(parent.pid).ppid())


def end_with(pid: int) -> None:
    """End this process as soon as process `pid` has ended. Returns at once."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_when, args=(ended,), name="actor-watchdog", daemon=True).start()


def _exit_when(ended: int) -> None:
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.poll()
    os._exit(1)  # not sys.exit: this is not the main thread, and nobody is left to clean up for
