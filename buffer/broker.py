"""What the buffer does with each message: pure state over a store, no socket and no clock.

Invariant: a reply that `handle` returns may be sent once the open transaction is committed; a request that
is refused has changed nothing. After a crash a new broker on the same store goes on as the old one.
Called by `buffer.server`, which begins and commits transactions around `handle` and `tick`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from buffer import evaluations, ledger, limiter
from buffer.batches import Batches, RequestError
from buffer.codec import ReceivedPut
from buffer.curriculum import Curriculum
from buffer.evaluations import Evaluations
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
    Gone,
    Heartbeat,
    HeartbeatAck,
    Hello,
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
    Welcome,
)
from buffer.roles import Roles
from buffer.running import RunningGroups
from buffer.store import Store
from configs.schema import RunConfig
from configs.shares import Share
from metrics import names

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
        shares: Sequence[Share] = (),
        num_held_out: int = 0,
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
        one_task = (Share(num_prompts, num_prompts),)
        self._curriculum = Curriculum(buffer.curriculum_max_rest, shares or one_task, store)
        self._running = RunningGroups(
            config, self._limits, store, self._ledger, self._batches, num_prompts, self._curriculum, now
        )
        self._evaluations = Evaluations(config, store.evaluations, num_held_out, now)
        self._publisher = store.meta("publisher")
        self._imbalance: list[str] = []
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
            Gone: self._gone,
            Scale: self._scale,
            Status: self._status,
        }

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
        self._running.expire(now)
        self._evaluations.expire(now)
        self._roles.forget_silent(now)
        if self.finished:
            self._drop_leftovers()

    def report(self, metrics: dict[str, float]) -> None:
        """Add the buffer's own gauges, and these, to the reports."""
        gauges = {
            names.BUFFER_READY: float(len(self._batches.ready)),
            names.BUFFER_RUNNING: float(len(self._running.groups)),
            names.BUFFER_LATE_PUTS: float(self._running.late_puts),
            names.BUFFER_SKIPPED: float(self._curriculum.skipped),
            names.BUFFER_RESTING: float(self._curriculum.num_resting),
            **{f"{names.BUFFER_LEDGER_PREFIX}{name}": float(n) for name, n in self.ledger_counts().items()},
        }
        self._running.late_puts = 0
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
        return self._ledger.counts(
            len(self._running.groups), len(self._batches.ready), self._batches.num_bound
        )

    def audit(self) -> list[str]:
        """Compare the index with the store; one sentence for each difference, kept for `Status` too."""
        places = Places(self._running.groups.keys(), self._batches.ready.keys(), self._batches.bound)
        self._imbalance = ledger.differences(
            places, self._store.places(), self.ledger_counts(), self._store.counts()
        )
        self._imbalance += self._curriculum.differences() + self._evaluations.differences()
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
        actors = self._roles.live_actors(now, oldest) | {request.actor}
        granted = self._evaluations.lease(request, now)
        rest = replace(request, max_groups=request.max_groups - len(granted))
        granted += self._running.lease(rest, len(actors), oldest, now)
        reason = "" if len(granted) >= request.max_groups else "capacity"
        return LeaseGrant(tuple(granted), reason, RETRY_S)

    def _return(self, request: ReturnLeases, now: float) -> Ok:
        self._running.take_back(request.actor, request.lease_ids)
        self._evaluations.take_back(request.actor, request.lease_ids)
        return Ok()

    def _put(self, request: PutTrajectory, now: float) -> PutAck:
        if evaluations.owns(request.trajectory.group_id):
            return self._evaluations.put(request.trajectory, now)
        return self._running.put(request, now)

    def _drop_leftovers(self) -> None:
        """No step is left to train them."""
        self._running.drop_all(DropReason.SHUTDOWN)
        for group_id in list(self._batches.ready):
            self._batches.drop_ready(group_id, DropReason.SHUTDOWN)
        self._evaluations.close()

    # --- the learner --------------------------------------------------------------------------------

    def _get_batch(self, request: GetBatch, now: float) -> BatchReply:
        batch, ready = self._batches.get(request.step), len(self._batches.ready)
        if batch is not None:
            return BatchReply(batch, ready)
        progress = f"{ready} of {self._config.buffer.groups_per_batch} groups are ready"
        return BatchReply(None, ready, "; ".join((progress, *self._roles.pauses(now))))

    def _commit(self, request: CommitStep, now: float) -> Ok:
        self._batches.commit(request.step, request.version)
        self._evaluations.committed(self._batches.committed_step, self._batches.version)
        if self.finished:
            self._drop_leftovers()
        return Ok()

    def _checkpointed(self, request: Checkpointed, now: float) -> Ok:
        self._batches.checkpointed(request.oldest_step)
        self.audit()
        return Ok()

    def _resume(self, request: Resume, now: float) -> Ok:
        self._batches.resume(request.step, request.version)
        self._evaluations.resumed(request.step, request.version)
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
            self._lose_leases(request.name)
        return Welcome(self._run_id, self._batches.version, self._publisher)

    def _heartbeat(self, beat: Heartbeat, now: float) -> HeartbeatAck:
        self._roles.heard(beat, now, self._wall())
        lost = self._running.heard(
            beat.name, [one for one in beat.lease_ids if not evaluations.owns(one)], now
        )
        lost += self._evaluations.heard(beat.name, filter(evaluations.owns, beat.lease_ids), now)
        if beat.state == "finished":
            self._running.take_back(beat.name)
            self._evaluations.take_back(beat.name)
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

    def _gone(self, request: Gone, now: float) -> Ok:
        for actor in request.actors:
            self._lose_leases(actor)
            self._roles.forget(actor)
        return Ok()

    def _lose_leases(self, actor: str) -> None:
        self._running.lose(actor)
        self._evaluations.lose(actor)

    def _scale(self, request: Scale, now: float) -> Ok:
        if request.actors < 1:
            raise RequestError(f"a run needs at least 1 actor, not {request.actors}")
        self._roles.want(request.actors)
        return Ok()

    def _status(self, request: Status, now: float) -> StatusReply:
        counts = self.ledger_counts()
        held_out = self._evaluations.counts()
        balanced = ledger.is_balanced(counts) and ledger.is_balanced(held_out) and not self._imbalance
        for metrics in self._evaluations.take_reports():
            self._roles.report("eval", "eval", self._wall(), metrics)
        return StatusReply(
            run_id=self._run_id,
            version=self._batches.version,
            step=self._batches.committed_step,
            roles=self._roles.statuses(now, self._running.leases_by_actor()),
            ledger=counts,
            balanced=balanced,
            reports=self._roles.reports_after(request.since),
            finished=self.finished,
            actors_wanted=self._roles.actors_wanted,
            held_out=held_out,
            imbalance=tuple(self._imbalance),
        )
