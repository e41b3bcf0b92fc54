"""Waiting for other processes to end."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def is_gone(process: psutil.Process) -> bool:
    """Ended. A zombie counts: it only waits for whoever adopted it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def left_alive(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended within `timeout_s`."""
    end = time.monotonic() + timeout_s
    alive = list(processes)
    while alive and time.monotonic() < end:
        time.sleep(0.05)
        alive = [process for process in alive if not is_gone(process)]
    return alive
