"""Who rolls out which members of which group, until when.

    waiting ──grant──▶ leased ──every member put──▶ (group complete)
       ▲                 │
       └── expired, returned or forgotten by its actor: only the missing members are leased again

Invariant: a running group is either waiting or under exactly one lease. A member may still be put after
its lease was given to another actor; whoever comes first is stored (CASES M1).
Pure: `now` is passed in, in seconds of any monotonic clock. Called by `buffer.running` and
`buffer.evaluations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from buffer.groups import Group
from configs.schema import RunConfig

# A prompt that kills its actors (memory, a crashing tool) must not go round for ever; three dead actors
# stay well below actors.max_restarts, and three unrelated deaths in a row on one group are rare.
MAX_EXPIRIES = 3
UNNAMED_S = 10.0  # at least: a grant whose reply was lost is sent again in this time


class LeaseEnd(StrEnum):
    """Why a lease ended; the store keeps it."""

    DONE = "done"
    EXPIRED = "expired"
    RETURNED = "returned"
    CLOSED = "closed"  # its group was dropped


@dataclass
class Held:
    """A lease in an actor's hands."""

    lease_id: str
    group_id: str
    actor: str
    members: tuple[int, ...]
    named_at: float  # when the actor last showed that it has the lease
    ends_at: float  # it ends here however often it is renewed: a hung member must not block its group


@dataclass(frozen=True)
class LeaseTimes:
    """After how many seconds a lease ends by itself."""

    silence_s: float  # without any sign of its actor
    unnamed_s: float  # the actor is heard but does not name it: a lost reply, or a new process of that name
    whole_s: float  # in all, however often it is renewed


def lease_times(config: RunConfig) -> LeaseTimes:
    return LeaseTimes(
        silence_s=config.buffer.lease_timeout_s,
        unnamed_s=max(UNNAMED_S, 3 * config.buffer.heartbeat_s),
        # Members start together, end by the trajectory's deadline, and are then scored.
        whole_s=2 * config.task.trajectory_timeout_s + config.buffer.lease_timeout_s,
    )


class LeaseBook:
    def __init__(self, times: LeaseTimes) -> None:
        self._times = times
        self._held: dict[str, Held] = {}  # by lease id
        self._of_group: dict[str, str] = {}  # group id → lease id
        self._of_actor: dict[str, set[str]] = {}
        self._waiting: dict[int, Group] = {}  # by number

    # --- granting ---------------------------------------------------------------------------------

    def waiting(self) -> list[Group]:
        """Groups with missing members and no lease, oldest first."""
        return [self._waiting[number] for number in sorted(self._waiting)]

    def wait(self, group: Group) -> None:
        """Put a group up for the next lease."""
        self._waiting[group.number] = group

    def grant(self, group: Group, actor: str, now: float) -> Held:
        """Lease the group's missing members to `actor`."""
        group.leases += 1
        return self.restore(f"{group.group_id}.{group.leases}", group, actor, now)

    def restore(self, lease_id: str, group: Group, actor: str, now: float) -> Held:
        """Take up a lease that the store remembers: it starts anew, for nobody could renew it meanwhile."""
        self._waiting.pop(group.number, None)
        held = Held(lease_id, group.group_id, actor, group.missing, now, now + self._times.whole_s)
        self._held[lease_id] = held
        self._of_group[group.group_id] = lease_id
        self._of_actor.setdefault(actor, set()).add(lease_id)
        return held

    # --- renewing ---------------------------------------------------------------------------------

    def renew(self, actor: str, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """The actor names the leases it has. Returns those that are no longer its own."""
        lost = []
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            if held is None or held.actor != actor:
                lost.append(lease_id)
            else:
                held.named_at = now
        return tuple(lost)

    def unnamed(self, actor: str, now: float) -> list[Held]:
        """Leases that the actor, just heard, has not named for too long: it does not have them."""
        limit = now - self._times.unnamed_s
        return [held for held in self.of_actor(actor) if held.named_at < limit]

    def expired(self, now: float) -> list[Held]:
        """Leases whose actor is silent, or which have lived too long."""
        limit = now - self._times.silence_s
        return [held for held in self._held.values() if held.named_at <= limit or held.ends_at <= now]

    # --- ending -----------------------------------------------------------------------------------

    def of_group(self, group_id: str) -> Held | None:
        lease_id = self._of_group.get(group_id)
        return self._held[lease_id] if lease_id is not None else None

    def of_actor(self, actor: str) -> list[Held]:
        return [self._held[lease_id] for lease_id in sorted(self._of_actor.get(actor, ()))]

    def count_by_actor(self) -> dict[str, int]:
        return {actor: len(leases) for actor, leases in self._of_actor.items()}

    def end(self, held: Held) -> None:
        """Forget a lease. Its group is complete, closed, or goes to `wait` next."""
        del self._held[held.lease_id]
        del self._of_group[held.group_id]
        mine = self._of_actor[held.actor]
        mine.discard(held.lease_id)
        if not mine:
            del self._of_actor[held.actor]

    def forget(self, group: Group) -> Held | None:
        """The group gets no more members. Returns the lease that this ends, if it had one."""
        self._waiting.pop(group.number, None)
        held = self.of_group(group.group_id)
        if held is not None:
            self.end(held)
        return held
