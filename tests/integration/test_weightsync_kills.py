"""Receivers in processes of their own, killed with SIGKILL around updates, over the real transport."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from configs.run_folder import CurveKeys
from tests.unit.weightsync.support import StagedEngine, learner_spec, new_keys
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver

pytestmark = pytest.mark.slow

KILLS = 20
METADATA = [("w", "float32", (4 << 20,))]  # 16 buckets of 1 MB
WAIT_S = 120.0  # only a failing test waits so long
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


class Follower:
    """A receiver's process; `versions` tells what it loaded, as (version, the values its model holds)."""

    def __init__(self, name: str, endpoint: str, keys: CurveKeys) -> None:
        self._pipe, theirs = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=follow, args=(name, endpoint, keys, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait_for(self, version: int) -> None:
        deadline = time.monotonic() + WAIT_S
        loaded = -1
        while loaded < version:
            assert self._pipe.poll(max(0.0, deadline - time.monotonic())), f"{version} did not come"
            loaded, values = self._pipe.recv()
            assert values == {float(loaded)}

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


def follow(name: str, endpoint: str, keys: CurveKeys, loaded: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_follow(Receiver(Reporting(loaded), keys, name, WAIT_S, "keep", endpoint=endpoint)))


async def _follow(receiver: Receiver) -> None:
    await receiver.run()


class Reporting(StagedEngine):
    def __init__(self, loaded: Any) -> None:
        super().__init__()
        self._loaded = loaded

    async def swap(self, version: int, *, clear_cache: bool) -> float:
        pause_s = await super().swap(version, clear_cache=clear_cache)
        self._loaded.send((version, self.values()))
        return pause_s


@pytest.fixture(params=["gloo", "shm", "disk"])
def learner(request, tmp_path) -> Iterator[tuple[Publisher, CurveKeys]]:
    keys = new_keys()
    spec = learner_spec(WAIT_S, tmp_path, backend=request.param, bucket_mb=1)
    with closing(Publisher(spec, METADATA, keys)) as made:
        yield made, keys


def publish(learner: Publisher, version: int) -> None:
    learner.publish(version, [("w", torch.full((4 << 20,), float(version)))])


def test_m4_kills_at_random_moments_around_updates_hold_nobody_up(learner):
    publisher, keys = learner
    rng = random.Random(0)
    survivor, victim = (Follower(f"actor-{i}", publisher.endpoint, keys) for i in range(2))
    started = time.monotonic()
    for version in range(3):  # how long an update takes here
        publish(publisher, version)
        survivor.wait_for(version)
        victim.wait_for(version)
        took, started = time.monotonic() - started, time.monotonic()
    try:
        for version in range(3, 3 + KILLS):
            publish(publisher, version)
            time.sleep(rng.uniform(0, 1.5 * took))
            victim.kill()
            survivor.wait_for(version)
            victim = Follower("actor-1", publisher.endpoint, keys)
            if rng.random() < 0.5:  # else it joins during the next update
                victim.wait_for(version)
        victim.wait_for(version)
        publisher.wait_idle(WAIT_S)
    finally:
        for follower in (survivor, victim):
            follower.kill()
