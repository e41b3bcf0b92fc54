"""The transfers of `weightsync.py`: a publisher and receivers in processes of their own, without an engine.

Each round measures a memcpy of the bytes, a bare gloo broadcast of them to the same processes, and a whole
transfer over a backend (messages, checksums on both sides, staging).
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs.roles import RoleSpec
from configs.run_folder import CurveKeys
from configs.schema import RunConfig
from tests.unit.weightsync.support import spec_of
from weightsync import rendezvous, transport
from weightsync.process_groups import BroadcastGroup
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver, Staged
from weightsync.staging import Staging
from weightsync.version import Manifest
from weightsync.wire import GroupSpec, Welcome

WAIT_S = 120.0
TENSORS = 200  # of equal size
SPAWN = multiprocessing.get_context("spawn")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Round:
    """Seconds of wall clock, and CPU seconds of all processes together."""

    memcpy_s: float
    publish_s: float
    raw_s: float
    raw_cpu_s: float
    transfer_s: float
    transfer_cpu_s: float


# --- receivers, each in a process of its own ----------------------------------------------------------


class NoEngine:
    """Stages over the real transport; there is no model to load into."""

    def __init__(self) -> None:
        self._staging = Staging(CPU)

    async def devices(self) -> tuple[str, ...]:
        return (transport.device_name(CPU),)

    async def begin(self, group: GroupSpec, layout: Welcome) -> None:
        self._staging.begin(group, Manifest.of(layout.tensors), layout.bucket_bytes)

    async def staged(self) -> Staged:
        complete, checksum, error = self._staging.status()
        return Staged(complete, (checksum,), error or None)

    async def swap(self, version: int, *, clear_cache: bool) -> float:
        self._staging.tensors()
        self._staging.discard()
        return 0.0

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        raise NotImplementedError("no probe is sent here")

    async def abort(self) -> None:
        self._staging.discard()


def receive(
    endpoint: str, keys: CurveKeys, raw: GroupSpec, nbytes: int, bucket_bytes: int, orders: Any
) -> None:
    torch.set_num_threads(1)
    asyncio.run(
        _receive(
            Receiver(NoEngine(), keys, f"actor-{raw.rank}", WAIT_S, "keep", endpoint=endpoint),
            raw,
            nbytes,
            bucket_bytes,
            orders,
        )
    )


async def _receive(receiver: Receiver, raw: GroupSpec, nbytes: int, bucket_bytes: int, orders: Any) -> None:
    """Obeys: a version is waited for, "raw" takes part in a bare broadcast, None ends."""
    following = asyncio.create_task(receiver.run())
    group = await asyncio.to_thread(open_gloo, raw)
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    while (order := await asyncio.to_thread(orders.recv)) is not None:
        if order == "raw":
            await asyncio.to_thread(broadcast, group, flat, bucket_bytes)
        else:
            await receiver.wait_for_version(order, WAIT_S)
        orders.send("done")
    following.cancel()


def open_gloo(spec: GroupSpec) -> BroadcastGroup:
    group = transport.open_group(spec, CPU)
    assert isinstance(group, BroadcastGroup)
    return group


def broadcast(group: BroadcastGroup, flat: torch.Tensor, bucket_bytes: int) -> None:
    """Nothing but the bytes."""
    for chunk in flat.split(bucket_bytes):
        group.start(chunk)()


@contextmanager
def receivers(count: int, *args: Any) -> Iterator[list[tuple[Any, psutil.Process]]]:
    """(pipe, process) of each; `args` follow the group in `receive`."""
    endpoint, keys, raw, nbytes, bucket_bytes = args
    made = []
    for rank in range(1, count + 1):
        mine, theirs = SPAWN.Pipe()
        group = GroupSpec(**(vars(raw) | {"rank": rank}))
        process = SPAWN.Process(
            target=receive, args=(endpoint, keys, group, nbytes, bucket_bytes, theirs), daemon=True
        )
        process.start()
        made.append((mine, process))
    try:
        yield [(pipe, psutil.Process(process.pid)) for pipe, process in made]
    finally:
        for pipe, process in made:
            pipe.send(None)
            process.join(WAIT_S)


# --- without an engine --------------------------------------------------------------------------------


def measure_transfer(backend: str, count: int, nbytes: int, rounds: int) -> list[Round]:
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.model_validate({"weightsync": {"backend": backend}})
        return measure_rounds(spec_of(config, Path(folder)), count, nbytes, rounds)


def measure_rounds(spec: RoleSpec, count: int, nbytes: int, rounds: int) -> list[Round]:
    size = nbytes // TENSORS // 2
    tensors = [(f"layer.{i}", torch.randn(size).to(torch.bfloat16)) for i in range(TENSORS)]
    keys = CurveKeys(*zmq.curve_keypair(), *zmq.curve_keypair())
    bucket_bytes = spec.config.weightsync.bucket_mb << 20
    store = rendezvous.serve_store("127.0.0.1", WAIT_S)
    raw = GroupSpec("gloo", "127.0.0.1", store.port, "raw", 0, count + 1, WAIT_S)
    metadata = [(name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors]
    with closing(Publisher(spec, metadata, keys)) as publisher:
        flat = torch.zeros(Manifest.of(metadata).nbytes, dtype=torch.uint8)
        with receivers(count, publisher.endpoint, keys, raw, flat.numel(), bucket_bytes) as peers:
            group = open_gloo(raw)
            return [
                one_round(v, publisher, tensors, group, flat, bucket_bytes, peers) for v in range(rounds + 1)
            ][1:]


def one_round(
    version: int,
    publisher: Publisher,
    tensors: list[tuple[str, torch.Tensor]],
    group: BroadcastGroup,
    flat: torch.Tensor,
    bucket_bytes: int,
    peers: list[tuple[Any, psutil.Process]],
) -> Round:
    memcpy_s = seconds(lambda: torch.empty_like(flat).copy_(flat))
    publish_s = seconds(lambda: publisher.publish(version + 1, tensors))
    before = cpu_seconds(peers)
    transfer_s = with_peers(peers, version + 1, lambda: publisher.wait_idle(WAIT_S))
    transfer_cpu_s = cpu_seconds(peers) - before
    before = cpu_seconds(peers)
    raw_s = with_peers(peers, "raw", lambda: broadcast(group, flat, bucket_bytes))
    raw_cpu_s = cpu_seconds(peers) - before
    return Round(memcpy_s, publish_s, raw_s, raw_cpu_s, transfer_s, transfer_cpu_s)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def with_peers(peers: list[tuple[Any, psutil.Process]], order: object, action: Callable[[], object]) -> float:
    started = time.perf_counter()
    for pipe, _ in peers:
        pipe.send(order)
    action()
    for pipe, _ in peers:
        if not pipe.poll(WAIT_S):
            raise TimeoutError(f"a receiver did not end {order!r} within {WAIT_S:g} s")
        pipe.recv()
    return time.perf_counter() - started


def cpu_seconds(peers: list[tuple[Any, psutil.Process]]) -> float:
    times = [psutil.Process().cpu_times(), *(process.cpu_times() for _, process in peers)]
    return sum(one.user + one.system for one in times)


def median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, rounds))


def print_transfers(backends: Sequence[str], counts: Sequence[int], nbytes: int, rounds: int) -> None:
    table = Table(title=f"{nbytes / 1e6:.0f} MB, medians of {rounds} updates")
    for column in (
        "receivers",
        "backend",
        "memcpy",
        "publish",
        "gloo broadcast",
        "transfer",
        "of memcpy",
        "of broadcast",
        "CPU of broadcast",
    ):
        table.add_column(column, justify="right")
    for count, backend in itertools.product(counts, backends):
        measured = measure_transfer(backend, count, nbytes, rounds)
        table.add_row(
            str(count),
            backend,
            *(
                f"{median(measured, value):.3f} s"
                for value in (
                    lambda r: r.memcpy_s,
                    lambda r: r.publish_s,
                    lambda r: r.raw_s,
                    lambda r: r.transfer_s,
                )
            ),
            f"{median(measured, lambda r: r.transfer_s / r.memcpy_s):.1f}x",
            f"{median(measured, lambda r: r.transfer_s / r.raw_s):.2f}x",
            f"{median(measured, lambda r: r.transfer_cpu_s / max(r.raw_cpu_s, 1e-3)):.2f}x",
        )
    Console(width=120).print(table)
