"""Groups: the order in which prompts are visited, the members of each, and the verdict when it is complete.

Invariant: an epoch visits each prompt at most once; a member is stored once. Pure: no clock, socket or store.
Called by `buffer.running`, `buffer.evaluations` and `buffer.leases`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import numpy as np

from buffer.messages import DropReason

COMPLETE = "complete"  # the verdict on a group that may be trained


@dataclass
class Group:
    """A group that is running: some members are still wanted."""

    number: int  # in order of leasing
    group_id: str
    epoch: int
    prompt_index: int
    size: int  # scored members wanted
    spare: int  # started beyond that, so that slow and failed ones need not be waited for
    seed: int
    rewards: dict[int, float | None] = field(default_factory=dict)  # of the members put, None: failed
    version_min: int | None = None  # of the oldest sampled token, None: nothing sampled yet
    version_max: int | None = None
    leases: int = 0  # granted so far
    expiries: int = 0  # of them, ended by silence

    @property
    def started(self) -> int:
        """Members that are rolled out; their indices are below it."""
        return self.size + self.spare

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.started) if index not in self.rewards)

    @property
    def is_complete(self) -> bool:
        """Enough members are scored, or none is left to wait for."""
        return sum(reward is not None for reward in self.rewards.values()) >= self.size or not self.missing

    def add(self, index: int, reward: float | None, version_min: int | None, version_max: int | None) -> None:
        """Note one member. The versions are those of its sampled tokens, None if it has none."""
        self.rewards[index] = reward
        if version_min is not None and version_max is not None:
            self.version_min = min(
                version_min, self.version_min if self.version_min is not None else version_min
            )
            self.version_max = max(
                version_max, self.version_max if self.version_max is not None else version_max
            )


@dataclass(frozen=True)
class ReadyGroup:
    """A complete group that waits for its batch: all that the index keeps of it."""

    number: int
    group_id: str
    version_min: int
    version_max: int


def verdict(group: Group, min_survivors: int, drop_zero_variance: bool) -> str:
    """COMPLETE, or the DropReason, of a group that gets no more members."""
    scored = [reward for reward in group.rewards.values() if reward is not None]
    if len(scored) < min_survivors or group.version_min is None:
        return DropReason.EXPIRED if group.missing else DropReason.ALL_FAILED
    if drop_zero_variance and len(set(scored)) == 1:
        return DropReason.ZERO_VARIANCE
    return COMPLETE


def group_id_of(epoch: int, prompt_index: int) -> str:
    """Unique in a run, because an epoch visits a prompt once."""
    return f"{epoch}-{prompt_index}"


def seed_of(run_seed: int, group_id: str) -> int:
    """48 bits (room for an actor to add to it), the same for every attempt at the group."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=6).digest())


class PromptOrder:
    """The prompts that are still to be visited, epoch after epoch, each shuffled by the run's seed.

    `visited(epoch)` are the prompts that the epoch has had already: nothing but the store has to survive a
    crash, and a run resumed with another seed or more data still visits each prompt once.
    `begin(epoch)` is called before it: what it leaves out counts as visited.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        epoch: int,
        visited: Callable[[int], Set[int]],
        begin: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        if num_prompts < 1:
            raise ValueError("the task has no training prompts; give its data at least one row")
        self._num_prompts, self._seed, self._visited = num_prompts, seed, visited
        self._begin = begin
        self._epoch = epoch
        self._left = self._shuffle(epoch)

    def next(self) -> tuple[int, int]:
        """(epoch, prompt index) of the next new group."""
        while not self._left:
            self._epoch += 1
            self._begin(self._epoch)
            self._left = self._shuffle(self._epoch)
        return self._epoch, self._left.pop()

    def _shuffle(self, epoch: int) -> list[int]:
        """What is left of an epoch, the next prompt last."""
        order = np.random.default_rng((self._seed, epoch)).permutation(self._num_prompts)
        visited = self._visited(epoch)
        return [int(prompt) for prompt in order[::-1] if int(prompt) not in visited]
