"""What does it cost to bring new weights into running engines, beside what the bytes alone would cost?

    python benchmarks/weightsync.py [--megabytes 269] [--receivers 1,2,4] [--backends gloo,shm,disk]
    python benchmarks/weightsync.py --model smollm2-135m-instruct      # a real vLLM engine as well

Without an engine: a publisher and receivers in processes of their own. Each round measures a memcpy of the
bytes, a bare gloo broadcast of them to the same processes, and a whole transfer over a backend (messages,
checksums on both sides, staging). With an engine: how long generation stands still, beside the bare load
of the same weights into the idle engine. Read the ratios: their parts come from the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
from metrics import names
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


def learner_spec(config: RunConfig, run_dir: Path = Path("unused")) -> RoleSpec:
    unused = Path("unused")
    return RoleSpec(
        role="learner",
        name="learner-0",
        rank=0,
        world=1,
        config=config,
        run_dir=run_dir,
        run_id="bench",
        config_dir=unused,
        model_path=unused,
        num_prompts=1,
        buffer_endpoint="tcp://127.0.0.1:1",
        device="cpu",
        threads=1,
    )


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
        return measure_rounds(learner_spec(config, Path(folder)), count, nbytes, rounds)


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


# --- with an engine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """One update of a real engine. `load_s` is the call that loads, `pause_s` all that generation sees."""

    busy: bool
    memcpy_s: float
    load_s: float
    pause_s: float
    transfer_s: float


async def measure_engine(model_path: Path, rounds: int, in_flight: int) -> list[Update]:
    from transformers import AutoModelForCausalLM

    from actors.vllm_engine import VllmEngine
    from weightsync.vllm_engine import VllmWeights

    config = RunConfig()
    engine = await VllmEngine.start(config, model_path, "cpu", 1, seed=0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=config.model.dtype)
    tensors = [(name, p.detach()) for name, p in model.named_parameters()]
    metadata = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]
    keys = CurveKeys(*zmq.curve_keypair(), *zmq.curve_keypair())
    loads: list[float] = []
    engine.llm.finish_weight_update = timed(engine.llm.finish_weight_update, loads)
    updates = []
    with closing(Publisher(learner_spec(config), metadata, keys)) as publisher:
        receiver = Receiver(
            VllmWeights(engine.llm), keys, "actor-0", WAIT_S, "keep", endpoint=publisher.endpoint
        )
        following = asyncio.create_task(receiver.run())
        for version in range(1, 2 * rounds + 3):
            busy = version % 2 == 0
            requests = [asyncio.create_task(keep_generating(engine, i)) for i in range(in_flight * busy)]
            receiver.take_metrics()
            publisher.publish(version, tensors)
            await receiver.wait_for_version(version, WAIT_S)
            await asyncio.to_thread(publisher.wait_idle, WAIT_S)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            taken = receiver.take_metrics()
            memcpy_s = seconds(lambda: [tensor.clone() for _, tensor in tensors])
            updates.append(
                Update(busy, memcpy_s, loads[-1], taken[names.ACTOR_PAUSED_S], taken[names.SYNC_TRANSFER_S])
            )
        following.cancel()
    await engine.close()
    return updates[2:]  # the first of each kind warms up


async def keep_generating(engine: Any, number: int) -> None:
    from actors.engine import Sampling

    sampling = Sampling(temperature=1.0, max_tokens=200)
    for turn in range(1000):
        await engine.generate([number + 10] * 64, sampling, f"{number}#{turn}")


def timed(call: Callable[..., Awaitable[Any]], taken: list[float]) -> Callable[..., Awaitable[Any]]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            taken.append(time.perf_counter() - started)

    return wrapper


def print_engine(model: str, rounds: int, in_flight: int) -> None:
    from launcher.preflight import prepare_model

    updates = asyncio.run(measure_engine(prepare_model(model), rounds, in_flight))
    idle, busy = ([u for u in updates if u.busy is wanted] for wanted in (False, True))
    bare = statistics.median(u.load_s for u in idle)
    table = Table(title=f"{model} in one vLLM engine, medians of {rounds} updates")
    for column in ("engine", "memcpy", "load", "pause", "pause of bare load", "transfer"):
        table.add_column(column, justify="right")
    for label, of in (("idle", idle), (f"{in_flight} requests", busy)):
        memcpy_s, load_s, pause_s, transfer_s = (
            statistics.median(getattr(u, name) for u in of)
            for name in ("memcpy_s", "load_s", "pause_s", "transfer_s")
        )
        table.add_row(
            label,
            *(f"{s:.3f} s" for s in (memcpy_s, load_s, pause_s)),
            f"{pause_s / bare:.2f}x",
            f"{transfer_s:.3f} s",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=269, help="of a version, for the transfers")
    parser.add_argument("--receivers", default="1,2,4")
    parser.add_argument("--backends", default="gloo,shm,disk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="", help="a model folder or packaged model, for the pause")
    parser.add_argument("--in-flight", type=int, default=32, help="requests while the engine is updated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in options.receivers.split(",") if count]
    if counts:
        print_transfers(options.backends.split(","), counts, options.megabytes * 10**6, options.rounds)
    if options.model:
        print_engine(options.model, options.rounds, options.in_flight)


if __name__ == "__main__":
    main()
