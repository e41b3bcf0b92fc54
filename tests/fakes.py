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
    RoleStatus,
    StatusReply,
    Trajectory,
)
from configs.roles import RoleSpec
from launcher.interfaces import Poll, Running

# --- actors.engine.Engine ---------------------------------------------------------------------------


class FakeEngine:
    """Answers each request by the script: request (prompt ids, sampling, request id) → token ids.

    `version` is the weight version it labels tokens with; a test may change it between or during requests.
    `requests` keeps every prompt that was asked for.
    """

    def __init__(self, script: Callable[[list[int], Sampling, str], Sequence[int]]) -> None:
        self._script = script
        self.version = 0
        self.kv_cache_tokens: int | None = None
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
        self._beat = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at after every heartbeat."""
        while not condition():
            self._beat.clear()
            await self._beat.wait()

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
                self._beat.set()
                finished = self.finish_when_put and len(self.put) >= self.expected
                return HeartbeatAck(0, "tcp://publisher", self.lost, self.drain, finished)
        raise AssertionError(f"unexpected {message}")


class FakeWeights:
    """Weights that never change; remembers the endpoint it was told."""

    version = 0
    cache_salt: str | None = None
    endpoint: str | None = None

    def set_endpoint(self, endpoint: str) -> None:
        self.endpoint = endpoint

    async def run(self) -> None:
        await asyncio.Event().wait()

    def take_metrics(self) -> dict[str, float]:
        return {}


# --- launcher.interfaces.Roles and Buffer -------------------------------------------------------------


class FakeRoles:
    """Processes that run until a test ends them. `ends` holds how each handle has ended."""

    def __init__(self) -> None:
        self.started: list[RoleSpec] = []
        self.killed: list[str] = []  # names, in order
        self.ends: dict[int, Poll] = {}  # by handle
        self._rendezvous = 0
        self.places = 100  # for more actors

    def start(self, spec: RoleSpec) -> int:
        self.started.append(spec)
        return len(self.started) - 1

    def poll(self, handle: int) -> Poll:
        return self.ends.get(handle, Running())

    def kill(self, handle: int) -> None:
        self.killed.append(self.started[handle].name)

    def room(self, specs: Sequence[RoleSpec]) -> int:
        return min(len(specs), self.places)

    def rendezvous(self) -> str:
        self._rendezvous += 1
        return f"127.0.0.1:{9000 + self._rendezvous}"

    def end(self, name: str, how: Poll) -> None:
        """End the newest process of the role."""
        self.ends[max(i for i, spec in enumerate(self.started) if spec.name == name)] = how

    def starts(self, name: str) -> int:
        return sum(spec.name == name for spec in self.started)


class FakeStatusBuffer:
    """Answers with the roles that the test says have been heard; `silent` answers nothing."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}  # role name → seconds since heard
        self.step = 0
        self.finished = False
        self.balanced = True
        self.silent = False
        self.reports: tuple[tuple[int, str, str, float, dict[str, float]], ...] = ()
        self.drained: list[str] = []
        self.released: list[str] = []
        self.actors_wanted = 0
        self.imbalance: tuple[str, ...] = ()
        self.asked_since: list[int] = []

    def status(self, since: int) -> StatusReply | None:
        self.asked_since.append(since)
        if self.silent:
            return None
        roles = tuple(
            RoleStatus(name.split("-")[0], name, "running", 0, 0, seconds)
            for name, seconds in self.heard.items()
        )
        reports = tuple(report for report in self.reports if report[0] > since)
        ledger = {"leased": 4, "trained": 3, "running": 1}
        return StatusReply(
            "run",
            0,
            self.step,
            roles,
            ledger,
            self.balanced,
            reports,
            self.finished,
            self.imbalance,
            self.actors_wanted,
        )

    def drain(self, actors: Sequence[str]) -> None:
        self.drained += actors

    def scale(self, actors: int) -> bool:
        self.actors_wanted = actors
        return not self.silent

    def release(self, actor: str) -> None:
        self.released.append(actor)


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
