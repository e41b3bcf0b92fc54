"""The socket loop and the clients, with the server in a thread of this process."""

import asyncio
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
import zmq

from buffer import client as buffer_client
from buffer import server
from buffer.client import AsyncBufferClient, BufferRefused, BufferUnreachable
from buffer.codec import encode
from buffer.messages import (
    CommitStep,
    GetBatch,
    Heartbeat,
    Hello,
    LeaseRequest,
    Ok,
    PutAck,
    PutTrajectory,
    Refused,
    Resume,
    Status,
    Welcome,
)
from buffer.store import open_store
from configs.run_folder import RunFolder
from metrics import names
from tests.unit.buffer.served import TIMEOUT_S, Raw, buffer_spec, client, serving
from tests.unit.buffer.support import config, member, trajectory


@pytest.fixture
def spec(tmp_path):
    return buffer_spec(tmp_path, config(batch=1, staleness=1, steps=2, heartbeat_s=0.1, max_message_mb=1))


@pytest.fixture
def raw(spec):
    with serving(spec):
        raw = Raw(spec)
        yield raw
        raw.close()


def put_group(call, lease):
    for index in lease.missing:
        assert call(PutTrajectory(member(lease, index, reward=float(index))), TIMEOUT_S).stored


def test_a_call_gets_its_reply(spec):
    with serving(spec), client(spec) as buffer:
        assert buffer.call(Hello("learner", "learner-0"), TIMEOUT_S) == Welcome("run", 0, None)


def test_a_refusal_is_raised_with_its_sentence(spec):
    with serving(spec), client(spec) as buffer, pytest.raises(BufferRefused, match="no step 7"):
        buffer.call(GetBatch(7, 0.0), TIMEOUT_S)


def test_a_batch_that_is_not_ready_is_waited_for_and_no_longer(spec):
    with serving(spec), client(spec) as buffer:
        started = time.monotonic()
        assert buffer.call(GetBatch(1, 0.3), TIMEOUT_S).batch is None
        assert 0.25 < time.monotonic() - started < 2


def test_a_waiting_learner_gets_its_batch_when_the_group_is_complete(spec):
    got = []

    def learner():
        with client(spec) as buffer:
            got.append(buffer.call(GetBatch(1, 30.0), TIMEOUT_S))

    with serving(spec), client(spec, "actor") as actor:
        waiting = threading.Thread(target=learner)
        waiting.start()
        put_group(actor.call, actor.call(LeaseRequest("a", 1, 0), TIMEOUT_S).leases[0])
        waiting.join(TIMEOUT_S)
    assert got[0].batch.step == 1 and len(got[0].batch.groups[0]) == 2


def test_an_unknown_client_key_gets_nothing(spec, tmp_path):
    ours = RunFolder(spec.run_dir).read_keys()
    public, secret = zmq.curve_keypair()
    stranger = replace(ours, client_public=public, client_secret=secret)
    with serving(spec), client(spec) as buffer:
        with (
            client(spec, keys=stranger) as strange,
            pytest.raises(BufferUnreachable, match="uses the keys"),
        ):
            strange.call(Status(), 0.7)
        assert buffer.call(Status(), TIMEOUT_S).roles == ()


def test_no_key_at_all_gets_nothing(spec):
    with serving(spec):
        context = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(spec.buffer_endpoint)
        plain.send_multipart([b"id", encode(Status())])
        assert not plain.poll(500)
        context.destroy(linger=0)


def test_unreachable_is_a_timeout_by_the_deadline(spec):
    with client(spec) as buffer:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"learner test got no reply to Status .* within 0\.3 s"):
            buffer.call(Status(), 0.3)
        assert time.monotonic() - started < 2


def test_a_taken_port_is_one_clear_sentence(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("buffer.transport.BIND_S", 0.0)
    with serving(spec), client(spec) as buffer:
        buffer.call(Status(), TIMEOUT_S)
        other = replace(spec, run_dir=tmp_path / "other")
        RunFolder(other.run_dir).create_keys()
        with pytest.raises(RuntimeError, match=r"cannot bind tcp://.*in use; stop the process that uses"):
            server.serve(other, threading.Event())


def test_a_request_sent_twice_is_done_once(raw):
    for _ in range(2):
        raw.send(b"same-id", encode(LeaseRequest("a", 1, 0)))
    assert raw.receive() == raw.receive()
    raw.send(b"other-id", encode(Status()))
    assert raw.receive()[1].ledger["leased"] == 1


@pytest.mark.parametrize(
    "parts, reason",
    [
        ((b"id", b"\xc1"), "not valid MessagePack"),
        ((b"id", b"x" * (2**20 + 1)), "exceeds the limit"),
        ((b"id",), "two parts"),
        ((b"id", b"a", b"b"), "two parts"),
        ((b"i" * 65, encode(Status())), "two parts"),
        ((b"id", encode(PutAck(True, False))), "not a request"),
        ((b"id", encode(PutTrajectory(trajectory("7-7")))), "never leased"),
    ],
)
def test_a_bad_frame_is_refused_counted_and_harmless(raw, parts, reason):
    raw.send(*parts)
    refusal = raw.receive()[1]
    assert isinstance(refusal, Refused) and reason in refusal.reason
    deadline = time.monotonic() + TIMEOUT_S
    counted = 0.0
    while not counted and time.monotonic() < deadline:
        raw.send(b"status" + str(time.monotonic()).encode(), encode(Status()))
        reports = raw.receive()[1].reports
        counted = sum(metrics.get(names.BUFFER_REFUSED, 0) for *_, metrics in reports)
    assert counted == 1


def test_endless_waits_are_cut(raw):
    raw.send(b"nan", encode(GetBatch(1, float("nan"))))
    raw.send(b"negative", encode(GetBatch(1, -1.0)))
    request_id, reply = raw.receive()
    assert request_id == b"negative" and reply.batch is None


def test_put_latency_and_refusals_are_reported(spec):
    with serving(spec), client(spec, "actor") as actor:
        put_group(actor.call, actor.call(LeaseRequest("a", 1, 0), TIMEOUT_S).leases[0])
        deadline = time.monotonic() + TIMEOUT_S
        metrics = {}
        while names.BUFFER_PUT_MS not in metrics and time.monotonic() < deadline:
            for *_, metrics in actor.call(Status(), TIMEOUT_S).reports:
                if names.BUFFER_PUT_MS in metrics:
                    break
        assert metrics[names.BUFFER_PUT_MS] > 0


def test_main_in_a_thread_ends_by_itself_after_the_run(spec, monkeypatch):
    """As Ray runs it. It leaves once the learner and the actors have said that they are finished."""
    monkeypatch.setattr(server, "LINGER_S", 0.3)
    thread = threading.Thread(target=server.main, args=(spec,), daemon=True)
    thread.start()
    with client(spec) as buffer:
        buffer.call(Resume(0, 0), TIMEOUT_S)
        for step in (1, 2):
            put_group(buffer.call, buffer.call(LeaseRequest("a", 1, step - 1), TIMEOUT_S).leases[0])
            assert buffer.call(GetBatch(step, 5.0), TIMEOUT_S).batch is not None
            assert buffer.call(CommitStep(step, step), TIMEOUT_S) == Ok()
        assert buffer.call(LeaseRequest("a", 1, 2), TIMEOUT_S).reason == "finished"
        buffer.call(Heartbeat("learner", "learner-0", state="running"), TIMEOUT_S)
        thread.join(1.0)
        assert thread.is_alive()  # the learner still exports
        assert buffer.call(Heartbeat("learner", "learner-0", state="finished"), TIMEOUT_S).finished
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_a_ledger_that_does_not_balance_fails_the_process_with_the_ids(spec):
    stop = threading.Event()
    failures = []

    def run():
        try:
            server.serve(spec, stop)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    with client(spec, "actor") as actor:
        (lease,) = actor.call(LeaseRequest("a", 1, 0), TIMEOUT_S).leases
    with sqlite3.connect(RunFolder(spec.run_dir).store) as connection:
        connection.execute("UPDATE groups SET outcome = 'stale'")
    connection.close()
    stop.set()
    thread.join(TIMEOUT_S)
    assert lease.group_id in failures[0] and "does not balance" in failures[0]


def served_until_it_fails(spec):
    """Serve in a thread; the thread, and where its sentence will be."""
    failures = []

    def run():
        try:
            server.serve(spec, threading.Event())
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def test_m7_a_file_that_is_no_store_is_named(spec):
    RunFolder(spec.run_dir).store.write_bytes(b"not a database, " * 1000)
    thread, failures = served_until_it_fails(spec)
    thread.join(TIMEOUT_S)
    assert "buffer.sqlite fails: file is not a database" in failures[0]


def test_m7_a_full_disk_acks_nothing_that_is_not_stored_and_names_the_store(spec, monkeypatch):
    def open_small(path, run_id):
        store = open_store(path, run_id)
        (pages,) = store._sql("PRAGMA page_count").fetchone()
        store._sql(f"PRAGMA max_page_count = {pages + 4}")
        return store

    monkeypatch.setattr(server, "open_store", open_small)
    thread, failures = served_until_it_fails(spec)
    acked = set()
    with client(spec, "actor") as actor:
        (lease,) = actor.call(LeaseRequest("a", 1, 0), TIMEOUT_S).leases
    raw = Raw(spec)
    for index in lease.missing:
        put = member(lease, index, reward=float(index), sampled=4 + 40_000 * index)
        raw.send(str(index).encode(), encode(PutTrajectory(put)))
        if index == 0:
            acked.add(raw.receive()[1].stored and put.trajectory_id)
    thread.join(TIMEOUT_S)
    raw.close()
    assert "buffer.sqlite fails: database or disk is full" in failures[0] and "resume" in failures[0]
    with sqlite3.connect(RunFolder(spec.run_dir).store) as connection:
        assert {one for (one,) in connection.execute("SELECT trajectory_id FROM trajectories")} == acked


# --- the asynchronous client ------------------------------------------------------------------------


def run_async(spec, work):
    async def main():
        connected = AsyncBufferClient(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), "actor", "a")
        try:
            return await work(connected)
        finally:
            await connected.close()

    return asyncio.run(main())


def test_hundreds_of_calls_in_flight_each_get_their_own_reply(tmp_path):
    spec = buffer_spec(tmp_path, config(batch=8, group_size=8, staleness=4))

    async def work(buffer):
        leases = (await buffer.call(LeaseRequest("a", 40, 0), TIMEOUT_S)).leases
        puts = [PutTrajectory(member(lease, i, reward=float(i))) for lease in leases for i in lease.missing]
        acks = await asyncio.gather(*(buffer.call(put, TIMEOUT_S) for put in puts))
        again = await asyncio.gather(*(buffer.call(put, TIMEOUT_S) for put in puts[:50]))
        return acks, again

    with serving(spec):
        acks, again = run_async(spec, work)
    assert len(acks) == 320 and all(ack.stored for ack in acks)
    assert all(ack.duplicate and not ack.stored for ack in again)


def test_the_async_client_raises_refusals_and_deadlines(spec):
    async def refused(buffer):
        await buffer.call(GetBatch(7, 0.0), TIMEOUT_S)

    async def unreachable(buffer):
        await buffer.call(Status(), 0.2)

    with serving(spec), pytest.raises(BufferRefused, match="no step 7"):
        run_async(spec, refused)
    with pytest.raises(BufferUnreachable, match="actor a got no reply to Status"):
        run_async(spec, unreachable)


def test_calls_made_before_the_server_is_there_are_answered_when_it_comes(spec, monkeypatch):
    monkeypatch.setattr("buffer.client.FIRST_ATTEMPT_S", 0.2)

    async def work(buffer):
        calls = [asyncio.create_task(buffer.call(Hello("actor", "a"), TIMEOUT_S)) for _ in range(5)]
        await asyncio.wait(calls, timeout=0.5)
        with serving(spec):
            return await asyncio.gather(*calls)

    assert run_async(spec, work) == [Welcome("run", 0, None)] * 5


def test_a_lost_put_is_sent_again_though_a_longer_wait_came_first(spec, monkeypatch):
    """The patience of a GetBatch must not become that of the requests after it."""
    monkeypatch.setattr("buffer.client.FIRST_ATTEMPT_S", 0.2)

    async def work(buffer):
        waiting = asyncio.create_task(buffer.call(GetBatch(1, 600.0), TIMEOUT_S))
        call = asyncio.create_task(buffer.call(Hello("actor", "a"), TIMEOUT_S))
        await asyncio.wait((call,), timeout=0.1)  # sent, and nobody is there
        buffer._close_socket()  # what was sent is lost
        buffer._socket = buffer_client._open(buffer._context, buffer._endpoint, buffer._keys)
        asyncio.get_running_loop().add_reader(buffer._socket.fd, buffer._receive)
        with serving(spec):
            welcome = await call
        waiting.cancel()
        return welcome

    assert run_async(spec, work) == Welcome("run", 0, None)


def test_keys_are_the_owners_alone(spec):
    keys = spec.run_dir / "keys"
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in keys.iterdir()} == {0o600}
