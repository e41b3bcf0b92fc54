"""Fakes of Slipstream's own interfaces, for tests of what stands on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from actors.engine import Sampled, Sampling
from buffer.messages import (
    Heartbeat,
    HeartbeatAck,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Ok,
    PutAck,
    PutTrajectory,
    ReturnLeases,
    Trajectory,
)

# --- actors.engine.Engine ---------------------------------------------------------------------------


class FakeEngine:
    """Answers each request by the script: request (prompt ids, sampling, request id) → token ids.

    `version` is the weight version it labels tokens with; a test may change it between or during requests.
    `requests` keeps every prompt that was asked for.
    """

    def __init__(self, script: Callable[[list[int], Sampling, str], Sequence[int]]) -> None:
        self._script = script
        self.version = 0
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.closed = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sampled:
        self.requests.append((list(prompt_ids), sampling, request_id))
        await asyncio.sleep(0)
        ids = list(self._script(list(prompt_ids), sampling, request_id))
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Sampled(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="length" if cut else "stop",
            prompt_tokens=len(prompt_ids),
        )

    async def close(self) -> None:
        self.closed = True


# --- actors.actor.BufferCalls and Weights -------------------------------------------------------------


class FakeBuffer:
    """Grants the leases it was given, remembers what was put, and ends the run when all is put."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = list(leases)
        self.expected = sum(len(lease.missing) for lease in leases)
        self.put: list[Trajectory] = []
        self.returned: list[str] = []
        self.beats: list[Heartbeat] = []
        self.lost: tuple[str, ...] = ()
        self.drain = False
        self.finish_when_put = True

    async def call(self, message: object, timeout_s: float) -> object:
        await asyncio.sleep(0)
        match message:
            case LeaseRequest(max_groups=n):
                granted, self.leases = self.leases[:n], self.leases[n:]
                return LeaseGrant(tuple(granted), "" if len(granted) == n else "capacity", 0.01)
            case PutTrajectory(trajectory=trajectory):
                self.put.append(trajectory)
                return PutAck(stored=True, duplicate=False)
            case ReturnLeases(lease_ids=lease_ids):
                self.returned += lease_ids
                return Ok()
            case Heartbeat():
                self.beats.append(message)
                finished = self.finish_when_put and len(self.put) >= self.expected
                return HeartbeatAck(0, "tcp://publisher", self.lost, self.drain, finished)
        raise AssertionError(f"unexpected {message}")


class FakeWeights:
    """Weights that never change; remembers the endpoint it was told."""

    version = 0
    endpoint: str | None = None

    def set_endpoint(self, endpoint: str) -> None:
        self.endpoint = endpoint

    async def run(self) -> None:
        await asyncio.Event().wait()

    def take_metrics(self) -> dict[str, float]:
        return {}
