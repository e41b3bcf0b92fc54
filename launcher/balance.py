"""Which side of a run waits for the other, and how many actors would balance it, from measured waits.

While n actors are busy a share a of their time, and the learner a share l, both do the same work per second:
so fully busy actors, as many as n · a / l, would feed a fully busy learner. Called by `launcher.run_view`.
"""

from __future__ import annotations

from dataclasses import dataclass

_BUSY = 0.9  # a side that is busy for this share of its time is not worth feeding better


@dataclass(frozen=True)
class Balance:
    actors: int
    learners: int
    actors_busy: float  # share of their time with a trajectory in flight
    learner_busy: float  # share of its time not waiting for a batch
    takes_turns: bool  # buffer.max_staleness = 0: one side waits by construction

    @property
    def actors_that_balance(self) -> float:
        """For the learners there are."""
        return self.actors * self.actors_busy / max(self.learner_busy, 0.01)

    @property
    def advice(self) -> str:
        """Short enough for a line of the picture."""
        if self.takes_turns:
            return "actors and learner take turns: max_staleness = 0"
        if min(self.actors_busy, self.learner_busy) >= _BUSY:
            return "actors and learner are both busy"
        side = "the actors are" if self.learner_busy < self.actors_busy else "the learner is"
        ratio, now = self.actors_that_balance / self.learners, self.actors / self.learners
        return f"{side} the bottleneck; {ratio:.1f} actors per learner would balance (now {now:g})"

    @property
    def words(self) -> str:
        """The advice with what was measured."""
        waits, idle = 1 - self.learner_busy, 1 - self.actors_busy
        return f"{self.advice}: learner waits {waits:.0%}, actors idle {idle:.0%}"
