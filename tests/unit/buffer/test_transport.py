"""The socket's thread: what waits is bounded, order holds, and its failure is not silent."""

import socket
import time

import pytest

from buffer import transport
from buffer.codec import CodecError, encode
from buffer.messages import GetBatch, Ok, Status
from buffer.transport import Reply, Transport
from configs.run_folder import RunFolder
from tests.unit.buffer.served import TIMEOUT_S, Raw, buffer_spec
from tests.unit.buffer.support import config


@pytest.fixture
def spec(tmp_path):
    return buffer_spec(tmp_path, config())


@pytest.fixture
def ends(spec):
    server = Transport(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), 1)
    raw = Raw(spec)
    yield server, raw
    raw.close()
    server.close()


def test_the_address_of_a_buffer_that_is_still_ending_is_waited_for(spec, monkeypatch):
    with socket.socket() as killed:
        host, port = spec.buffer_endpoint.removeprefix("tcp://").split(":")
        killed.bind((host, int(port)))
        killed.listen()
        monkeypatch.setattr(transport.time, "sleep", lambda _: killed.close())
        Transport(spec.buffer_endpoint, RunFolder(spec.run_dir).read_keys(), 1).close()


def take(server, count):
    """So many requests, by a deadline."""
    found = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        found += server.take(0.1)
    return found


def test_requests_come_in_order_and_replies_go_back(ends):
    server, raw = ends
    for step in range(1, 30):
        raw.send(str(step).encode(), encode(GetBatch(step, 0.0)))
    requests = take(server, 29)
    assert [request.message.step for request in requests] == list(range(1, 30))
    server.send(Reply(request, encode(Ok())) for request in requests)
    assert [raw.receive()[0] for _ in requests] == [request.request_id for request in requests]


def test_what_cannot_be_read_comes_as_its_error(ends):
    server, raw = ends
    raw.send(b"id", b"\xc1")
    (request,) = take(server, 1)
    assert isinstance(request.message, CodecError) and request.message.reason == "msgpack"


def test_m8_requests_wait_outside_when_the_server_is_behind_and_none_is_lost(ends, monkeypatch):
    monkeypatch.setattr(transport, "MAX_BYTES_WAITING", 2000)
    server, raw = ends
    for number in range(200):
        raw.send(str(number).encode() + bytes(40), encode(Status(number)))
    found = []
    while len(found) < 200:
        batch = take(server, 1)
        assert 0 < sum(request.num_bytes for request in batch) < 2000 + 200
        found += batch
        server.send([])  # a turn without replies
    assert [request.message.since for request in found] == list(range(200))


def test_m7_a_failure_of_the_thread_comes_out_of_take(ends, monkeypatch):
    def fails(parts, max_bytes):
        raise MemoryError("no memory for this")

    monkeypatch.setattr(transport, "_request", fails)
    server, raw = ends
    raw.send(b"id", encode(Status()))
    with pytest.raises(MemoryError, match="no memory"):
        take(server, 1)


def test_requests_of_the_next_moment_share_the_turn(ends, monkeypatch):
    server, raw = ends

    def a_moment(_seconds):
        raw.send(b"second", encode(Status(2)))
        deadline = time.monotonic() + TIMEOUT_S
        while not server._requests.qsize() and time.monotonic() < deadline:
            pass

    raw.send(b"first", encode(Status(1)))
    monkeypatch.setattr(transport.time, "sleep", a_moment)
    found = server.take(TIMEOUT_S)
    assert [request.request_id for request in found] == [b"first", b"second"]
