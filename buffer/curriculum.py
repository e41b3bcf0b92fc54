"""Which prompts rest: those whose last group was all right or all wrong, so that it taught nothing.

A group whose rewards are all equal has no gradient. Its prompt is passed over at the next visit; if the
group after that is no better, at the next two, then four, up to `buffer.curriculum_max_rest`. A group whose
rewards differ wakes its prompt. So the solved are looked at again in case they are forgotten, and the
hopeless in case they have come within reach.

Invariant: who rests follows from the closed groups in the store, and who was passed over is in the store, so
that a crash changes neither. Called by `buffer.groups.PromptOrder` and whoever closes groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from buffer.groups import Group
from buffer.store import Store
from configs.shares import Place, Share, locate


class Curriculum:
    def __init__(self, max_rest: int, shares: Sequence[Share], store: Store) -> None:
        """max_rest: visits; 0: nobody rests."""
        self._max_rest, self._shares, self._store = max_rest, shares, store
        self._resting: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # by task and row: groups in vain, last visit
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

    def passes_over(self, epoch: int, prompt_index: int) -> bool:
        """Whether the prompt rests now; if so, that is counted and stored."""
        if not self._max_rest:
            return False
        place = locate(self._shares, prompt_index, epoch)
        in_vain, last_visit = self._resting.get((place.task, place.row), (0, 0))
        if not in_vain or place.visit > last_visit + min(2 ** (in_vain - 1), self._max_rest):
            return False
        self.skipped += 1
        self._store.add_skip(epoch, prompt_index)
        return True

    def differences(self) -> list[str]:
        """Where the index and the store disagree, in a sentence."""
        stored = self._store.num_skipped()
        return [f"skipped by the curriculum: {self.skipped} counted, {stored} stored"] * (
            stored != self.skipped
        )

    def _note(self, place: Place, differs: bool) -> None:
        key = (place.task, place.row)
        if differs:
            self._resting.pop(key, None)
        else:
            in_vain, _ = self._resting.get(key, (0, 0))
            self._resting[key] = (in_vain + 1, place.visit)
