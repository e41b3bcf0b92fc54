import socket

import pytest
import torch

from tests.unit.weightsync.support import METADATA, WAIT_S, weights
from weightsync import transport
from weightsync.snapshot import SnapshotStore
from weightsync.staging import Staging
from weightsync.version import Manifest
from weightsync.wire import GroupSpec

BUCKET = 1024  # several broadcasts for METADATA's 4 kB
CPU = torch.device("cpu")
MANIFEST = Manifest.of(METADATA)


@pytest.fixture
def store():
    return transport.serve_store("127.0.0.1", WAIT_S)


def group(store, name: str, rank: int, timeout_s: float = WAIT_S) -> GroupSpec:
    return GroupSpec("gloo", "127.0.0.1", store.port, name, rank, 2, timeout_s)


def flat(value: float) -> torch.Tensor:
    snapshots = SnapshotStore(MANIFEST)
    snapshots.write(1, weights(value))
    with snapshots.reading(WAIT_S) as snapshot:
        return snapshot.flat.clone()


def wait_until_ended(staging: Staging) -> tuple[bool, int, str]:
    assert staging._current is not None and staging._current.ended.wait(WAIT_S)
    return staging.status()


def test_all_buckets_arrive_and_both_sides_compute_the_same_checksum(store):
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1), MANIFEST, BUCKET)
    sender = transport.open_group(group(store, "g", rank=0), CPU)
    for value in (1.5, 2.5):  # the second transfer takes the same group and buffer
        sent = transport.send(sender, flat(value), BUCKET)
        assert wait_until_ended(staging) == (True, sent, "")
        assert {v for _, t in staging.tensors() for v in t.float().flatten().tolist()} == {value}
        staging.begin(group(store, "g", rank=1), MANIFEST, BUCKET)
    sender.close()
    assert not wait_until_ended(staging)[0]


def test_a_sender_that_dies_between_buckets_leaves_nothing_to_load(store):
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1), MANIFEST, BUCKET)
    sender = transport.open_group(group(store, "g", rank=0), CPU)
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
    assert not complete and "ranks [0] of the transfer did not come within 0.3 s" in error


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
    transport.send(new, flat(2.0), BUCKET)
    assert wait_until_ended(staging)[0]
    transport.send(old, flat(9.0), BUCKET)  # the old thread still listens
    assert {v for _, t in staging.tensors() for v in t.float().flatten().tolist()} == {2.0}


def test_the_store_listens_on_the_given_interface_only(store):
    assert transport.local_address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=WAIT_S)


def test_two_rendezvous_at_once_do_not_lock_each_other_out(store):
    """Rank 0 waits for a rank that never comes, and meets another one all the same."""
    hopeless = Staging(CPU)
    hopeless.begin(group(store, "hopeless", rank=0), MANIFEST, BUCKET)
    staging = Staging(CPU)
    staging.begin(group(store, "g", rank=1, timeout_s=WAIT_S / 2), MANIFEST, BUCKET)
    sender = transport.open_group(group(store, "g", rank=0, timeout_s=WAIT_S / 2), CPU)
    transport.send(sender, flat(1.0), BUCKET)
    assert wait_until_ended(staging)[0]
    assert hopeless.status() == (False, 0, "")
