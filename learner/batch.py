"""From the buffer's `Batch` to packed micro-batches: no padding, and a group's prompt only once.

Layout of a row: first the *root*, tokens with which every prompt of the update begins (system message,
worked examples; often none); then one *block* per group: the rest of its shared prompt, then each member's
own tokens, one after the other. Position ids of every branch go on from what it continues, and
`learner.attention` lets it see that and itself only, so the result equals separate rows. Without sharing,
there is no root and a block is one trajectory.

Invariants: a target exists exactly for each token with action mask 1 (no observation or prompt token is
ever predicted, T5); the plan is a pure function of batch and settings, so that all ranks, which get the
same batch, agree on it without talking; every rank runs the same number of micro-batches (collectives of
ZeRO-2 and 3 happen in each); weights add up over all ranks and micro-batches of an update.

Called by `learner.trainer`. Shapes: T packed tokens of the row, N targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from buffer.messages import Batch, Trajectory
from configs.schema import LearnerConfig
from learner.advantage import Sample, advantages, has_no_contrast
from learner.losses import token_weights
from learner.members import Member, Members, read_members

_SHORTEST_ROOT = 32  # tokens; a shorter one costs more in bookkeeping than it saves


@dataclass(frozen=True)
class BatchSettings:
    """What the plan depends on besides the batch."""

    learner: LearnerConfig
    max_sequence_tokens: int  # the most tokens a trajectory may sample; for seq-mean-token-sum-norm
    world: int
    hidden_size: int  # sets what an attended pair costs against a token


@dataclass(frozen=True)
class Block:
    """A branch of the root: `prefix` causal tokens, then continuations of it. It sees the root and itself."""

    start: int
    prefix: int
    continuations: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.prefix + sum(self.continuations)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward. numpy; `learner.trainer` moves it to the device."""

    token_ids: np.ndarray  # int64 [1, T]
    position_ids: np.ndarray  # int64 [1, T]
    root: int  # the row's first tokens, which all blocks continue
    blocks: tuple[Block, ...]
    predict_from: np.ndarray  # int64 [N] index of the hidden state that predicts the target
    targets: np.ndarray  # int64 [N] token ids
    behaviour: np.ndarray  # float32 [N] logprobs at sampling time
    advantages: np.ndarray  # float32 [N]
    weights: np.ndarray  # float32 [N] of the token's loss in the update; 0 only in an idle micro-batch
    sequence_of: np.ndarray  # int64 [N] index of the trajectory among the batch's samples
    token_index: np.ndarray  # int64 [N] place of the target in the batch's flat order A

    @property
    def idle(self) -> bool:
        """It only keeps a rank in step with the others."""
        return not self.weights.any()


@dataclass(frozen=True)
class Update:
    """One optimizer update: `ranks[r]` are rank r's micro-batches, equally many for each."""

    ranks: tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True)
class Plan:
    updates: tuple[Update, ...]
    samples: tuple[Sample, ...]
    tokens_action: int
    tokens_packed: int  # computed, after prefix sharing
    tokens_unpacked: int  # of the trajectories as they are
    groups_without_contrast: int
    imbalance: float  # what the dearest rank computes beyond the mean, over the mean

    @property
    def tokens_sampled(self) -> int:
        """Length of the flat order A."""
        return sum(len(sample.turn_of) for sample in self.samples)

    def advantages(
        self, config: LearnerConfig, penalty_A: np.ndarray, values_A: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(advantages, the critic's targets if there is one) [A], from what the model says of the tokens."""
        ends = np.cumsum([len(sample.turn_of) for sample in self.samples])[:-1]
        parts = zip(self.samples, np.split(penalty_A, ends), np.split(values_A, ends), strict=True)
        told = [dataclasses.replace(sample, penalty=p, values=v) for sample, p, v in parts]
        result = advantages(told, config)
        returns = None if result.returns is None else np.concatenate(result.returns)
        return np.concatenate(result.tokens), returns

    def with_advantages(self, advantages_A: np.ndarray) -> Plan:
        """The same plan with these advantages [A]."""
        return dataclasses.replace(
            self,
            updates=tuple(
                Update(tuple(tuple(_advised(m, advantages_A) for m in rank) for rank in update.ranks))
                for update in self.updates
            ),
        )


def _advised(micro: MicroBatch, advantages_A: np.ndarray) -> MicroBatch:
    if micro.idle:
        return micro
    return dataclasses.replace(micro, advantages=advantages_A[micro.token_index])


@dataclass(frozen=True)
class _Unit:
    """Members packed as one block, and what that costs. `prefix` includes the root, `tokens` does not."""

    members: tuple[Member, ...]
    prefix: int
    tokens: int
    cost: float


@dataclass(frozen=True)
class _Row:
    units: tuple[_Unit, ...]
    root: int

    @property
    def tokens(self) -> int:
        return self.root + sum(unit.tokens for unit in self.units)

    @property
    def cost(self) -> float:
        return self.root + sum(unit.cost for unit in self.units)


def plan(batch: Batch, settings: BatchSettings) -> Plan:
    """Cut a batch into updates, ranks and micro-batches. Every rank computes the same plan.

    Advantages are those without KL in the reward and without a critic; what these say of the tokens needs a
    forward pass: see `Plan.advantages`. With `policy_loss = "sft"` there are none: all are 0.
    """
    config = settings.learner
    members = read_members(batch, config, settings.max_sequence_tokens)
    updates, rows = [], []  # rows: by update, rank
    for first in range(config.minibatches):
        chosen = slice(first, None, config.minibatches)
        if batch.groups[chosen]:
            update, its_rows = _plan_update(batch.groups[chosen], members, chosen, settings)
            updates.append(update)
            rows.append(its_rows)
    all_rows = [row for by_rank in rows for of_rank in by_rank for row in of_rank]
    in_loss = [member for row in all_rows for unit in row.units for member in unit.members]
    result = Plan(
        updates=tuple(updates),
        samples=tuple(members.samples),
        tokens_action=sum(len(m.targets) for m in in_loss),
        tokens_packed=sum(row.tokens for row in all_rows),
        tokens_unpacked=sum(len(m.trajectory.token_ids) for m in in_loss),
        groups_without_contrast=sum(has_no_contrast(_rewards(group)) for group in batch.groups),
        imbalance=_imbalance(rows),
    )
    if config.policy_loss == "sft" or config.needs_model_outputs or not members.samples:
        return result
    nothing = np.zeros(result.tokens_sampled)
    return result.with_advantages(result.advantages(config, nothing, nothing)[0])


def _plan_update(
    groups: Sequence[Sequence[Trajectory]], members: Members, chosen: slice, settings: BatchSettings
) -> tuple[Update, list[list[_Row]]]:
    """The update, and what each rank packs in it."""
    grouped = [group for group in members.by_group[chosen] if group]
    root = _root(grouped) if settings.learner.shared_prefix else 0
    shares = _balance(_units(grouped, root, settings), settings.world)
    rows = [_fill(share, root, settings.learner.tokens_per_microbatch) for share in shares]
    count = max(1, *(len(of_rank) for of_rank in rows))
    idle = _idle_microbatch(groups[0][0])
    lengths = _lengths_in(grouped, members)
    ranks = tuple(
        tuple(_pack(row, lengths, members.group_of, settings) for row in of_rank)
        + (idle,) * (count - len(of_rank))
        for of_rank in rows
    )
    return Update(ranks), rows


def _imbalance(rows: list[list[list[_Row]]]) -> float:
    """All ranks wait for the dearest one at the end of every update."""
    loads = [[sum(row.cost for row in of_rank) for of_rank in by_rank] for by_rank in rows]
    mean = sum(sum(by_rank) / len(by_rank) for by_rank in loads)
    return sum(map(max, loads)) / mean - 1 if mean else 0.0


def _lengths_in(grouped: list[list[Member]], members: Members) -> np.ndarray:
    """[S] action tokens of each sample that these groups hold, 0 for the others."""
    lengths = np.zeros_like(members.lengths)
    for member in (member for group in grouped for member in group):
        lengths[member.sequence] = members.lengths[member.sequence]
    return lengths


def _rewards(group: Sequence[Trajectory]) -> np.ndarray:
    return np.array([t.reward for t in group if t.reward is not None], dtype=np.float64)


# --- blocks, balance, bins --------------------------------------------------------------------


def _root(grouped: list[list[Member]]) -> int:
    """How many tokens all prompts of the update share; 0 if that is not worth a branch."""
    everyone = tuple(member for members in grouped for member in members)
    shared = _common_prefix(everyone) if len(grouped) > 1 else 0
    return shared if shared >= _SHORTEST_ROOT else 0


def _units(grouped: list[list[Member]], root: int, settings: BatchSettings) -> list[_Unit]:
    """One unit per group where the budget allows; a larger group is cut, its prompt then repeated."""
    if not settings.learner.shared_prefix:
        return [_unit((m,), m.end, 0, settings) for members in grouped for m in members]
    units: list[_Unit] = []
    waiting = [_unit(tuple(members), _common_prefix(tuple(members)), root, settings) for members in grouped]
    while waiting:
        unit = waiting.pop()
        too_large = root + unit.tokens > settings.learner.tokens_per_microbatch
        too_few = len(units) + len(waiting) + 1 < settings.world
        if len(unit.members) > 1 and (too_large or too_few):
            half = len(unit.members) // 2
            for part in (unit.members[half:], unit.members[:half]):
                waiting.append(_unit(part, _common_prefix(part), root, settings))
        else:
            units.append(unit)
    return units


def _unit(members: tuple[Member, ...], prefix: int, root: int, settings: BatchSettings) -> _Unit:
    rests = [m.end - prefix for m in members]
    tokens = prefix - root + sum(rests)
    pairs = (prefix**2 - root**2) / 2 + sum(rest * (prefix + rest / 2) for rest in rests)
    # A transformer layer spends about 24 h^2 flops on a token and 4 h on an attended pair.
    return _Unit(members, prefix, tokens, tokens + pairs / (6 * settings.hidden_size))


def _common_prefix(members: tuple[Member, ...]) -> int:
    """Length of the longest prefix that all share, within their prompts and what is computed of them."""
    limit = min(min(m.trajectory.prompt_len, m.end) for m in members)
    first = members[0].trajectory.token_ids[:limit]
    for member in members[1:]:
        different = np.flatnonzero(first[:limit] != member.trajectory.token_ids[:limit])
        if len(different):
            limit = int(different[0])
    return limit


def _balance(units: list[_Unit], world: int) -> list[list[_Unit]]:
    """Longest processing time first: the next dearest unit goes to the rank with the least so far."""
    shares: list[list[_Unit]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for unit in sorted(units, key=lambda u: (-u.cost, u.members[0].sequence)):
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.cost
    return shares


def _fill(units: list[_Unit], root: int, budget: int) -> list[_Row]:
    """First fit in falling size; a unit larger than the budget gets a row of its own."""
    bins: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: (-u.tokens, u.members[0].sequence)):
        index = next((i for i, left in enumerate(room) if unit.tokens <= left), None)
        if index is None:
            bins.append([unit])
            room.append(budget - root - unit.tokens)
        else:
            bins[index].append(unit)
            room[index] -= unit.tokens
    return [_Row(tuple(units_of_row), root) for units_of_row in bins]


# --- packing ----------------------------------------------------------------------------------


def _pack(row: _Row, lengths: np.ndarray, group_of: np.ndarray, settings: BatchSettings) -> MicroBatch:
    root = row.root
    ids, positions = [row.units[0].members[0].trajectory.token_ids[:root]], [np.arange(root)]
    blocks, columns = [], []
    start = root
    for unit in row.units:
        first = unit.members[0].trajectory
        ids.append(first.token_ids[root : unit.prefix])
        positions.append(np.arange(root, unit.prefix))
        rests = []
        offset = start + unit.prefix - root  # of the continuation being laid out
        for member in unit.members:
            ids.append(member.trajectory.token_ids[unit.prefix : member.end])
            positions.append(np.arange(unit.prefix, member.end))
            columns.append(_target_columns(member, root, start, unit.prefix, offset))
            rests.append(member.end - unit.prefix)
            offset += rests[-1]
        blocks.append(Block(start, unit.prefix - root, tuple(rest for rest in rests if rest)))
        start = offset
    predict_from, targets, behaviour, sequence_of, token_index = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    return MicroBatch(
        token_ids=np.concatenate(ids).astype(np.int64)[None],
        position_ids=np.concatenate(positions).astype(np.int64)[None],
        root=root,
        blocks=tuple(blocks),
        predict_from=predict_from,
        targets=targets,
        behaviour=behaviour,
        advantages=np.zeros(len(targets), dtype=np.float32),
        weights=token_weights(
            settings.learner.loss_agg_mode, lengths, sequence_of, settings.max_sequence_tokens, group_of
        ),
        sequence_of=sequence_of,
        token_index=token_index,
    )


def _target_columns(
    member: Member, root: int, start: int, prefix: int, offset: int
) -> tuple[np.ndarray, ...]:
    """(predict_from, targets, behaviour, sequence_of, token_index) of one member, each [targets].

    A token at position p is predicted from the hidden state of p - 1, which lies in the row's root, in the
    group's prefix (at `start`) or in the member's continuation (at `offset`).
    """
    trajectory, previous = member.trajectory, member.targets - 1
    count = len(member.targets)
    in_block = np.where(previous < prefix, start + previous - root, offset + previous - prefix)
    return (
        np.where(previous < root, previous, in_block).astype(np.int64),
        trajectory.token_ids[member.targets].astype(np.int64),
        trajectory.logprobs[member.targets].astype(np.float32),
        np.full(count, member.sequence, dtype=np.int64),
        np.arange(member.start, member.start + count),
    )


def _idle_microbatch(trajectory: Trajectory) -> MicroBatch:
    """Keeps a rank in step with the others when it has nothing to compute: one token, weight 0."""
    zero = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids=trajectory.token_ids[:1].astype(np.int64)[None],
        position_ids=np.zeros((1, 1), dtype=np.int64),
        root=0,
        blocks=(Block(0, 1),),
        predict_from=np.zeros(1, dtype=np.int64),
        targets=trajectory.token_ids[:1].astype(np.int64),
        behaviour=zero,
        advantages=zero,
        weights=zero,
        sequence_of=np.zeros(1, dtype=np.int64),
        token_index=np.zeros(1, dtype=np.int64),
    )
