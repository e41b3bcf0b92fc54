"""A fake engine over the real staging, and a publisher and receivers around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
import zmq

from configs.roles import RoleSpec
from configs.run_folder import CurveKeys
from configs.schema import RunConfig, WeightSyncConfig
from weightsync import transport
from weightsync.publisher import Publisher
from weightsync.receiver import EngineBroken, Receiver, Staged, TransferFailed
from weightsync.staging import Staging
from weightsync.version import Manifest
from weightsync.wire import GroupSpec, Welcome

METADATA = [
    ("embed.weight", "float32", (64, 16)),
    ("norm.bias", "bfloat16", (7,)),
    ("head.weight", "float32", (3, 5)),
]
WAIT_S = 20.0  # more than any test needs; only a failing test waits for it


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value, dtype=getattr(torch, dtype))) for name, dtype, shape in METADATA]


def new_keys() -> CurveKeys:
    return CurveKeys(*zmq.curve_keypair(), *zmq.curve_keypair())


def learner_spec(timeout_s: float, run_dir: Path = Path("unused"), **weightsync: object) -> RoleSpec:
    config = RunConfig(weightsync=WeightSyncConfig.model_validate({"timeout_s": timeout_s, **weightsync}))
    return spec_of(config, run_dir)


def spec_of(config: RunConfig, run_dir: Path = Path("unused")) -> RoleSpec:
    """A learner that publishes only: what a `Publisher` reads, the rest filled in."""
    return RoleSpec(
        role="learner",
        name="learner-0",
        rank=0,
        world=1,
        config=config,
        run_dir=run_dir,
        run_id="run",
        config_dir=Path("unused"),
        model_path=Path("unused"),
        num_prompts=1,
        buffer_endpoint="tcp://127.0.0.1:1",
        device="cpu",
        threads=1,
    )


@contextmanager
def publisher(
    keys: CurveKeys, timeout_s: float = WAIT_S, run_dir: Path = Path("unused"), **weightsync: object
) -> Iterator[Publisher]:
    made = Publisher(learner_spec(timeout_s, run_dir, **weightsync), METADATA, keys)
    try:
        yield made
    finally:
        made.close()


class StagedEngine:
    """An `UpdatableEngine` whose model is a dict of tensors; the bytes come over the real transport."""

    def __init__(self) -> None:
        self.model: dict[str, torch.Tensor] = {}
        self.swaps: list[tuple[int, bool]] = []  # (version, clear_cache)
        self.aborts = 0
        self.begun = asyncio.Event()
        self.breaks_in_swap = False
        self.damages = 0  # transfers whose bytes are damaged after they came
        self.misloads = 0  # probes that find something else than was sent
        self.refusals = 0  # calls of `begin` that fail
        self._staging = Staging(torch.device("cpu"))

    async def devices(self) -> tuple[str, ...]:
        return (transport.device_name(torch.device("cpu")),)

    async def begin(self, group: GroupSpec, layout: Welcome) -> None:
        self.begun.set()
        if self.refusals:
            self.refusals -= 1
            raise TransferFailed("refused")
        self._staging.begin(group, Manifest.of(layout.tensors), layout.bucket_bytes)

    async def staged(self) -> Staged:
        complete, checksum, error = self._staging.status()
        if complete and self.damages:
            self.damages -= 1
            checksum ^= 1
        return Staged(complete, (checksum,), error or None)

    async def swap(self, version: int, *, clear_cache: bool) -> float:
        if self.breaks_in_swap:
            raise EngineBroken("half loaded")
        self.model = {name: tensor.clone() for name, tensor in self._staging.tensors()}
        self._staging.discard()
        self.swaps.append((version, clear_cache))
        return 0.25

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The value of the weights for every token."""
        if self.misloads:
            self.misloads -= 1
            return [-9.0] * (len(token_ids) - 1)
        return list(self.values()) * (len(token_ids) - 1)

    async def abort(self) -> None:
        self.aborts += 1
        self._staging.discard()

    def values(self) -> set[float]:
        return {value for tensor in self.model.values() for value in tensor.float().flatten().tolist()}


class HangingEngine(StagedEngine):
    """While `hangs`, agrees to every transfer, never joins its group and never lets go."""

    hangs = True

    async def begin(self, group: GroupSpec, layout: Welcome) -> None:
        self.begun.set()
        if not self.hangs:
            await super().begin(group, layout)

    async def abort(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()


@asynccontextmanager
async def running(receiver: Receiver):
    """The receiver's task; cancelled at the end, and its error raised if it had failed."""
    task = asyncio.create_task(receiver.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)
        if not task.cancelled():
            task.result()
