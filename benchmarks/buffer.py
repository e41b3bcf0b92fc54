"""How fast is the buffer? Durable puts, gets, latency, restart and memory, beside two floors and two peers.

    python benchmarks/buffer.py [--trajectories 4096] [--producers 1,4,16] [--rounds 3]
    python benchmarks/buffer.py --only restart | memory

Trajectories of 2,000 tokens (26 KB as plain arrays). Every put is acked after its commit to disk. The floors
carry the plain arrays' bytes: a bare ZeroMQ echo without keys or checks, and a bare SQLite append that
commits 16 rows at once with the store's own settings. Redis Streams syncs once a second, a Ray actor queue
never. All take turns for `--rounds` rounds in one run; shown is each one's best round. Read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.buffer_peers import (
    CALL_S,
    Measured,
    Unavailable,
    free_endpoint,
    load_ray,
    measure_echo,
    measure_ray,
    measure_redis,
    measure_sqlite,
    process,
    put_all,
    ray_cluster,
    run_producers,
)
from buffer import server
from buffer.broker import Broker
from buffer.client import AsyncBufferClient, BufferClient
from buffer.codec import ReceivedPut, encode_trajectory
from buffer.messages import (
    Checkpointed,
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
from buffer.store import Store, open_store
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from configs.schema import RunConfig

TOKENS, PROMPT = 2000, 200
GROUP_SIZE, GROUPS_PER_BATCH = 8, 64
UNIT = GROUP_SIZE * GROUPS_PER_BATCH
STEPS_PER_CHECKPOINT = 20


def trajectory(tokens: int = TOKENS, prompt: int = PROMPT) -> Trajectory:
    """Four turns of sampled tokens with observations between them, the second half by a newer version."""
    rng = np.random.default_rng(0)
    mask, size = np.zeros(tokens, "u1"), (tokens - prompt) // 4
    starts = range(prompt, tokens - size + 1, size)
    turns = tuple(Turn(start, start + size - size // 9, start + size, "stop") for start in starts)
    for turn in turns:
        mask[turn.start : turn.end] = 1
    versions = np.where(mask, np.arange(tokens) // (tokens // 2 + 1), -1).astype("<i4")
    return Trajectory(
        trajectory_id="0-0/0",
        group_id="0-0",
        index=0,
        lease_id="",
        actor="bench",
        task="bench",
        prompt_index=0,
        prompt_len=prompt,
        token_ids=rng.integers(0, 50_000, tokens).astype("<i4"),
        action_mask=mask,
        logprobs=(rng.normal(size=tokens) * mask).astype("<f4"),
        versions=versions,
        turns=turns,
        stop_reason="answer",
        reward=0.0,
    )


def plain_bytes(model: Trajectory) -> bytes:
    """What the arrays take without the codec's runs: the bytes of the floors."""
    arrays = (model.token_ids, model.action_mask, model.logprobs, model.versions)
    return b"".join(array.tobytes() for array in arrays) + bytes(500)


def members(model: Trajectory, leases: Sequence[Lease]) -> list[Trajectory]:
    return [
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


def buffer_spec(run_dir: Path, groups: int, steps: int = 10**9) -> RoleSpec:
    """A buffer whose window holds all groups of the benchmark at once."""
    batches = max(1, groups // GROUPS_PER_BATCH)
    run_config = RunConfig.model_validate(
        {
            "actors": {"group_size": GROUP_SIZE},
            "buffer": {"groups_per_batch": GROUPS_PER_BATCH, "max_staleness": batches - 1},
            "learner": {"steps": steps},
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
        num_prompts=10**6,
        buffer_endpoint=free_endpoint(),
        device="cpu",
        threads=1,
    )


# --- puts and gets ----------------------------------------------------------------------------------


def measure_buffer(model: Trajectory, count: int, producers: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        spec = buffer_spec(Path(folder), count // GROUP_SIZE)
        keys = RunFolder(spec.run_dir).read_keys()
        with (
            process(server.main, spec) as serving,
            closing(BufferClient(spec.buffer_endpoint, keys, "learner", "bench")) as client,
        ):
            client.call(Resume(0, 0), CALL_S)
            leases = client.call(LeaseRequest("bench", count // GROUP_SIZE, 0), CALL_S).leases
            shares = [(spec, model, leases[rank::producers]) for rank in range(producers)]
            measured = run_producers(serving.pid, _produce, shares)
            measured.gets_per_s = measure_gets(client, count)
    return measured


def _produce(spec: RoleSpec, model: Trajectory, leases: tuple[Lease, ...], ready: Any, results: Any) -> None:
    async def produce() -> Any:
        keys = RunFolder(spec.run_dir).read_keys()
        buffer = AsyncBufferClient(spec.buffer_endpoint, keys, "actor", "bench")
        await buffer.call(Status(), CALL_S)
        queue = members(model, leases)
        done = await put_all(queue, lambda one: buffer.call(PutTrajectory(one), CALL_S), ready)
        await buffer.close()
        return done

    results.put(asyncio.run(produce()))


def measure_gets(client: BufferClient, count: int) -> float:
    """Trajectories handed out, decoded and committed per second."""
    started, steps = time.perf_counter(), count // UNIT
    for step in range(1, steps + 1):
        batch = client.call(GetBatch(step, 5.0), CALL_S).batch
        assert batch is not None and len(batch.groups) == GROUPS_PER_BATCH
        client.call(CommitStep(step, step), CALL_S)
    return steps * UNIT / (time.perf_counter() - started)


def take_turns(
    measurements: dict[str, Callable[[], Measured]], rounds: int, console: Console
) -> dict[str, Measured]:
    """The best round of each. What is not available here is said and left out."""
    best: dict[str, Measured] = {}
    for number in range(1, rounds + 1):
        for name, measure in list(measurements.items()):
            try:
                measured = measure()
            except Unavailable as error:
                console.print(str(error))
                del measurements[name]
                continue
            speed = f"{measured.puts_per_s:,.0f} put/s, {measured.cpu_us:.0f} us of CPU each"
            console.print(f"round {number}: {name} {speed}", style="dim", highlight=False)
            if name not in best or measured.puts_per_s > best[name].puts_per_s:
                best[name] = measured
    return best


def measure_all(
    count: int, producers: Sequence[int], peers: Sequence[str], rounds: int, console: Console
) -> None:
    model = trajectory()
    body = plain_bytes(model)
    with ExitStack() as stack:
        measurements: dict[str, Callable[[], Measured]] = {
            "raw ZeroMQ echo": lambda: measure_echo(body, count),
            "raw SQLite append": lambda: measure_sqlite(body, count),
        }
        for n in producers:
            measurements[f"buffer, {n} producers"] = lambda n=n: measure_buffer(model, count, n)
            if "redis" in peers:
                measurements[f"Redis Streams, {n} producers"] = lambda n=n: measure_redis(model, count, n)
        if "ray" in peers:
            load_ray()
            start_ray = cache(lambda: stack.enter_context(ray_cluster(max(producers))))
            for n in producers:
                measurements[f"Ray queue, {n} producers"] = lambda n=n: (
                    start_ray() or measure_ray(model, UNIT, n)
                )
        best = take_turns(measurements, rounds, console)
    sizes = f"{len(body):,} bytes plain, {len(encode_trajectory(model)):,} as sent and stored"
    console.print(table(best, f"{count} trajectories of {TOKENS} tokens, {sizes}; best of {rounds} rounds"))


def table(best: dict[str, Measured], title: str) -> Table:
    slower = min(best[name].puts_per_s for name in ("raw ZeroMQ echo", "raw SQLite append"))
    shown = Table("", title=title)
    for column in ("put/s", "of slower floor", "p50 ms", "p99 ms", "CPU us/put", "get/s"):
        shown.add_column(column, justify="right")
    for name, one in best.items():
        percentiles = np.percentile(one.latencies, [50, 99]) * 1000 if len(one.latencies) else ()
        shown.add_row(
            name,
            f"{one.puts_per_s:,.0f}",
            f"{one.puts_per_s / slower:.0%}",
            *([f"{value:.1f}" for value in percentiles] or ["", ""]),
            f"{one.cpu_us:.0f}",
            f"{one.gets_per_s:,.0f}" if one.gets_per_s else "",
        )
    return shown


# --- restart and memory: the server without its socket ----------------------------------------------


class Local:
    """The server's turns on a store, called directly."""

    def __init__(self, spec: RoleSpec, store: Store) -> None:
        self._broker = Broker(spec.config, store, spec.num_prompts, spec.run_id, time.monotonic())
        self._store = store

    def __call__(self, *messages: Any) -> list[Any]:
        """The replies, all in one transaction."""
        self._store.begin()
        self._broker.tick(time.monotonic())
        replies = [self._broker.handle(message, time.monotonic()) for message in messages]
        self._store.commit()
        return replies

    def fill(self, model: Trajectory, groups: int, version: int = 0) -> None:
        """Lease and complete so many groups; they share one payload, so that only the buffer works."""
        versions = np.where(model.action_mask, version, -1).astype("<i4")
        model = replace(model, versions=versions)
        payload = encode_trajectory(model)
        (grant,) = self(LeaseRequest("bench", groups, version))
        assert len(grant.leases) == groups, grant.reason
        self(*(ReceivedPut(one, payload) for one in members(model, grant.leases)))


def measure_restart(stored: int, console: Console) -> None:
    """From the start of the process to its first answer, and the part of it that the store takes."""
    groups = stored // GROUP_SIZE
    with tempfile.TemporaryDirectory() as folder:
        spec = buffer_spec(Path(folder), groups)
        with closing(open_store(RunFolder(spec.run_dir).store, spec.run_id)) as store:
            local = Local(spec, store)
            for _ in range(groups // GROUPS_PER_BATCH):
                local.fill(trajectory(), GROUPS_PER_BATCH)
        started = time.perf_counter()
        with closing(open_store(RunFolder(spec.run_dir).store, spec.run_id)) as store:
            Local(spec, store)
        opened_s = time.perf_counter() - started
        keys = RunFolder(spec.run_dir).read_keys()
        started = time.perf_counter()
        with (
            process(server.main, spec),
            closing(BufferClient(spec.buffer_endpoint, keys, "launcher", "bench")) as client,
        ):
            ready = client.call(Status(), CALL_S).ledger["ready"]
        seconds = time.perf_counter() - started
    console.print(
        f"restart with {ready * GROUP_SIZE:,} trajectories stored: {seconds:.2f} s from the start of the "
        f"process to its first answer; {opened_s:.2f} s to open the store and build the index"
    )


def measure_memory(total: int, console: Console) -> None:
    """Lease, put, train and prune trajectories of 20 tokens; resident memory along the way."""
    model, steps = trajectory(20, 4), total // UNIT
    shown = Table("trajectories trained", "resident memory", title="memory, trajectories of 20 tokens")
    with tempfile.TemporaryDirectory() as folder:
        spec = buffer_spec(Path(folder), GROUPS_PER_BATCH, steps)
        with closing(open_store(RunFolder(spec.run_dir).store, spec.run_id)) as store:
            local = Local(spec, store)
            for step in range(1, steps + 1):
                local.fill(model, GROUPS_PER_BATCH, version=step - 1)
                local(GetBatch(step, 0.0))
                local(CommitStep(step, step))
                if step % STEPS_PER_CHECKPOINT == 0:
                    local(Checkpointed(step, step - STEPS_PER_CHECKPOINT))
                if step in _tenths(steps):
                    shown.add_row(f"{step * UNIT:,}", f"{psutil.Process().memory_info().rss / 2**20:.1f} MiB")
            (status,) = local(Status())
    console.print(shown)
    console.print(f"ledger balanced: {status.balanced}, trained {status.ledger['trained']:,} groups")


def _tenths(steps: int) -> Iterator[int]:
    return iter(sorted({max(1, steps * tenth // 10) for tenth in (1, 2, 4, 6, 8, 10)}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=4096, help="of each measurement; Ray's has 512")
    parser.add_argument("--producers", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="redis,ray", help="those to compare with; empty for none")
    parser.add_argument("--stored", type=int, default=100_000, help="trajectories in the restart's store")
    parser.add_argument("--trained", type=int, default=1_000_000, help="trajectories of the memory test")
    parser.add_argument("--only", choices=["speed", "restart", "memory"])
    options = parser.parse_args()
    console = Console(width=130)
    if options.only in (None, "speed"):
        count = max(1, options.trajectories // UNIT) * UNIT
        producers = [int(n) for n in options.producers.split(",")]
        measure_all(count, producers, options.peers.split(","), options.rounds, console)
    if options.only in (None, "restart"):
        measure_restart(options.stored, console)
    if options.only in (None, "memory"):
        measure_memory(options.trained, console)


if __name__ == "__main__":
    main()
