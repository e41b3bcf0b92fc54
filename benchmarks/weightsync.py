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
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.weightsync_transfers import WAIT_S, print_transfers, seconds
from configs.run_folder import CurveKeys
from configs.schema import RunConfig
from metrics import names
from tests.unit.weightsync.support import spec_of
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver


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
    with closing(Publisher(spec_of(config), metadata, keys)) as publisher:
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
