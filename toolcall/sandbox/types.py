"""What a caller says to the sandbox and hears from it. Standard library only: both sides of the fence use it.

Invariant: every run ends as one `RunResult`, whatever the code did; its `ended` says who ended it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Ended(StrEnum):
    """Why a run is over. Only `EXITED` is the code's own doing; the others killed everything it started."""

    EXITED = "exited"  # by itself: the exit code says how
    SIGNALLED = "signalled"  # it crashed, or killed itself; the exit code is minus the signal
    TIMEOUT = "timeout"  # wall clock
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    BROKEN = "broken"  # it damaged the session's control channel


@dataclass(frozen=True)
class Limits:
    """Bounds of one run, over all processes that it starts unless said otherwise."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512  # also the address space of each process
    disk_mb: int = 64  # of /tmp, the only writable place; it lives in memory
    processes: int = 32  # threads count
    open_files: int = 128  # of each process
    output_bytes: int = 1 << 20  # stdout and stderr together

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"sandbox limit {name} = {value} must be above 0")


@dataclass(frozen=True)
class RunResult:
    """How one run went. Output is what was written before the end, decoded with replacement characters."""

    ended: Ended
    exit_code: int | None  # minus the signal if a signal ended it; None if the sandbox did
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float  # of all its processes, as far as seen

    @property
    def ok(self) -> bool:
        return self.ended is Ended.EXITED and self.exit_code == 0


class SandboxUnavailable(Exception):
    """The sandbox cannot run code, through no fault of the code; the message says why and what to do."""
