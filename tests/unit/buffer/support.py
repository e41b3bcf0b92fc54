"""What the buffer's tests share: small configs, trajectories, and a broker over a real store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from buffer.broker import Broker
from buffer.codec import Packed, decode_trajectory
from buffer.messages import (
    Batch,
    CommitStep,
    GetBatch,
    Heartbeat,
    Lease,
    LeaseGrant,
    LeaseRequest,
    PutAck,
    PutTrajectory,
    Status,
    StatusReply,
    Trajectory,
    Turn,
)
from buffer.store import open_store
from configs.schema import RunConfig
from configs.shares import Share

T0 = 1000.0  # of the tests' clock


def config(
    *,
    steps: int = 100,
    group_size: int = 2,
    batch: int = 2,
    staleness: int = 1,
    every: int = 1,
    spare: int = 0,
    evaluate_every: int = 0,
    **buffer: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "actors": {"group_size": group_size, "spare_members": spare},
            "buffer": {"groups_per_batch": batch, "max_staleness": staleness, **buffer},
            "learner": {"steps": steps},
            "weightsync": {"every": every},
            "eval": {"every_steps": evaluate_every},
        }
    )


def trajectory(
    group_id: str = "0-1",
    index: int = 0,
    *,
    prompt_index: int = 1,
    reward: float | None = 1.0,
    version: int = 0,
    prompt: int = 3,
    sampled: int = 4,
    lease_id: str = "0-1.1",
    actor: str = "actor-0",
) -> Trajectory:
    """`prompt` tokens, then `sampled` tokens, then one observation token."""
    n = prompt + sampled + 1
    mask = np.zeros(n, dtype=np.uint8)
    mask[prompt : prompt + sampled] = 1
    call = {"call_id": "c1", "name": "search", "outcome": "ok", "queued": 1.0, "cached": False}
    return Trajectory(
        trajectory_id=f"{group_id}/{index}",
        group_id=group_id,
        index=index,
        lease_id=lease_id,
        actor=actor,
        task="calculator",
        prompt_index=prompt_index,
        prompt_len=prompt,
        token_ids=np.arange(n, dtype="<i4"),
        action_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype("<f4"),
        versions=np.where(mask, version, -1).astype("<i4"),
        turns=(Turn(prompt, prompt + sampled, n, "stop", (call,)),),
        stop_reason="answer" if reward is not None else "error",
        reward=reward,
        reward_components={"exact": reward} if reward is not None else {},
        error=None if reward is not None else "the tool server is gone",
        metrics={"generate_s": 0.25},
    )


class Buffer:
    """A broker over a real store with a clock of its own; every request is one committed transaction."""

    def __init__(
        self,
        path: Path,
        run_config: RunConfig,
        num_prompts: int = 1000,
        shares: Sequence[Share] = (),
        num_held_out: int = 0,
    ) -> None:
        self.path, self.config, self.num_prompts, self.shares = path, run_config, num_prompts, shares
        self.num_held_out = num_held_out
        self.now = T0
        self._open()

    def _open(self) -> None:
        self.store = open_store(self.path, "run")
        # These crashes lose the process, not the machine: fsync would only slow the tests.
        self.store._connection.execute("PRAGMA synchronous = OFF")
        self.broker = Broker(
            self.config,
            self.store,
            self.num_prompts,
            "run",
            self.now,
            wall=lambda: self.now,
            shares=self.shares,
            num_held_out=self.num_held_out,
        )

    def crash(self, run_config: RunConfig | None = None) -> None:
        """Lose everything that is not in the store; come back, maybe with another config."""
        self.store.close()
        self.config = run_config or self.config
        self._open()

    def close(self) -> None:
        self.store.close()

    def __call__(self, message: Any) -> Any:
        self.store.begin()
        self.broker.tick(self.now)
        reply = self.broker.handle(message, self.now)
        self.store.commit()
        return reply

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.begin()
        self.broker.tick(self.now)
        self.store.commit()

    # --- what actors and learners do ----------------------------------------------------------------

    def lease(self, actor: str = "actor-0", most: int = 100, version: int | None = None) -> tuple[Lease, ...]:
        return self.grant(actor, most, version).leases

    def grant(self, actor: str = "actor-0", most: int = 100, version: int | None = None) -> LeaseGrant:
        version = self.status().version if version is None else version
        grant = self(LeaseRequest(actor, most, version))
        assert isinstance(grant, LeaseGrant)
        return grant

    def put(self, lease: Lease, index: int, reward: float | None = None, **more: Any) -> PutAck:
        """Put one member; rewards differ within a group unless given."""
        more = {"reward": float(index) if reward is None else reward, "version": lease.version, **more}
        return self(PutTrajectory(member(lease, index, **more)))

    def complete(self, lease: Lease, **more: Any) -> None:
        for index in lease.missing:
            self.put(lease, index, **more)

    def batch(self, step: int) -> Batch | None:
        return self(GetBatch(step, 0.0)).batch

    def train(self, step: int, version: int | None = None) -> None:
        assert self.batch(step) is not None
        self(CommitStep(step, step if version is None else version))

    def beat(self, actor: str, *leases: Lease, state: str = "running", version: int = 0) -> Any:
        return self(Heartbeat("actor", actor, tuple(lease.lease_id for lease in leases), version, state))

    def status(self) -> StatusReply:
        return self(Status())

    def places(self) -> dict[str, int]:
        """The ledger without its zeros."""
        return {name: count for name, count in self.status().ledger.items() if count}


def member(lease: Lease, index: int, **more: Any) -> Trajectory:
    made = trajectory(lease.group_id, index, prompt_index=lease.prompt_index, **more)
    return replace(made, lease_id=lease.lease_id)


def members(batch: Batch) -> list[list[Trajectory]]:
    """The batch's groups, decoded where they were handed out as stored."""
    return [
        [decode_trajectory(one.payload) if isinstance(one, Packed) else one for one in group]
        for group in batch.groups
    ]


def same(one: Trajectory, other: Trajectory) -> bool:
    """Equality that looks into arrays."""
    mine, theirs = vars(one), vars(other)
    return all(
        np.array_equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype
        if isinstance(mine[name], np.ndarray)
        else mine[name] == theirs[name] and type(mine[name]) is type(theirs[name])
        for name in mine
    )
