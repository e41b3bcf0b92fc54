"""How many new groups may be leased now: the one rule that bounds staleness and applies backpressure.

Invariant: a group leased to an engine that serves version v, and trained in its turn, is handed out at a
version of at most v + max_staleness. Pure arithmetic; called by `buffer.broker` for every lease request.

The rule of the design, with G groups per published version, counted since version 0:

    capacity = (max_staleness + version + 1) · G − (accepted + running)

`accepted` are all groups that were or will be trained: trained + ready + bound. Of the trained ones,
version · G were trained before the newest version and the rest since, so version · G cancels:

    capacity = (max_staleness + 1) · G − (running + ready + bound + trained since the newest version)

The second form needs no history: a run may be resumed with another batch size, another limit or a
rewound version, and the rule still holds for what is in flight from then on.

`version` is the one that the asking actor's engine serves, which lags behind the newest while weights
travel: its next tokens are of that version, whatever the learner has published since.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Limits:
    """The settings the rule depends on. `publish_every`: optimizer steps between versions."""

    max_staleness: int
    groups_per_batch: int
    publish_every: int
    steps: int

    @property
    def groups_per_version(self) -> int:
        return self.groups_per_batch * self.publish_every

    @property
    def max_outstanding(self) -> int:
        """Groups that may be on their way to the next versions at once."""
        return (self.max_staleness + 1) * self.groups_per_version


@dataclass(frozen=True)
class Outstanding:
    """Groups leased and not yet under a published version, by where they are."""

    running: int
    ready: int
    bound: int
    unpublished: int  # trained since the newest version was published

    @property
    def untrained(self) -> int:
        return self.running + self.ready + self.bound


def capacity(limits: Limits, outstanding: Outstanding, committed_step: int, lag: int = 0) -> int:
    """New groups that may be leased now; never more than the steps that are left can train.

    `lag`: versions by which the asking engine is behind the newest.
    """
    by_staleness = limits.max_outstanding - lag * limits.groups_per_version
    by_staleness -= outstanding.untrained + outstanding.unpublished
    steps_left = limits.steps - committed_step
    by_need = steps_left * limits.groups_per_batch - outstanding.untrained
    return max(0, min(by_staleness, by_need))


def fair_share(limits: Limits, actors: int) -> int:
    """Groups that one of `actors` may hold, so that an actor that joins finds work."""
    return ceil(limits.max_outstanding / max(1, actors))


def oldest_allowed(limits: Limits, version: int) -> int:
    """The oldest weight version that a token may have when the newest is `version`."""
    return version - limits.max_staleness


def version_at(limits: Limits, step: int, committed_step: int, version: int) -> int:
    """The version that will be current when `step` is trained.

    A learner asks for the next batch while it trains the one before, so the batches in between count
    as if they were committed; it publishes after every `publish_every`-th step.
    """
    every = limits.publish_every
    return version + max(0, (step - 1) // every - committed_step // every)
