"""What the buffer does with each message: pure state over a store, no socket and no clock.

Invariant: a reply that `handle` returns may be sent once the open transaction is committed; a request that
is refused has changed nothing. After a crash a new broker on the same store goes on as the old one.
Called by `buffer.server`, which begins and commits transactions around `handle` and `tick`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from buffer import groups, ledger, limiter
from buffer.batches import Batches, RequestError
from buffer.codec import ReceivedPut, encode_trajectory
from buffer.groups import COMPLETE, Group, ReadyGroup
from buffer.leases import MAX_EXPIRIES, Held, LeaseBook, LeaseEnd, LeaseTimes
from buffer.ledger import Ledger, Places
from buffer.messages import (
    PROTOCOL_VERSION,
    AnnouncePublisher,
    BatchReply,
    Checkpointed,
    CommitStep,
    Drain,
    DropReason,
    GetBatch,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Ok,
    PutAck,
    PutTrajectory,
    Refused,
    Resume,
    ReturnLeases,
    Scale,
    Status,
    StatusReply,
    Trajectory,
    Welcome,
)
from buffer.roles import Roles
from buffer.store import Store, StoreError, versions_of
from configs.schema import RunConfig
from metrics import names

UNNAMED_S = 10.0  # at least: a grant whose reply was lost is sent again in this time
RETRY_S = 0.2  # for an actor that could not get all the groups it asked for


class Broker:
    """`now` is in seconds of any monotonic clock; `wall` (unix seconds) only dates reports."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        num_prompts: int,
        run_id: str,
        now: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._store, self._run_id, self._wall = config, store, run_id, wall
        buffer = config.buffer
        self._limits = limiter.Limits(
            buffer.max_staleness, buffer.groups_per_batch, config.weightsync.every, config.learner.steps
        )
        counts = store.counts()
        dropped = {reason: counts[f"dropped_{reason}"] for reason in DropReason}
        self._ledger = Ledger(counts["leased"], counts["trained"])
        self._ledger.dropped.update(dropped)
        self._batches = Batches(buffer, self._limits, store, self._ledger)
        self._roles = Roles(store, buffer.heartbeat_s, wall())
        self._order = groups.PromptOrder(num_prompts, config.seed, store.last_group()[1], store.visited)
        self._publisher = store.meta("publisher")
        self._late_puts = 0
        self._imbalance: list[str] = []
        self._leases = LeaseBook(
            LeaseTimes(
                silence_s=buffer.lease_timeout_s,
                unnamed_s=max(UNNAMED_S, 3 * buffer.heartbeat_s),
                # Members start together, end by the trajectory's deadline, and are then scored.
                whole_s=2 * config.task.trajectory_timeout_s + buffer.lease_timeout_s,
            )
        )
        self._running: dict[str, Group] = {}
        self._restore_running(num_prompts, now)
        self._handlers: dict[type, Callable[[Any, float], Any]] = {
            Hello: self._hello,
            LeaseRequest: self._lease,
            Heartbeat: self._heartbeat,
            ReturnLeases: self._return,
            PutTrajectory: self._put,
            ReceivedPut: self._put,
            GetBatch: self._get_batch,
            CommitStep: self._commit,
            Checkpointed: self._checkpointed,
            Resume: self._resume,
            AnnouncePublisher: self._announce,
            Drain: self._drain,
            Scale: self._scale,
            Status: self._status,
        }

    def _restore_running(self, num_prompts: int, now: float) -> None:
        for group in self._store.running_groups():
            if group.prompt_index >= num_prompts:
                raise StoreError(
                    f"group {group.group_id} is of prompt {group.prompt_index}, but the task now has "
                    f"{num_prompts} rows; resume with the data that the run began with (rows may be added)"
                )
            self._running[group.group_id] = group
            self._leases.wait(group)
        for lease in self._store.open_leases():
            self._leases.restore(lease.lease_id, self._running[lease.group_id], lease.actor, now)

    # --- for the server -----------------------------------------------------------------------------

    def handle(self, message: Any, now: float) -> Any:
        """The reply to one request. A GetBatch that is not ready gets an empty reply at once."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return Refused(f"{type(message).__name__} is not a request")
        try:
            return handler(message, now)
        except RequestError as error:
            return Refused(str(error))

    def tick(self, now: float) -> None:
        """Act on time alone: leases that ran out, roles long gone, groups left over at the end."""
        for held in self._leases.expired(now):
            self._release(held, LeaseEnd.EXPIRED)
        self._roles.forget_silent(now)
        if self.finished:
            self._drop_leftovers()

    def report(self, metrics: dict[str, float]) -> None:
        """Add the buffer's own gauges, and these, to the reports."""
        gauges = {
            names.BUFFER_READY: float(len(self._batches.ready)),
            names.BUFFER_RUNNING: float(len(self._running)),
            names.BUFFER_LATE_PUTS: float(self._late_puts),
            **{f"{names.BUFFER_LEDGER_PREFIX}{name}": float(n) for name, n in self.ledger_counts().items()},
        }
        self._late_puts = 0
        self._roles.report("buffer", "buffer", self._wall(), gauges | metrics)

    @property
    def finished(self) -> bool:
        """The run has trained its last step."""
        return self._batches.finished

    def all_said_goodbye(self, now: float, learner_silence_s: float, actor_silence_s: float) -> bool:
        """Every role that was heard within its time has said that it is finished."""
        return not (
            self._roles.unfinished("learner", now, learner_silence_s)
            or self._roles.unfinished("actor", now, actor_silence_s)
        )

    def ledger_counts(self) -> dict[str, int]:
        return self._ledger.counts(len(self._running), len(self._batches.ready), self._batches.num_bound)

    def audit(self) -> list[str]:
        """Compare the index with the store; one sentence for each difference, kept for `Status` too."""
        places = Places(self._running.keys(), self._batches.ready.keys(), self._batches.bound)
        self._imbalance = ledger.differences(
            places, self._store.places(), self.ledger_counts(), self._store.counts()
        )
        return self._imbalance

    # --- leases -------------------------------------------------------------------------------------

    def _lease(self, request: LeaseRequest, now: float) -> LeaseGrant:
        heartbeat_s = self._config.buffer.heartbeat_s
        if self.finished:
            return LeaseGrant((), "finished", heartbeat_s)
        if self._roles.is_draining(request.actor):
            return LeaseGrant((), "draining", heartbeat_s)
        oldest = limiter.oldest_allowed(self._limits, self._batches.version)
        if request.version < oldest:
            return LeaseGrant((), "weights_too_old", RETRY_S)
        granted = self._lease_again(request, oldest, now)
        granted += self._lease_new(request, len(granted), oldest, now)
        reason = "" if len(granted) >= request.max_groups else "capacity"
        return LeaseGrant(tuple(granted), reason, RETRY_S)

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

    def _lease_new(self, request: LeaseRequest, granted: int, oldest: int, now: float) -> list[Lease]:
        outstanding = self._batches.outstanding(len(self._running))
        lag = max(0, self._batches.version - request.version)
        capacity = limiter.capacity(self._limits, outstanding, self._batches.committed_step, lag)
        actors = self._roles.live_actors(now, oldest) | {request.actor}
        share = limiter.fair_share(self._limits, len(actors)) - len(self._leases.of_actor(request.actor))
        count = min(request.max_groups - granted, capacity, share)
        return [self._grant(self._new_group(), request.actor, now) for _ in range(count)]

    def _new_group(self) -> Group:
        epoch, prompt_index = self._order.next()
        group_id = groups.group_id_of(epoch, prompt_index)
        self._ledger.leased += 1
        group = Group(
            number=self._ledger.leased,
            group_id=group_id,
            epoch=epoch,
            prompt_index=prompt_index,
            size=self._config.actors.group_size,
            spare=self._config.actors.spare_members,
            seed=groups.seed_of(self._config.seed, group_id),
        )
        self._running[group_id] = group
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

    def _return(self, request: ReturnLeases, now: float) -> Ok:
        for held in self._leases.of_actor(request.actor):
            if held.lease_id in request.lease_ids:
                self._release(held, LeaseEnd.RETURNED)
        return Ok()

    def _release(self, held: Held, how: LeaseEnd) -> None:
        """Take a lease back: its missing members go to the next actor, unless they failed too often."""
        group = self._running[held.group_id]
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

    def _put(self, request: PutTrajectory, now: float) -> PutAck:
        trajectory = request.trajectory
        group = self._running.get(trajectory.group_id)
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
        self._late_puts += 1
        duplicate = self._store.has_member(trajectory.group_id, trajectory.index)
        return PutAck(stored=False, duplicate=duplicate)

    def _verdict(self, group: Group) -> str:
        buffer = self._config.buffer
        return groups.verdict(group, buffer.min_group_survivors, buffer.drop_zero_variance)

    def _close(self, group: Group, outcome: str) -> None:
        """The group takes no more members: it is ready, or dropped for a reason."""
        del self._running[group.group_id]
        held = self._leases.forget(group)
        if held is not None:
            self._store.end_lease(held.lease_id, LeaseEnd.CLOSED if group.missing else LeaseEnd.DONE)
        self._store.close_group(group, outcome)
        if outcome == COMPLETE:
            assert group.version_min is not None and group.version_max is not None
            ready = ReadyGroup(group.number, group.group_id, group.version_min, group.version_max)
            self._batches.ready[group.group_id] = ready
        else:
            self._ledger.dropped[outcome] += 1

    def _drop_leftovers(self) -> None:
        """No step is left to train them."""
        for group in list(self._running.values()):
            self._close(group, DropReason.SHUTDOWN)
        for group_id in list(self._batches.ready):
            self._batches.drop_ready(group_id, DropReason.SHUTDOWN)

    # --- the learner --------------------------------------------------------------------------------

    def _get_batch(self, request: GetBatch, now: float) -> BatchReply:
        return BatchReply(self._batches.get(request.step), len(self._batches.ready))

    def _commit(self, request: CommitStep, now: float) -> Ok:
        self._batches.commit(request.step, request.version)
        if self.finished:
            self._drop_leftovers()
        return Ok()

    def _checkpointed(self, request: Checkpointed, now: float) -> Ok:
        self._batches.checkpointed(request.oldest_step)
        self.audit()
        return Ok()

    def _resume(self, request: Resume, now: float) -> Ok:
        self._batches.resume(request.step, request.version)
        return Ok()

    def _announce(self, request: AnnouncePublisher, now: float) -> Ok:
        self._publisher = request.endpoint
        self._store.set_meta("publisher", request.endpoint)
        return Ok()

    # --- everyone -----------------------------------------------------------------------------------

    def _hello(self, request: Hello, now: float) -> Welcome:
        if request.protocol != PROTOCOL_VERSION:
            raise RequestError(
                f"{request.name} speaks protocol {request.protocol}, the buffer {PROTOCOL_VERSION}; "
                "run the same Slipstream everywhere"
            )
        if request.role == "actor":
            self._roles.greet(request.name)
        return Welcome(self._run_id, self._batches.version, self._publisher)

    def _heartbeat(self, beat: Heartbeat, now: float) -> HeartbeatAck:
        self._roles.heard(beat, now, self._wall())
        lost = self._leases.renew(beat.name, beat.lease_ids, now)
        for held in self._leases.unnamed(beat.name, now):
            self._release(held, LeaseEnd.EXPIRED)
        if beat.state == "finished":
            for held in self._leases.of_actor(beat.name):
                self._release(held, LeaseEnd.RETURNED)
        return HeartbeatAck(
            version=self._batches.version,
            publisher=self._publisher,
            lost=lost,
            drain=self._roles.is_draining(beat.name),
            finished=self.finished,
        )

    def _drain(self, request: Drain, now: float) -> Ok:
        self._roles.drain(request.actors)
        return Ok()

    def _scale(self, request: Scale, now: float) -> Ok:
        if request.actors < 1:
            raise RequestError(f"a run needs at least 1 actor, not {request.actors}")
        self._roles.want(request.actors)
        return Ok()

    def _status(self, request: Status, now: float) -> StatusReply:
        counts = self.ledger_counts()
        balanced = ledger.is_balanced(counts) and not self._imbalance
        return StatusReply(
            run_id=self._run_id,
            version=self._batches.version,
            step=self._batches.committed_step,
            roles=self._roles.statuses(now, self._leases.count_by_actor()),
            ledger=counts,
            balanced=balanced,
            reports=self._roles.reports_after(request.since),
            finished=self.finished,
            actors_wanted=self._roles.actors_wanted,
            imbalance=tuple(self._imbalance),
        )


def _older(group: Group, oldest: int) -> bool:
    return group.version_min is not None and group.version_min < oldest
