"""Keeps the roles of a run alive until it ends: a state machine over processes that it cannot see into.

What is restarted together is a unit: the buffer, each actor, all learner ranks. Invariant: every unit
is waiting for its start, up, or done; each wait has a deadline; the run ends exactly once, with an
`Outcome` that names the first cause if it failed.

Pure: processes, the buffer and the clock are injected. `launcher.train` calls `tick` about twice a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from buffer.messages import RoleStatus, StatusReply
from configs.roles import RoleSpec
from configs.schema import RunConfig
from launcher.interfaces import Buffer, Died, Done, End, Event, Outcome, Roles
from launcher.units import State, Unit, more_actors, units_of
from launcher.verdict import imbalance_of, verdict

STOP_GRACE_S = 10.0  # for actors to hand back their leases when the run is stopped
FINISH_GRACE_S = 30.0  # the same after the last step
STATUS_EVERY_S = 1.0
MAX_BUFFER_RESTARTS = 10
BACK_AT_THE_BUFFER_S = 30.0  # of an actor, after the buffer was started again
MOST_ADDED = 1024  # actors at once, whatever slip of the finger asks for more than any cluster has room for
STEADY_S = 60.0  # a unit that lived this long is restarted without delay
LONGEST_DELAY_S = 30.0


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
        self._units = units_of(specs)
        self._restarts: Counter[str] = Counter()  # by kind of unit
        self._limits = {
            "buffer": (MAX_BUFFER_RESTARTS, "the buffer's limit"),
            "actor": (config.actors.max_restarts, "actors.max_restarts"),
            "learner": (config.learner.max_restarts, "learner.max_restarts"),
        }
        self._status: StatusReply | None = None
        self._answered = clock()  # when the buffer last did, or was started
        self._next_status = clock()
        self._since = 0
        self._stop_by: float | None = None
        self._finish_by: float | None = None
        self._wanted: int | None = None  # actors; None until the buffer knows the config's number
        self.outcome: Outcome | None = None

    def tick(self) -> bool:
        """Look at everything once and act on it. False when the run has ended."""
        steps = (
            self._reap,
            self._start_due,
            self._ask_status,
            self._check_startup,
            self._check_leaving,
            self._end_if_over,
        )
        for step in steps:
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

    def fail(self, role: str, cause: str) -> None:
        """End the run because of something that is not a unit."""
        if self.outcome is None:
            self._fail(role, Died(cause))

    def close(self) -> None:
        """Kill whatever still runs."""
        for unit in self._units:
            self._kill(unit)

    # --- deaths and restarts ----------------------------------------------------------------------

    def _reap(self) -> None:
        for unit in list(self._units):
            polls = {name: self._roles.poll(handle) for name, handle in unit.handles.items()}
            deaths = {name: poll for name, poll in polls.items() if isinstance(poll, Died)}
            if deaths:
                # A killed process has no time; what the other ranks raised follows from it.
                first = min(deaths, key=lambda name: deaths[name].time or 0.0)
                self._lost(unit, first, deaths[first])
            elif polls and all(isinstance(poll, Done) for poll in polls.values()):
                unit.state = State.DONE
                if unit.leave_by is not None:
                    self._kill(unit)  # its main has returned, its process has not
                    self._remove(unit, f"{unit.name} has left")
            elif done := [name for name, poll in polls.items() if isinstance(poll, Done)]:
                self._check_late_ranks(unit, done)
            if self.outcome is not None:
                return

    def _check_late_ranks(self, unit: Unit, done: Sequence[str]) -> None:
        """Ranks end together; one that hangs in its end must not keep the run."""
        unit.first_done = unit.first_done or self._clock()
        limit = 2 * self._config.learner.timeout_s  # its last collective and its last word to the buffer
        if self._clock() > unit.first_done + limit:
            late = next(spec.name for spec in unit.specs if spec.name not in done)
            self._lost(unit, late, Died(f"it did not end within {limit:g} s of {done[0]}"))

    def _lost(self, unit: Unit, role: str, died: Died) -> None:
        """A member of the unit is dead: restart the unit or end the run."""
        self._kill(unit)
        self._release(unit)
        if unit.leave_by is not None:
            self._remove(unit, f"{role} died while it was leaving ({died.cause})")
            return
        if self._stop_by is not None or (self._finish_by is not None and unit.kind == "actor"):
            unit.state = State.DONE
            self._event("finish", role, f"{role} died while the run ended ({died.cause})")
            return
        if not unit.ready and unit.failed_start is not None:
            self._cannot_start(unit, *unit.failed_start)
            return
        if died.final:
            self._fail(role, died)
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

    def _plan_restart(self, unit: Unit) -> float:
        """Set when the unit starts again; the delay in seconds doubles with each early death."""
        now = self._clock()
        unit.streak = 0 if now - unit.started >= STEADY_S else unit.streak + 1
        delay = min(LONGEST_DELAY_S, 2.0**unit.streak) if unit.streak > 1 else 0.0
        unit.state, unit.due = State.WAITING, now + delay
        return delay

    def _start_due(self) -> None:
        if self._stop_by is not None:
            return
        for unit in self._units:
            if unit.state is State.WAITING and self._clock() >= unit.due:
                self._start(unit)

    def _start(self, unit: Unit) -> None:
        if unit.kind == "learner":
            master = self._roles.rendezvous()
            unit.specs = [replace(spec, master=master) for spec in unit.specs]
        if unit.kind == "buffer":
            self._answered = self._clock()
        unit.handles = {spec.name: self._roles.start(spec) for spec in unit.specs}
        unit.state, unit.started, unit.ready, unit.first_done = State.UP, self._clock(), False, None
        self._event("start", unit.name, f"{', '.join(unit.handles)} started")

    def _kill(self, unit: Unit) -> None:
        for handle in unit.handles.values():
            self._roles.kill(handle)
        unit.handles = {}

    def _release(self, unit: Unit) -> None:
        """Give what a dead actor had leased to others now; without this they wait for its silence."""
        buffer = self._of_kind("buffer")[0]
        if unit.kind == "actor" and buffer.ready and buffer.state is State.UP:
            self._buffer.release(unit.name)

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
            if unit.state is State.UP and not unit.ready:
                self._note_if_ready(unit, heard)
            elif unit.state is State.UP and unit.kind == "actor":
                self._check_silence(unit, heard.get(unit.name))
        self._on_status(status)
        if not status.balanced:
            self._fail("buffer", Died(imbalance_of(status)))
            return
        self._follow_scale(status)

    def _note_if_ready(self, unit: Unit, heard: dict[str, RoleStatus]) -> None:
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

    def _check_silence(self, actor: Unit, heard: RoleStatus | None) -> None:
        # The buffer gives the leases of an actor silent for this long to others: it counts as dead.
        limit = self._config.buffer.lease_timeout_s
        if heard is not None:
            actor.heard = self._answered - heard.seconds_since_heard
        else:  # a buffer that was restarted knows nobody, until they have come back to it
            back = self._of_kind("buffer")[0].started + BACK_AT_THE_BUFFER_S
            actor.heard = max(actor.heard, back)
        if self._answered - actor.heard > limit:
            self._lost(actor, actor.name, Died(f"no heartbeat for {limit:g} s"))

    def _check_buffer_silence(self) -> None:
        buffer, limit = self._of_kind("buffer")[0], self._config.buffer.lease_timeout_s
        if buffer.ready and buffer.state is State.UP and self._clock() > self._answered + limit:
            self._lost(buffer, buffer.name, Died(f"no answer for {limit:g} s"))

    def _check_startup(self) -> None:
        limit = self._config.launch.startup_timeout_s
        for unit in list(self._units):
            if unit.state is State.UP and not unit.ready and self._clock() > unit.started + limit:
                cause = Died(f"not ready within launch.startup_timeout_s = {limit:g} s")
                self._cannot_start(unit, unit.specs[0].name, cause)
                return

    # --- more or fewer actors ---------------------------------------------------------------------

    def _follow_scale(self, status: StatusReply) -> None:
        """Do what `launch.py scale` asked the buffer for."""
        if self._wanted is None:
            # A run starts with its config's actors, whatever was asked of the launcher before this one.
            count = self._config.actors.count
            self._wanted = count if self._buffer.scale(count) else None
        elif status.actors_wanted not in (0, self._wanted) and not self._is_ending():
            self._wanted = status.actors_wanted
            staying = [unit for unit in self._of_kind("actor") if unit.leave_by is None]
            if len(staying) < self._wanted:
                self._add_actors(self._wanted - len(staying))
            elif len(staying) > self._wanted:
                self._drain(sorted(staying, key=lambda unit: unit.specs[0].rank)[self._wanted :])
        states = {role.name: role.state for role in status.roles}
        leaving = [unit.name for unit in self._of_kind("actor") if unit.leave_by is not None]
        deaf = [name for name in leaving if states.get(name, "finished") not in ("draining", "finished")]
        if deaf:
            self._buffer.drain(deaf)  # the buffer may have been away when it was first asked

    def _add_actors(self, count: int) -> None:
        specs = more_actors(self._of_kind("actor"), min(count, MOST_ADDED))
        room = self._roles.room(specs)
        self._units += [Unit(spec.role, spec.name, [spec], added=True) for spec in specs[:room]]
        names = ", ".join(spec.name for spec in specs[:room])
        self._event("scale", "run", f"scaling up: {names}" if names else "scaling up: no room")
        if room < count:
            self._settle_for_fewer(f"there is room for {room} of {count} more actors")

    def _drain(self, units: list[Unit]) -> None:
        """Let these actors finish what they have leased, and leave."""
        grace_s = self._config.task.trajectory_timeout_s + STOP_GRACE_S
        for unit in units:
            unit.leave_by = self._clock() + grace_s
        names = [unit.name for unit in units]
        self._event("scale", "run", f"scaling down: {', '.join(names)} finish their leases and leave")
        self._buffer.drain(names)

    def _check_leaving(self) -> None:
        for unit in self._of_kind("actor"):
            if unit.leave_by is None:
                continue
            if unit.state is State.WAITING:
                self._remove(unit, f"{unit.name} has left")
            elif self._clock() >= unit.leave_by:
                self._kill(unit)
                self._release(unit)
                self._remove(unit, f"{unit.name} did not leave in time: killed, its leases go to others")

    def _remove(self, unit: Unit, text: str) -> None:
        self._units.remove(unit)
        self._event("scale", unit.name, text)

    def _cannot_start(self, unit: Unit, role: str, died: Died) -> None:
        """An actor that was added later is given up; without any other role there is no run."""
        if not unit.added:
            self._fail(role, died)
            return
        self._kill(unit)
        self._remove(unit, f"{unit.name} cannot start ({died.cause}); the run goes on without it")
        self._settle_for_fewer(f"{unit.name} cannot start")

    def _settle_for_fewer(self, why: str) -> None:
        """Say that the number asked for cannot be had, so that nobody waits for it."""
        self._wanted = sum(unit.leave_by is None for unit in self._of_kind("actor"))
        self._event("scale", "run", f"{why}: the run goes on with {self._wanted} actors")
        self._buffer.scale(self._wanted)

    def _is_ending(self) -> bool:
        return self._stop_by is not None or self._finish_by is not None

    # --- the end ----------------------------------------------------------------------------------

    def _end_if_over(self) -> None:
        if self._stop_by is not None:
            self._end_stopped(self._stop_by)
        elif self._of_kind("learner")[0].state is State.DONE:
            self._end_finished()
        else:
            self._refuse_early_leavers()

    def _end_stopped(self, stop_by: float) -> None:
        if self._clock() >= stop_by or all(unit.state is not State.UP for unit in self._of_kind("actor")):
            self.close()
            step = self._status.step if self._status else 0
            self.outcome = Outcome(End.STOPPED, f"stopped after step {step} of {self._config.learner.steps}")

    def _end_finished(self) -> None:
        """The learner is done: let the actors hand back leases, then hold the ledger to account."""
        now = self._clock()
        if self._finish_by is None:
            self._finish_by = now + FINISH_GRACE_S
            self._event("finish", "learner", "the learner has trained its last step")
        late = [unit for unit in self._of_kind("actor") if unit.state is not State.DONE]
        for unit in [unit for unit in late if not unit.ready or unit.state is State.WAITING]:
            self._kill(unit)  # it was about to start: there is nothing to hand back
            unit.state = State.DONE
            late.remove(unit)
        if late and now < self._finish_by:
            return
        for unit in late:
            self._kill(unit)
            unit.state = State.DONE
            self._event("finish", unit.name, f"{unit.name} did not end within {FINISH_GRACE_S:g} s: killed")
        last = self._buffer.status(self._since)
        if last is None and now < self._finish_by + FINISH_GRACE_S:
            return  # the buffer may be about to restart
        self.close()
        if last is not None:
            self._on_status(last)
        self.outcome = verdict(last, self._config.learner.steps)

    def _refuse_early_leavers(self) -> None:
        """Roles other than the learner return only when the run is finished, which the buffer knows first."""
        for unit in list(self._units):
            if unit.state is State.DONE:
                status = self._buffer.status(self._since)
                if status is not None and not status.finished:
                    self._lost(unit, unit.name, Died("it ended before the run did"))

    def _of_kind(self, kind: str) -> list[Unit]:
        return [unit for unit in self._units if unit.kind == kind]

    def _fail(self, role: str, died: Died) -> None:
        self.close()
        self._event("fail", role, f"{role} failed: {died.cause}")
        self.outcome = Outcome(End.FAILED, f"{role}: {died.cause}", role)

    def _event(self, kind: str, role: str, text: str) -> None:
        self._on_event(Event(kind, role, text))
