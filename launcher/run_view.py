"""What the terminal shows of a run, gathered from the roles' reports.

Pure data: `RunView.take` folds one `StatusReply` in, `launcher.progress` draws the result.
Rates and success are over the reports of the last `RECENT_S` seconds, or of two steps where that is longer,
so that the picture follows the run and is never that of a handful of episodes between two slow steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from buffer.messages import RoleStatus, StatusReply
from configs.schema import RunConfig
from launcher.balance import Balance
from metrics import names

RECENT_S = 60.0
_STEPS_FOR_RATE = 10  # steps whose median duration gives the time left
_STEPS_FOR_BALANCE = 3  # besides the first, which waits for the engines to start


def is_working_actor(role: RoleStatus) -> bool:
    """It takes leases, or would if its tools were there; not one that leaves."""
    return role.role == "actor" and role.state.startswith(("running", "paused"))


@dataclass(frozen=True)
class StepRow:
    """One optimizer step: the learner's report, and what the actors did around it."""

    step: int
    reward: float
    success: float | None
    seconds: float
    metrics: dict[str, float]


@dataclass
class RunView:
    """The state behind the picture. Create with `RunView.of(config, name)`."""

    name: str
    steps: int
    actors: int
    groups_per_batch: int
    max_staleness: int = 1
    learners: int = 1
    step: int = 0
    version: int = 0
    started: float | None = None  # unix time of the first report
    now: float = 0.0
    rows: dict[int, StepRow] = field(default_factory=dict)  # by step; a step done again replaces its row
    ledger: dict[str, int] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)  # role name → state
    last_event: str = ""
    evaluates: bool = False  # by eval.every_steps
    evaluations: list[dict[str, float]] = field(default_factory=list)  # their reports, oldest first
    held_out: dict[str, int] = field(default_factory=dict)  # the evaluations' own ledger
    skipped: int = 0  # visits that the curriculum passed over
    _recent: deque[tuple[float, str, dict[str, float]]] = field(default_factory=deque)  # actors' reports

    @classmethod
    def of(cls, config: RunConfig, name: str) -> RunView:
        return cls(
            name,
            config.learner.steps,
            config.actors.count,
            config.buffer.groups_per_batch,
            config.buffer.max_staleness,
            config.learner.count,
            evaluates=config.eval.every_steps > 0,
        )

    def take(self, status: StatusReply, now: float) -> list[StepRow]:
        """Fold a status in at unix time `now`; the steps that it completed, in order."""
        self.now, self.step, self.version = now, status.step, status.version
        self.ledger, self.held_out = dict(status.ledger), dict(status.held_out)
        self.states = {role.name: role.state for role in status.roles}
        self.actors = sum(map(is_working_actor, status.roles)) or self.actors
        new = []
        for _, role, name, time, metrics in status.reports:
            self.started = time if self.started is None else self.started
            if role == "actor":
                self._recent.append((time, name, metrics))
            elif role == "eval":
                self.evaluations.append(metrics)
            elif names.STEP in metrics:
                new.append(self._row(metrics))
            self.skipped = int(metrics.get(names.BUFFER_SKIPPED, self.skipped))
        self.rows |= {row.step: row for row in new}
        recent_s = max(RECENT_S, 2 * self.last.seconds if self.last else 0.0)
        while self._recent and self._recent[0][0] < now - recent_s:
            self._recent.popleft()
        return new

    def _row(self, metrics: dict[str, float]) -> StepRow:
        return StepRow(
            step=int(metrics[names.STEP]),
            reward=metrics.get(names.REWARD_MEAN, 0.0),
            success=self.success,
            seconds=metrics.get(names.STEP_S, 0.0),
            metrics=metrics,
        )

    # --- derived ----------------------------------------------------------------------------------

    @property
    def last(self) -> StepRow | None:
        return self.rows[max(self.rows)] if self.rows else None

    @property
    def elapsed_s(self) -> float:
        return self.now - self.started if self.started is not None else 0.0

    @property
    def seconds_left(self) -> float | None:
        """By the median of the latest steps; None before the first."""
        latest = [self.rows[step].seconds for step in sorted(self.rows)[-_STEPS_FOR_RATE:]]
        if not latest:
            return None
        return (self.steps - self.step) * median(latest)

    @property
    def success(self) -> float | None:
        return _ratio(self._sum(names.ACTOR_SUCCESS), self._sum(names.ACTOR_TRAJECTORIES))

    @property
    def unscored(self) -> float | None:
        """Share of trajectories without a reward: their error is in the buffer, and in the actor's log."""
        return _ratio(self._sum(names.ACTOR_ERRORS), self._sum(names.ACTOR_TRAJECTORIES))

    @property
    def actor_tokens_per_s(self) -> float | None:
        """Sampled tokens of all actors together: each one's tokens over its own windows."""
        rates = []
        for actor in {name for _, name, _ in self._recent}:
            own = [metrics for _, name, metrics in self._recent if name == actor]
            rates.append(_ratio(_total(own, names.ACTOR_TOKENS), _total(own, names.ACTOR_WINDOW_S)))
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def learner_tokens_per_s(self) -> float | None:
        """Tokens computed per second of training, waits left out."""
        if self.last is None:
            return None
        return _ratio(self.last.metrics.get(names.TOKENS_PACKED, 0), self.last.metrics.get(names.TRAIN_S, 0))

    @property
    def learner_wait(self) -> float | None:
        """Share of the last step spent waiting for its batch."""
        if self.last is None:
            return None
        return _ratio(self.last.metrics.get(names.WAIT_S, 0), self.last.seconds)

    @property
    def balance(self) -> Balance | None:
        """Who waits for whom, by the latest steps and reports; None before there are enough."""
        latest = [self.rows[step] for step in sorted(self.rows)[1:][-_STEPS_FOR_RATE:]]
        idle = self.actor_share(names.ACTOR_IDLE_S)
        waited = _ratio(_total((row.metrics for row in latest), names.WAIT_S), sum(r.seconds for r in latest))
        if len(latest) < _STEPS_FOR_BALANCE or idle is None or waited is None:
            return None
        return Balance(
            self.actors, self.learners, max(0.0, 1 - idle), max(0.0, 1 - waited), self.max_staleness == 0
        )

    @property
    def in_flight(self) -> int:
        latest = {name: metrics.get(names.ACTOR_IN_FLIGHT, 0) for _, name, metrics in self._recent}
        return int(sum(latest.values()))

    def actor_share(self, metric: str) -> float | None:
        """Share of the actors' time that a `*_s` counter took, e.g. idle or paused."""
        return _ratio(self._sum(metric), self._sum(names.ACTOR_WINDOW_S))

    @property
    def tool_calls(self) -> int:
        return int(self._sum(names.TOOL_CALLS))

    @property
    def tool_seconds(self) -> float | None:
        """Mean latency of a call."""
        return _ratio(self._sum(names.TOOL_SECONDS), self._sum(names.TOOL_CALLS))

    @property
    def tool_failures(self) -> float | None:
        """Share of calls that failed."""
        return _ratio(self._sum(names.TOOL_FAILURES), self._sum(names.TOOL_CALLS))

    @property
    def dropped(self) -> dict[str, int]:
        prefix = "dropped_"
        return {k.removeprefix(prefix): n for k, n in self.ledger.items() if k.startswith(prefix) and n}

    def _sum(self, metric: str) -> float:
        return _total((metrics for _, _, metrics in self._recent), metric)


def _total(reports: Iterable[dict[str, float]], metric: str) -> float:
    return sum(metrics.get(metric, 0.0) for metrics in reports)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
