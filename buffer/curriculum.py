"""Which prompts rest: those whose last group was all right or all wrong, so that it taught nothing.

A group whose rewards are all equal has no gradient. Its prompt is left out of the next epoch; if the group
after that is no better, of the next two, then four, up to `buffer.curriculum_max_rest`. A group whose
rewards differ wakes its prompt. So the solved are looked at again in case they are forgotten, and the
hopeless in case they have come within reach. An epoch in which everybody would rest visits everybody.

Invariant: who rests follows from the closed groups in the store, and who is left out of an epoch is stored
when the epoch begins, so that a crash changes neither. Called by `buffer.groups.PromptOrder` and
`buffer.running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from buffer.groups import Group
from buffer.store import Store
from configs.shares import Place, Share, locate


class Rest(NamedTuple):
    in_vain: int  # groups in a row that taught nothing
    last_visit: int


class Curriculum:
    def __init__(self, max_rest: int, shares: Sequence[Share], store: Store) -> None:
        """max_rest: visits; 0: nobody rests."""
        self._max_rest, self._shares, self._store = max_rest, shares, store
        self._num_prompts = sum(share.prompts for share in shares)
        self._resting: dict[tuple[int, int], Rest] = {}  # by task and row
        self.skipped = store.num_skipped()
        for epoch, prompt_index, differs in store.closed_groups() if max_rest else ():
            self._note(locate(shares, prompt_index, epoch), differs)

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def note(self, group: Group) -> None:
        """The group is closed. What too few of its members say is no verdict on its prompt."""
        scored = [reward for reward in group.rewards.values() if reward is not None]
        if self._max_rest and len(scored) > 1:
            self._note(locate(self._shares, group.prompt_index, group.epoch), len(set(scored)) > 1)

    def _note(self, place: Place, differs: bool) -> None:
        key = (place.task, place.row)
        if differs:
            self._resting.pop(key, None)
        else:
            in_vain = self._resting[key].in_vain if key in self._resting else 0
            self._resting[key] = Rest(in_vain + 1, place.visit)

    def begin(self, epoch: int) -> None:
        """Store which prompts the epoch leaves out."""
        if not self._resting:
            return
        resting = [prompt for prompt in range(self._num_prompts) if self._rests(epoch, prompt)]
        if len(resting) < self._num_prompts:
            self._store.add_skips(epoch, resting)
            self.skipped += len(resting)

    def _rests(self, epoch: int, prompt_index: int) -> bool:
        place = locate(self._shares, prompt_index, epoch)
        rest = self._resting.get((place.task, place.row))
        if rest is None:
            return False
        return place.visit <= rest.last_visit + min(2 ** (rest.in_vain - 1), self._max_rest)

    def differences(self) -> list[str]:
        """Where the index and the store disagree, in a sentence."""
        stored = self._store.num_skipped()
        if stored == self.skipped:
            return []
        return [f"skipped by the curriculum: {self.skipped} counted, {stored} stored"]
