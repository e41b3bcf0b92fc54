"""Batches: binding ready groups to steps, commits, resumes and pruning.

Invariant (exactly once): a step is bound to its groups once and for all, in the store, before it is handed
out, and a group is bound to at most one step. Weights at step s have therefore seen batches 1 .. s, each
once, whichever of them were served again after a crash. Commits move only the counters.

Called by `buffer.broker`; writes inside the transaction that is open.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Any, cast

import numpy as np

from buffer.codec import Packed, decode_trajectory
from buffer.groups import ReadyGroup
from buffer.ledger import Ledger
from buffer.limiter import Limits, Outstanding, oldest_allowed, version_at
from buffer.messages import Batch, DropReason, Trajectory
from buffer.store import BatchRow, Payload, Store
from configs.schema import BufferConfig


class RequestError(ValueError):
    """A request that cannot be served; one sentence with the mend. It changes nothing."""


class Batches:
    def __init__(self, config: BufferConfig, limits: Limits, store: Store, ledger: Ledger) -> None:
        self._config, self._limits, self._store, self._ledger = config, limits, store, ledger
        self.version = int(store.meta("version") or 0)
        self.committed_step, self._last_bound = store.steps()
        self._pruned_step = int(store.meta("pruned_step") or 0)
        self._unpublished = store.trained_since_publish()
        self.ready = {group.group_id: group for group in store.ready_groups()}
        self._bound = store.bound_groups()

    @property
    def bound(self) -> frozenset[str]:
        """Ids of the groups in batches that are not committed."""
        return frozenset(group_id for groups in self._bound.values() for group_id in groups)

    @property
    def num_bound(self) -> int:
        return sum(map(len, self._bound.values()))

    @property
    def finished(self) -> bool:
        return self.committed_step >= self._limits.steps

    def outstanding(self, running: int) -> Outstanding:
        return Outstanding(running, len(self.ready), self.num_bound, self._unpublished)

    # --- handing out ------------------------------------------------------------------------------

    def get(self, step: int) -> Batch | None:
        """The batch of `step`, bound now if it can be; None while too few groups are ready."""
        if not 1 <= step <= self._limits.steps:
            raise RequestError(f"there is no step {step}: learner.steps = {self._limits.steps}")
        if step <= self._pruned_step:
            raise RequestError(
                f"the batch of step {step} was pruned after the checkpoint of step {self._pruned_step}; "
                'resume from that checkpoint, or run with buffer.keep = "all"'
            )
        if step > self._last_bound + 1:
            raise RequestError(
                f"step {step} was asked for, but the next new batch is that of step {self._last_bound + 1}; "
                "a learner sends Resume with its checkpoint's step before it asks"
            )
        row = self._store.batch(step) if step <= self._last_bound else self._bind(step)
        return self._load(row) if row is not None else None

    def _bind(self, step: int) -> BatchRow | None:
        version_then = version_at(self._limits, step, self.committed_step, self.version)
        oldest = oldest_allowed(self._limits, version_then)
        self._drop_stale(oldest)
        size = self._config.groups_per_batch
        if len(self.ready) < size:
            return None
        chosen = nsmallest(size, self.ready.values(), key=lambda group: group.number)
        group_ids = tuple(group.group_id for group in chosen)
        row = BatchRow(step, version_then, oldest if self._config.on_stale == "mask" else None)
        self._store.bind(row, group_ids)
        for group_id in group_ids:
            del self.ready[group_id]
        self._bound[step] = group_ids
        self._last_bound = step
        return row

    def _drop_stale(self, oldest: int) -> None:
        """The hard bound: what no later step may use leaves now."""
        for group in list(self.ready.values()):
            if self._is_stale(group, oldest):
                self.drop_ready(group.group_id, DropReason.STALE)

    def _is_stale(self, group: ReadyGroup, oldest: int) -> bool:
        """Masking saves a group of which some token is young enough."""
        masks = self._config.on_stale == "mask"
        return (group.version_max if masks else group.version_min) < oldest

    def drop_ready(self, group_id: str, reason: DropReason) -> None:
        del self.ready[group_id]
        self._store.drop_ready(group_id, reason)
        self._ledger.dropped[reason] += 1

    def _load(self, row: BatchRow) -> Batch:
        groups = tuple(
            tuple(_member(payload, row.mask_below) for payload in group)
            for group in self._store.batch_payloads(row.step)
        )
        return Batch(row.step, row.version, cast(Any, groups))

    # --- commits and checkpoints ------------------------------------------------------------------

    def commit(self, step: int, version: int) -> None:
        """The learner trained `step`. Asking again changes nothing."""
        if step <= self.committed_step:
            return
        if step != self.committed_step + 1 or step not in self._bound:
            raise RequestError(
                f"step {step} cannot be committed after step {self.committed_step}: it is not the next one"
            )
        if version < self.version:
            raise RequestError(
                f"step {step} would take the version back from {self.version} to {version}; send Resume first"
            )
        self._commit(step, version)

    def _commit(self, step: int, version: int) -> None:
        group_ids = self._bound.pop(step)
        published = version > self.version
        self._store.commit_batch(step, version, published)
        self._ledger.trained += len(group_ids)
        self._unpublished = 0 if published else self._unpublished + len(group_ids)
        self.committed_step = step
        self._set_version(version)

    def resume(self, step: int, version: int) -> None:
        """The learner's weights are those after `step`: that decides which batches count as trained."""
        if version < 0:
            raise RequestError(f"there is no weight version {version}; versions count from 0")
        if step > self._last_bound:
            raise RequestError(
                f"the checkpoint of step {step} is newer than the store's last batch, that of step "
                f"{self._last_bound}; restore the run folder's buffer.sqlite or resume from an older one"
            )
        if step < self._pruned_step:
            raise RequestError(
                f"step {step} is older than the oldest checkpoint reported, of step {self._pruned_step}, "
                "and the batches after it were pruned; resume from a newer checkpoint, or run with "
                'buffer.keep = "all"'
            )
        # Died between checkpoint and commit (CASES M2): the weights have seen these.
        for seen in range(self.committed_step + 1, step + 1):
            self._commit(seen, version if seen == step else self.version)
        if step < self.committed_step:
            self._store.uncommit_after(step)
            still_bound, self._bound = self.num_bound, self._store.bound_groups()
            self._ledger.trained -= self.num_bound - still_bound
        self.committed_step = step
        self._set_version(version)
        self._unpublished = self._store.trained_since_publish()

    def checkpointed(self, oldest_step: int) -> None:
        """Batches up to `oldest_step` will never be asked for again."""
        step = min(oldest_step, self.committed_step)
        if self._config.keep == "checkpoint" and step > self._pruned_step:
            self._store.prune(step)
            self._store.set_meta("pruned_step", str(step))
            self._pruned_step = step

    def _set_version(self, version: int) -> None:
        self.version = version
        self._store.set_meta("version", str(version))


def _member(payload: Payload, mask_below: int | None) -> Trajectory | Packed:
    """One member as it is handed out: the stored bytes, or a copy without its expired tokens."""
    assert payload.data is not None, "a batch that may be asked for is never pruned"
    if mask_below is None or payload.version_min is None or payload.version_min >= mask_below:
        return Packed(payload.data)
    return mask_expired(decode_trajectory(payload.data), mask_below)


def mask_expired(trajectory: Trajectory, oldest: int) -> Trajectory:
    """`trajectory` with action mask 0 at tokens sampled by versions before `oldest`."""
    mask = np.where(trajectory.versions < oldest, 0, trajectory.action_mask).astype(np.uint8)
    return Trajectory(**{**vars(trajectory), "action_mask": mask})
