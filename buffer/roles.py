"""Who is alive, how many actors are wanted, who shall drain, and what everyone reports.

Kept in memory alone, except what is wanted and the drain list: after a restart of the buffer the next
heartbeats fill it again.
Invariant: memory is bounded; report numbers grow, also across restarts. Called by `buffer.broker`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from buffer.messages import Heartbeat, RoleStatus
from buffer.store import Store

MAX_REPORTS = 10_000
FORGET_S = 600.0  # a role silent for this long is no longer listed

Report = tuple[int, str, str, float, dict[str, float]]  # as in `StatusReply.reports`


@dataclass
class _Role:
    role: str
    name: str
    state: str
    version: int
    heard_at: float


class Roles:
    def __init__(self, store: Store, heartbeat_s: float, wall: float) -> None:
        self._store = store
        self._live_s = 3 * heartbeat_s
        self._roles: dict[str, _Role] = {}
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)
        # Starting at the time in ms keeps the numbers growing over restarts, and so `since` valid.
        self._last_report = int(wall * 1000)
        self.actors_wanted = int(store.meta("actors_wanted") or 0)
        self._draining: set[str] = set(json.loads(store.meta("draining") or "[]"))

    # --- life ---------------------------------------------------------------------------------------

    def heard(self, beat: Heartbeat, now: float, wall: float) -> None:
        self._roles[beat.name] = _Role(beat.role, beat.name, beat.state, beat.version, now)
        if beat.metrics:
            self.report(beat.role, beat.name, wall, beat.metrics)

    def forget_silent(self, now: float) -> None:
        self._roles = {name: role for name, role in self._roles.items() if now - role.heard_at < FORGET_S}

    def forget(self, name: str) -> None:
        """Its process is gone; another of its name will be heard."""
        self._roles.pop(name, None)

    def live_actors(self, now: float, oldest_version: int) -> set[str]:
        """Actors that can take leases: heard lately, not leaving, with weights that are new enough."""
        return {
            role.name
            for role in self._roles.values()
            if role.role == "actor"
            and now - role.heard_at < self._live_s
            and role.state == "running"
            and role.version >= oldest_version
            and role.name not in self._draining
        }

    def unfinished(self, role: str, now: float, silence_s: float) -> bool:
        """Whether a role of this kind was heard within `silence_s` and has not said that it is finished."""
        return any(
            one.role == role and one.state != "finished" and now - one.heard_at < silence_s
            for one in self._roles.values()
        )

    def pauses(self, now: float) -> list[str]:
        """One clause for each actor that takes no leases for a reason of its own."""
        return [
            f"{one.name} is {one.state}"
            for one in sorted(self._roles.values(), key=lambda one: one.name)
            if one.state.startswith("paused") and now - one.heard_at < self._live_s
        ]

    def statuses(self, now: float, leases: dict[str, int]) -> tuple[RoleStatus, ...]:
        """`leases`: how many each actor holds."""
        return tuple(
            RoleStatus(
                one.role, one.name, one.state, one.version, leases.get(one.name, 0), now - one.heard_at
            )
            for one in sorted(self._roles.values(), key=lambda one: (one.role, one.name))
        )

    # --- scale and drain ----------------------------------------------------------------------------

    def want(self, actors: int) -> None:
        """The run shall have so many actors; the launcher sees to it."""
        self.actors_wanted = actors
        self._store.set_meta("actors_wanted", str(actors))

    def drain(self, actors: Iterable[str]) -> None:
        self._set_draining(self._draining | set(actors))

    def greet(self, name: str) -> None:
        """A new process says hello: a drain meant an earlier one of its name."""
        if name in self._draining:
            self._set_draining(self._draining - {name})

    def is_draining(self, name: str) -> bool:
        return name in self._draining

    def _set_draining(self, names: set[str]) -> None:
        self._draining = names
        self._store.set_meta("draining", json.dumps(sorted(names)))

    # --- reports ------------------------------------------------------------------------------------

    def report(self, role: str, name: str, wall: float, metrics: dict[str, float]) -> None:
        self._last_report += 1
        self._reports.append((self._last_report, role, name, wall, metrics))

    def reports_after(self, since: int) -> tuple[Report, ...]:
        newer = sum(1 for _ in _while_newer(self._reports, since))
        return tuple(islice(self._reports, len(self._reports) - newer, None))


def _while_newer(reports: deque[Report], since: int) -> Iterable[Report]:
    """From the newest back to the first that was seen already."""
    for report in reversed(reports):
        if report[0] <= since:
            return
        yield report
