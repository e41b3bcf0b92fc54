"""What the supervisor speaks: processes below it, the buffer beside it, events and the outcome above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from buffer.messages import StatusReply
from configs.roles import RoleSpec


@dataclass(frozen=True)
class Running:
    """The role's main has not ended."""


@dataclass(frozen=True)
class Done:
    """The role's main returned."""


@dataclass(frozen=True)
class Died:
    """The role's main raised at unix time `time`, or its process is gone (`time` is None)."""

    cause: str
    time: float | None = None
    final: bool = False  # starting the role again cannot help


Poll = Running | Done | Died


class Roles(Protocol):
    """Processes of roles. See `launcher.ray_roles.RayRoles`."""

    def start(self, spec: RoleSpec) -> Any:
        """Start the role's main; the handle is for `poll` and `kill`."""
        ...

    def poll(self, handle: Any) -> Poll: ...

    def kill(self, handle: Any) -> None: ...

    def room(self, specs: Sequence[RoleSpec]) -> int:
        """How many of these actors, in order, there are resources for now."""
        ...

    def rendezvous(self) -> str:
        """A fresh `host:port` for the learners' process group."""
        ...


class Buffer(Protocol):
    """What the supervisor asks of the buffer. See `launcher.buffer_link.BufferLink`."""

    def status(self, since: int) -> StatusReply | None:
        """What the buffer knows, with the reports after number `since`. None: no answer now."""
        ...

    def drain(self, actors: Sequence[str]) -> None:
        """Ask these actors to hand back their leases and stop. Best effort."""
        ...

    def scale(self, actors: int) -> bool:
        """Note how many actors the run shall have. False: no answer now."""
        ...

    def release(self, actor: str) -> None:
        """Say that an actor's process is gone, so that others get its leases now. Best effort."""
        ...


class End(StrEnum):
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How the run ended. `role`: whose log to read, if it failed because of one."""

    end: End
    message: str
    role: str | None = None


@dataclass(frozen=True)
class Event:
    """One line for the terminal and for events.jsonl."""

    kind: str  # "start", "ready", "restart", "pause", "resume", "scale", "finish", "stop", "fail"
    role: str
    text: str
