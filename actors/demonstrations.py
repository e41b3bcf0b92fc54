"""An actor without an engine: puts demonstrations in the buffer as if a policy had sampled them.

`tasks.demonstrations` turns a row into tokens and mask; here it becomes the trajectory of a lease. Started by
Ray through `main` in a run of `launch.py sft`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.renderer import load_tokenizer
from buffer.client import AsyncBufferClient
from buffer.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    PutTrajectory,
    StopReason,
    Trajectory,
    Turn,
)
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from tasks.demonstrations import Rendered, render
from tasks.readers import PlacedRow, read_rows

CALL_TIMEOUT_S = 120.0  # of one request to the buffer, restarts of the buffer included
GROUPS_AT_ONCE = 64


def main(spec: RoleSpec) -> None:
    asyncio.run(_main(spec))


async def _main(spec: RoleSpec) -> None:
    assert spec.config.sft.data is not None, "only an sft run starts this actor"
    rows = read_rows(spec.config.sft.data, spec.config_dir)
    tokenizer = load_tokenizer(spec.model_path)
    longest = spec.config.task.max_trajectory_tokens
    keys = RunFolder(spec.run_dir).read_keys()
    client = AsyncBufferClient(spec.buffer_endpoint, keys, "actor", spec.name)
    try:
        await client.call(Hello("actor", spec.name), CALL_TIMEOUT_S)
        await put_demonstrations(rows, tokenizer, longest, client, spec.name)
    finally:
        await client.close()


async def put_demonstrations(
    rows: Sequence[PlacedRow], tokenizer: Any, longest: int, client: Any, name: str
) -> None:
    """Answer leases with the rows they name until the run is finished or this actor is drained.

    Raises BadData for a row that cannot be rendered.
    """
    while True:
        ack = await client.call(Heartbeat("actor", name), CALL_TIMEOUT_S)
        assert isinstance(ack, HeartbeatAck)
        if ack.finished or ack.drain:
            break
        # It has no weights of its own: its rows are as good for the newest version as for any.
        grant = await client.call(LeaseRequest(name, GROUPS_AT_ONCE, ack.version), CALL_TIMEOUT_S)
        assert isinstance(grant, LeaseGrant)
        for lease in grant.leases:
            rendered = render(rows[lease.prompt_index], tokenizer, longest)
            for index in lease.missing:
                trajectory = _trajectory(rendered, lease, index, name)
                await client.call(PutTrajectory(trajectory), CALL_TIMEOUT_S)
        if grant.reason:
            await asyncio.sleep(grant.retry_after_s)
    await client.call(Heartbeat("actor", name, state="finished"), CALL_TIMEOUT_S)


def _trajectory(rendered: Rendered, lease: Lease, index: int, actor: str) -> Trajectory:
    mask = np.array(rendered.action_mask, dtype=np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    starts, ends = edges[::2], edges[1::2]
    observed = [*starts[1:], len(mask)]
    spans = zip(starts.tolist(), ends.tolist(), map(int, observed), strict=True)
    return Trajectory(
        trajectory_id=f"{lease.group_id}/{index}",
        group_id=lease.group_id,
        index=index,
        lease_id=lease.lease_id,
        actor=actor,
        task="demonstrations",
        prompt_index=lease.prompt_index,
        prompt_len=int(starts[0]),
        token_ids=np.array(rendered.token_ids, dtype="<i4"),
        action_mask=mask,
        logprobs=np.zeros(len(mask), dtype="<f4"),  # nobody sampled them
        versions=np.where(mask, lease.version, -1).astype("<i4"),
        turns=tuple(Turn(start, end, observation_end, "stop") for start, end, observation_end in spans),
        stop_reason=StopReason.ANSWER,
        reward=0.0,
    )
