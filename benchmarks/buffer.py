"""How fast is the buffer? Durable puts, gets and latency, beside what its two halves could do at best.

    python benchmarks/buffer.py [--trajectories 4096] [--producers 1,4,16]

Trajectories of 2,000 tokens (27 KB). Every put is acked after its commit to disk. The floors run the same
bytes: a bare ZeroMQ echo without keys or checks, and a bare SQLite append that commits 16 rows at once with
the store's own settings. All in one run, on one machine: read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[1]))

from buffer import server
from buffer.client import AsyncBufferClient, BufferClient
from buffer.codec import encode_trajectory
from buffer.messages import (
    CommitStep,
    GetBatch,
    Lease,
    LeaseRequest,
    PutTrajectory,
    Resume,
    Status,
    Trajectory,
    Turn,
)
from buffer.store import PAGE_BYTES, WAL_PAGES
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from configs.schema import RunConfig

TOKENS, PROMPT = 2000, 200
GROUP_SIZE, GROUPS_PER_BATCH = 8, 64
IN_FLIGHT = 16  # puts of one producer
ROWS_PER_COMMIT = 16
CALL_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


def trajectory(group_id: str = "0-0", index: int = 0) -> Trajectory:
    rng = np.random.default_rng(index)
    mask = np.ones(TOKENS, dtype=np.uint8)
    mask[:PROMPT] = 0
    turns = tuple(Turn(start, start + 400, start + 450, "stop") for start in range(PROMPT, TOKENS, 450))
    return Trajectory(
        trajectory_id=f"{group_id}/{index}",
        group_id=group_id,
        index=index,
        lease_id="",
        actor="bench",
        task="bench",
        prompt_index=0,
        prompt_len=PROMPT,
        token_ids=rng.integers(0, 50_000, TOKENS).astype("<i4"),
        action_mask=mask,
        logprobs=rng.normal(size=TOKENS).astype("<f4"),
        versions=np.zeros(TOKENS, dtype="<i4"),
        turns=turns,
        stop_reason="answer",
        reward=float(index),
    )


# --- processes --------------------------------------------------------------------------------------


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[SpawnProcess]:
    started = SPAWN.Process(target=target, args=args, daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join(CALL_S)


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def buffer_spec(run_dir: Path, groups: int) -> RoleSpec:
    """A buffer whose window holds all groups of the benchmark at once."""
    run_config = RunConfig.model_validate(
        {
            "actors": {"group_size": GROUP_SIZE},
            "buffer": {"groups_per_batch": GROUPS_PER_BATCH, "max_staleness": groups // GROUPS_PER_BATCH - 1},
        }
    )
    RunFolder(run_dir).create_keys()
    return RoleSpec(
        role="buffer",
        name="buffer",
        rank=0,
        world=1,
        config=run_config,
        run_dir=run_dir,
        run_id="bench",
        config_dir=run_dir,
        model_path=run_dir,
        num_prompts=groups,
        buffer_endpoint=free_endpoint(),
        device="cpu",
        threads=1,
    )


def produce(spec: RoleSpec, leases: tuple[Lease, ...], ready: Any, latencies: Any) -> None:
    """One producer process: put every member of its leases, IN_FLIGHT at a time."""
    asyncio.run(_produce(spec, leases, ready, latencies))


async def _produce(spec: RoleSpec, leases: tuple[Lease, ...], ready: Any, latencies: Any) -> None:
    buffer = AsyncBufferClient(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "actor", "bench")
    await buffer.call(Status(), CALL_S)
    model = trajectory()
    queue = [
        replace(
            model,
            trajectory_id=f"{lease.group_id}/{index}",
            group_id=lease.group_id,
            index=index,
            prompt_index=lease.prompt_index,
            reward=float(index),
        )
        for lease in leases
        for index in lease.missing
    ]
    took: list[float] = []

    async def putter() -> None:
        while queue:
            started = time.perf_counter()
            await buffer.call(PutTrajectory(queue.pop()), CALL_S)
            took.append(time.perf_counter() - started)

    ready.wait(CALL_S)
    await asyncio.gather(*(putter() for _ in range(IN_FLIGHT)))
    latencies.put(took)
    await buffer.close()


# --- measurements -----------------------------------------------------------------------------------


def measure_buffer(count: int, producers: int) -> tuple[float, list[float], float]:
    """(puts per second, latency of each in seconds, trajectories handed out per second)."""
    with tempfile.TemporaryDirectory() as folder:
        spec = buffer_spec(Path(folder), count // GROUP_SIZE)
        keys = RunFolder(spec.run_dir).read_keys()
        with (
            process(server.main, spec),
            closing(BufferClient(spec.buffer_endpoint, keys, "learner", "bench")) as client,
        ):
            client.call(Resume(0, 0), CALL_S)
            leases = client.call(LeaseRequest("bench", count // GROUP_SIZE, 0), CALL_S).leases
            puts_per_s, latencies = measure_puts(spec, leases, producers)
            return puts_per_s, latencies, measure_gets(client, count)


def measure_puts(spec: RoleSpec, leases: tuple[Lease, ...], producers: int) -> tuple[float, list[float]]:
    ready, results = SPAWN.Barrier(producers + 1), SPAWN.Queue()
    workers = [
        SPAWN.Process(target=produce, args=(spec, leases[rank::producers], ready, results), daemon=True)
        for rank in range(producers)
    ]
    for worker in workers:
        worker.start()
    ready.wait(CALL_S)
    started = time.perf_counter()
    latencies = [one for _ in workers for one in results.get(timeout=CALL_S)]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join(CALL_S)
    return len(latencies) / seconds, latencies


def measure_gets(client: BufferClient, count: int) -> float:
    started = time.perf_counter()
    steps = count // GROUP_SIZE // GROUPS_PER_BATCH
    for step in range(1, steps + 1):
        batch = client.call(GetBatch(step, 5.0), CALL_S).batch
        assert batch is not None and len(batch.groups) == GROUPS_PER_BATCH
        client.call(CommitStep(step, step), CALL_S)
    return steps * GROUPS_PER_BATCH * GROUP_SIZE / (time.perf_counter() - started)


def echo(endpoint: str) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        peer, request_id, _ = router.recv_multipart()
        router.send_multipart([peer, request_id, b"ok"])


def measure_echo(count: int) -> float:
    """Requests of the same size per second, one client, IN_FLIGHT at a time."""
    endpoint, body = free_endpoint(), encode_trajectory(trajectory())
    with process(echo, endpoint):
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_multipart([b"0", body])
        dealer.recv_multipart()
        started = time.perf_counter()
        for sent in range(count + IN_FLIGHT):
            if sent >= IN_FLIGHT:
                dealer.recv_multipart()
            if sent < count:
                dealer.send_multipart([b"0", body])
        seconds = time.perf_counter() - started
        dealer.close(linger=0)
    return count / seconds


def measure_sqlite(count: int) -> float:
    """Rows of the same size appended per second, ROWS_PER_COMMIT in a transaction, fsync on commit."""
    body = encode_trajectory(trajectory())
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(Path(folder) / "raw.sqlite", isolation_level=None)
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, payload BLOB)")
        started = time.perf_counter()
        for _ in range(count // ROWS_PER_COMMIT):
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO rows (payload) VALUES (?)", [(body,)] * ROWS_PER_COMMIT)
            connection.execute("COMMIT")
        seconds = time.perf_counter() - started
        connection.close()
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--producers", default="1,4,16")
    options = parser.parse_args()
    unit = GROUP_SIZE * GROUPS_PER_BATCH
    count = max(1, options.trajectories // unit) * unit
    floors = {"raw ZeroMQ echo": measure_echo(count), "raw SQLite append": measure_sqlite(count)}
    slower = min(floors.values())
    print(f"{count} trajectories of {TOKENS} tokens, {len(encode_trajectory(trajectory())):,} bytes each")
    print(f"{'':24}{'put/s':>9}{'of floor':>10}{'p50 ms':>9}{'p99 ms':>9}{'get/s':>9}")
    for producers in map(int, options.producers.split(",")):
        puts_per_s, latencies, gets_per_s = measure_buffer(count, producers)
        p50, p99 = np.percentile(latencies, [50, 99]) * 1000
        name = f"buffer, {producers} producers"
        print(f"{name:24}{puts_per_s:9.0f}{puts_per_s / slower:9.0%} {p50:9.1f}{p99:9.1f}{gets_per_s:9.0f}")
    for name, per_s in floors.items():
        print(f"{name:24}{per_s:9.0f}")


if __name__ == "__main__":
    main()
