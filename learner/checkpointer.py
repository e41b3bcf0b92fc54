"""Writes checkpoints while the next steps train.

Invariants: the trainer waits for a copy in memory, never for the disk; a checkpoint is reported only once it
is complete and synced on every rank; an error of any rank's writing is raised on all. `start`, `poll` and
`finish` are collectives, called by every rank at the same steps. Called by `learner.learner`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist

from learner import checkpoint
from learner.checkpoint import Progress, Snapshot
from learner.trainer import Trainer

_RUNNING, _WRITTEN, _FAILED = 1, 2, 0  # the least of all ranks' decides


class CheckpointFailed(RuntimeError):
    """A rank could not write its share."""


class Checkpointer:
    """At most one checkpoint is being written; starting the next waits for it."""

    def __init__(self, trainer: Trainer, folder: Path, keep: int, keep_best: int) -> None:
        self._trainer, self._folder = trainer, folder
        self._keep, self._keep_best = keep, keep_best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Snapshot, Future[None]] | None = None
        if trainer.rank == 0:
            checkpoint.clear_leftovers(folder)
        dist.barrier()

    def start(self, progress: Progress, score: float) -> int | None:
        """Copy the state now and write it in the background. Returns the step that the wait for an earlier
        one completed, as `finish` does."""
        done = self.finish()
        taken = checkpoint.snapshot(self._trainer, progress, score)
        self._pending = taken, self._thread.submit(checkpoint.write, taken, self._folder)
        return done

    def poll(self) -> int | None:
        """The step of the checkpoint that has just become complete, if one has."""
        if self._pending is None:
            return None
        return self._settle() if self._state() == _WRITTEN else None

    def finish(self) -> int | None:
        """Wait until what is being written is complete; its step, None if there was nothing."""
        if self._pending is None:
            return None
        timeout_s = self._trainer.config.timeout_s
        wait((self._pending[1],), timeout_s)
        if self._state() == _RUNNING:
            raise CheckpointFailed(
                f"the checkpoint of step {self._pending[0].progress.step} was not written to {self._folder} "
                f"within learner.timeout_s = {timeout_s:g} s"
            )
        return self._settle()

    def oldest_step(self) -> int:
        """The oldest step that a run may be resumed from; 0 without a checkpoint. Best ones do not count."""
        newest = checkpoint.complete_ones(self._folder)[-self._keep :]
        return checkpoint.step_of(newest[0]) if newest else 0

    def close(self) -> None:
        """Let the thread end; an unfinished checkpoint stays without a name."""
        self._thread.shutdown(wait=True)

    def _state(self) -> int:
        """The least of all ranks' states. Raises CheckpointFailed on all if one rank failed."""
        assert self._pending is not None
        future = self._pending[1]
        error = future.exception() if future.done() else None
        mine = _FAILED if error is not None else _WRITTEN if future.done() else _RUNNING
        if self._trainer.world > 1:
            states = torch.tensor(mine, device=self._trainer.device)
            dist.all_reduce(states, op=dist.ReduceOp.MIN)
            mine = int(states)
        if mine == _FAILED:
            reason = f"{type(error).__name__}: {error}" if error else "another rank failed; see its log"
            raise CheckpointFailed(
                f"the checkpoint of step {self._pending[0].progress.step} in {self._folder} could not be "
                f"written: {reason}"
            ) from error
        return mine

    def _settle(self) -> int:
        assert self._pending is not None
        taken, self._pending = self._pending[0], None
        if self._trainer.rank == 0:
            checkpoint.complete(taken, self._folder, self._keep, self._keep_best)
        dist.barrier()  # afterwards it exists for every rank
        return taken.progress.step
