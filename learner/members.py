"""From the buffer's `Batch` to its members: who is in the loss, and what advantages are computed from.

Invariant: every scored trajectory is a sample, in the batch's order; a member without a sampled token, or one
that `mask_truncated` leaves out, has a say in its group's mean but no place in the loss. The action tokens of
all samples, one after the other, are the batch's flat order A, in which per-token arrays are kept.
Called by `learner.batch`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from buffer.messages import Batch, StopReason, Trajectory
from configs.schema import LearnerConfig
from learner.advantage import Sample, overlong_penalty

_CUT_BY_A_LIMIT = {
    StopReason.MAX_TURNS,
    StopReason.MAX_TOKENS,
    StopReason.CONTEXT_LENGTH,
    StopReason.DEADLINE,
}


@dataclass(frozen=True)
class Member:
    """A trajectory in the loss."""

    trajectory: Trajectory
    sequence: int  # index of its sample
    targets: np.ndarray  # positions in the trajectory with action mask 1
    end: int  # tokens to compute: all before the last target
    start: int  # of its targets in the flat order A


@dataclass(frozen=True)
class Members:
    by_group: list[list[Member]]  # only those in the loss; a group may be empty
    samples: list[Sample]  # all scored trajectories
    lengths: np.ndarray  # [S] action tokens of each sample in the loss, else 0
    group_of: np.ndarray  # [S]


def read_members(batch: Batch, config: LearnerConfig, max_sequence_tokens: int) -> Members:
    """Raises ValueError for a trajectory whose mask cannot be."""
    by_group: list[list[Member]] = []
    samples: list[Sample] = []
    lengths: list[int] = []
    start = 0
    for group_index, group in enumerate(batch.groups):
        members = []
        for trajectory in group:
            if trajectory.reward is None:
                continue
            targets = _targets(trajectory)
            cut = config.mask_truncated and trajectory.stop_reason in _CUT_BY_A_LIMIT
            if len(targets) and not cut:
                members.append(Member(trajectory, len(samples), targets, int(targets[-1]), start))
            lengths.append(0 if cut else len(targets))
            sample = _sample(trajectory, group_index, targets, config, max_sequence_tokens)
            samples.append(replace(sample, in_loss=not cut))
            start += len(targets)
        by_group.append(members)
    group_of = np.array([sample.group for sample in samples], dtype=np.int64)
    return Members(by_group, samples, np.array(lengths, dtype=np.int64), group_of)


def _targets(trajectory: Trajectory) -> np.ndarray:
    targets = np.flatnonzero(trajectory.action_mask)
    if len(targets) and targets[0] == 0:
        raise ValueError(
            f"trajectory {trajectory.trajectory_id}: its first token is marked as sampled, "
            "but nothing precedes it that could predict it"
        )
    return targets


def _sample(
    trajectory: Trajectory, group: int, targets: np.ndarray, config: LearnerConfig, longest: int
) -> Sample:
    assert trajectory.reward is not None
    nothing = np.zeros(len(targets))
    sampled = int(np.count_nonzero(trajectory.versions >= 0))  # expired tokens, which are no targets, too
    return Sample(
        group=group,
        reward=trajectory.reward + overlong_penalty(sampled, longest, config),
        turn_of=turn_of(trajectory, targets),
        turn_rewards=np.array([turn.reward for turn in trajectory.turns]),
        penalty=nothing,
        values=nothing,
    )


def turn_of(trajectory: Trajectory, targets: np.ndarray) -> np.ndarray:
    """The turn [N] in which each target was sampled; 0 where the trajectory lists no turns."""
    starts = np.array([turn.start for turn in trajectory.turns], dtype=np.int64)
    return np.maximum(np.searchsorted(starts, targets, side="right") - 1, 0)
