"""Where every group that was ever leased is, counted twice.

    leased = trained + bound + ready + running + dropped_<reason> + ...

running: members missing. ready: complete, waiting for a batch. bound: in a batch whose step is not committed.
trained: in a committed batch. dropped: will never be trained, by `DropReason`.

Invariant of the run, not of this code: the broker counts events (leased, trained, dropped) and holds the
sets of the rest; the store derives the same classes from its rows. Neither is computed from the other, so a
group that is lost or kept twice shows as an imbalance. Called by `buffer.broker`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from buffer.messages import DropReason


@dataclass
class Ledger:
    """Counts of events since the run began."""

    leased: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by DropReason

    def counts(self, running: int, ready: int, bound: int) -> dict[str, int]:
        """As `StatusReply.ledger` shows them."""
        return {
            "leased": self.leased,
            "trained": self.trained,
            "bound": bound,
            "ready": ready,
            "running": running,
            **{f"dropped_{reason}": self.dropped[reason] for reason in DropReason},
        }


def is_balanced(counts: Mapping[str, int]) -> bool:
    return counts["leased"] == sum(count for name, count in counts.items() if name != "leased")


@dataclass(frozen=True)
class Places:
    """The ids of the groups that are not at their end yet, as one side knows them."""

    running: Set[str]
    ready: Set[str]
    bound: Set[str]


def differences(
    ours: Places, stored: Places, counts: Mapping[str, int], stored_counts: Mapping[str, int]
) -> list[str]:
    """One sentence for each way in which the index and the store disagree; empty if they agree."""
    found = []
    for place in ("running", "ready", "bound"):
        ids = sorted(getattr(ours, place) ^ getattr(stored, place))
        if ids:
            found.append(f"{place} in the index or the store alone: {', '.join(ids[:20])}")
    for name, count in counts.items():
        if stored_counts[name] != count:
            found.append(f"{name}: {count} counted, {stored_counts[name]} stored")
    if not is_balanced(counts):
        found.append(f"the counts do not add up: {dict(counts)}")
    return found
