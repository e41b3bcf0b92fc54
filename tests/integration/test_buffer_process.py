"""The buffer as a real process: killed, restarted and attacked, with real clients that know nothing of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import zmq

from benchmarks.fuzz import fuzz
from buffer import server
from buffer.client import AsyncBufferClient, BufferUnreachable
from buffer.messages import (
    Batch,
    Checkpointed,
    CommitStep,
    GetBatch,
    Heartbeat,
    LeaseRequest,
    PutTrajectory,
    Resume,
    Status,
)
from configs.roles import RoleSpec
from configs.run_folder import RunFolder
from tests.unit.buffer.served import buffer_spec, client
from tests.unit.buffer.support import config, member

CALL_S = 30.0
KILLS = 4
STEPS = 8


class BufferProcess:
    """Starts, kills and restarts the server."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=server.main, args=(self.spec,), daemon=True)
        self.process.start()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(CALL_S)


@contextmanager
def running(spec: RoleSpec) -> Iterator[BufferProcess]:
    buffer = BufferProcess(spec)
    try:
        yield buffer
    finally:
        buffer.kill()


@pytest.fixture(autouse=True)
def impatient_clients(monkeypatch):
    monkeypatch.setattr("buffer.client.FIRST_ATTEMPT_S", 0.5)


@dataclass
class Seen:
    """What the clients were promised."""

    acked: set[str] = field(default_factory=set)
    batches: dict[int, list[str]] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)


async def act(spec: RoleSpec, name: str, seen: Seen) -> None:
    """An actor: leases, puts all members at once, heartbeats, until the run is finished."""
    buffer = AsyncBufferClient(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "actor", name)
    version, finished = 0, False
    while not finished:
        grant = await buffer.call(LeaseRequest(name, 2, version), CALL_S)
        puts = [
            member(lease, index, reward=float(index), version=version, actor=name)
            for lease in grant.leases
            for index in lease.missing
        ]
        acks = await asyncio.gather(*(buffer.call(PutTrajectory(put), CALL_S) for put in puts))
        seen.acked |= {
            put.trajectory_id for put, ack in zip(puts, acks, strict=True) if ack.stored or ack.duplicate
        }
        beat = await buffer.call(Heartbeat("actor", name, version=version), CALL_S)
        version, finished = beat.version, beat.finished
        if not grant.leases:
            await asyncio.sleep(grant.retry_after_s)
    await buffer.call(Heartbeat("actor", name, version=version, state="finished"), CALL_S)
    await buffer.close()


def learn(spec: RoleSpec, seen: Seen, kill_buffer) -> None:
    """A learner that trains every batch; the buffer is killed around some of its requests."""
    with client(spec) as buffer:
        buffer.call(Resume(0, 0), CALL_S)
        for step in range(1, STEPS + 1):
            kill_buffer(step, "before the batch")
            batch = None
            while batch is None:
                batch = buffer.call(GetBatch(step, 0.5), CALL_S).batch
            seen.batches[step] = ids(batch)
            kill_buffer(step, "before the commit")
            assert ids(buffer.call(GetBatch(step, 0.5), CALL_S).batch) == seen.batches[step]
            buffer.call(CommitStep(step, step), CALL_S)
        buffer.call(Checkpointed(STEPS, STEPS), CALL_S)


def ids(batch: Batch) -> list[str]:
    return [one.trajectory_id for group in batch.groups for one in group]


def in_thread(work, seen: Seen) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test's main thread raises it
            seen.failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_clients_go_on_when_the_buffer_is_killed_between_puts_and_batches(tmp_path):
    spec = buffer_spec(tmp_path, config(steps=STEPS, batch=2, group_size=4, staleness=1, heartbeat_s=0.5))
    seen = Seen()
    moments = [
        (step, when) for step in range(1, STEPS + 1) for when in ("before the batch", "before the commit")
    ]
    kills = set(random.Random(0).sample(moments, KILLS))
    with running(spec) as buffer:

        def kill(step: int, when: str) -> None:
            if (step, when) in kills:
                buffer.kill()
                buffer.start()

        actors = [
            in_thread(lambda name=name: asyncio.run(act(spec, name, seen)), seen)
            for name in ("actor-0", "actor-1")
        ]
        learn(spec, seen, kill)
        for actor in actors:
            actor.join(CALL_S)
        assert not seen.failures
        with client(spec) as looking:
            status = looking.call(Status(), CALL_S)
    assert status.finished and status.balanced and status.step == STEPS
    trained = [one for batch in seen.batches.values() for one in batch]
    assert len(trained) == len(set(trained)) == STEPS * 2 * 4
    connection = sqlite3.connect(RunFolder(spec.run_dir).store)
    stored = {one for (one,) in connection.execute("SELECT trajectory_id FROM trajectories")}
    connection.close()
    assert seen.acked <= stored and set(trained) <= stored


def test_a_wrong_key_gets_nothing_from_the_process(tmp_path):
    spec = buffer_spec(tmp_path, config())
    keys = RunFolder(spec.run_dir).read_keys()
    public, secret = zmq.curve_keypair()
    with running(spec), client(spec) as ours:
        ours.call(Status(), CALL_S)
        for wrong in (
            replace(keys, client_public=public, client_secret=secret),
            replace(keys, server_public=public),
        ):
            with client(spec, keys=wrong) as stranger, pytest.raises(BufferUnreachable):
                stranger.call(Status(), 0.7)


def test_garbage_with_a_valid_key_does_not_crash_it(tmp_path):
    result = fuzz(buffer_spec(tmp_path, config(heartbeat_s=0.2)), frames=20_000, seed=1)
    assert result.frames == 20_000 and result.crashes == 0 and result.balanced
    assert result.honest >= 100 and result.strangers == 20
    assert result.refused.total() > 10_000
    assert {"msgpack", "field", "frames", "dtype", "request"} <= set(result.refused)


def test_sigterm_closes_cleanly(tmp_path):
    spec = buffer_spec(tmp_path, config())
    with running(spec) as buffer:
        with client(spec) as looking:
            looking.call(Status(), CALL_S)
        buffer.process.terminate()
        buffer.process.join(CALL_S)
        assert buffer.process.exitcode == 0
    assert not os.path.exists(f"{RunFolder(spec.run_dir).store}-wal")  # closed, not abandoned
