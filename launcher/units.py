"""What the supervisor starts and restarts together: the buffer, each actor, all learner ranks.

Plain records; the rules are in `launcher.supervisor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from configs.roles import RoleSpec
from launcher.interfaces import Died


class State(Enum):
    WAITING = auto()  # for its first or next start
    UP = auto()
    DONE = auto()


@dataclass
class Unit:
    kind: str  # "buffer", "actor", "learner"
    name: str
    specs: list[RoleSpec]
    handles: dict[str, Any] = field(default_factory=dict)  # by role name
    state: State = State.WAITING
    due: float = 0.0  # of the next start
    started: float = 0.0
    ready: bool = False  # heard from since it started
    first_done: float | None = None  # when the first of its processes had ended well
    heard: float = 0.0  # when the buffer last heard it; of an actor
    streak: int = 0  # deaths in a row, each soon after its start
    failed_start: tuple[str, Died] | None = None  # role and cause, if the last start never got ready
    added: bool = False  # by `scale`: the run can do without it
    leave_by: float | None = None  # draining; killed at this time


def units_of(specs: Iterable[RoleSpec]) -> list[Unit]:
    """One unit for the buffer and for each actor, one for all learners, in order of start."""
    specs = list(specs)
    alone = [Unit(spec.role, spec.name, [spec]) for spec in specs if spec.role != "learner"]
    learners = Unit("learner", "learner", [spec for spec in specs if spec.role == "learner"])
    return sorted([*alone, learners], key=lambda unit: unit.kind != "buffer")


def more_actors(actors: Iterable[Unit], count: int) -> list[RoleSpec]:
    """Specs of `count` new actors like those there are, under the lowest free numbers."""
    specs = [spec for unit in actors for spec in unit.specs]
    taken = {spec.rank for spec in specs}
    free = [rank for rank in range(len(taken) + count) if rank not in taken]
    return [replace(specs[0], name=f"actor-{rank}", rank=rank) for rank in free[:count]]
