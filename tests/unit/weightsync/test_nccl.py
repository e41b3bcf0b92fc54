"""The nccl backend; needs CUDA. What it shares with gloo is tested there."""

import pytest
import torch

from tests.unit.weightsync.support import METADATA, WAIT_S
from weightsync import rendezvous, transport
from weightsync.staging import Staging
from weightsync.version import Manifest, host_buffer
from weightsync.wire import GroupSpec

pytestmark = pytest.mark.gpu

BUCKET = 1024
MANIFEST = Manifest.of(METADATA)


def filled() -> torch.Tensor:
    flat = host_buffer(MANIFEST.nbytes)
    flat.copy_(torch.arange(MANIFEST.nbytes) % 251)
    return flat


def send(group: transport.Group, flat: torch.Tensor) -> int:
    return group.send(MANIFEST, flat, BUCKET, lambda: True)


def nccl(port: int, rank: int, world: int) -> GroupSpec:
    return GroupSpec("nccl", "127.0.0.1", port, "g", rank, world, WAIT_S)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_buckets_pass_through_the_device_unchanged():
    store = rendezvous.serve_store("127.0.0.1", WAIT_S)
    group = transport.open_group(nccl(store.port, 0, 1), torch.device("cuda", 0))
    flat = filled()
    assert send(group, flat) == send(group, filled())
    assert torch.equal(flat, filled())
    group.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs a CUDA device per rank, so two")
def test_what_one_device_sends_another_stages():
    store = rendezvous.serve_store("127.0.0.1", WAIT_S)
    staging = Staging(torch.device("cuda", 1))
    staging.begin(nccl(store.port, 1, 2), MANIFEST, BUCKET)
    group = transport.open_group(nccl(store.port, 0, 2), torch.device("cuda", 0))
    sent = send(group, filled())
    assert staging._current is not None and staging._current.ended.wait(WAIT_S)
    assert staging.status() == (True, sent, "")
    group.close()
