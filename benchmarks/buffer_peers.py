"""What `benchmarks/buffer.py` compares the buffer with: two floors, Redis Streams, and a Ray actor queue.

Each measurement is a function from counts to a `Measured`. The peers carry the same bytes as the buffer,
without its leases, ids, groups or checks; the Ray queue is not durable either.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import zmq

from buffer.codec import decode_trajectory, encode_trajectory
from buffer.messages import Trajectory
from buffer.store import PAGE_BYTES, WAL_PAGES

IN_FLIGHT = 16  # puts of one producer
ROWS_PER_COMMIT = 16
BATCH = 512  # trajectories of one get
CALL_S = 120.0
SPAWN = multiprocessing.get_context("spawn")


class Unavailable(RuntimeError):
    """A peer that cannot run here; the sentence says what is missing."""


@dataclass
class Measured:
    puts_per_s: float
    cpu_us: float  # of all processes together, for one trajectory put
    latencies: Sequence[float] = ()  # seconds
    gets_per_s: float | None = None


@dataclass
class Produced:
    """What one producer process reports."""

    latencies: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


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


def cpu_of(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run_producers(
    server_pid: int | None, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> Measured:
    """Start a process for each tuple of arguments, let all begin at once, and measure until the last ends."""
    ready, results = SPAWN.Barrier(len(arguments) + 1), SPAWN.Queue()
    workers = [SPAWN.Process(target=target, args=(*one, ready, results), daemon=True) for one in arguments]
    for worker in workers:
        worker.start()
    ready.wait(CALL_S)
    cpu, started = cpu_of(server_pid), time.perf_counter()
    produced: list[Produced] = [results.get(timeout=CALL_S) for _ in workers]
    seconds = time.perf_counter() - started
    cpu = cpu_of(server_pid) - cpu + sum(one.cpu_s for one in produced)
    for worker in workers:
        worker.join(CALL_S)
    latencies = [latency for one in produced for latency in one.latencies]
    return Measured(len(latencies) / seconds, cpu / len(latencies) * 1e6, latencies)


async def put_all(queue: list[Any], put: Callable[[Any], Any], ready: Any) -> Produced:
    """Put everything in `queue`, IN_FLIGHT at a time."""
    done = Produced()

    async def putter() -> None:
        while queue:
            started = time.perf_counter()
            await put(queue.pop())
            done.latencies.append(time.perf_counter() - started)

    ready.wait(CALL_S)
    cpu = time.process_time()
    await asyncio.gather(*(putter() for _ in range(IN_FLIGHT)))
    done.cpu_s = time.process_time() - cpu
    return done


# --- the floors -------------------------------------------------------------------------------------


def _echo(endpoint: str) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        peer, request_id, _ = router.recv_multipart()
        router.send_multipart([peer, request_id, b"ok"])


def measure_echo(body: bytes, count: int) -> Measured:
    """ZeroMQ without keys, checks or a store: one client, IN_FLIGHT at a time."""
    endpoint = free_endpoint()
    with process(_echo, endpoint) as server:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_multipart([b"0", body])
        dealer.recv_multipart()
        cpu, started = time.process_time() + cpu_of(server.pid), time.perf_counter()
        for sent in range(count + IN_FLIGHT):
            if sent >= IN_FLIGHT:
                dealer.recv_multipart()
            if sent < count:
                dealer.send_multipart([b"0", body])
        seconds = time.perf_counter() - started
        cpu = time.process_time() + cpu_of(server.pid) - cpu
        dealer.close(linger=0)
    return Measured(count / seconds, cpu / count * 1e6)


def measure_sqlite(body: bytes, count: int) -> Measured:
    """SQLite with the store's settings alone: ROWS_PER_COMMIT in a transaction, fsync on commit."""
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(Path(folder) / "raw.sqlite", isolation_level=None)
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, payload BLOB)")
        cpu, started = time.process_time(), time.perf_counter()
        for _ in range(count // ROWS_PER_COMMIT):
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO rows (payload) VALUES (?)", [(body,)] * ROWS_PER_COMMIT)
            connection.execute("COMMIT")
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        connection.close()
    return Measured(count / seconds, cpu / count * 1e6)


# --- Redis Streams ----------------------------------------------------------------------------------


def measure_redis(trajectory: Trajectory, count: int, producers: int) -> Measured:
    """XADD to a stream, append-only file synced every second, as Redis users run it."""
    try:
        import redis
    except ImportError as error:
        raise Unavailable("Redis is left out: pip install redis hiredis") from error
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("Redis is left out: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        options = ("--port", "0", "--unixsocket", path, "--dir", folder, "--appendonly", "yes")
        command = [program, *options, "--appendfsync", "everysec", "--save", "", "--loglevel", "warning"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(unix_socket_path=path)
            _wait_for(lambda: os.path.exists(path) and client.ping())
            shares = [(path, trajectory, count // producers)] * producers
            measured = run_producers(server.pid, _produce_for_redis, shares)
            measured.gets_per_s = _read_redis(client, count // producers * producers)
        finally:
            server.kill()
            server.wait(CALL_S)
    return measured


def _produce_for_redis(path: str, trajectory: Trajectory, count: int, ready: Any, results: Any) -> None:
    import redis.asyncio

    async def produce() -> Produced:
        client = redis.asyncio.Redis(unix_socket_path=path)
        await client.ping()
        queue = [trajectory] * count
        done = await put_all(
            queue, lambda one: client.xadd("trajectories", {"payload": encode_trajectory(one)}), ready
        )
        await client.aclose()
        return done

    results.put(asyncio.run(produce()))


def _read_redis(client: Any, count: int) -> float:
    started, last, seen = time.perf_counter(), "0", 0
    while seen < count:
        ((_, rows),) = client.xread({"trajectories": last}, count=BATCH)
        for _, fields in rows:
            decode_trajectory(fields[b"payload"])
        last, seen = rows[-1][0], seen + len(rows)
        client.xtrim("trajectories", minid=last)
    return count / (time.perf_counter() - started)


def _wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + CALL_S
    while not condition():
        if time.monotonic() > until:
            raise Unavailable("Redis is left out: it did not start")
        time.sleep(0.02)


# --- a Ray actor queue ------------------------------------------------------------------------------


def load_ray() -> None:
    """Import Ray, before ZeroMQ is used: after it the import crashes."""
    # Read at the import: no idle workers, and patience where the machine is busy.
    os.environ.update(RAY_enable_worker_prestart="0", RAY_raylet_start_wait_time_s=f"{CALL_S:.0f}")
    import ray  # noqa: F401


@contextmanager
def ray_cluster(producers: int) -> Iterator[None]:
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                num_cpus=producers + 2,
                include_dashboard=False,
                object_store_memory=2**30,
                _temp_dir=folder,
                log_to_driver=False,
                logging_level="ERROR",  # type: ignore[arg-type]
            )
        except Exception as error:  # Ray raises the bare class
            raise Unavailable(f"Ray is left out: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()


def measure_ray(trajectory: Trajectory, count: int, producers: int) -> Measured:
    """`ray.util.queue.Queue`, the usual buffer between Ray actors. Call inside `ray_cluster`."""
    import ray
    from ray.util.queue import Queue

    queue = Queue()

    @ray.remote(num_cpus=0)
    class Producer:
        def ready(self) -> bool:
            return True

        async def run(self, count: int) -> list[float]:
            left, latencies = [trajectory] * count, []

            async def putter() -> None:
                while left:
                    started = time.perf_counter()
                    await queue.put_async(left.pop())
                    latencies.append(time.perf_counter() - started)

            await asyncio.gather(*(putter() for _ in range(IN_FLIGHT)))
            return latencies

    workers: list[Any] = [Producer.remote() for _ in range(producers)]  # type: ignore[attr-defined]
    ray.get([worker.ready.remote() for worker in workers], timeout=CALL_S)
    processes = psutil.Process().children(recursive=True)
    cpu, started = sum(cpu_of(one.pid) for one in processes), time.perf_counter()
    share = count // producers
    shares: Any = ray.get([worker.run.remote(share) for worker in workers], timeout=10 * CALL_S)
    seconds = time.perf_counter() - started
    cpu = sum(cpu_of(one.pid) for one in processes) - cpu
    started, total = time.perf_counter(), share * producers
    for first in range(0, total, BATCH):
        queue.get_nowait_batch(min(BATCH, total - first))
    gets_per_s = total / (time.perf_counter() - started)
    queue.shutdown(force=True)
    for worker in workers:
        ray.kill(worker)
    return Measured(total / seconds, cpu / total * 1e6, [one for some in shares for one in some], gets_per_s)
