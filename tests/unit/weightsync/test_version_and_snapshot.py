import threading

import pytest
import torch

from tests.unit.weightsync.support import METADATA, WAIT_S, weights
from weightsync.snapshot import SnapshotStore
from weightsync.version import ALIGNMENT, Checksum, Manifest


def test_a_manifest_views_each_tensor_at_an_aligned_place():
    manifest = Manifest.of([("a", "bfloat16", (3,)), ("b", "float32", (2, 2)), ("scalar", "float64", ())])
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for value, (_, view) in enumerate(manifest.views(flat), start=1):
        view.fill_(value)
    views = dict(manifest.views(flat))
    assert [view.dtype for view in views.values()] == [torch.bfloat16, torch.float32, torch.float64]
    assert views["b"].tolist() == [[2, 2], [2, 2]]
    assert views["scalar"].item() == 3
    assert all(slot.offset % ALIGNMENT == 0 for slot in manifest.slots)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ([("a", "torch.bfloat16", (1,))], "dtype 'torch.bfloat16'"),
        ([("a", "int8", ()), ("a", "int8", ())], "twice"),
    ],
)
def test_a_manifest_refuses_what_it_cannot_lay_out(metadata, says):
    with pytest.raises(ValueError, match=says):
        Manifest.of(metadata)


def test_the_checksum_of_pieces_is_that_of_the_whole():
    data = torch.arange(250, dtype=torch.uint8)
    assert checksum(data[:100], data[100:]) == checksum(data)
    assert checksum(data) != checksum(data.flip(0)) != checksum(data[100:], data[:100])


def checksum(*chunks):
    made = Checksum()
    for chunk in chunks:
        made.add(chunk)
    return made.value()


def test_writing_converts_to_the_announced_dtype():
    store = SnapshotStore(Manifest.of([("w", "bfloat16", (2,))]))
    store.write(1, [("w", torch.tensor([1.0, 2.0], dtype=torch.float32))])
    with store.reading(WAIT_S) as snapshot:
        assert snapshot.flat[:4].view(torch.bfloat16).tolist() == [1.0, 2.0]


def test_a_snapshot_that_is_read_is_never_written():
    store = SnapshotStore(Manifest.of(METADATA))
    store.write(1, weights(1.0))
    with store.reading(WAIT_S) as first:
        before = first.flat.clone()
        store.write(2, weights(2.0))
        store.write(3, weights(3.0))
        assert torch.equal(first.flat, before)
        with store.reading(WAIT_S) as newest:
            assert newest.version == 3
    assert store.take_skipped() == 1  # version 2
    assert store.take_skipped() == 0


def test_an_idle_store_needs_one_buffer():
    store = SnapshotStore(Manifest.of(METADATA))
    addresses = set()
    for version in range(4):
        store.write(version, weights(version))
        with store.reading(WAIT_S) as snapshot:
            addresses.add(snapshot.flat.data_ptr())
    assert len(addresses) == 1


def test_a_reader_waits_for_the_first_version():
    store = SnapshotStore(Manifest.of(METADATA))
    writer = threading.Thread(target=store.write, args=(5, weights(5.0)))
    writer.start()
    with store.reading(WAIT_S) as snapshot:
        assert snapshot.version == 5
    writer.join()
    with pytest.raises(RuntimeError, match="no weights"), SnapshotStore(Manifest.of(METADATA)).reading(0.01):
        pass


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (weights(0)[:2], "'head.weight' is missing"),
        ([*weights(0), ("extra", torch.zeros(1))], "'extra' comes after the last"),
        ([weights(0)[1], weights(0)[0], weights(0)[2]], "expected tensor 'embed.weight'"),
        ([("embed.weight", torch.zeros(64, 15)), *weights(0)[1:]], r"shape \(64, 16\), got 'embed.weight'"),
    ],
)
def test_publishing_other_tensors_than_announced_names_the_first(tensors, says):
    with pytest.raises(ValueError, match=says):
        SnapshotStore(Manifest.of(METADATA)).write(1, tensors)
