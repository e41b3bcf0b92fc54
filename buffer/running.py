"""Groups on their way: leased, put member by member, and closed with a verdict.

Invariant: a group is in `groups` from its first lease to its close, and then in `Batches.ready` or counted as
dropped, never in two places. Pure but for the store: `now` is passed in. Called by `buffer.broker`, inside
the transaction that is open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from buffer import limiter
from buffer.batches import Batches, RequestError
from buffer.codec import ReceivedPut, encode_trajectory
from buffer.curriculum import Curriculum
from buffer.groups import COMPLETE, Group, PromptOrder, ReadyGroup, group_id_of, seed_of, verdict
from buffer.leases import MAX_EXPIRIES, Held, LeaseBook, LeaseEnd, lease_times
from buffer.ledger import Ledger
from buffer.limiter import Limits
from buffer.messages import DropReason, Lease, LeaseRequest, PutAck, PutTrajectory, Trajectory
from buffer.store import Store, StoreError, versions_of
from configs.schema import RunConfig


class RunningGroups:
    def __init__(
        self,
        config: RunConfig,
        limits: Limits,
        store: Store,
        ledger: Ledger,
        batches: Batches,
        num_prompts: int,
        curriculum: Curriculum,
        now: float,
    ) -> None:
        self._config, self._limits, self._store = config, limits, store
        self._ledger, self._batches = ledger, batches
        self._curriculum = curriculum
        self._order = PromptOrder(
            num_prompts, config.seed, store.last_group()[1], store.visited, curriculum.begin
        )
        self._leases = LeaseBook(lease_times(config))
        self.groups: dict[str, Group] = {}  # by id
        self.late_puts = 0  # since the last report
        self._restore(num_prompts, now)

    def _restore(self, num_prompts: int, now: float) -> None:
        for group in self._store.running_groups():
            if group.prompt_index >= num_prompts:
                raise StoreError(
                    f"group {group.group_id} is of prompt {group.prompt_index}, but the task now has "
                    f"{num_prompts} rows; resume with the data that the run began with (rows may be added)"
                )
            self.groups[group.group_id] = group
            self._leases.wait(group)
        for lease in self._store.open_leases():
            self._leases.restore(lease.lease_id, self.groups[lease.group_id], lease.actor, now)

    def leases_by_actor(self) -> dict[str, int]:
        return self._leases.count_by_actor()

    # --- granting -----------------------------------------------------------------------------------

    def lease(self, request: LeaseRequest, actors: int, oldest: int, now: float) -> list[Lease]:
        """What the asking actor may have, one of `actors` that share the work: given up groups first."""
        granted = self._lease_again(request, oldest, now)
        return granted + self._lease_new(request, len(granted), actors, now)

    def _lease_again(self, request: LeaseRequest, oldest: int, now: float) -> list[Lease]:
        """Groups whose lease ended early, oldest first. They count as running already."""
        granted: list[Lease] = []
        for group in self._leases.waiting():
            if len(granted) >= request.max_groups:
                break
            if self._config.buffer.on_stale == "drop" and _older(group, oldest):
                self._close(group, DropReason.STALE)
            else:
                granted.append(self._grant(group, request.actor, now))
        return granted

    def _lease_new(self, request: LeaseRequest, granted: int, actors: int, now: float) -> list[Lease]:
        outstanding = self._batches.outstanding(len(self.groups))
        lag = max(0, self._batches.version - request.version)
        capacity = limiter.capacity(self._limits, outstanding, self._batches.committed_step, lag)
        share = limiter.fair_share(self._limits, actors) - len(self._leases.of_actor(request.actor))
        count = min(request.max_groups - granted, capacity, share)
        return [self._grant(self._new_group(), request.actor, now) for _ in range(count)]

    def _new_group(self) -> Group:
        epoch, prompt_index = self._order.next()
        group_id = group_id_of(epoch, prompt_index)
        self._ledger.leased += 1
        group = Group(
            number=self._ledger.leased,
            group_id=group_id,
            epoch=epoch,
            prompt_index=prompt_index,
            size=self._config.actors.group_size,
            spare=self._config.actors.spare_members,
            seed=seed_of(self._config.seed, group_id),
        )
        self.groups[group_id] = group
        self._store.add_group(group, self._batches.version)
        return group

    def _grant(self, group: Group, actor: str, now: float) -> Lease:
        held = self._leases.grant(group, actor, now)
        self._store.add_lease(held)
        return Lease(
            lease_id=held.lease_id,
            group_id=group.group_id,
            prompt_index=group.prompt_index,
            epoch=group.epoch,
            group_size=group.started,
            missing=held.members,
            seed=group.seed,
            version=self._batches.version,
            deadline_s=self._config.buffer.lease_timeout_s,
        )

    # --- renewing and taking back --------------------------------------------------------------------

    def heard(self, actor: str, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Renew the leases that an actor names. Returns those that are no longer its own."""
        lost = self._leases.renew(actor, lease_ids, now)
        for held in self._leases.unnamed(actor, now):
            self._release(held, LeaseEnd.EXPIRED)
        return lost

    def expire(self, now: float) -> None:
        """Take back the leases that ran out."""
        for held in self._leases.expired(now):
            self._release(held, LeaseEnd.EXPIRED)

    def lose(self, actor: str) -> None:
        """The actor's process is gone, and with it what it had leased."""
        for held in self._leases.of_actor(actor):
            self._release(held, LeaseEnd.EXPIRED)

    def take_back(self, actor: str, lease_ids: Collection[str] | None = None) -> None:
        """The actor hands back these leases, or all that it has."""
        for held in self._leases.of_actor(actor):
            if lease_ids is None or held.lease_id in lease_ids:
                self._release(held, LeaseEnd.RETURNED)

    def _release(self, held: Held, how: LeaseEnd) -> None:
        """Take a lease back: its missing members go to the next actor, unless they failed too often."""
        group = self.groups[held.group_id]
        self._leases.end(held)
        self._store.end_lease(held.lease_id, how)
        if how is LeaseEnd.EXPIRED:
            group.expiries += 1
            self._store.note_expiry(group.group_id)
        if group.expiries >= MAX_EXPIRIES:
            self._close(group, self._verdict(group))  # the members that never came count as failed
        else:
            self._leases.wait(group)

    # --- trajectories -------------------------------------------------------------------------------

    def put(self, request: PutTrajectory, now: float) -> PutAck:
        trajectory = request.trajectory
        group = self.groups.get(trajectory.group_id)
        if group is None:
            return self._put_late(trajectory)
        if trajectory.prompt_index != group.prompt_index or not 0 <= trajectory.index < group.started:
            raise RequestError(
                f"trajectory {trajectory.trajectory_id} with prompt {trajectory.prompt_index} does not fit "
                f"its group of {group.started} with prompt {group.prompt_index}; put what the lease asked for"
            )
        if trajectory.index in group.rewards:
            return self._put_late(trajectory)
        versions = versions_of(trajectory)
        received = isinstance(request, ReceivedPut)
        payload = request.payload if received else encode_trajectory(trajectory)
        self._store.put(trajectory, versions, payload)
        group.add(trajectory.index, trajectory.reward, *versions)
        self._leases.renew(trajectory.actor, (trajectory.lease_id,), now)
        if group.is_complete:
            self._close(group, self._verdict(group))
        return PutAck(stored=True, duplicate=False)

    def _put_late(self, trajectory: Trajectory) -> PutAck:
        """A duplicate, or a member that its group no longer waits for: acked and counted (CASES M1)."""
        if not self._store.has_group(trajectory.group_id):
            raise RequestError(
                f"group {trajectory.group_id!r} was never leased by this run; its actor serves another run"
            )
        self._store.note_late_put(trajectory.group_id)
        self.late_puts += 1
        duplicate = self._store.has_member(trajectory.group_id, trajectory.index)
        return PutAck(stored=False, duplicate=duplicate)

    def _verdict(self, group: Group) -> str:
        buffer = self._config.buffer
        return verdict(group, buffer.min_group_survivors, buffer.drop_zero_variance)

    def _close(self, group: Group, outcome: str) -> None:
        """The group takes no more members: it is ready, or dropped for a reason."""
        del self.groups[group.group_id]
        held = self._leases.forget(group)
        if held is not None:
            self._store.end_lease(held.lease_id, LeaseEnd.CLOSED if group.missing else LeaseEnd.DONE)
        self._store.close_group(group, outcome)
        self._curriculum.note(group)
        if outcome == COMPLETE:
            assert group.version_min is not None and group.version_max is not None
            ready = ReadyGroup(group.number, group.group_id, group.version_min, group.version_max)
            self._batches.ready[group.group_id] = ready
        else:
            self._ledger.dropped[outcome] += 1

    def drop_all(self, reason: DropReason) -> None:
        for group in list(self.groups.values()):
            self._close(group, reason)


def _older(group: Group, oldest: int) -> bool:
    return group.version_min is not None and group.version_min < oldest
