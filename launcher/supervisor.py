"""Keeps the roles of a run alive until it ends: a state machine over processes that it cannot see into.

What is restarted together is a unit: the buffer, each actor, all learner ranks. Invariant: every unit
is waiting for its start, up, or done; each wait has a deadline; the run ends exactly once, with an
`Outcome` that names the first cause if it failed.

Pure: processes, the buffer and the clock are injected. `launcher.train` calls `tick` about twice a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from buffer.messages import RoleStatus, StatusReply
from configs.roles import RoleSpec
from configs.schema import RunConfig
from launcher.interfaces import Buffer, Died, Done, End, Event, Outcome, Roles

STOP_GRACE_S = 10.0  # for actors to hand back their leases when the run is stopped
FINISH_GRACE_S = 30.0  # the same after the last step
STATUS_EVERY_S = 1.0
MAX_BUFFER_RESTARTS = 10
STEADY_S = 60.0  # a unit that lived this long is restarted without delay
LONGEST_DELAY_S = 30.0


class _State(Enum):
    WAITING = auto()  # for its first or next start
    UP = auto()
    DONE = auto()


@dataclass
class _Unit:
    kind: str  # "buffer", "actor", "learner"
    name: str
    specs: list[RoleSpec]
    handles: dict[str, Any] = field(default_factory=dict)  # by role name
    state: _State = _State.WAITING
    due: float = 0.0  # of the next start
    started: float = 0.0
    ready: bool = False  # heard from since it started
    streak: int = 0  # deaths in a row, each soon after its start
    failed_start: tuple[str, Died] | None = None  # role and cause, if the last start never got ready


class Supervisor:
    """Starts the roles of `specs` and restarts them as the config says."""

    def __init__(
        self,
        specs: Iterable[RoleSpec],
        roles: Roles,
        buffer: Buffer,
        config: RunConfig,
        clock: Callable[[], float],
        on_event: Callable[[Event], None],
        on_status: Callable[[StatusReply], None],
    ) -> None:
        self._roles = roles
        self._buffer = buffer
        self._config = config
        self._clock = clock
        self._on_event = on_event
        self._on_status = on_status
        self._units = _units(specs)
        self._restarts: Counter[str] = Counter()  # by kind of unit
        self._limits = {
            "buffer": (MAX_BUFFER_RESTARTS, "of the buffer"),
            "actor": (config.actors.max_restarts, "actors.max_restarts"),
            "learner": (config.learner.max_restarts, "learner.max_restarts"),
        }
        self._status: StatusReply | None = None
        self._answered = clock()  # when the buffer last did, or was started
        self._next_status = clock()
        self._since = 0
        self._stop_by: float | None = None
        self._finish_by: float | None = None
        self.outcome: Outcome | None = None

    def tick(self) -> bool:
        """Look at everything once and act on it. False when the run has ended."""
        for step in (self._reap, self._start_due, self._ask_status, self._check_startup, self._end_if_over):
            if self.outcome is None:
                step()
        return self.outcome is None

    def stop(self) -> None:
        """End the run early: actors hand back what they have leased, then all is killed."""
        if self._stop_by is not None or self.outcome is not None:
            return
        self._stop_by = self._clock() + STOP_GRACE_S
        self._event("stop", "run", "stopping: actors hand back their leases")
        self._buffer.drain([unit.name for unit in self._of_kind("actor")])

    def close(self) -> None:
        """Kill whatever still runs."""
        for unit in self._units:
            self._kill(unit)

    # --- deaths and restarts ----------------------------------------------------------------------

    def _reap(self) -> None:
        for unit in self._units:
            polls = {name: self._roles.poll(handle) for name, handle in unit.handles.items()}
            deaths = {name: poll for name, poll in polls.items() if isinstance(poll, Died)}
            if deaths:
                # A killed process has no time; what the other ranks raised follows from it.
                first = min(deaths, key=lambda name: deaths[name].time or 0.0)
                self._lost(unit, first, deaths[first])
            elif polls and all(isinstance(poll, Done) for poll in polls.values()):
                unit.state = _State.DONE
            if self.outcome is not None:
                return

    def _lost(self, unit: _Unit, role: str, died: Died) -> None:
        """A member of the unit is dead: restart the unit or end the run."""
        self._kill(unit)
        if self._stop_by is not None or (self._finish_by is not None and unit.kind == "actor"):
            unit.state = _State.DONE
            self._event("finish", role, f"{role} died while the run ended ({died.cause})")
            return
        if not unit.ready and unit.failed_start is not None:
            self._fail(*unit.failed_start)
            return
        unit.failed_start = None if unit.ready else (role, died)
        limit, key = self._limits[unit.kind]
        if self._restarts[unit.kind] >= limit:
            self._fail(role, Died(f"{died.cause} (no restart left: {key} = {limit})"))
            return
        self._restarts[unit.kind] += 1
        delay = self._plan_restart(unit)
        count = f"restart {self._restarts[unit.kind]} of at most {limit}"
        when = f"in {delay:g} s" if delay else "now"
        self._event("restart", role, f"{role} died ({died.cause}); {unit.name} starts again {when}, {count}")

    def _plan_restart(self, unit: _Unit) -> float:
        """Set when the unit starts again; the delay in seconds doubles with each early death."""
        now = self._clock()
        unit.streak = 0 if now - unit.started >= STEADY_S else unit.streak + 1
        delay = min(LONGEST_DELAY_S, 2.0**unit.streak) if unit.streak > 1 else 0.0
        unit.state, unit.due = _State.WAITING, now + delay
        return delay

    def _start_due(self) -> None:
        if self._stop_by is not None:
            return
        for unit in self._units:
            if unit.state is _State.WAITING and self._clock() >= unit.due:
                self._start(unit)

    def _start(self, unit: _Unit) -> None:
        if unit.kind == "learner":
            master = self._roles.rendezvous()
            unit.specs = [replace(spec, master=master) for spec in unit.specs]
        if unit.kind == "buffer":
            self._answered = self._clock()
        unit.handles = {spec.name: self._roles.start(spec) for spec in unit.specs}
        unit.state, unit.started, unit.ready = _State.UP, self._clock(), False
        self._event("start", unit.name, f"{', '.join(unit.handles)} started")

    def _kill(self, unit: _Unit) -> None:
        for handle in unit.handles.values():
            self._roles.kill(handle)
        unit.handles = {}

    # --- what the buffer knows --------------------------------------------------------------------

    def _ask_status(self) -> None:
        if self._clock() < self._next_status:
            return
        status = self._buffer.status(self._since)
        self._next_status = self._clock() + STATUS_EVERY_S
        if status is None:
            self._check_buffer_silence()
            return
        self._status, self._answered = status, self._clock()
        self._since = max([self._since, *(number for number, *_ in status.reports)])
        heard = {role.name: role for role in status.roles}
        for unit in self._units:
            if unit.state is _State.UP and not unit.ready:
                self._note_if_ready(unit, heard)
            elif unit.state is _State.UP and unit.kind == "actor" and unit.name in heard:
                self._check_silence(unit, heard[unit.name].seconds_since_heard)
        self._on_status(status)

    def _note_if_ready(self, unit: _Unit, heard: dict[str, RoleStatus]) -> None:
        """A unit is ready once every member has been heard from since the unit was started."""
        ready = unit.kind == "buffer" or all(
            spec.name in heard
            and heard[spec.name].state != "starting"
            and self._answered - heard[spec.name].seconds_since_heard > unit.started
            for spec in unit.specs
        )
        if ready:
            unit.ready, unit.failed_start = True, None
            seconds = self._clock() - unit.started
            self._event("ready", unit.name, f"{unit.name} is ready after {seconds:.0f} s")

    def _check_silence(self, actor: _Unit, seconds: float) -> None:
        # The buffer gives the leases of an actor silent for this long to others: it counts as dead.
        limit = self._config.buffer.lease_timeout_s
        if seconds > limit:
            self._lost(actor, actor.name, Died(f"no heartbeat for {limit:g} s"))

    def _check_buffer_silence(self) -> None:
        buffer, limit = self._of_kind("buffer")[0], self._config.buffer.lease_timeout_s
        if buffer.ready and buffer.state is _State.UP and self._clock() > self._answered + limit:
            self._lost(buffer, buffer.name, Died(f"no answer for {limit:g} s"))

    def _check_startup(self) -> None:
        limit = self._config.launch.startup_timeout_s
        for unit in self._units:
            if unit.state is _State.UP and not unit.ready and self._clock() > unit.started + limit:
                self._fail(
                    unit.specs[0].name, Died(f"not ready within launch.startup_timeout_s = {limit:g} s")
                )
                return

    # --- the end ----------------------------------------------------------------------------------

    def _end_if_over(self) -> None:
        if self._stop_by is not None:
            self._end_stopped(self._stop_by)
        elif self._of_kind("learner")[0].state is _State.DONE:
            self._end_finished()
        else:
            self._refuse_early_leavers()

    def _end_stopped(self, stop_by: float) -> None:
        if self._clock() >= stop_by or all(unit.state is not _State.UP for unit in self._of_kind("actor")):
            self.close()
            step = self._status.step if self._status else 0
            self.outcome = Outcome(End.STOPPED, f"stopped after step {step} of {self._config.learner.steps}")

    def _end_finished(self) -> None:
        """The learner is done: let the actors hand back leases, then hold the ledger to account."""
        now = self._clock()
        if self._finish_by is None:
            self._finish_by = now + FINISH_GRACE_S
            self._event("finish", "learner", "the learner has trained its last step")
        late = [unit for unit in self._of_kind("actor") if unit.state is not _State.DONE]
        if late and now < self._finish_by:
            return
        for unit in late:
            self._kill(unit)
            unit.state = _State.DONE
            self._event("finish", unit.name, f"{unit.name} did not end within {FINISH_GRACE_S:g} s: killed")
        last = self._buffer.status(self._since)
        if last is None and now < self._finish_by + FINISH_GRACE_S:
            return  # the buffer may be about to restart
        self.close()
        if last is not None:
            self._on_status(last)
        self.outcome = _verdict(last, self._config.learner.steps)

    def _refuse_early_leavers(self) -> None:
        """Roles other than the learner return only when the run is finished, which the buffer knows first."""
        for unit in self._units:
            if unit.state is _State.DONE:
                status = self._buffer.status(self._since)
                if status is not None and not status.finished:
                    self._lost(unit, unit.name, Died("it ended before the run did"))

    def _of_kind(self, kind: str) -> list[_Unit]:
        return [unit for unit in self._units if unit.kind == kind]

    def _fail(self, role: str, died: Died) -> None:
        self.close()
        self._event("fail", role, f"{role} failed: {died.cause}")
        self.outcome = Outcome(End.FAILED, f"{role}: {died.cause}", role)

    def _event(self, kind: str, role: str, text: str) -> None:
        self._on_event(Event(kind, role, text))


def _units(specs: Iterable[RoleSpec]) -> list[_Unit]:
    """One unit for the buffer and for each actor, one for all learners, in order of start."""
    specs = list(specs)
    alone = [_Unit(spec.role, spec.name, [spec]) for spec in specs if spec.role != "learner"]
    learners = _Unit("learner", "learner", [spec for spec in specs if spec.role == "learner"])
    return sorted([*alone, learners], key=lambda unit: unit.kind != "buffer")


def in_words(ledger: Mapping[str, int]) -> str:
    """`leased 40 = trained 32 + dropped_stale 8`; what is zero is left out."""
    parts = [f"{name} {count}" for name, count in ledger.items() if name != "leased" and count]
    return f"leased {ledger.get('leased', 0)} = {' + '.join(parts) or 0}"


def _verdict(status: StatusReply | None, steps: int) -> Outcome:
    if status is None:
        return Outcome(End.FAILED, "the buffer does not answer, so the ledger is unknown", "buffer")
    ledger = in_words(status.ledger)
    if not status.balanced:
        return Outcome(End.FAILED, f"the ledger does not balance: {ledger}", "buffer")
    if not status.finished:
        text = f"the learner ended at step {status.step} of {steps}, before the run did"
        return Outcome(End.FAILED, text, "learner-0")
    return Outcome(End.FINISHED, f"{status.step} steps trained; ledger: {ledger}")
