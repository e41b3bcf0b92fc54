import gc
import os
import socket
import threading

import pytest
import torch
from safetensors import safe_open

from tests.unit.weightsync.support import METADATA, WAIT_S, weights
from weightsync import rendezvous, shared_memory, transport
from weightsync.files import FileGroup
from weightsync.process_groups import GlooGroup
from weightsync.shared_memory import shared_buffer
from weightsync.snapshot import SnapshotStore
from weightsync.staging import Staging
from weightsync.version import Manifest
from weightsync.wire import GroupSpec

BUCKET = 1024  # several broadcasts for METADATA's 4 kB
CPU = torch.device("cpu")
MANIFEST = Manifest.of(METADATA)


@pytest.fixture
def store():
    return rendezvous.serve_store("127.0.0.1", WAIT_S)


def group(
    store, name: str, rank: int, timeout_s: float = WAIT_S, backend: str = "gloo", folder: str = ""
) -> GroupSpec:
    return GroupSpec(backend, "127.0.0.1", store.port, name, rank, 2, timeout_s, folder)


def flat(value: float) -> torch.Tensor:
    snapshots = SnapshotStore(MANIFEST, shared_buffer)
    snapshots.write(1, weights(value))
    with snapshots.reading(WAIT_S) as snapshot:
        return snapshot.flat


def send(sender: transport.Group, weights: torch.Tensor, wanted=lambda: True) -> int:
    return sender.send(MANIFEST, weights, BUCKET, wanted)


def wait_until_ended(staging: Staging) -> tuple[bool, int, str]:
    assert staging._current is not None and staging._current.ended.wait(WAIT_S)
    return staging.status()


@pytest.mark.parametrize("backend", ["gloo", "shm", "disk"])
def test_all_bytes_arrive_and_both_sides_compute_the_same_checksum(store, backend, tmp_path):
    mine, theirs = (group(store, "g", rank, WAIT_S, backend, str(tmp_path)) for rank in (0, 1))
    staging = Staging(CPU)
    staging.begin(theirs, MANIFEST, BUCKET)
    sender = transport.open_group(mine, CPU)
    for value in (1.5, 2.5):  # the second transfer takes the same group and buffer
        sent = send(sender, flat(value))
        assert wait_until_ended(staging) == (True, sent, "")
        assert {v for _, t in staging.tensors() for v in t.float().flatten().tolist()} == {value}
        staging.begin(theirs, MANIFEST, BUCKET)
    sender.close()
    staging.discard()
    assert not list(tmp_path.iterdir())


def test_the_group_is_there_for_the_next_transfer_as_soon_as_one_has_ended(store, monkeypatch):
    mine, theirs = (group(store, "g", rank, WAIT_S, "shm") for rank in (0, 1))
    staging = Staging(CPU)
    staging.begin(theirs, MANIFEST, BUCKET)
    reception = staging._current
    assert reception is not None
    held, end = [], reception.ended.set
    monkeypatch.setattr(reception.ended, "set", lambda: (held.append(staging._group), end()))
    send(transport.open_group(mine, CPU), flat(1.5))
    assert wait_until_ended(staging)[0]
    assert held != [None]


@pytest.mark.parametrize("backend", ["shm", "disk"])
def test_what_nobody_fetches_is_withdrawn_when_the_transfer_ends(store, backend, tmp_path):
    for name, timeout_s, wanted, says in [
        ("late", 0.2, lambda: True, r"ranks \[1\] did not fetch the weights within 0.2 s"),
        ("given-up", 3600, lambda: False, "given up"),
    ]:
        mine, theirs = (group(store, name, rank, timeout_s, backend, str(tmp_path)) for rank in (0, 1))
        opening = threading.Thread(target=transport.open_group, args=(theirs, CPU))
        opening.start()
        sender = transport.open_group(mine, CPU)
        opening.join(WAIT_S)
        with pytest.raises(RuntimeError, match=says):
            send(sender, flat(1.0), wanted)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["shm", "disk"])
def test_a_transfer_that_is_let_go_stops_waiting_for_an_offer(store, backend, tmp_path):
    staging = Staging(CPU)
    staging.begin(group(store, "g", 1, 3600, backend, str(tmp_path)), MANIFEST, BUCKET)
    transport.open_group(group(store, "g", 0, 3600, backend, str(tmp_path)), CPU)
    waiting = staging._current
    staging.discard()
    assert waiting is not None and waiting.ended.wait(WAIT_S)
    assert "given up" in str(waiting.error)


def test_a_version_on_disk_is_a_safetensors_file(store, tmp_path):
    files = FileGroup(store, group(store, "run/1", 0, backend="disk", folder=str(tmp_path)))
    place = files.offer(MANIFEST, flat(3.0), 1)
    with safe_open(place, framework="pt") as file:
        tensors = [file.get_tensor(name) for name, _, _ in METADATA]
        assert {v for tensor in tensors for v in tensor.float().flatten().tolist()} == {3.0}
    received = torch.zeros(MANIFEST.nbytes, dtype=torch.uint8)
    files.fetch(place, MANIFEST, received)
    assert torch.equal(received, flat(3.0))
    files.withdraw(place)
    with pytest.raises(RuntimeError, match="needs a run folder that every actor reaches by the same path"):
        files.fetch(place, MANIFEST, received)


def test_a_shared_buffer_ends_with_its_last_reference():
    def shared_files() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if "slipstream" in link(fd)]

    def link(fd: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            return ""

    gc.collect()
    before = len(shared_files())
    buffer = shared_buffer(100)
    assert len(shared_files()) > before and buffer.sum() == 0
    del buffer
    gc.collect()
    assert len(shared_files()) == before


def test_a_buffer_that_ends_late_leaves_the_file_of_the_next_one_at_its_address():
    buffer = shared_buffer(100)
    address = buffer.untyped_storage().data_ptr()
    another = os.memfd_create("another")
    shared_memory._files[address] = another  # its memory was unmapped, and mapped anew by another thread
    del buffer
    gc.collect()
    assert shared_memory._files.pop(address) == another
    os.close(another)  # was open still


def test_a_sender_that_dies_between_buckets_leaves_nothing_to_load(store):
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1), MANIFEST, BUCKET)
    sender = transport.open_group(group(store, "g", rank=0), CPU)
    assert isinstance(sender, GlooGroup)
    sender.start(flat(1.0)[:BUCKET])()
    sender.close()
    complete, _, error = wait_until_ended(staging)
    assert not complete and error
    with pytest.raises(RuntimeError, match="not complete"):
        staging.tensors()


def test_a_rank_that_never_comes_ends_the_wait_at_the_deadline(store):
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1, timeout_s=0.3), MANIFEST, BUCKET)
    assert staging._current is not None and staging._current.flat is None  # no memory held while waiting
    complete, _, error = wait_until_ended(staging)
    assert not complete and "ranks [0] did not come to the transfer within 0.3 s" in error


def test_a_transfer_that_is_let_go_stops_waiting_for_its_ranks(store):
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1, timeout_s=3600), MANIFEST, BUCKET)
    waiting = staging._current
    staging.discard()
    assert waiting is not None and waiting.ended.wait(WAIT_S)
    assert "given up" in str(waiting.error)


def test_a_transfer_that_was_let_go_cannot_write_into_the_next(store):
    staging = Staging(CPU)
    staging.begin(group(store, "old", rank=1), MANIFEST, BUCKET)
    old = transport.open_group(group(store, "old", rank=0), CPU)
    staging.discard()
    assert staging.status() == (False, 0, "no transfer is running")
    staging.begin(group(store, "new", rank=1), MANIFEST, BUCKET)
    new = transport.open_group(group(store, "new", rank=0), CPU)
    send(new, flat(2.0))
    assert wait_until_ended(staging)[0]
    send(old, flat(9.0))  # the old thread still listens
    assert {v for _, t in staging.tensors() for v in t.float().flatten().tolist()} == {2.0}


def test_the_store_listens_on_the_given_interface_only(store):
    assert rendezvous.local_address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=WAIT_S)


def test_two_rendezvous_at_once_do_not_lock_each_other_out(store):
    """Rank 0 waits for a rank that never comes, and meets another one all the same."""
    hopeless = Staging(CPU)
    hopeless.begin(group(store, "hopeless", rank=0), MANIFEST, BUCKET)
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1, timeout_s=WAIT_S / 2), MANIFEST, BUCKET)
    sender = transport.open_group(group(store, "g", rank=0, timeout_s=WAIT_S / 2), CPU)
    send(sender, flat(1.0))
    assert wait_until_ended(staging)[0]
    assert hopeless.status() == (False, 0, "")
